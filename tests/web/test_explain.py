"""``/debug/explain``: one answer in sentences for each thing that can keep a pod from its GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.web.conftest import MEMORY, NOW, TOKEN, VGPU, a_pod, wants_vgpus
from vgpu_agent.gpu import xid
from vgpu_agent.journal import Entry
from vgpu_agent.ledger.accounting import Overcommit
from vgpu_agent.model import DeviceRoom, Grant, GrantState, Health, Owner, Share
from vgpu_agent.pods import PodContainer
from vgpu_agent.status import (
    AgentStatus,
    ClusterStatus,
    PluginState,
    PluginStatus,
    Problem,
    ProblemKind,
    WatchStatus,
    XidSeen,
)
from vgpu_agent.web import explain, page, problems

if TYPE_CHECKING:
    from vgpu_agent.pods import Pod


def sentences(status: AgentStatus, name: str) -> str:
    """The answer about ``ml/<name>``."""
    return "\n".join(explain.explain(status, NOW, f"ml/{name}").answer)


def shown(status: AgentStatus, pod: Pod) -> AgentStatus:
    """The watch shows one pod more, and nothing is reserved for unknown pods."""
    status.cluster.pods = (*status.cluster.pods, pod)
    status.ledger.grants = tuple(grant for grant in status.ledger.grants if grant.owner is not None)
    return status


def test_a_pod_that_runs_has_its_gpu_with_the_evidence(volcano_node: AgentStatus) -> None:
    """Every decision with its evidence."""
    told = explain.explain(volcano_node, NOW, "ml/served")
    has, known, is_ = told.answer
    assert has == (
        "Container main has 4096 MiB and 30 % of the cores of GPU 0 (GPU-0) through "
        "volcano.sh/vgpu-number. Its limit is in force: a process in the "
        "container has the library open, and its region holds these limits."
    )
    assert known == (
        "That is known because: kubelet's checkpoint gives these ids to container main; "
        "decided by the scheduler, in volcano.sh/vgpu-ids-new."
    )
    assert is_ == "The pod has UID uid-served, phase Running, and was placed by volcano."


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"health": Health(ok=False, reason="XID 79: fell off the bus")},
            "GPU 0 (GPU-0) is unhealthy: XID 79: fell off the bus.",
        ),
        ({"present": False}, "GPU 0 (GPU-0) is gone: it no longer answers."),
        ({"uuid": "GPU-9"}, "This node has no GPU-0 any more"),
    ],
)
def test_a_pod_on_an_ill_gpu_is_told_so(
    volcano_node: AgentStatus, changes: dict[str, Any], sentence: str
) -> None:
    """An explanation of the pod's failure must not say that all is well with what it has."""
    first, *others = volcano_node.inventory.gpus
    volcano_node.inventory = msgspec.structs.replace(
        volcano_node.inventory, gpus=(msgspec.structs.replace(first, **changes), *others)
    )
    assert sentence in explain.explain(volcano_node, NOW, "ml/served").answer[2]


def saw_xid(status: AgentStatus, code: int, at: float, **changes: Any) -> None:
    """The driver has reported an XID on GPU 0."""
    found = xid.trouble_of(code)
    seen = XidSeen(code, found.text, found.remedy, code in xid.IGNORED_BY_DEFAULT, at, at)
    earlier = status.nvml.xids.get("GPU-0", ())
    status.nvml.xids["GPU-0"] = (*earlier, msgspec.structs.replace(seen, **changes))


