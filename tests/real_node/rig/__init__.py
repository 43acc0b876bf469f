"""A real Kubernetes cluster on this machine, for tests and for experiments:
etcd, control plane, kubelets, containerd, runc.

Why: what a kubelet really does with a device plugin can only be shown by a kubelet. Everything of a
rig lives in namespaces of its own, so a rig needs no free ports, several run side by side, and
killing one process removes it.

Called by: the fixtures of tests/real_node/conftest.py, and `scripts/cluster`
(tests/real_node/rig/__main__.py).

How the parts meet, from the outside in:

* `lifecycle.Rig` starts a *keeper*, a small process on the host that owns one rig (keeper.py). It
  ends the rig when its owner dies.
* The keeper starts the namespaces' first process (inside.py): mounts, network, etcd and the control
  plane. That one starts a process per Kubernetes node (node.py), each in a mount namespace of its
  own with containerd and a kubelet.
* Outside and inside share only a folder (layout.py), whose sockets and files also are how a device
  plugin on the host reaches a kubelet.
"""

from tests.real_node.rig.api import Api, ApiError
from tests.real_node.rig.errors import RequirementError, RigError
from tests.real_node.rig.layout import Layout, Options
from tests.real_node.rig.lifecycle import Rig, running_rig

__all__ = [
    "Api",
    "ApiError",
    "Layout",
    "Options",
    "RequirementError",
    "Rig",
    "RigError",
    "running_rig",
]
