"""The files of grants over time, on a real folder: restored after a reboot, collected when the pod is gone, and never before."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from tests.allocation.binding_parts import IDS, NUMBER, Place, a_pod, wants
from tests.golden import U0
from vgpu_agent.agent.grant_keeping import GrantKeeping
from vgpu_agent.allocation.carrier import grant_token
from vgpu_agent.model import Holding, KubeletRecords, Owner
from vgpu_agent.pods import Pod, PodContainer
from vgpu_agent.runtime.grants import GrantDirectory


class Kept:
    """A place whose carrier is a real directory."""

    def __init__(self, folder: Path) -> None:
        self.place = Place()
        self.cdi, self.containers = folder / "cdi", folder / "containers"
        self.directory = GrantDirectory(str(self.cdi), self.place.journal, proc_root=str(folder / "proc"))
        self.keeping = GrantKeeping(
            directory=self.directory,
            allocator=self.place.allocator,
            ledger=self.place.ledger,
            book=self.place.book,
            containers_directory=str(self.containers),
            pause_seconds=30,
            refresh=self._nothing,
        )

    @staticmethod
    async def _nothing() -> None:
        """Nothing was delivered."""

    @property
    def specs(self) -> list[str]:
        """What the runtime would find."""
        return sorted(path.name for path in self.cdi.glob("*.json"))

    def running(self, pod: Pod) -> None:
        """kubelet's records name the pod, which runs."""
        holding = Holding(NUMBER, IDS[:1], Owner("main", pod.uid, pod.namespace, pod.name))
        self.place.allocator.confirm(KubeletRecords((holding,)), reservation_seconds=60, initial=True)


def a_running_pod() -> Pod:
    """A pod whose container has started."""
    pod = a_pod("train", annotations=wants(main=f"{U0} 1000"), phase="Running")
    return dataclasses.replace(pod, containers=(PodContainer("main", limits={NUMBER: 1}, started=True),))


async def test_a_rebooted_node_has_its_specs_before_anything_is_offered(tmp_path: Path) -> None:
    """The directory is empty; the records and the pod's annotation say what must be there."""
    kept, pod = Kept(tmp_path), a_running_pod()
    await kept.keeping.load()
    kept.place.book.replace([pod])
    kept.running(pod)
    await kept.keeping.restore()
    assert await asyncio.to_thread(lambda: kept.specs) == [f"vgpu-agent-{grant_token(NUMBER, IDS[:1])}.json"]


async def test_a_spec_stays_as_long_as_anybody_knows_its_pod(tmp_path: Path) -> None:
    """volcano-vgpu:D5 gone from the watch is not enough while kubelet's records have the pod, and nobody is gone while there is no list."""
    kept, pod = Kept(tmp_path), a_running_pod()
    kept.place.book.put(pod)
    kept.running(pod)
    await kept.keeping.restore()
    kept.place.book.remove(pod)
    await kept.keeping.collect()
    assert len(await asyncio.to_thread(lambda: kept.specs)) == 1  # the watch has not listed yet
    kept.place.book.replace([])
    await kept.keeping.collect()
    assert len(await asyncio.to_thread(lambda: kept.specs)) == 1  # the ledger has it from kubelet
    kept.place.ledger.release(kept.place.ledger.grants[0].number)
    await kept.keeping.collect()
    assert await asyncio.to_thread(lambda: kept.specs) == []


async def test_directories_that_nobody_owns_go_and_those_of_live_pods_stay(tmp_path: Path) -> None:
    """What an agent that was killed, or another plugin, has left behind is swept by the pod's UID in its name."""
    kept, pod = Kept(tmp_path), a_running_pod()
    for name in ("uid-train_main", "uid-gone_main"):
        await asyncio.to_thread((kept.containers / name).mkdir, parents=True)
    kept.place.book.replace([pod])
    await kept.keeping.collect()
    assert await asyncio.to_thread(lambda: sorted(path.name for path in kept.containers.iterdir())) == ["uid-train_main"]