@pytest.mark.parametrize("code", [13, 31, 43, 45])
def test_an_error_of_a_pods_own_program_is_told(volcano_node: AgentStatus, code: int) -> None:
    """The GPU stays healthy, so nothing else tells why the pod failed."""
    (owned,) = (grant for grant in volcano_node.ledger.grants if grant.number == 7)
    volcano_node.ledger.grants = (owned,)
    saw_xid(volcano_node, code, NOW - 42, first_at=NOW - 45, count=3)

    text = sentences(volcano_node, "served")

    assert (
        f"{xid.describe(code)}. That was reported on GPU 0 (GPU-0) while the pod had it, 3 times, "
        "from 2027-01-15T07:59:15Z to 2027-01-15T07:59:18Z (42 s ago).\n"
        "No other pod has the GPU, so the program of container main has most likely caused it, "
        "and the GPU is not the cause; look at its log of that time."
    ) in text


def test_on_a_shared_gpu_the_others_are_named(volcano_node: AgentStatus) -> None:
    """The driver does not name the process."""
    saw_xid(volcano_node, 31, NOW - 42)

    text = sentences(volcano_node, "served")

    assert "while the pod had it, at 2027-01-15T07:59:18Z (42 s ago)." in text
    assert "that of this pod, or that of another pod on the GPU (ml/train-0)." in text


def test_the_end_of_the_container_points_to_its_program(volcano_node: AgentStatus) -> None:
    """Also on a shared GPU, a container that ended right after the error is the likeliest."""
    saw_xid(volcano_node, 31, NOW - 42.5)
    served, *others = volcano_node.cluster.pods
    crashed = wants_vgpus("main", 2, started=True, ended_at=NOW - 42)
    volcano_node.cluster.pods = (
        msgspec.structs.replace(served, containers=(crashed,)),
        *others,
    )

    assert (
        "Container main ended at 2027-01-15T07:59:18Z, right after it: its own program has most "
        "likely caused it, and the GPU is not the cause; look at its log."
    ) in sentences(volcano_node, "served")


def test_an_error_before_the_pod_had_the_gpu_is_not_its_own(volcano_node: AgentStatus) -> None:
    """The share was granted 50 seconds ago."""
    saw_xid(volcano_node, 31, NOW - 51)
    assert "XID 31" not in sentences(volcano_node, "served")


def test_an_error_of_the_gpu_is_not_blamed_on_the_program(volcano_node: AgentStatus) -> None:
    """Also after the GPU has recovered, or where the configuration ignores the XID."""
    saw_xid(volcano_node, 48, NOW - 42)

    assert (
        "It is an error of the GPU, not of the program; the program may have failed because of it."
    ) in sentences(volcano_node, "served")


def test_an_error_in_another_mig_instance_is_not_told(volcano_node: AgentStatus) -> None:
    """An XID that names an instance concerns that instance alone."""
    healthy, broken = volcano_node.inventory.gpus
    volcano_node.inventory = msgspec.structs.replace(
        volcano_node.inventory, gpus=(healthy, msgspec.structs.replace(broken, health=Health()))
    )
    (owned,) = (grant for grant in volcano_node.ledger.grants if grant.number == 7)
    volcano_node.ledger.grants = (msgspec.structs.replace(owned, shares=(Share("MIG-1"),)),)
    saw_xid(volcano_node, 31, NOW - 42, gpu_instance=8, compute_instance=0)
    volcano_node.nvml.xids["GPU-1"] = volcano_node.nvml.xids.pop("GPU-0")
    assert "XID 31" not in sentences(volcano_node, "served")

    saw_xid(volcano_node, 31, NOW - 42, gpu_instance=7, compute_instance=0)
    volcano_node.nvml.xids["GPU-1"] = volcano_node.nvml.xids.pop("GPU-0")
    assert "That was reported on MIG-1 of GPU 1 while the pod had it" in sentences(
        volcano_node, "served"
    )


