"""The worth of the checker of mixed days:
it finds what must not be in what containers have written. No node is needed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.real_node.mixed import tools
from tests.real_node.mixed.checker import Checker, Report
from tests.real_node.mixed.jobs import (
    AWS,
    FAMILIES,
    GPUSHARE,
    NVIDIA,
    RESOURCES,
    SLOTS,
    UNIT_MIB,
    VGPU_FAMILY,
    VGPU_MANAGER,
    Job,
    draw,
)
from tests.real_node.mixed.tools import Sizes

_UUIDS = tuple(f"GPU-{number:08x}-aaaa-bbbb-cccc-{number:012x}" for number in (1, 2))
_MEMORY_MIB = 8 * UNIT_MIB
_SIZES = Sizes(_UUIDS, _MEMORY_MIB, FAMILIES)
_FOREVER = "9223372036854775807"


def _job(name: str, family: str, memory: int = 4) -> Job:
    return Job(name, family, 0.0, 0, 5, deleted=False, memory=memory)


def _of_vgpu_manager(job: Job, gpu: int, mib: int) -> list[str]:
    """Lines that a container of vgpu-manager writes, its library's file among them."""
    slots = {f"SLOT_{what}_{slot}": 0 for what in ("BYTES", "CORES") for slot in range(SLOTS)}
    slots |= {f"SLOT_BYTES_{gpu}": mib << 20, f"SLOT_CORES_{gpu}": job.cores_percent}
    found = {
        "VGPU_POD_UID": f"uid-{job.name}",
        "OWNER_POD": f"uid-{job.name}",
        "VGPU_CONTAINER_NAME": "main",
        "OWNER_CONTAINER": "main",
        f"CUDA_MEM_LIMIT_{gpu}": f"{mib}m",
        f"CUDA_CORE_LIMIT_{gpu}": job.cores_percent,
        **slots,
    }
    # as od prints numbers
    return [
        f"{key}= {value}" if key.startswith("SLOT") else f"{key}={value}"
        for key, value in found.items()
    ]


