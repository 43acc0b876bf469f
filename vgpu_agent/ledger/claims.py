"""Claims: GPUs that schedulers have named for pods whose containers have not been given their shares yet.

A claim is no booking. `book` keeps them all; who makes them is `allocation`.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """One GPU that a pod waits for.

    Attributes:
        gpu: its UUID.
        family: the family of the pod's request.
        pod: ``namespace/name``.
        pod_uid: kubelet's UID of the pod.
        since: unix seconds when the claim was first seen.
        order: `Pod.bound`; smaller is older.
    """

    gpu: str
    family: str
    pod: str
    pod_uid: str
    since: float
    order: int
