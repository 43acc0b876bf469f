"""From the region files of living containers to what the metrics show."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.golden import U0, U1
from tests.regions import Device, Slot, v0, v1
from vgpu_agent.concurrency import Supervisor
from vgpu_agent.isolation.hami_usage import read_region
from vgpu_agent.journal import Journal
from vgpu_agent.model import ContainerUsage
from vgpu_agent.pods import MIRROR_POD, STATIC_POD_HASH, Pod, PodCache, PodContainer
from vgpu_agent.runtime.container_usage import DIRECTORY_BEFORE_1_12, ContainerUsages

MIB = 1 << 20
NOW = 1_795_200_000


class Host:
    """The directories of this agent and of the replaced plugin, a /proc,
    and the pods of the node.
    """

    def __init__(self, folder: Path, journal: Journal) -> None:
        self.new, self.old, self.proc = (
            folder / "vgpu" / "containers",
            folder / "tmp" / "containers",
            folder / "proc",
        )
        self.book = PodCache()
        self.journal = journal
        self.usages = ContainerUsages(
            self.book,
            [str(self.new), str(self.old)],
            journal,
            pause_seconds=5,
            proc_root=str(self.proc),
        )

    def pod(
        self,
        name: str,
        *,
        uid: str = "",
        phase: str = "Running",
        containers: tuple[str, ...] = ("main",),
    ) -> None:
        """A pod that the API server shows on this node; its UID is ``uid-<name>``."""
        many = tuple(PodContainer(container) for container in containers)
        self.book.put(Pod(uid or f"uid-{name}", "team", name, phase=phase, containers=many))

    def region(
        self, directory: Path, owner: str, content: bytes | bytearray, name: str = "a.cache"
    ) -> Path:
        """A file in the directory of one container."""
        path = directory / owner / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def process(self, hostpid: int, pid: int, name: str = "python3") -> None:
        """A process on the host."""
        (self.proc / str(hostpid)).mkdir(parents=True, exist_ok=True)
        (self.proc / str(hostpid) / "status").write_text(
            f"Name:\t{name}\nState:\tR (running)\nNSpid:\t{hostpid}\t{pid}\n"
        )

    async def look(self) -> list[tuple[str, str, int]]:
        """Look once: (pod, container, bytes in use) of each device."""
        await self.usages.read_once()
        return [(entry.pod, entry.container, entry.used_bytes) for entry in self.usages.usage.value]


@pytest.fixture
def host(tmp_path: Path, journal: Journal) -> Host:
    """A node on which nothing runs yet."""
    return Host(tmp_path, journal)


def used(size: int, *, pid: int = 1, hostpid: int = 0) -> bytearray:
    """The region of one process on one device."""
    return v1([Device(U0, 3000 * MIB)], [Slot({0: size}, pid=pid, hostpid=hostpid)])


async def test_a_container_of_this_agent(host: Host) -> None:
    """volcano-vgpu:D7: namespace, pod and container by the directory's name, one entry a device,
    in the container's order.
    """
    host.pod("train-0", containers=("sidecar", "main"))
    two = [Device(U1, 3000 * MIB, 50), Device(U0, 4000 * MIB)]
    host.region(
        host.new, "uid-train-0_main", v1(two, [Slot({0: 700 * MIB}, {0: 30})], last_kernel=NOW)
    )
    await host.usages.read_once()
    assert host.usages.usage.value == (
        ContainerUsage("team", "train-0", "main", 0, U1, 700 * MIB, 3000 * MIB, 30, NOW, 50, 1),
        ContainerUsage("team", "train-0", "main", 1, U0, 0, 4000 * MIB, 0, NOW, 100, 1),
    )


async def test_a_container_that_the_replaced_plugin_has_started(host: Host) -> None:
    """volcano-vgpu:D7: its pods run on after the change of plugins, and are shown from the
    directory that up to v1.11 it used.
    """
    assert DIRECTORY_BEFORE_1_12 == "/tmp/vgpu/containers"
    host.pod("old")
    host.pod("new")
    host.region(host.old, "uid-old_main", v0([Device(U0)], [Slot({0: 5})]))
    host.region(host.new, "uid-new_main", used(6))
    assert await host.look() == [("new", "main", 6), ("old", "main", 5)]


async def test_a_container_in_both_directories_is_shown_once(host: Host) -> None:
    """A series that is there twice costs the whole scrape;
    ours is what the container has mounted.
    """
    host.pod("p")
    host.region(host.old, "uid-p_main", used(5))
    host.region(host.new, "uid-p_main", used(6))
    assert await host.look() == [("p", "main", 6)]


async def test_a_pod_and_its_successor_of_the_same_name(host: Host) -> None:
    """While one is on its way out, both are known. The later one has the name."""
    host.pod("same", uid="uid-b")
    host.pod("same", uid="uid-a")
    host.region(host.new, "uid-b_main", used(5))
    host.region(host.new, "uid-a_main", used(6))
    assert await host.look() == [("same", "main", 6)]


async def test_directories_of_nobody_are_not_looked_at(host: Host) -> None:
    """Pods that are gone or have ended, containers that the pod does not have,
    and what else may lie there.
    """
    host.pod("lives")
    host.pod("ended", phase="Succeeded")
    for owner in ("uid-gone_main", "uid-ended_main", "uid-lives_other", "lost+found"):
        host.region(host.new, owner, used(5))
    assert await host.look() == []


async def test_a_static_pod_under_either_uid(host: Host) -> None:
    """The kubelet knows it by the hash of its file, and so do we.
    The replaced plugin knew the API server's.
    """
    annotations = {MIRROR_POD: "x", STATIC_POD_HASH: "hash"}
    containers = (PodContainer("main"),)
    host.book.put(
        Pod(
            "uid-api",
            "team",
            "static",
            phase="Running",
            annotations=annotations,
            containers=containers,
            reported=True,
        )
    )
    region = host.region(host.old, "uid-api_main", used(5))
    assert await host.look() == [("static", "main", 5)]
    region.unlink()
    host.region(host.new, "hash_main", used(6))
    assert await host.look() == [("static", "main", 6)]


async def test_a_killed_process_is_not_counted(host: Host) -> None:
    """Its slot says running for ever. Where the host's processes are seen,
    it is known to be gone (hami-core §2.4).
    """
    host.process(2, 2, "kthreadd")
    host.process(4001, 7)
    host.pod("p")
    host.region(
        host.new,
        "uid-p_main",
        v1([Device(U0)], [Slot({0: 100}, pid=6, hostpid=4000), Slot({0: 1}, pid=7, hostpid=4001)]),
    )
    assert await host.look() == [("p", "main", 1)]


async def test_without_host_pids_every_process_counts(host: Host) -> None:
    """The agent sees only its own processes then, and the absence of others says nothing."""
    host.process(2, 2, "sleep")
    host.pod("p")
    host.region(host.new, "uid-p_main", used(100, pid=6, hostpid=4000))
    assert await host.look() == [("p", "main", 100)]


async def test_a_container_that_has_not_used_cuda_yet(host: Host) -> None:
    """An empty directory, an empty file, and one that is being made:
    nothing is shown, and nothing is reported.
    """
    for name in ("a", "b", "c"):
        host.pod(name)
    (host.new / "uid-a_main").mkdir(parents=True)
    host.region(host.new, "uid-b_main", b"")
    host.region(host.new, "uid-c_main", bytes(2_008_953))
    assert await host.look() == []
    assert host.journal.entries == []


async def test_a_region_that_cannot_be_read_is_said_once(host: Host) -> None:
    """With pod, container and reason. The others are shown,
    and it is shown as soon as it can be read.
    """
    host.pod("good")
    host.pod("odd")
    host.region(host.new, "uid-good_main", used(5))
    region = host.region(host.new, "uid-odd_main", b"hello")
    assert await host.look() == [("good", "main", 5)]
    await host.look()
    (entry,) = host.journal.entries
    assert (entry.event, entry.facts["pod"], entry.facts["container"]) == (
        "region.unreadable",
        "team/odd",
        "main",
    )
    assert "5 bytes" in entry.facts["reason"]
    assert host.usages.unreadable == {"team/odd/main": entry.facts["reason"]}
    region.write_bytes(used(6))
    assert await host.look() == [("good", "main", 5), ("odd", "main", 6)]
    assert host.usages.unreadable == {}


async def test_of_several_regions_the_last_written_counts(host: Host) -> None:
    """Each Allocate of the replaced plugin chose a new name;
    junk beside it does not hide a region.
    """
    host.pod("p")
    for place, (name, content) in enumerate(
        (("new.cache", used(6)), ("old.cache", used(5)), ("junk.cache", bytearray(b"junk")))
    ):
        path = host.region(host.new, "uid-p_main", content, name)
        os.utime(path, (NOW, NOW - place if name != "junk.cache" else NOW + 9))
    assert await host.look() == [("p", "main", 6)]


async def test_what_is_no_file_is_not_opened(host: Host) -> None:
    """volcano-vgpu:D20: the container owns the directory: links out of it, pipes and directories
    under a region's name do no harm.
    """
    host.pod("p")
    directory = host.new / "uid-p_main"
    elsewhere = host.region(host.old, "somebody_else", used(5))
    directory.mkdir(parents=True)
    (directory / "a.cache").symlink_to(elsewhere)
    os.mkfifo(directory / "b.cache")
    (directory / "c.cache").mkdir()
    host.pod("q")
    (host.new / "uid-q_main").symlink_to(elsewhere.parent)
    assert await host.look() == []


async def test_a_directory_full_of_files_costs_no_more_than_some(host: Host) -> None:
    """A container that fills its directory gets no usage, and delays no other's."""
    host.pod("full")
    host.pod("p")
    for number in range(200):
        host.region(host.new, "uid-full_main", b"x", f"{number}.cache")
    host.region(host.new, "uid-p_main", used(5))
    assert await host.look() == [("p", "main", 5)]


