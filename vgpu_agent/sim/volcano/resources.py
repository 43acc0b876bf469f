"""Plain resource arithmetic of the simulated Volcano scheduler: what pods ask for, what a node has
left, and where a pod may go at all.

Called by `node`, and by the scheduler's accounts of each node's cards (`ledger`, `gpushare`).
Objects are the API's JSON. It has only what volcano-vgpu and volcano-gpushare need: taints,
affinities and ports are ignored.
"""

from __future__ import annotations

import decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Object = dict[str, Any]
Amounts = dict[str, decimal.Decimal]  # resource → amount

_ZERO = decimal.Decimal(0)
_TOO_MUCH = decimal.Decimal(2) ** 63  # Kubernetes counts in 64 bits
_SUFFIXES = {
    **{
        suffix: decimal.Decimal(10) ** power
        for suffix, power in (
            ("n", -9),
            ("u", -6),
            ("m", -3),
            ("k", 3),
            ("M", 6),
            ("G", 9),
            ("T", 12),
        )
    },
    **{
        suffix: decimal.Decimal(1024) ** power
        for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)
    },
    **{suffix: decimal.Decimal(10) ** power for suffix, power in (("P", 15), ("E", 18))},
}


def amount(text: object) -> decimal.Decimal:
    """Parse a Kubernetes quantity (``10k``, ``500m``, ``3Gi``); 0 for anything else and beyond 64
    bits.
    """
    written = str(text)
    suffix = next(
        (
            suffix
            for suffix in ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei", *_SUFFIXES)
            if written.endswith(suffix)
        ),
        "",
    )
    try:
        number = decimal.Decimal(written.removesuffix(suffix)) * _SUFFIXES.get(
            suffix, decimal.Decimal(1)
        )
    except decimal.DecimalException:
        return _ZERO
    return number if number.is_finite() and abs(number) < _TOO_MUCH else _ZERO


def annotations_of(thing: Object) -> dict[str, str]:
    """The annotations of a node or pod."""
    return thing.get("metadata", {}).get("annotations") or {}


def key(pod: Object) -> str:
    """Return ``namespace/name``."""
    return f"{pod['metadata'].get('namespace', 'default')}/{pod['metadata']['name']}"


def is_terminated(pod: Object) -> bool:
    """Tell whether the pod's containers have ended for good."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def is_terminating(pod: Object) -> bool:
    """Tell whether the pod has been deleted."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def limits(container: Object) -> dict[str, str]:
    """The limits of one container."""
    return (container.get("resources") or {}).get("limits") or {}


def requests(pod: Object) -> Amounts:
    """Sum up a pod's requests: the sum of its containers,
    or its largest init container where that is more.
    """
    spec = pod.get("spec") or {}
    regular, largest_init = Amounts(), Amounts()
    for container in spec.get("containers") or ():
        for resource, wanted in _wanted(container).items():
            regular[resource] = regular.get(resource, _ZERO) + wanted
    for container in spec.get("initContainers") or ():
        for resource, wanted in _wanted(container).items():
            largest_init[resource] = max(largest_init.get(resource, _ZERO), wanted)
    return {
        resource: max(regular.get(resource, _ZERO), largest_init.get(resource, _ZERO))
        for resource in regular | largest_init
    }


def free(node: Object, pods: Iterable[Object]) -> Amounts:
    """Return the amounts of ``node`` that ``pods`` leave free. Terminating pods count: their ids
    are free only when the pods are gone.
    """
    left = {
        resource: amount(text)
        for resource, text in ((node.get("status") or {}).get("allocatable") or {}).items()
    }
    for pod in pods:
        if not is_terminated(pod):
            take(left, requests(pod))
    return left


def take(left: Amounts, wanted: Mapping[str, decimal.Decimal]) -> None:
    """Subtract ``wanted`` from ``left``."""
    for resource, number in wanted.items():
        left[resource] = left.get(resource, _ZERO) - number


def lacking(
    left: Mapping[str, decimal.Decimal], wanted: Mapping[str, decimal.Decimal]
) -> list[str]:
    """List the resources of which less is left than ``wanted``;
    a requested one that the node does not have is lacking.
    """
    return sorted(
        resource for resource, number in wanted.items() if number > left.get(resource, _ZERO)
    )


def may_hold(node: Object, pod: Object) -> bool:
    """Tell whether the node is ready, not marked unschedulable,
    and carries the labels that the pod's nodeSelector names.
    """
    spec, status = node.get("spec") or {}, node.get("status") or {}
    ready = [
        condition.get("status")
        for condition in status.get("conditions") or ()
        if condition.get("type") == "Ready"
    ]
    labels = node["metadata"].get("labels") or {}
    wanted = (pod.get("spec") or {}).get("nodeSelector") or {}
    return (
        not spec.get("unschedulable")
        and ready in ([], ["True"])
        and all(labels.get(name) == value for name, value in wanted.items())
    )


def _wanted(container: Object) -> Amounts:
    """Return the requests, or the limits where no request is written: for extended resources both
    are the same.
    """
    written = {**limits(container), **((container.get("resources") or {}).get("requests") or {})}
    return {resource: amount(text) for resource, text in written.items()}
