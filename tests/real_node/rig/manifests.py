"""Short ways to write the objects that tests create,
and to read the quantities that the API server writes.

Called by tests; everything is plain JSON as the API takes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.real_node.rig.images import BUSYBOX

if TYPE_CHECKING:
    from collections.abc import Mapping

_SUFFIXES = {
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}

LEAN = {
    "dnsPolicy": "Default",
    "automountServiceAccountToken": False,
    "enableServiceLinks": False,
}
"""Fields of a pod's spec that leave out what hardly any test asks for: a DNS of the cluster (the
kubelet says in events that there is none), a token, for which the kubelet needs the API server
before the start, and the addresses of services but that of the API server. From a pod's creation to
its end they save an eighth of the processor time.
"""


def pod(
    name: str,
    *,
    command: str = "sleep 100000",
    limits: Mapping[str, int] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """A pod with one container ``main`` that runs ``command`` in a shell; ``spec`` adds to or
    replaces fields of the pod's spec.

    A grace period of one second, not zero: with zero the API server forgets the pod before the
    kubelet has ended it.
    """
    main = container("main", command=command, limits=limits)
    defaults = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "containers": [main],
        **LEAN,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": defaults | spec}


def container(
    name: str,
    *,
    command: str = "sleep 100000",
    limits: Mapping[str, int] | None = None,
    image: str = BUSYBOX,
) -> dict[str, Any]:
    """One container of a pod.

    The command runs behind a shell that ends on SIGTERM: process 1 of a container has no default
    reaction to it, and would cost every deletion the whole grace period. Its exit code is the
    container's.
    """
    script = f"trap 'exit 0' TERM\n{{ {command}\n}} & wait $!"
    resources = {"limits": {resource: str(count) for resource, count in (limits or {}).items()}}
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["/bin/sh", "-c", script],
        "resources": resources,
    }


def quantity(text: str | None) -> int:
    """The whole number that a Kubernetes quantity stands for (``10k`` is ten thousand devices);
    0 for an absent one.
    """
    if text is None:
        return 0
    number = text.rstrip("".join({letter for suffix in _SUFFIXES for letter in suffix}))
    return int(number) * _SUFFIXES.get(text.removeprefix(number), 1)
