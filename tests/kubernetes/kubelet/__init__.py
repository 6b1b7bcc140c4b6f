"""A kubelet stand-in: pods bound to its nodes run as processes of this machine.

Model: every pod has an address of its own out of 127.0.0.0/8; every container is a process in a mount and PID
namespace in which its volumes are where its spec mounts them, with the host's file system read-only around them;
where namespaces are not to be had, paths in its command and environment are rewritten instead. Images are ignored:
what runs is this checkout.

Limits: no cgroups (limits of memory and CPU are not enforced; hooks kill as they would), no users but the caller's, no
network policy; `0.0.0.0` in a command means the pod's address, since all pods share the machine's network.
"""

from tests.kubernetes.kubelet.kubelet import Kubelet
from tests.kubernetes.kubelet.node import NodeSpec

__all__ = ["Kubelet", "NodeSpec"]