def test_a_pod_that_has_ended_is_told_by_the_journal(volcano_node: AgentStatus) -> None:
    """Its grant is gone. The journal has its device, from when and until when."""
    volcano_node.cluster.pods = (
        a_pod("served", wants_vgpus("main", 2, started=True), phase="Failed"),
    )
    volcano_node.ledger.grants = ()
    facts = {"grant": 7, "pod": "ml/served", "container": "main", "devices": ["GPU-0 4096 MiB 3 %"]}
    volcano_node.events = (
        Entry(NOW - 50, "allocate.reserved", {"grant": 7, "devices": []}),
        Entry(NOW - 40, "start.bound", facts),
        Entry(NOW - 20, "ledger.released", {**facts, "devices": ["GPU-0"]}),
    )
    saw_xid(volcano_node, 31, NOW - 45)
    saw_xid(volcano_node, 13, NOW - 10)

    text = sentences(volcano_node, "served")

    assert "XID 31" in text
    assert "XID 13" not in text


def test_a_request_for_more_gpus_than_there_are_fits_nowhere(volcano_node: AgentStatus) -> None:
    """However much is free. Each GPU of such a request is another one."""
    counted = PluginStatus(MEMORY, "volcano-vgpu", PluginState.REGISTERED)
    volcano_node.plugins = (*volcano_node.plugins, counted)
    status = shown(volcano_node, a_pod("new", wants_vgpus("main", 3)))

    assert (
        "Container main fits nowhere on this node: it asks for 3 of volcano.sh/vgpu-number, each "
        "of another GPU, and the node shares 1."
    ) in sentences(status, "new")


def test_a_request_for_more_ids_than_there_are_fits_nowhere(node: AgentStatus) -> None:
    """The kubelet refuses such a pod at its admission."""
    node.ledger.rooms = {"nvidia.com/gpu": (DeviceRoom("GPU-0", "", 81920, 81920, 100, 0, 10),)}
    asking = PodContainer("main", limits={"nvidia.com/gpu": 21})
    told = (
        "Container main fits nowhere on this node: it asks for 21 of nvidia.com/gpu, and the node "
        "has 20 in all."
    )
    assert told in sentences(shown(node, a_pod("new", asking, phase="Failed")), "new")
    assert told in sentences(shown(node, a_pod("other", asking)), "other")
    fits = PodContainer("main", limits={"nvidia.com/gpu": 20})
    assert "fits nowhere" not in sentences(shown(node, a_pod("fits", fits)), "fits")


def test_the_events_of_a_pod_are_found_by_its_name_and_by_the_token_of_its_grant(
    volcano_node: AgentStatus,
) -> None:
    """Allocate does not know the pod. The token leads from it to the last annotation."""
    assert [event.event for event in explain.explain(volcano_node, NOW, "ml/served").events] == [
        "allocate.reserved",
        "start.bound",
        "pods.written",
    ]


def test_a_pod_on_an_overcommitted_gpu_is_told_why_it_may_be_slow(
    volcano_node: AgentStatus,
) -> None:
    """Its scheduler gave out more compute than there is.
    The node's problems and the debug page name the GPU, too.
    """
    volcano_node.ledger.overcommitted = (Overcommit(VGPU, "GPU-0", 111, 100, 3, 10),)
    said = "more of GPU-0 is allocated than it has: 111 % of the compute of 100, 3 containers of 10"
    assert f"Scheduler overcommitted: {said}. Its containers share the compute" in sentences(
        volcano_node, "served"
    )
    assert Problem(
        ProblemKind.RESOURCE, VGPU, f"scheduler overcommitted: {said}"
    ) in problems.known(volcano_node, NOW)


def test_a_refused_start_comes_first_with_its_reason(volcano_node: AgentStatus) -> None:
    """The sentence says how often, since when, and whether waiting helps."""
    first, *others = explain.explain(volcano_node, NOW, "ml/refused").answer
    assert first == (
        "Container main may not start: no GPU has 4096 MiB left. Refused 5 times, first 63 s "
        "ago; the kubelet tries again by itself."
    )
    assert others[0].startswith("GPU 1 (GPU-1) has been unhealthy since 2027-01-15T07:59:30Z")
    assert others[1:] == ["The pod has UID uid-refused, phase Pending, and was placed by volcano."]


