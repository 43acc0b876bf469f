"""The files of grants over time, on a real folder:
restored after a reboot, collected when the pod is gone, and never before.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tests.allocation.binding_parts import IDS, NUMBER, MemoryCarrier, Place, a_pod, wants
from tests.allocation.later_parts import confirm
from tests.golden import U0, U1
from tests.patience import PATIENCE_SECONDS
from vgpu_agent.agent.records.grant_files import GrantKeeping
from vgpu_agent.allocation.carrier import GrantRecord, grant_token
from vgpu_agent.isolation.edits import Provision
from vgpu_agent.journal import Journal
from vgpu_agent.model import Holding, KubeletRecords, Owner
from vgpu_agent.pods import Pod, PodContainer
from vgpu_agent.runtime.grants import GrantDirectory


class DiskCarrier(MemoryCarrier):
    """A real directory instead of memory."""

    def __init__(self, directory: GrantDirectory) -> None:
        super().__init__()
        self.directory = directory

    @property
    def records(self) -> Sequence[GrantRecord]:
        return self.directory.records

    outdated = False

    async def has_usable_spec(self, token: str) -> bool:
        return await self.directory.has_usable_spec(token)

    async def deliver(self, record: GrantRecord, provision: Provision) -> None:
        await self.directory.deliver(record, provision)


class Kept:
    """A place whose carrier is a real directory."""

    def __init__(self, folder: Path) -> None:
        self.cdi, self.containers = folder / "cdi", folder / "containers"
        self.shared = folder / "shared"
        self.directory = GrantDirectory(
            str(self.cdi),
            Journal(),
            proc_root=str(folder / "proc"),
            kept_directory=str(folder / "kept"),
        )
        self.place = Place(carrier=DiskCarrier(self.directory))
        self.keeping = GrantKeeping(
            grant_directory=self.directory,
            allocator=self.place.allocator,
            ledger=self.place.ledger,
            pod_cache=self.place.book,
            container_directories=[str(self.containers)],
            shared_directories=[str(self.shared)],
            pause_seconds=30,
            renew_offer=self._nothing,
        )

    @staticmethod
    async def _nothing() -> None:
        """Nothing was delivered."""

    @property
    def specs(self) -> list[str]:
        """Return the specs that the runtime would find."""
        return sorted(path.name for path in self.cdi.glob("*.json"))

    async def start(self, pod: Pod, *ids: str) -> None:
        """Admit and start the pod's only container."""
        self.place.book.put(pod)
        await self.place.admit(pod, "main", ids)
        await self.place.start(ids)

    def running(self, pod: Pod) -> None:
        """The kubelet's records name the pod, which runs."""
        holding = Holding(NUMBER, IDS[:1], Owner("main", pod.uid, pod.namespace, pod.name))
        self.place.allocator.confirm(
            KubeletRecords((holding,)), reservation_seconds=60, initial=True
        )


def a_running_pod() -> Pod:
    """A pod whose container has started."""
    pod = a_pod("train", annotations=wants(main=f"{U0} 1000"), phase="Running")
    return msgspec.structs.replace(
        pod, containers=(PodContainer("main", limits={NUMBER: 1}, started=True),)
    )


async def test_a_rebooted_node_has_its_specs_before_anything_is_offered(tmp_path: Path) -> None:
    """The directory is empty. The records and the pod's annotation say what must be there."""
    kept, pod = Kept(tmp_path), a_running_pod()
    await kept.keeping.load()
    kept.place.book.replace([pod])
    kept.running(pod)
    await kept.keeping.restore()
    assert await asyncio.to_thread(lambda: kept.specs) == [
        f"vgpu-agent-{grant_token(NUMBER, IDS[:1])}.json"
    ]


async def test_directories_of_a_replaced_plugin_go_by_who_lives(tmp_path: Path) -> None:
    """vgpu-manager:D27: neither age nor labels say that a container has ended. What lies beside
    such directories is left alone.
    """
    kept, pod = Kept(tmp_path), a_running_pod()
    uid = "6d0f1c3e-52a4-4c0b-9f2c-1f6f2b3a4d5e"
    pod = msgspec.structs.replace(pod, uid=uid, labels={"vgpu": "relabelled"})
    others = ["registry", "watcher", "not-a-uid_main", uid]
    gone = "7d0f1c3e-52a4-4c0b-9f2c-1f6f2b3a4d5e_main"
    for name in (*others, f"{uid}_main", gone):
        (kept.shared / name / "config").mkdir(parents=True)
    kept.place.book.replace([pod])
    await kept.keeping.collect()
    assert sorted(os.listdir(kept.shared)) == sorted([*others, f"{uid}_main"])


async def test_a_spec_stays_as_long_as_anybody_knows_its_pod(tmp_path: Path) -> None:
    """volcano-vgpu:D5 gone from the watch is not enough while the kubelet's records have the pod.
    Without a list no pod is gone.
    """
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
    """Directories left by a killed agent or another plugin are swept by the pod's UID
    in their names.
    """
    kept, pod = Kept(tmp_path), a_running_pod()
    for name in ("uid-train_main", "uid-gone_main"):
        await asyncio.to_thread((kept.containers / name).mkdir, parents=True)
    kept.place.book.replace([pod])
    await kept.keeping.collect()
    assert await asyncio.to_thread(
        lambda: sorted(path.name for path in kept.containers.iterdir())
    ) == ["uid-train_main"]


