"""A node with volcano.sh/vgpu-number: two GPUs of 40 units of 1024 MiB and four slots each; and
pods as Volcano's scheduler leaves them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.allocation.binding_parts import NODE, Place
from tests.families.volcano_vgpu.golden import NUMBER, decided
from tests.families.volcano_vgpu.golden import main as container
from tests.golden import U0, U1
from vgpu_agent.config.binding import Binding
from vgpu_agent.families.volcano_vgpu.family import VolcanoVgpuFamily, VolcanoVgpuOptions
from vgpu_agent.isolation.backend import Target
from vgpu_agent.isolation.edits import Edits, Mount, Provision
from vgpu_agent.pods import Pod, PodContainer

UNIT_MIB, SLOTS = 1024, 4
IDS = tuple(f"{uuid}-{number}" for uuid in (U0, U1) for number in range(SLOTS))


class OwnDirectory:
    """An isolation backend whose answers differ from container to container,
    as those of a real one do.
    """

    name = "own-directory"

    def provision(self, target: Target) -> Provision:
        """Each limit as a variable, and a directory of the container's own."""
        own = f"/own/{target.pod_uid}_{target.container}"
        limits = {
            f"CORES_{place}": str(share.cores_percent)
            for place, (_, share) in enumerate(target.shares)
        }
        return Provision(Edits(limits, (Mount("/own", own),)), own_directory=own)


class VolcanoPlace(Place):
    """The node. Each admitted container gets the next free id, as from the kubelet."""

    def __init__(
        self,
        *,
        binding: Binding | None = None,
        late: bool = True,
        before: VolcanoPlace | None = None,
    ) -> None:
        """A node on which nothing runs, or the one of ``before`` with a new agent."""
        family = VolcanoVgpuFamily(VolcanoVgpuOptions(split=SLOTS, factor=UNIT_MIB), OwnDirectory())
        super().__init__(
            late=late,
            carrier=before.carrier if before else None,
            family=family,
            resource=NUMBER,
            binding=binding,
        )
        self.ids: dict[tuple[str, str], tuple[str, ...]] = {}
        if before is None:
            self.book.replace([])
        else:
            self.checkpoint, self.pod_resources, self.answers = (
                before.checkpoint,
                before.pod_resources,
                before.answers,
            )
            self.ids = before.ids
            self.book.replace(before.book.pods)

    async def admitted(self, pod: Pod) -> None:
        """The kubelet admits ``pod``: one id for each container, none of them started."""
        self.book.put(pod)
        for each in pod.containers:
            taken = {id_ for ids in self.ids.values() for id_ in ids}
            ids = [id_ for id_ in IDS if id_ not in taken][: each.limits[NUMBER]]
            self.ids[pod.kubelet_uid, each.name] = tuple(ids)
            await self.admit(pod, each.name, ids)

    async def started(self, pod: Pod) -> None:
        """``pod`` is admitted and all its containers start."""
        await self.admitted(pod)
        for each in pod.containers:
            await self.start(self.ids[pod.kubelet_uid, each.name])

    def ended(self, pod: Pod) -> None:
        """The pod is gone for the kubelet and for the API server. The pod cache is not informed."""
        self.forget(pod)
        self.book.remove(pod)
        self.ids = {key: ids for key, ids in self.ids.items() if key[0] != pod.kubelet_uid}


def scheduled(
    name: str,
    *shares: tuple[str, int, int],
    scheduler: str = "volcano",
    node: str = NODE,
    more: dict[str, str] | None = None,
) -> Pod:
    """A pod with a container for each of ``shares`` (GPU, units, percent),
    as Volcano's scheduler decided.
    """
    text = ";".join(f"{gpu},NVIDIA,{units},{cores}:" for gpu, units, cores in shares)
    annotations = {**decided(text), "volcano.sh/vgpu-node": node, **(more or {})}
    return unscheduled(
        name,
        *((units, cores) for _, units, cores in shares),
        scheduler=scheduler,
        annotations=annotations,
    )


def unscheduled(
    name: str,
    *asks: tuple[int, int],
    scheduler: str = "default-scheduler",
    annotations: dict[str, str] | None = None,
) -> Pod:
    """A pod with a container for each of ``asks`` (units, percent), which the agent has to place
    unless ``annotations`` say more.
    """
    containers: Sequence[PodContainer] = [
        container(f"c{place}", number=1, memory=units, cores=cores)
        for place, (units, cores) in enumerate(asks)
    ]
    return Pod(
        f"uid-{name}",
        "team",
        name,
        node=NODE,
        annotations=annotations or {},
        containers=tuple(containers),
        scheduler=scheduler,
    )