def test_a_final_refusal_says_that_waiting_does_not_help(volcano_node: AgentStatus) -> None:
    """An early guess was wrong."""
    (refusal,) = volcano_node.binding.refusals
    volcano_node.binding.refusals = (msgspec.structs.replace(refusal, final=True, count=1),)
    assert "Refused once, first 63 s ago; trying again cannot help." in sentences(
        volcano_node, "refused"
    )


def test_memory_without_a_number_of_gpus_gets_none_and_is_told_why(
    volcano_node: AgentStatus,
) -> None:
    """Schedulers of Volcano place such a pod as if it had asked for one GPU.
    It runs and sees none.
    """
    counted = PluginStatus(MEMORY, "volcano-vgpu", PluginState.REGISTERED)
    volcano_node.plugins = (*volcano_node.plugins, counted)
    lonely = PodContainer("main", limits={MEMORY: 3000}, started=True)
    status = shown(volcano_node, a_pod("lonely", lonely, phase="Running"))
    assert (
        f"Container main asks for {MEMORY} and not for {VGPU}, so the kubelet gives it no GPU: "
        f"ask for {VGPU}, too."
    ) in sentences(status, "lonely")
    assert "so the kubelet gives it no GPU" not in sentences(status, "served")


def test_a_pod_that_is_not_admitted_yet_sends_to_kubectl(volcano_node: AgentStatus) -> None:
    """No Allocate, no reservation: the agent knows nothing but the pod."""
    status = shown(volcano_node, a_pod("new", wants_vgpus("main")))
    assert (
        "The kubelet has not asked for volcano.sh/vgpu-number for container main: the pod is not "
        "admitted yet"
    ) in sentences(status, "new")
    assert MEMORY not in sentences(status, "new")


def test_a_reservation_that_nobody_has_claimed_may_be_the_pods(volcano_node: AgentStatus) -> None:
    """The kubelet writes its records after Allocate. For a moment the grant may be any pod's."""
    volcano_node.cluster.pods = (a_pod("new", wants_vgpus("main")),)
    assert (
        "its records do not say yet for which container; it may be main (such reservations: 1)."
        in sentences(volcano_node, "new")
    )


def test_an_early_guess_is_called_a_guess(volcano_node: AgentStatus) -> None:
    """Early mode: decided for the pod, not proven."""
    status = shown(volcano_node, a_pod("new", wants_vgpus("main")))
    status.ledger.grants = (
        *status.ledger.grants,
        Grant(
            9,
            "volcano-vgpu",
            VGPU,
            ("a-4",),
            (),
            reserved_at=NOW - 4,
            decided_for=("uid-new", "main"),
        ),
    )
    assert (
        "Container main was probably meant by an Allocate 4 s ago; its pod is identified before "
        "the container starts."
    ) in sentences(status, "new")


def test_ids_that_wait_for_the_start_are_promised(volcano_node: AgentStatus) -> None:
    """Late mode between Allocate and PreStartContainer, which may be minutes."""
    status = shown(volcano_node, a_pod("new", wants_vgpus("main")))
    granted = Grant(
        9,
        "volcano-vgpu",
        VGPU,
        ("a-4",),
        (),
        GrantState.GRANTED,
        Owner("main", "uid-new", "ml", "new"),
    )
    status.ledger.grants = (*status.ledger.grants, granted)
    assert sentences(status, "new").startswith(
        "Container main is promised 1 of volcano.sh/vgpu-number and has not started. Its devices "
        "are chosen when the kubelet asks"
    )


def test_a_pod_whose_name_only_the_watch_knows_is_found_by_its_uid(
    volcano_node: AgentStatus,
) -> None:
    """While pod-resources is silent, kubelet's checkpoint gives the UID alone."""
    (*_, served, _) = volcano_node.ledger.grants
    volcano_node.ledger.grants = (
        msgspec.structs.replace(served, owner=Owner("main", "uid-served")),
    )
    assert "Container main has 4096 MiB" in sentences(volcano_node, "served")


