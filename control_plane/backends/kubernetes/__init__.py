"""Slots as pods: `Backend` over the API of a Kubernetes cluster. Nothing here is imported unless it is turned on."""
