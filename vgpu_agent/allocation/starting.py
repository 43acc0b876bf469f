"""One container about to start, proven: what `binder` and `early_proof` know of it while they decide."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vgpu_agent.allocation.proof import Claim, KubeletEvidence
    from vgpu_agent.families.family import PodFamily
    from vgpu_agent.model import Owner, Resource
    from vgpu_agent.pods import Pod


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """One start.

    Attributes:
        token: the name of the ids, see `carrier.grant_token`.
        found: the kubelet's records about the ids.
        until: the loop's time by which kubelet must have an answer.
    """

    offered: Resource
    ids: tuple[str, ...]
    token: str
    family: PodFamily
    pod: Pod
    owner: Owner
    found: Claim
    kubelet_evidence: KubeletEvidence
    until: float

    @property
    def key(self) -> tuple[str, str]:
        """Kubelet's UID of the pod, and the container."""
        return self.owner.pod_uid, self.owner.container