def test_a_resource_that_is_not_served_says_why(volcano_node: AgentStatus) -> None:
    """The sentence has the reason of the readiness."""
    status = shown(volcano_node, a_pod("new", wants_vgpus("main")))
    status.not_ready = (Problem(ProblemKind.RESOURCE, VGPU, "libvgpu.so is missing"),)
    assert (
        "Container main asks for volcano.sh/vgpu-number, which is not offered now: libvgpu.so is "
        "missing."
    ) in sentences(status, "new")


def test_a_pod_that_asks_for_nothing_of_ours_is_told_what_there_is(
    volcano_node: AgentStatus,
) -> None:
    """A misspelt resource is the usual cause."""
    pod = a_pod("new", PodContainer("main", limits={"volcano.sh/vgpu-numbers": 1}))
    text = sentences(shown(volcano_node, pod), "new")
    assert (
        "No container of ml/new asks for a resource of this node's agent (nvidia.com/gpu, "
        "volcano.sh/vgpu-memory"
    ) in text
    assert "its limits name volcano.sh/vgpu-numbers." in text


def test_a_limit_that_cannot_be_read_is_quoted(volcano_node: AgentStatus) -> None:
    """Instead of being taken for 0."""
    pod = a_pod("new", PodContainer("main", unreadable_limits={VGPU: "1.5"}))
    assert (
        "Container main asks for volcano.sh/vgpu-number = '1.5', which is not a whole number."
        in sentences(shown(volcano_node, pod), "new")
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"phase": "Failed"}, "The pod has ended (Failed); nothing of it starts again."),
        (
            {"phase": "Failed"},
            (
                "The kubelet has most likely refused the pod before anything of "
                "volcano.sh/vgpu-number was given to it"
            ),
        ),
        ({"deleting": True}, "The pod is being deleted."),
    ],
)
def test_a_pod_at_its_end_says_so(
    volcano_node: AgentStatus, changes: dict[str, object], sentence: str
) -> None:
    """There is nothing to wait for."""
    assert sentence in sentences(
        shown(volcano_node, a_pod("new", wants_vgpus("main"), **changes)), "new"
    )


def test_a_pod_that_took_anothers_name_is_told_about_the_other(volcano_node: AgentStatus) -> None:
    """A StatefulSet's pod beside its predecessor, whose share is not returned yet."""
    status = shown(volcano_node, a_pod("served", wants_vgpus("main", 2), uid="uid-2", bound=9))
    text = sentences(status, "served")
    assert (
        "An earlier pod of that name (UID uid-served) still holds 4096 MiB and 30 % of the cores "
        "of GPU 0 (GPU-0)"
    ) in text
    assert "The pod has UID uid-2" in text


def test_an_unknown_pod_is_told_where_it_was_looked_for(volcano_node: AgentStatus) -> None:
    """Book, ledger, refusals and journal, and how fresh each is."""
    told = explain.explain(volcano_node, NOW, "ml/never")
    assert told.answer == (
        (
            "Nothing is known of a pod ml/never on node node-a. It may be on another node or on "
            "none yet: kubectl get pod -o wide says where."
        ),
        (
            "1 of 1 GPUs have room for a new container of volcano.sh/vgpu-number; the most is on "
            "GPU 0: 77824 of 81920 MiB and 70 % of the cores. A container that asks for more of "
            "one GPU does not fit."
        ),
        (
            "GPU 1 (GPU-1) has been unhealthy since 2027-01-15T07:59:30Z (30 s): XID 79: the GPU "
            "has fallen off the bus; it does not answer; it is offered again at "
            "2027-01-15T08:00:30Z, in 30 s, if it stays quiet. Remedy: drain the node and reboot "
            "it; if the GPU is lost again, check its slot and its power, and replace the card."
        ),
    )
    assert told.sources == (
        "the watch of pods: 2 pods, complete, last answer 3 s ago",
        "the ledger: 4 grants, compared with the kubelet's records 12 s ago",
        "the refusals: 1",
        "the journal: 7 events, the oldest 10 min ago",
    )