def _served(job: Job, gpu: int = 0, changed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A pod whose scheduler has named this GPU, and which is marked as served, but for the keys
    that were ``changed``, by what stands behind the slash.
    """
    claim = f"main[{gpu}_{_UUIDS[gpu]}_{job.cores_percent}_{job.memory * UNIT_MIB}]"
    annotations, labels = {
        VGPU_FAMILY: (
            {
                "volcano.sh/vgpu-ids-new": f"{_UUIDS[gpu]},NVIDIA,{job.memory},0:",
                "volcano.sh/devices-to-allocate": "",
                "volcano.sh/bind-phase": "success",
                "volcano.sh/vgpu-time": "18446744073709551615",
            },
            {},
        ),
        GPUSHARE: ({"volcano.sh/gpu-index": str(gpu), "volcano.sh/gpu-assigned": "true"}, {}),
        VGPU_MANAGER: (
            {
                "nvidia.com/pre-allocated": claim,
                "nvidia.com/real-allocated": claim,
                "nvidia.com/predicate-node": "node",
                "nvidia.com/predicate-time": _FOREVER,
            },
            {"nvidia.com/assigned-phase": "succeed", "nvidia.com/metrics-node": "node"},
        ),
    }.get(job.family, ({}, {}))
    for key, value in (changed or {}).items():
        for written in (annotations, labels):
            for found in [each for each in written if each.endswith(f"/{key}")]:
                written[found] = value
    metadata = {
        "name": job.name,
        "uid": f"uid-{job.name}",
        "annotations": annotations,
        "labels": labels,
    }
    return {"metadata": metadata, "spec": {"nodeName": "node"}, "status": {}}


def _node(taken: Mapping[int, str] | None = None) -> dict[str, Any]:
    """A Node of two GPUs; ``taken`` is GPU → the family that has it."""
    taken = taken or {}

    def is_free(gpu: int, family: str) -> bool:
        return taken.get(gpu, family) == family

    allocatable = {
        resource: sum(is_free(gpu, tools.family_of(resource)) for gpu in range(2)) * count
        for resource, count in _SIZES.counts.items()
    }
    capacity = {resource: 2 * count for resource, count in _SIZES.counts.items()}
    register = [
        {
            "id": gpu,
            "uuid": uuid,
            "type": "NVIDIA A10",
            "core": 100,
            "memory": _MEMORY_MIB,
            "number": 10,
            "numa": -1,
            "mig": False,
            "healthy": is_free(gpu, VGPU_MANAGER),
        }
        for gpu, uuid in enumerate(_UUIDS)
    ]
    annotations = {
        "volcano.sh/node-vgpu-register": "".join(
            f"{uuid},{10 if is_free(gpu, VGPU_FAMILY) else 0},8,NVIDIA-NVIDIA A10,true,hami-core:"
            for gpu, uuid in enumerate(_UUIDS)
        ),
        "volcano.sh/gpu-unhealthy-ids": ",".join(
            str(gpu) for gpu in range(2) if not is_free(gpu, GPUSHARE)
        ),
        "nvidia.com/node-device-register": json.dumps(register),
        "nvidia.com/node-config-info": '{"deviceSplit":10,"memoryFactor":1}',
    }
    status = {
        part: {"volcano.sh/gpu-number": "2"} | {name: str(count) for name, count in counts.items()}
        for part, counts in (("capacity", capacity), ("allocatable", allocatable))
    }
    return {"metadata": {"name": "node", "annotations": annotations}, "status": status}


class _Folder:
    """A folder of files as containers write them, all on GPU 0 by default."""

    def __init__(self, path: Path, jobs: Sequence[Job]) -> None:
        self.path, self.jobs = path, {job.name: job for job in jobs}
        families = tuple(dict.fromkeys(job.family for job in jobs))
        self.checker = Checker(jobs, path, Sizes(_UUIDS, _MEMORY_MIB, families))

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
        if self.jobs[name].family == GPUSHARE:
            lines += [f"VOLCANO_GPU_ALLOCATED={mib}"]
        if self.jobs[name].family == VGPU_MANAGER:
            lines += _of_vgpu_manager(self.jobs[name], gpu, mib)
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
    assert f": {12 * UNIT_MIB} MiB" in folder.checker.report.overcommitted[0]
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
        f"AT=1.0\nNVIDIA_VISIBLE_DEVICES=1\nNODES=/dev/nvidia[0-9]*\n"
        f"VOLCANO_GPU_ALLOCATED={4 * UNIT_MIB}"
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
    """For a deleted pod, pod-resources drops the ids two seconds before the API server shows the
    end of the pod. These two seconds are the kubelet's, not the agent's.
    """
    folder = _Folder(tmp_path, [_job("n", NVIDIA)])
    folder.start("n", 1.0)
    folder.end("n", 10.0)
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


def test_a_handover_counts_from_the_last_pod_that_the_kubelet_has_let_go(tmp_path: Path) -> None:
    """The kubelet lets go of a deleted pod at once, and only seconds later of one that ended before
    it by itself. While it has either, the GPU is not the agent's to hand over.
    """
    folder = _Folder(tmp_path, [_job("n", NVIDIA), _job("deleted", NVIDIA)])
    for name, end in (("n", 9.5), ("deleted", 10.0)):
        folder.start(name, 1.0)
        folder.end(name, end)
    folder.checker.see_healthy({}, ["n"], 10.25)
    folder.checker.see_healthy({}, ["n"], 11.5)
    folder.checker.see_healthy({}, [], 11.75)
    folder.checker.see_healthy({}, [], 12.0)
    folder.checker.see_healthy({RESOURCES[AWS]: frozenset(_UUIDS)}, [], 12.25)
    assert folder.checker.report.handovers == [2.25]
    assert folder.checker.report.after_kubelet == [0.75]
    assert folder.checker.report.surely_after_kubelet == [0.25]
    assert folder.faults() == []


def test_an_offer_while_the_kubelet_has_any_ended_holder_is_found(tmp_path: Path) -> None:
    """Not only the pod whose container ended last may still have processes on the GPU."""
    folder = _Folder(tmp_path, [_job("n", NVIDIA), _job("deleted", NVIDIA)])
    for name, end in (("n", 9.5), ("deleted", 10.0)):
        folder.start(name, 1.0)
        folder.end(name, end)
    folder.checker.see_healthy({RESOURCES[AWS]: frozenset(_UUIDS)}, ["n"], 11.0)
    assert ["while kubelet still listed n" in fault for fault in folder.checker.report.wrong] == [
        True
    ]


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
    """A race of two schedulers for a free GPU is a known limitation. Any other lost pod is the
    agent's fault.
    """
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


# -- vgpu-manager, and what each family's own tools read -------------------------------------------


def _of_all_families(path: Path, **more: Job) -> _Folder:
    jobs = {family: _job(family, family) for family in FAMILIES} | more
    return _Folder(path, list(jobs.values()))


def test_all_families_one_after_the_other_are_right(tmp_path: Path) -> None:
    """Pods and a Node that are as the contracts say are accused of nothing."""
    folder = _of_all_families(tmp_path)
    checker = folder.checker
    for at, family in enumerate(FAMILIES):
        began = 100.0 * at
        checker.see_pods([_served(folder.jobs[family])], {}, began)
        folder.start(family, began)
        checker.see_pods([_served(folder.jobs[family])], {}, began + 20.0)
        checker.see_node(_node({0: family}), began + 20.0)
        folder.end(family, began + 30.0)
    pods = [_served(job) for job in folder.jobs.values()]
    assert checker.at_rest(pods, _node(), 600.0) == []
    assert folder.faults() == []
    assert checker.report.by_family == dict.fromkeys(FAMILIES, 1)
    assert checker.report.marked == 3  # of the families whose pods are marked


def test_a_claim_that_the_container_does_not_have_is_found(tmp_path: Path) -> None:
    """Another's file, another memory, another GPU than the extender has claimed, and a container
    that asks for nothing of vgpu-manager's and finds its file.
    """
    jobs = {name: _job(name, VGPU_MANAGER) for name in ("file", "memory", "gpu", "right")}
    folder = _Folder(tmp_path, [*jobs.values(), _job("n", NVIDIA)])
    folder.checker.see_pods([_served(job) for job in jobs.values()], {}, 0.0)
    folder.start("right", 1.0)
    folder.start("memory", 1.0, mib=5 * UNIT_MIB)
    folder.start("gpu", 1.0, 1)
    for name, line in (("file", "OWNER_POD=uid-right"), ("n", "OWNER_POD=uid-n")):
        folder.start(name, 1.0)
        path = tmp_path / f"{name}.start"
        path.write_text(f"{path.read_text()}\n{line}")
        del folder.checker.views[name]
    folder.checker.read_views()
    folder.faults()
    wrong = {text.partition(":")[0]: text for text in folder.checker.report.wrong}
    assert sorted(wrong) == ["file", "gpu", "memory", "n"]
    assert "another family's ['OWNER_POD']" in wrong["n"]


@pytest.mark.parametrize("family", FAMILIES)
def test_another_gpus_device_node_is_found(tmp_path: Path, family: str) -> None:
    """The variable names the right GPU, and the container can open another one."""
    folder = _Folder(tmp_path, [_job("p", family)])
    folder.checker.see_pods([_served(folder.jobs["p"])], {}, 0.0)
    folder.start("p", 1.0, node=1)
    assert ["its device nodes are /dev/nvidia1" in text for text in folder.faults()] == [True]


def test_compute_given_twice_is_found(tmp_path: Path) -> None:
    """Memory is left, and each container alone has what was meant for it."""
    jobs = [_job(f"m{number}", VGPU_MANAGER, 8) for number in range(3)]
    folder = _Folder(tmp_path, jobs)
    for job in jobs:
        folder.start(job.name, 1.0)
    folder.faults()
    assert any(": 120 percent" in text for text in folder.checker.report.overcommitted)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        (VGPU_FAMILY, "bind-phase", "failed"),
        (VGPU_FAMILY, "vgpu-time", "1795200991"),
        (VGPU_FAMILY, "devices-to-allocate", "GPU-1,NVIDIA,4,0:"),
        (GPUSHARE, "gpu-assigned", "false"),
        (VGPU_MANAGER, "assigned-phase", "failed"),
        (VGPU_MANAGER, "real-allocated", "main[0_GPU-1_20_4096]"),
        (VGPU_MANAGER, "predicate-time", "1795200991000000000"),
        (VGPU_MANAGER, "predicate-node", "other"),
        (VGPU_MANAGER, "metrics-node", "other"),
    ],
)
def test_a_wrong_mark_on_a_served_pod_is_found(
    tmp_path: Path, family: str, key: str, value: str
) -> None:
    """The family's scheduler would count the pod wrongly, or wait for it."""
    folder = _Folder(tmp_path, [_job("p", family)])
    folder.checker.see_pods([_served(folder.jobs["p"])], {}, 0.0)
    assert folder.faults() == []
    folder.checker.see_pods([_served(folder.jobs["p"], changed={key: value})], {}, 1.0)
    assert [f"/{key} is {value}" in text for text in folder.faults()] == [True]


@pytest.mark.parametrize("family", [VGPU_FAMILY, GPUSHARE, VGPU_MANAGER])
def test_a_changed_plan_of_a_bound_pod_is_found(tmp_path: Path, family: str) -> None:
    """A scheduler may plan anew before it binds, and counts by what it has written then."""
    folder = _Folder(tmp_path, [_job("p", family)])
    planned, bound, changed = (_served(folder.jobs["p"], gpu) for gpu in (1, 0, 1))
    planned["spec"], planned["metadata"]["labels"] = {}, {}
    for now, pod in enumerate((planned, bound)):
        folder.checker.see_pods([pod], {}, float(now))
    assert folder.faults() == []
    folder.checker.see_pods([changed], {}, 2.0)
    assert [tools.PLANS[family] in text and " was " in text for text in folder.faults()] == [True]


@pytest.mark.parametrize("family", [VGPU_FAMILY, GPUSHARE, VGPU_MANAGER])
@pytest.mark.parametrize(("seen_at", "is_found"), [(10.0, False), (20.0, True)])
def test_a_running_pod_that_is_not_marked_is_found(
    tmp_path: Path, family: str, seen_at: float, is_found: bool
) -> None:
    """Marks may wait for pods that are being started; not for longer, and not for ever."""
    folder = _Folder(tmp_path, [_job("p", family)])
    unmarked = {"bind-phase": "allocating", "assigned-phase": "allocating", "real-allocated": ""}
    waiting = _served(folder.jobs["p"], changed=unmarked)
    waiting["metadata"]["annotations"].pop("volcano.sh/gpu-assigned", None)
    folder.checker.see_pods([waiting], {}, 0.5)
    folder.start("p", 1.0)
    folder.checker.see_pods([waiting], {}, seen_at)
    assert any("not marked" in text for text in folder.faults()) == is_found
    folder.end("p", 21.0)
    missing = folder.checker.at_rest([waiting], _node(), 22.0)
    assert missing == ["p has started and is not marked as served"]


def test_a_mark_on_a_pod_of_another_family_is_found(tmp_path: Path) -> None:
    """Schedulers of Volcano's would take it for one of theirs."""
    folder = _Folder(tmp_path, [_job("n", NVIDIA)])
    pod = _served(folder.jobs["n"])
    pod["metadata"]["annotations"] = {"volcano.sh/gpu-assigned": "true"}
    folder.checker.see_pods([pod], {}, 0.0)
    assert folder.faults() == ["n: volcano.sh/gpu-assigned is true"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("seconds", "is_found"), [(4.0, False), (6.0, True)])
def test_a_gpu_that_is_offered_while_another_family_has_it_is_found(
    tmp_path: Path, family: str, seconds: float, is_found: bool
) -> None:
    """By each of the others' counts and annotations; a moment after the start it may be."""
    folder = _of_all_families(tmp_path)
    folder.checker.see_pods([_served(folder.jobs[family])], {}, 0.0)
    folder.start(family, 1.0)
    folder.checker.see_node(_node(), 1.0 + seconds)
    folder.end(family, 20.0)
    folder.checker.see_node(_node(), 21.0)
    found = folder.faults()
    by_annotation = {
        other for other in FAMILIES if any(text.endswith(f"free for {other}") for text in found)
    }
    by_count = {
        tools.family_of(name)
        for name in _SIZES.counts
        if any(f" {name} are allocatable" in text for text in found)
    }
    others = set(FAMILIES) - {family}
    assert by_count == (others if is_found else set())
    assert by_annotation == (others & tools.PLANS.keys() if is_found else set())
    assert all(text.startswith(f"at {1.0 + seconds:.2f}: ") for text in found)


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("volcano.sh/node-vgpu-register", ",8,", ",9,"),
        ("volcano.sh/node-vgpu-register", ",10,", ",11,"),
        ("volcano.sh/node-vgpu-register", _UUIDS[0], _UUIDS[1]),
        ("nvidia.com/node-device-register", "8192", "8191"),
        ("nvidia.com/node-device-register", '"id": 1', '"id": 2'),
        ("nvidia.com/node-config-info", ":10", ":11"),
    ],
)
def test_a_wrong_annotation_of_the_node_is_found(
    tmp_path: Path, key: str, old: str, new: str
) -> None:
    """Schedulers count with it, whoever has the GPUs."""
    folder = _of_all_families(tmp_path)
    node = _node()
    node["metadata"]["annotations"][key] = node["metadata"]["annotations"][key].replace(old, new)
    folder.checker.see_node(node, 1.0)
    assert [text.startswith(key) for text in folder.faults()] == [True]


