"""A Kubernetes cluster of the tests' own: an API server, what a controller manager does, and a kubelet stand-in."""