def test_a_pod_that_is_gone_leaves_its_events(volcano_node: AgentStatus) -> None:
    """The morning after."""
    told = explain.explain(volcano_node, NOW, "ml/gone")
    assert told.answer == (
        "There is no pod ml/gone on this node now; it was here, see the events.",
    )
    assert [event.event for event in told.events] == ["ledger.released"]


def test_without_the_api_server_kubelets_records_answer(node: AgentStatus) -> None:
    """A node that offers nvidia.com/gpu alone needs no credentials."""
    node.cluster = ClusterStatus(disconnected_reason="no family that needs the API server is on")
    told = explain.explain(node, NOW, "ml/train-0")
    assert told.answer == (
        "Container main has GPU 0 (GPU-0) without a limit through nvidia.com/gpu.",
        "The pod itself is known from the kubelet's records only.",
    )
    assert (
        told.sources[0]
        == "the watch of pods: there is none, because no family that needs the API server is on"
    )


def test_what_is_wrong_with_what_it_has_is_told_without_the_api_server_too(
    node: AgentStatus,
) -> None:
    """Pods of NVIDIA's names are known from kubelet's records alone,
    and one of them fails when its GPU or its MPS daemon does.
    """
    first, *others = node.inventory.gpus
    ill = msgspec.structs.replace(first, health=Health(ok=False, reason="XID 79"))
    node.inventory = msgspec.structs.replace(node.inventory, gpus=(ill, *others))
    node.not_ready = (
        Problem(
            ProblemKind.RESOURCE,
            "nvidia.com/gpu",
            "there is no MPS control daemon at /mps",
        ),
    )
    text = sentences(node, "train-0")
    assert "GPU 0 (GPU-0) is unhealthy: XID 79." in text
    assert "nvidia.com/gpu is not offered now: there is no MPS control daemon at /mps." in text


def test_a_holder_that_the_watch_does_not_show_may_be_gone_or_new(
    volcano_node: AgentStatus,
) -> None:
    """A pod that was fetched for its start may run before a slow watch shows it,
    so it is not called gone.
    """
    volcano_node.cluster.pods = ()
    told = explain.explain(volcano_node, NOW, "ml/served")
    assert (
        told.answer[-1]
        == "The pod itself is not shown by the watch: it has ended, or the watch is behind."
    )


def test_an_outage_stands_beside_the_answer(volcano_node: AgentStatus) -> None:
    """The watch may be out of date then, and the line says for how long."""
    volcano_node.cluster.watches = (
        WatchStatus(
            "pods of this node", failing_since=NOW - 61, last_error="GET /api/v1/pods: refused"
        ),
    )
    assert explain.explain(volcano_node, NOW, "ml/never").sources[0] == (
        "the watch of pods: 2 pods, complete, failing for 61 s: GET /api/v1/pods: refused"
    )


def test_the_pods_that_can_be_asked_about_are_those_that_concern_the_agent(
    volcano_node: AgentStatus,
) -> None:
    """Not the hundred others of the node."""
    status = shown(volcano_node, a_pod("web", PodContainer("main")))
    assert explain.pods(status) == ("ml/refused", "ml/served", "ml/train-0")


def test_a_terminal_gets_sentences_places_and_events(volcano_node: AgentStatus) -> None:
    """``vgpu-agent status --pod`` prints this text."""
    lines = page.explained(explain.explain(volcano_node, NOW, "ml/served")).splitlines()
    assert lines[0] == "pod ml/served"
    assert "Sources" in lines
    assert f"  50s ago  allocate.reserved  grant: 7, token: {TOKEN}" in lines