@pytest.mark.parametrize("part", ["capacity", "allocatable"])
def test_a_wrong_count_of_cards_is_found(tmp_path: Path, part: str) -> None:
    """Volcano divides the memory of the node by it."""
    folder = _of_all_families(tmp_path)
    node = _node()
    node["status"][part]["volcano.sh/gpu-number"] = "1"
    folder.checker.see_node(node, 1.0)
    assert folder.faults() == [f"volcano.sh/gpu-number is 1 in {part}"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_that_no_one_uses_and_that_is_not_offered_is_found(
    tmp_path: Path, family: str
) -> None:
    """After a day all of the node is every family's again."""
    folder = _of_all_families(tmp_path)
    missing = folder.checker.at_rest([], _node({1: family}), 1.0)
    others = set(FAMILIES) - {family}
    assert {
        other for other in FAMILIES if f"{_UUIDS[1]} is not free for {other}" in missing
    } == others & tools.PLANS.keys()
    assert {
        tools.family_of(name)
        for name in _SIZES.counts
        if any(text.startswith(f"{name} is ") for text in missing)
    } == others


@pytest.mark.parametrize(("look_seconds", "is_found"), [(0.25, True), (2.0, False)])
def test_a_slow_handover_is_found_where_the_looks_are_quick(
    tmp_path: Path, look_seconds: float, is_found: bool
) -> None:
    """On a busy machine two looks are seconds apart, and what happened between them is not known;
    that is not the agent's fault.
    """
    folder = _Folder(tmp_path, [_job("n", NVIDIA)])
    folder.start("n", 1.0)
    folder.end("n", 10.0)
    folder.checker.see_healthy({}, ["n"], 10.0)
    for look in range(1, round(2.0 / look_seconds) + 1):
        folder.checker.see_healthy({}, [], 10.0 + look * look_seconds)
    folder.checker.see_healthy({RESOURCES[AWS]: frozenset(_UUIDS)}, [], 12.0 + look_seconds)
    assert folder.checker.report.after_kubelet == [2.0 + look_seconds]
    violations = folder.checker.report.violations
    assert any("of a handover" in text for text in violations) == is_found


@pytest.mark.parametrize(
    ("pods", "failed", "message", "is_found"),
    [
        (500, 1, "OutOfnvidia.com/gpu: Node didn't have enough resource", False),
        (500, 2, "OutOfnvidia.com/gpu: Node didn't have enough resource", True),
        (36, 1, "OutOfnvidia.com/gpu: Node didn't have enough resource", True),
        (500, 1, "OutOfnvidia.com/vgpu-number: Node didn't have enough resource", True),
        (500, 1, "UnexpectedAdmissionError: Allocate failed", True),
    ],
)
def test_a_pod_that_a_withdrawal_has_outrun_is_excused_as_rarely_as_in_the_model(
    tmp_path: Path, pods: int, failed: int, message: str, is_found: bool
) -> None:
    """Its scheduler went by the count of a moment ago. Nothing else may fail a pod."""
    folder = _Folder(tmp_path, [_job(f"n{number}", NVIDIA) for number in range(pods)])
    folder.checker.see_failed({f"n{number}": message for number in range(failed)}, {})
    assert bool(folder.checker.report.violations) == is_found


def test_a_round_of_five_families_takes_longer(tmp_path: Path) -> None:
    """A pod waits beside a free GPU while the turns of four others pass."""
    folder = _of_all_families(tmp_path, w=_job("w", AWS))
    pods = [{"metadata": {"name": "w"}, "spec": {}}]
    for now in (0.0, 9.0):
        folder.checker.see_pods(copy.deepcopy(pods), {}, now)
    assert folder.checker.report.idle == {}
    folder.checker.see_pods(pods, {}, 10.0)
    assert folder.checker.report.idle == {"w": 10.0}


def test_a_day_has_jobs_of_every_family() -> None:
    """The flooding family has every second one, and the others have as many each."""
    jobs = list(draw(1, 36, families=FAMILIES, flooding=NVIDIA))
    numbers = {family: sum(job.family == family for job in jobs) for family in FAMILIES}
    assert sum(numbers.values()) == 36
    assert max(numbers.values()) == numbers.pop(NVIDIA)
    assert min(numbers.values()) >= max(numbers.values()) - 1 >= 1


@pytest.mark.parametrize(
    ("seconds", "sound"),
    [
        ([0.1] * 8 + [1.4], True),
        ([0.1] * 8 + [1.6], False),
        ([0.1] * 4 + [0.6] * 5, False),
        ([0.1] * 199 + [1.6], True),
    ],
)
def test_handovers_are_judged_by_the_usual_and_the_slowest(
    seconds: list[float], *, sound: bool
) -> None:
    """One may coincide with other work of the machine; a slow agent is slow in most of them."""
    assert (not Report(surely_after_kubelet=seconds).violations) is sound