def spec_of(*ids: str) -> str:
    """The name of the file that the runtime reads for these ids."""
    return f"vgpu-agent-{grant_token(NUMBER, ids)}.json"


ENDED, NEXT = (
    a_pod("ended", annotations=wants(main=f"{U0} 1000")),
    a_pod("next", annotations=wants(main=f"{U1} 2000")),
)


async def one_has_ended(folder: Path) -> Kept:
    """The kubelet has cleaned up after a pod, and the API server has not reported it yet.
    Its spec is still there.
    """
    kept = Kept(folder)
    kept.place.book.replace([])
    await kept.start(ENDED, *IDS[:1])
    kept.place.forget(ENDED)
    assert await asyncio.to_thread(lambda: kept.specs) == [spec_of(*IDS[:1])]
    return kept


async def test_the_next_holder_of_the_ids_finds_no_spec_under_their_name(tmp_path: Path) -> None:
    """A container without PreStartContainer, as right after a kubelet restart,
    must not start with the previous pod's spec.
    """
    kept = await one_has_ended(tmp_path)
    await kept.place.admit(NEXT, "main", IDS[:1])
    await kept.keeping.withdraw_foreign_specs()
    assert await asyncio.to_thread(lambda: kept.specs) == []
    assert kept.place.carrier.records == ()  # so that no share is read from it either


async def test_nor_once_kubelets_records_have_named_the_next_holder(tmp_path: Path) -> None:
    """Before its own start has replaced the spec, a pass over the records has shown its UID."""
    kept = await one_has_ended(tmp_path)
    await kept.place.admit(NEXT, "main", IDS[:1])
    kept.place.book.put(NEXT)
    confirm(kept.place)
    await kept.keeping.withdraw_foreign_specs()
    assert await asyncio.to_thread(lambda: kept.specs) == []


async def test_the_spec_of_whoever_has_the_ids_stays(tmp_path: Path) -> None:
    """Right after its start, after each pass over the records,
    and after the next pod has got other ids.
    """
    kept = Kept(tmp_path)
    kept.place.book.replace([])
    await kept.start(ENDED, *IDS[:1])
    await kept.keeping.withdraw_foreign_specs()
    confirm(kept.place, times=2)
    await kept.place.admit(NEXT, "main", IDS[1:2])
    await kept.keeping.withdraw_foreign_specs()
    assert await asyncio.to_thread(lambda: kept.specs) == [spec_of(*IDS[:1])]


async def test_ids_that_nobody_holds_leave_their_spec_to_the_collection(tmp_path: Path) -> None:
    """No container can start from it, and its directory may still be mounted."""
    kept = await one_has_ended(tmp_path)
    kept.place.ledger.release(kept.place.ledger.grants[0].number)
    await kept.keeping.withdraw_foreign_specs()
    assert await asyncio.to_thread(lambda: kept.specs) == [spec_of(*IDS[:1])]
    kept.place.book.remove(ENDED)
    await kept.keeping.collect()
    assert await asyncio.to_thread(lambda: kept.specs) == []


async def test_the_loop_looks_right_after_an_allocate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next container starts within milliseconds of it, long before the regular look."""
    kept, withdrawn = await one_has_ended(tmp_path), asyncio.Event()
    original = kept.directory.withdraw

    async def withdraw(record: GrantRecord) -> None:
        await original(record)
        withdrawn.set()

    monkeypatch.setattr(kept.directory, "withdraw", withdraw)
    running = asyncio.ensure_future(kept.keeping.run(lambda: None))
    await asyncio.sleep(0.05)
    assert await asyncio.to_thread(lambda: kept.specs) == [spec_of(*IDS[:1])]
    await kept.place.admit(NEXT, "main", IDS[:1])
    async with asyncio.timeout(PATIENCE_SECONDS):  # of 30 s until the regular look
        await withdrawn.wait()
    assert await asyncio.to_thread(lambda: kept.specs) == []
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_nothing_is_restored_for_a_container_that_has_lost_its_ids_meanwhile(
    tmp_path: Path,
) -> None:
    """Writing takes a while, and kubelet admits pods at the same time:
    a late spec would be under another pod's name.
    """
    kept = Kept(tmp_path)
    kept.place.book.replace([])
    await kept.start(ENDED, *IDS[:1])
    await kept.start(NEXT, *IDS[1:2])
    await asyncio.to_thread(shutil.rmtree, kept.cdi)
    await kept.directory.load()
    restoring = asyncio.ensure_future(kept.keeping.restore())
    await asyncio.sleep(0)  # the first is being written
    await kept.place.allocator.allocate(NUMBER, IDS[1:2])
    await restoring
    assert await asyncio.to_thread(lambda: kept.specs) == [spec_of(*IDS[:1])]
