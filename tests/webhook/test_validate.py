"""Pods that are refused at admission, with the sentence that their owner reads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.webhook.reviews import container, pod, response, review
from vgpu_agent.families.admission import AdmissionOptions, LargestNode
from vgpu_agent.families.vgpu_manager.admission.family import build
from vgpu_agent.journal import Journal
from vgpu_agent.webhook.review import Reviewer

U0, U1 = (f"GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d2{place}" for place in (8, 9))
SEEN = LargestNode(gpus=8, memory_units=24576)
BOUND = LargestNode(gpus=8, memory_units=24576, is_limit=True)


def judged(given: Any, largest: LargestNode = BOUND) -> dict[str, Any]:
    """The response to a pod that is to be validated."""
    found = Reviewer(build(AdmissionOptions()), journal=Journal(), largest_node=lambda: largest)
    return response(found.validate(review(given)))


def denial(given: Any, largest: LargestNode = BOUND) -> str:
    """The sentence; empty for a pod that is admitted."""
    found = judged(given, largest)
    return "" if found["allowed"] else str(found["status"]["message"])


def words(**annotations: str) -> Any:
    """A vGPU pod with these annotations."""
    keys = {f"nvidia.com/{key.replace('_', '-')}": text for key, text in annotations.items()}
    return pod(container(number="2", cores="5"), annotations=keys)


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        (
            {"number": "1", "cores": "101"},
            ("nvidia.com/vgpu-cores is '101'; expected percent of each GPU's compute, 0 to 100"),
        ),
        (
            {"number": "17"},
            ("nvidia.com/vgpu-number is '17'; expected a number of GPUs, at most 16"),
        ),
        (
            {"number": 9, "cores": "5"},
            ("nvidia.com/vgpu-number is 9, and the largest Node has 8 GPUs; ask for at most 8"),
        ),
        (
            {"number": "1", "memory": "16Gi"},
            (
                "nvidia.com/vgpu-memory is 17179869184, more than any GPU has; "
                "expected a plain number such as 3000, without Mi or Gi"
            ),
        ),
        (
            {"number": "1", "memory": "1500m"},
            (
                "nvidia.com/vgpu-memory is '1500m'; expected a "
                "plain number of 1 MiB on each GPU, such as 3000, without Mi or Gi"
            ),
        ),
        (
            {"number": "0.5"},
            ("nvidia.com/vgpu-number is '0.5'; expected a number of GPUs, at most 16"),
        ),
        (
            {"number": -1},
            ("nvidia.com/vgpu-number is '-1'; expected a number of GPUs, at most 16"),
        ),
    ],
)
@pytest.mark.parametrize("place", ["containers", "initContainers"])
def test_amounts_that_no_node_has_are_refused(
    limits: dict[str, Any], sentence: str, place: str
) -> None:
    """In vgpu-manager the scheduler says so, in an event that few read (vgpu-manager §5.2, §6)."""
    given = pod(container("a"), spec={place: [container(**limits)]})
    assert denial(given) == f"pod default/train, container main: {sentence}"


@pytest.mark.parametrize(
    ("limits", "largest", "warning"),
    [
        (
            {"number": 9, "cores": "5"},
            SEEN,
            "nvidia.com/vgpu-number is 9, and the largest Node that was seen has 8 GPUs",
        ),
        (
            {"number": 1, "memory": 30000},
            SEEN,
            "nvidia.com/vgpu-memory is 30000, and the largest GPU that was seen has 24576",
        ),
        (
            {"number": 1, "memory": 30000},
            BOUND,
            "nvidia.com/vgpu-memory is 30000, and the largest GPU that was seen has 24576",
        ),
    ],
)
def test_what_no_node_has_had_yet_is_a_warning(
    limits: dict[str, Any], largest: LargestNode, warning: str
) -> None:
    """Replicas have not seen the same Nodes, and larger ones may come: a pool that is scaled to
    zero, a Node under repair.
    """
    found = judged(pod(container(**limits)), largest)
    assert found["allowed"]
    waits = "the pod waits until there is a larger one"
    assert found["warnings"] == [f"container 'main': {warning}; {waits}"]


@pytest.mark.parametrize("largest", [LargestNode(), LargestNode(16, 2**40, is_limit=True)])
def test_what_may_fit_is_admitted(largest: LargestNode) -> None:
    """Nodes that are not known yet, or large enough."""
    given = pod(container(number="16", cores="100", memory="81920"))
    assert judged(given, largest) == {"uid": judged(given, largest)["uid"], "allowed": True}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            words(device_scheduler_policy="binpak"),
            (
                "nvidia.com/device-scheduler-policy: 'binpak' is unknown, expected binpack, "
                "spread or none; did you mean binpack?"
            ),
        ),
        (
            words(node_scheduler_policy="tightest"),
            (
                "nvidia.com/node-scheduler-policy: 'tightest' is unknown, expected binpack, "
                "spread or none"
            ),
        ),
        (
            words(memory_scheduler_policy="swap"),
            ("nvidia.com/memory-scheduler-policy: 'swap' is unknown, expected virtual or physical"),
        ),
        (
            words(device_topology_mode="nvlink"),
            (
                "nvidia.com/device-topology-mode: 'nvlink' is unknown, expected numa, "
                "numa-strict, link, link-strict or none; did you mean link?"
            ),
        ),
        (
            words(cross_pod_topology="yes"),
            "nvidia.com/cross-pod-topology: 'yes' is unknown, expected true or false",
        ),
        (
            words(vgpu_compute_policy="strict"),
            (
                "nvidia.com/vgpu-compute-policy: 'strict' is unknown, expected fixed, "
                "balance or none"
            ),
        ),
        (
            words(stuck_grace_period="30"),
            (
                "nvidia.com/stuck-grace-period: '30' is unknown, expected a time of at "
                "least 1s, such as 30s or 2m"
            ),
        ),
        (
            words(stuck_grace_period="30S"),
            (
                "nvidia.com/stuck-grace-period: '30S' is unknown, expected a time of at "
                "least 1s, such as 30s or 2m"
            ),
        ),
        (
            words(include_gpu_type="A100,H100", exclude_gpu_type="nvidia,H100,100"),
            (
                "nvidia.com/exclude-gpu-type excludes every GPU that nvidia.com/include-gpu-type "
                "includes ('a100, h100'); remove one of the two"
            ),
        ),
        (
            words(include_gpu_uuid="GPU-49aa2", exclude_gpu_uuid="GPU-49aa"),
            (
                "nvidia.com/exclude-gpu-uuid excludes every GPU that nvidia.com/include-gpu-uuid "
                "includes ('gpu-49aa2'); remove one of the two"
            ),
        ),
        (
            words(include_gpu_uuid=f"{U0}, {U0.lower()}"),
            (
                "nvidia.com/include-gpu-uuid names 1 GPUs, and a container asks for 2 "
                "(nvidia.com/vgpu-number); name as many, or ask for 1"
            ),
        ),
        (
            words(include_gpu_type="x" * 5000),
            ("nvidia.com/include-gpu-type has 5000 characters; expected a list of at most 4096"),
        ),
    ],
)
def test_words_that_mean_nothing_are_refused(given: Any, sentence: str) -> None:
    """A scheduler takes an unknown word for none, and the pod runs in another way than its owner
    believes (vgpu-manager §4.1); with contradictory lists it waits for ever.
    """
    found = denial(given)
    assert found.startswith("pod default/train: ")
    assert sentence in found
    assert "; pod" not in found  # nothing else is wrong


@pytest.mark.parametrize(
    "given",
    [
        words(),
        words(device_scheduler_policy=" BinPack ", node_scheduler_policy="none"),
        words(device_scheduler_policy=""),
        words(memory_scheduler_policy="Virt", device_topology_mode="link-strict"),
        words(memory_scheduler_policy="physically"),
        words(cross_pod_topology="TRUE", device_topology_mode="link"),
        words(stuck_grace_period="1m30s", vgpu_compute_policy="balance"),
        words(stuck_grace_period="1500ms"),
        words(stuck_grace_period="+30s"),
        words(stuck_grace_period="30000000000ns"),
        words(include_gpu_type="A100", exclude_gpu_type="A10"),
        words(include_gpu_type="A100,H100", exclude_gpu_type="H100"),
        words(include_gpu_uuid=f"{U0},{U1}"),
        words(include_gpu_uuid="GPU-49aa"),
        pod(container(), annotations={"nvidia.com/device-scheduler-policy": "theirs"}),
        pod(),
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "train"}},
    ],
)
def test_what_schedulers_understand_is_admitted(given: Any) -> None:
    """Whatever they admit today; pods that are not ours have no policies of ours."""
    assert denial(given) == ""


def test_everything_that_is_wrong_is_said_at_once() -> None:
    """Nobody likes to try again for each mistake."""
    given = words(device_scheduler_policy="x", node_scheduler_policy="y")
    given["spec"]["containers"][0] = container(number="1", cores="500")
    assert [part.count("nvidia.com/") for part in denial(given).split("; pod ")] == [1, 1, 1]


@pytest.mark.parametrize("where", ["annotations", "labels"])
@pytest.mark.parametrize("label", [{}, {"vgpu-manager.io/ignore-webhook": "true"}])
def test_state_that_was_not_taken_off_is_refused(where: str, label: dict[str, str]) -> None:
    """The call that removes such state may fail, and the API server ignores the failure. This call
    must then refuse what is left (vgpu-manager:D16).
    """
    metadata = {"labels": label, "annotations": {}}
    metadata[where] = {**metadata[where], "nvidia.com/pre-allocated": "x"}
    found = denial(pod(container(), **metadata))
    assert found == (
        "pod default/train: nvidia.com/pre-allocated is written by schedulers and by agents only; "
        "remove it from the pod"
    )


def test_who_opts_out_is_not_judged() -> None:
    """vgpu-manager §4.1."""
    label = {"vgpu-manager.io/ignore-webhook": "true"}
    assert denial(pod(container(number="99"), labels=label)) == ""


def test_the_mirror_of_a_static_pod_is_judged_for_its_state_only() -> None:
    """The kubelet runs the pod anyway; without its mirror, schedulers do not see its GPUs."""
    mirror = {"kubernetes.io/config.mirror": "x", "nvidia.com/device-scheduler-policy": "binpak"}
    given = pod(container(number="99"), annotations=mirror)
    assert "warnings" not in judged(given)
    assert denial(given) == ""
    given["metadata"]["annotations"]["nvidia.com/pre-allocated"] = "x"
    assert denial(given) == (
        "pod default/train: nvidia.com/pre-allocated is written by schedulers and by agents only; "
        "remove it from the pod"
    )


@pytest.mark.parametrize(
    ("given", "warning"),
    [
        (
            pod(container(cores="5")),
            (
                "container 'main' gets no GPU: it has nvidia.com/vgpu-cores or "
                "nvidia.com/vgpu-memory and no nvidia.com/vgpu-number"
            ),
        ),
        (
            words(cross_pod_topology="true", device_topology_mode="numa"),
            (
                "nvidia.com/cross-pod-topology has no effect without "
                "nvidia.com/device-topology-mode: link"
            ),
        ),
    ],
)
def test_what_is_asked_for_in_vain_is_a_warning(given: Any, warning: str) -> None:
    """The pod may run; kubectl shows the line."""
    assert judged(given)["warnings"] == [warning]


def test_a_pod_that_will_get_its_name_is_named_by_its_beginning() -> None:
    """Controllers create pods with ``generateName``, so a review may have no name."""
    given = pod(container(number="17"), name=None, generateName="train-")
    assert denial(given).startswith("pod default/train-, container main: ")


def test_what_is_denied_is_recorded() -> None:
    """An operator is asked why a Deployment has no pods."""
    journal = Journal()
    found = Reviewer(build(AdmissionOptions()), journal=journal, largest_node=LargestNode)
    found.validate(review(pod(container(number="17"))))
    (entry,) = journal.entries
    assert (entry.event, entry.facts["pod"]) == ("webhook.denied", "default/train")
    assert "vgpu-number" in entry.facts["reason"]
    assert found.counts == {("validate", "denied"): 1}
