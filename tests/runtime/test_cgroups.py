"""The container of a process, found by the names that kubelet and runtimes give to cgroups, and by
nothing that a container can name itself (vgpu-manager §7.6).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.contained import CGROUPS, bases, kubepods
from vgpu_agent.runtime import cgroups
from vgpu_agent.runtime.cgroups import ContainerKey, PodCgroups, container_of, parse_container

pytestmark = pytest.mark.component  # it starts programs

UID = "6d0f3a1c-2b4e-4f7a-9c8d-1e2f3a4b4d5e"
OTHER = "11111111-2b4e-4f7a-9c8d-1e2f3a4b4d5e"
HASH = "0123456789abcdef0123456789abcdef"
ID, OTHER_ID = "ab" * 32, "cd" * 32
SLICE = f"kubepods-burstable-pod{UID.replace('-', '_')}.slice"


@pytest.mark.parametrize(
    ("path", "uid"),
    [
        (f"/kubepods/pod{UID}/{ID}", UID),
        (f"/kubepods/burstable/pod{UID}/{ID}", UID),
        (f"/kubepods/besteffort/pod{HASH}/{ID}", HASH),
        (f"/kubepods/besteffort/pod{UID}/crio-{ID}", UID),
        (f"/kubepods.slice/kubepods-burstable.slice/{SLICE}/cri-containerd-{ID}.scope", UID),
        (f"/kubepods.slice/kubepods-pod{HASH}.slice/crio-{ID}.scope", HASH),
        (f"/kubelet.slice/kubelet-{SLICE}/docker-{ID}.scope", UID),
        (f"/docker/{OTHER_ID}/kubelet/kubepods/pod{UID}/{ID}", UID),
        (f"/../../../{SLICE}/cri-containerd-{ID}.scope", UID),
        (f"/../../pod{UID}/{ID}", UID),
        (f"/kubepods/pod{UID}/{ID}/made/by/the/container", UID),
    ],
)
def test_a_process_is_known_by_the_names_of_each_driver_and_runtime(path: str, uid: str) -> None:
    """Also of a static pod, whose UID is a hash, and as an agent in a cgroup namespace sees it."""
    assert parse_container(f"0::{path}\n") == ContainerKey(uid, ID)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0::/\n",
        "0::/init.scope\n",
        "0::/system.slice/containerd.service\n",
        f"0::/kubepods/pod{UID}\n",  # the pod's own sandbox, before a container
        f"0::/kubepods/pod{UID}/crio-conmon-{ID}\n",
        f"0::/kubepods/pod/{ID}\n",
        f"0::/kubepods/pod{UID}/../pod{OTHER}/{ID}\n",
        "garbage\n::\n:\n",
        "\x00\xff",
    ],
)
def test_all_else_is_in_no_container(text: str) -> None:
    """A daemon of the node, the runtime's own helper, and what cannot be read."""
    assert parse_container(text) is None


def test_the_lines_of_both_versions_count_where_they_agree() -> None:
    """On a node with both, the hierarchies that do not follow pods are at their roots."""
    mixed = f"9:name=systemd:/\n4:memory:/kubepods/pod{UID}/{ID}\n0::/\n"
    assert parse_container(mixed) == ContainerKey(UID, ID)
    assert parse_container(mixed + f"3:pids:/kubepods/pod{OTHER}/{ID}\n") is None


def test_a_container_cannot_name_itself_another_pods() -> None:
    """It may make cgroups below its own, so it is the outermost name that counts."""
    forged = f"0::/kubepods/pod{UID}/{ID}/kubepods/pod{OTHER}/{OTHER_ID}\n"
    assert parse_container(forged) == ContainerKey(UID, ID)
    assert parse_container(f"0::/kubepods/pod{UID}/x/pod{OTHER}/{OTHER_ID}\n") is None


@given(st.text(max_size=300))
def test_no_text_is_too_strange(text: str) -> None:
    """Whatever the kernel shows, the answer is a container or none."""
    found = parse_container(text)
    assert found is None or found.pod_uid


