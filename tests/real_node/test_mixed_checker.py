"""The worth of the checker of mixed days:
it finds what must not be in what containers have written. No node is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.real_node.mixed.checker import Checker
from tests.real_node.mixed.jobs import AWS, GPUSHARE, NVIDIA, RESOURCES, UNIT_MIB, VGPU_FAMILY, Job

_UUIDS = tuple(f"GPU-{number:08x}-aaaa-bbbb-cccc-{number:012x}" for number in (1, 2))
_MEMORY_MIB = 8 * UNIT_MIB


def _job(name: str, family: str, memory: int = 4) -> Job:
    return Job(name, family, 0.0, 0, 5, deleted=False, memory=memory)


class _Folder:
    """A folder of files as containers write them, all on GPU 0 by default."""

    def __init__(self, path: Path, jobs: Sequence[Job]) -> None:
        self.path, self.jobs = path, {job.name: job for job in jobs}
        self.checker = Checker(jobs, path, _UUIDS, _MEMORY_MIB)

    def start(
        self, name: str, at: float, gpu: int = 0, *, node: int | None = None, mib: int | None = None
    ) -> None:
        mib = self.jobs[name].memory * UNIT_MIB if mib is None else mib
        lines = [
            f"AT={at}",
            f"NVIDIA_VISIBLE_DEVICES={_UUIDS[gpu]}",
            f"NODES=/dev/nvidia{gpu if node is None else node}",
        ]
        if self.jobs[name].family == VGPU_FAMILY:
            lines += [f"CUDA_DEVICE_MEMORY_LIMIT_0={mib}m", f"REGION_BYTES={mib << 20}"]
        (self.path / f"{name}.start").write_text("\n".join(lines))
        self.checker.read_views()

    def end(self, name: str, at: float) -> None:
        (self.path / f"{name}.end").write_text(f"{at}\n")
        self.checker.read_views()

    def bound(self, now: float, **gpus: int) -> None:
        """Volcano's scheduler has named these GPUs for these pods;
        the others wait without a node, unless they have started.
        """
        pods = [
            {
                "metadata": {
                    "name": name,
                    "annotations": {"volcano.sh/vgpu-ids-new": f"{_UUIDS[gpus[name]]},NVIDIA,4,0:"},
                },
                "spec": {"nodeName": "node"},
            }
            if name in gpus
            else {
                "metadata": {"name": name},
                "spec": {"nodeName": "node"} if name in self.checker.views else {},
            }
            for name in self.jobs
        ]
        self.checker.see_pods(pods, {}, now)

    def faults(self) -> list[str]:
        self.checker.judge()
        return self.checker.report.faults


def test_one_family_after_the_other_is_right(tmp_path: Path) -> None:
    """Correct use is not accused, to the hundredth of a second."""
    folder = _Folder(tmp_path, [_job("n", NVIDIA), _job("a", AWS), _job("v", VGPU_FAMILY)])
    folder.bound(0.0, v=0)
    for name, at in {"n": 1.0, "a": 2.0, "v": 3.0}.items():
        folder.start(name, at)
        folder.end(name, at + 1.0)
    assert folder.faults() == []


def test_a_wrong_share_is_found(tmp_path: Path) -> None:
    """Another's device node, another's memory, another GPU than the scheduler named."""
    folder = _Folder(tmp_path, [_job("n", NVIDIA), _job("m", VGPU_FAMILY), _job("g", VGPU_FAMILY)])
    folder.bound(0.0, m=1, g=1)
    folder.start("n", 1.0, 0, node=1)
    folder.start("m", 1.0, 1, mib=6 * UNIT_MIB)
    folder.start("g", 2.0, 0)
    assert len(folder.checker.report.wrong) == 0
    assert sorted(text.partition(":")[0] for text in folder.faults() if "found" in text) == [
        "g",
        "m",
        "n",
    ]


def test_two_families_at_once_and_memory_given_twice_are_found(tmp_path: Path) -> None:
    """Each container alone has what was meant for it."""
    folder = _Folder(
        tmp_path, [_job("n", NVIDIA), _job("v", VGPU_FAMILY, 6), _job("w", VGPU_FAMILY, 6)]
    )
    folder.bound(0.0, v=1, w=1)
    folder.start("v", 1.0, 1)
    folder.start("w", 2.0, 1)
    folder.start("n", 3.0, 1)
    folder.faults()
    assert f": {12 * UNIT_MIB} MiB" in folder.checker.report.over_memory[0]
    assert "['n', 'v', 'w']" in folder.checker.report.two_families[0]


def test_a_pod_that_waits_beside_an_idle_gpu_is_found(tmp_path: Path) -> None:
    """Not while the GPU is named for a pod that has not started,
    and not in its first seven seconds.
    """
    folder = _Folder(tmp_path, [_job("n", NVIDIA), _job("v", VGPU_FAMILY), _job("w", AWS)])
    folder.start("n", 0.0, 0)
    for now in (0.0, 4.0, 8.0, 12.0):
        folder.bound(now, v=1)
    assert folder.checker.report.idle == {}
    folder.start("v", 12.5, 1)
    folder.end("v", 13.0)
    for now in (13.0, 17.0, 21.0):
        folder.bound(now)
    assert folder.checker.report.idle == {"w": 8.0}


@pytest.mark.parametrize("holds", [True, False])
def test_a_wait_by_volcanos_sum_over_the_node_is_counted_by_itself(
    tmp_path: Path, holds: bool
) -> None:
    """Only while a pod that it has placed waits for another family's GPU; else the agent is asked
    why the free one is not given out.
    """
    folder = _Folder(tmp_path, [_job("a", AWS), _job("v", VGPU_FAMILY), _job("w", VGPU_FAMILY)])
    folder.start("a", 0.0, 0)
    why = "0/1 nodes are unavailable: 1 Insufficient volcano.sh/vgpu-memory."
    waits = {
        "metadata": {"name": "w"},
        "spec": {},
        "status": {"conditions": [{"type": "PodScheduled", "message": why}]},
    }
    placed = {
        "metadata": {
            "name": "v",
            "annotations": {"volcano.sh/vgpu-ids-new": f"{_UUIDS[0]},NVIDIA,4,0:"},
        },
        "spec": {"nodeName": "node"},
    }
    held = {"a": {RESOURCES[AWS]: [f"{_UUIDS[0]}::0"]}} if holds else {}
    for now in (0.0, 8.0):
        folder.checker.see_pods([placed, waits], held, now)
    report = folder.checker.report
    assert (report.idle, report.summed) == (({}, {"w": 8.0}) if holds else ({"w": 8.0}, {}))


def test_memory_of_gpu_share_is_read_in_mib(tmp_path: Path) -> None:
    """Its variable counts MiB, whatever a unit of the resource is."""
    folder = _Folder(tmp_path, [_job("s", GPUSHARE)])
    (tmp_path / "s.start").write_text(
        f"AT=1.0\nNVIDIA_VISIBLE_DEVICES=1\nNODES=\nVOLCANO_GPU_ALLOCATED={4 * UNIT_MIB}"
    )
    folder.checker.read_views()
    folder.checker.see_pods(
        [
            {
                "metadata": {"name": "s", "annotations": {"volcano.sh/gpu-index": "1"}},
                "spec": {"nodeName": "node"},
            }
        ],
        {},
        2.0,
    )
    assert folder.faults() == []


def test_a_handover_counts_from_the_end_that_the_api_server_shows(tmp_path: Path) -> None:
    """Of a deleted pod pod-resources forgets the ids two seconds before anybody is told that the
    pod has ended. These are the kubelet's seconds, not the agent's.
    """
    folder = _Folder(tmp_path, [_job("n", NVIDIA)])
    folder.start("n", 1.0)
    folder.end("n", 10.0)
    assert folder.checker.released_by == {"n"}
    folder.checker.see_healthy({}, [], 12.0, shown=["n"])
    folder.checker.see_healthy({RESOURCES[AWS]: frozenset(_UUIDS)}, [], 12.25)
    assert folder.checker.report.handovers == [2.25]
    assert folder.checker.report.after_kubelet == [0.25]
    assert folder.faults() == []


def test_a_handover_ends_with_healthy_ids_of_another_family(tmp_path: Path) -> None:
    """Those of the same family were healthy all the time."""
    folder = _Folder(tmp_path, [_job("n", NVIDIA)])
    folder.start("n", 1.0)
    folder.end("n", 10.0)
    folder.checker.see_healthy(
        {RESOURCES[NVIDIA]: frozenset(_UUIDS), RESOURCES[AWS]: frozenset(_UUIDS[1:])}, ["n"], 11.0
    )
    assert folder.checker.handing_over
    folder.checker.see_healthy({RESOURCES[AWS]: frozenset(_UUIDS)}, [], 12.5)
    assert folder.checker.report.handovers == [2.5]
    assert folder.checker.report.after_kubelet == [1.5]
    assert folder.faults() == []


def test_an_offer_before_kubelet_has_let_go_is_found(tmp_path: Path) -> None:
    """The kubelet would give the GPU to another family while the pod may still have processes."""
    folder = _Folder(tmp_path, [_job("n", NVIDIA)])
    folder.start("n", 1.0)
    folder.end("n", 10.0)
    folder.checker.see_healthy({RESOURCES[AWS]: frozenset(_UUIDS)}, ["n"], 11.0)
    assert ["while kubelet still listed n" in fault for fault in folder.checker.report.wrong] == [
        True
    ]


@pytest.mark.parametrize(
    ("family", "seconds_later", "is_first", "raced"),
    [
        (AWS, 0.0, True, True),
        (AWS, 2.0, True, True),
        (AWS, 3.0, True, False),
        (AWS, -1.0, True, False),
        (AWS, 0.0, False, False),
        (NVIDIA, 0.0, True, False),
        (VGPU_FAMILY, 0.0, True, False),
    ],
)
def test_a_failed_pod_is_excused_only_in_the_instant_in_which_another_family_got_a_gpu(
    tmp_path: Path, family: str, seconds_later: float, is_first: bool, raced: bool
) -> None:
    """That race of two schedulers is known. Any other lost pod is the agent's fault."""
    folder = _Folder(tmp_path, [_job("n", NVIDIA), _job("before", NVIDIA), _job("f", family)])
    if not is_first:
        folder.start("before", 9.0)
    folder.start("n", 10.0)
    folder.checker.see_failed({"f": "no healthy ids"}, {"n": 1000.0, "f": 1000.0 + seconds_later})
    report = folder.checker.report
    assert (report.raced, report.failed) == (
        ({"f": "no healthy ids"}, {}) if raced else ({}, {"f": "no healthy ids"})
    )
    assert bool(report.violations) != raced


def test_more_lost_pods_than_a_gpu_has_ids_are_no_race(tmp_path: Path) -> None:
    """One race is about one GPU."""
    jobs = [_job("n", NVIDIA), *(_job(f"f{number}", AWS) for number in range(5))]
    folder = _Folder(tmp_path, jobs)
    folder.start("n", 10.0)
    admitted = {job.name: 1000.0 for job in jobs}
    failed = {job.name: "no healthy ids" for job in jobs[1:5]}
    folder.checker.see_failed(failed, admitted)
    assert not folder.checker.report.violations
    folder.checker.see_failed({"f4": "no healthy ids"}, admitted)
    assert folder.checker.report.violations