async def test_files_that_vanish_or_shrink_while_they_are_read(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """volcano-vgpu:D20: a region ends under the reader's hands.
    What was copied is let go, and the other containers are shown.
    """
    for name in ("gone", "short", "stays"):
        host.pod(name)
    paths = {
        name: host.region(host.new, f"uid-{name}_main", used(5))
        for name in ("gone", "short", "stays")
    }

    def late(size: int, pread: object, **options: object) -> object:
        os.truncate(paths["short"], 2_000)
        paths["gone"].unlink(missing_ok=True)
        # passed on as they are
        return read_region(size, pread, **options)  # type: ignore[arg-type]  # the test's own keywords

    with monkeypatch.context() as patched:
        patched.setattr("vgpu_agent.runtime.container_usage.read_region", late)
        found = await host.look()
    assert ("stays", "main", 5) in found
    assert "short" not in [pod for pod, _, _ in found]
    assert await host.look() == [("stays", "main", 5)]


async def test_nothing_stays_of_a_container_that_is_gone(host: Host) -> None:
    """Its series go with the pod, also while its directory still lies there."""
    host.pod("p")
    host.region(host.new, "uid-p_main", used(5))
    assert await host.look() == [("p", "main", 5)]
    pod = host.book.get("uid-p")
    assert pod is not None
    host.book.remove(pod)
    assert await host.look() == []


async def test_an_idle_node_publishes_nothing(host: Host) -> None:
    """Readers wait for something newer. The same again is none."""
    host.pod("p")
    host.region(host.new, "uid-p_main", used(5))
    await host.look()
    await host.look()
    assert host.usages.usage.version == 1


@pytest.mark.looptime
async def test_it_looks_again_after_each_pause(host: Host) -> None:
    """One supervised loop, for as long as the agent runs."""
    host.pod("p")
    region = host.region(host.new, "uid-p_main", used(5))
    async with Supervisor(backoff_min_seconds=1, backoff_max_seconds=1) as supervisor:
        supervisor.start("container usage", host.usages.run)
        assert [entry.used_bytes for entry in await host.usages.usage.newer_than(0)] == [5]
        region.write_bytes(used(6))
        assert [entry.used_bytes for entry in await host.usages.usage.newer_than(1)] == [6]