@pytest.mark.parametrize("systemd", [False, True], ids=["cgroupfs", "systemd"])
@pytest.mark.parametrize("base", bases(), ids=lambda base: base.name)
def test_real_processes_are_found_from_both_ends(base: Path, systemd: bool) -> None:
    """From the process to its container, and from the container to all of its processes, also in
    cgroups that it made itself.
    """
    with kubepods(base) as pods:
        one, other = pods.container(systemd=systemd), pods.container(systemd=systemd)
        processes = [one.start(), one.start("below"), other.start()]
        now = time.clock_gettime(time.CLOCK_BOOTTIME) + 1
        assert [container_of("/proc", process.pid, seen_at=now) for process in processes] == [
            one.member,
            one.member,
            other.member,
        ]
        tree = PodCgroups(str(CGROUPS))
        assert tree.processes(one.member) == tuple(sorted(each.pid for each in processes[:2]))
        assert tree.processes(other.member) == (processes[2].pid,)
        assert tree.processes(ContainerKey(one.member.pod_uid, other.member.container_id)) == ()
        late = pods.container(systemd=systemd)
        assert tree.processes(late.member) == ()
        pid = late.start().pid
        assert tree.processes(late.member) == (pid,)


def test_a_number_that_another_process_has_by_now_is_nobody() -> None:
    """A process that began after the connection was made did not make it."""
    with kubepods() as pods:
        container = pods.container()
        process = container.start()
        began = time.clock_gettime(time.CLOCK_BOOTTIME) - 60
        assert container_of("/proc", process.pid, seen_at=began) is None
        process.end()
        assert container_of("/proc", process.pid, seen_at=began + 120) is None


def _tree(root: Path, *groups: str) -> None:
    for group in ("", *groups):
        (root / group).mkdir(parents=True, exist_ok=True)
        (root / group / "cgroup.procs").write_text("")


def test_a_forged_cgroup_is_never_found_in_place_of_the_real_one(tmp_path: Path) -> None:
    """A search does not look below pods; so neither a twin of another pod nor a thousand names
    lead it astray.
    """
    forged = f"kubepods/pod{OTHER}/{OTHER_ID}/kubepods/pod{UID}/{ID}"
    real = f"kubepods/burstable/pod{UID}/{ID}"
    _tree(tmp_path, forged, real)
    (tmp_path / forged / "cgroup.procs").write_text("666\n")
    (tmp_path / real / "cgroup.procs").write_text("42\n7\n0\n")
    assert PodCgroups(str(tmp_path)).processes(ContainerKey(UID, ID)) == (7, 42)


def test_a_container_with_many_cgroups_costs_a_bounded_look(tmp_path: Path) -> None:
    """It may make as many as it likes."""
    groups = [f"kubepods/pod{UID}/{ID}/{number:04}" for number in range(2000)]
    _tree(tmp_path, f"kubepods/pod{UID}/{ID}", *groups)
    for number, group in enumerate(groups):
        (tmp_path / group / "cgroup.procs").write_text(f"{number + 1}\n")
    found = PodCgroups(str(tmp_path)).processes(ContainerKey(UID, ID))
    assert 0 < len(found) < 300


def test_a_container_with_very_many_processes_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is a file of the agent's, and the library reads no more than 1,024 of it."""
    monkeypatch.setattr(cgroups, "MAX_PROCESSES", 10)
    _tree(tmp_path, f"kubepods/pod{UID}/{ID}")
    procs = tmp_path / "kubepods" / f"pod{UID}" / ID / "cgroup.procs"
    procs.write_text("".join(f"{number}\n" for number in range(1, 100)))
    assert PodCgroups(str(tmp_path)).processes(ContainerKey(UID, ID)) == tuple(range(1, 11))


def test_the_agent_itself_is_in_no_pod_here() -> None:
    """A plain process has no container, and asking for it raises nothing."""
    now = time.clock_gettime(time.CLOCK_BOOTTIME) + 1
    assert container_of("/proc", 2**22 + 1, seen_at=now) is None
    container_of("/proc", os.getpid(), seen_at=now)
