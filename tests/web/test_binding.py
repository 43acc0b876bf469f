"""Grants bound to pods, and the API server, in ``/debug`` and on the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from tests.web.conftest import IDS, NOW, TOKEN, VGPU
from tests.web.test_debug import answer
from vgpu_agent.allocation.mode import BindingMode
from vgpu_agent.model import Share
from vgpu_agent.status import FamilyStatus, WatchStatus, WriterStatus
from vgpu_agent.web import page, problems, views
from vgpu_agent.web.dashboard import node

if TYPE_CHECKING:
    from vgpu_agent.status import AgentStatus


def test_an_allocation_shows_its_token_and_its_evidence(volcano_node: AgentStatus) -> None:
    """Every decision is recorded with its evidence in /debug/allocations."""
    (grant,) = answer(volcano_node, "allocations", pod="ml/served")["allocations"]
    assert (grant["token"], grant["ids"], grant["ids_total"]) == (TOKEN, list(IDS), 2)
    assert grant["decided_for"] == {"pod_uid": "uid-served", "container": "main"}
    assert grant["evidence"] == [
        "kubelet's checkpoint gives these ids to container main",
        "decided by the scheduler, in volcano.sh/vgpu-ids-new",
    ]


def test_a_grant_whose_ids_say_everything_has_no_token(volcano_node: AgentStatus) -> None:
    """It has no CDI device."""
    (grant,) = answer(volcano_node, "allocations", pod="ml/train-0")["allocations"]
    assert (grant["token"], grant["decided_for"]) == ("", None)


def test_reservations_without_an_owner_are_shown_for_every_pod(volcano_node: AgentStatus) -> None:
    """Each may be its own."""
    for query in ({}, {"pod": "ml/refused"}):
        assert [
            grant["number"] for grant in answer(volcano_node, "allocations", **query)["unconfirmed"]
        ] == [2, 8]


def test_refusals_are_filtered_like_grants(volcano_node: AgentStatus) -> None:
    """With reason, age, number and whether there is hope."""
    (refusal,) = answer(volcano_node, "allocations", pod="ml/refused")["refusals"]
    assert (
        refusal["reason"],
        refusal["since"]["seconds_ago"],
        refusal["count"],
        refusal["final"],
    ) == (
        "no GPU has 4096 MiB left",
        63.0,
        5,
        False,
    )
    assert answer(volcano_node, "allocations", pod="ml/served")["refusals"] == []


def test_thousands_of_ids_are_shortened_and_counted(volcano_node: AgentStatus) -> None:
    """A container of one card's memory holds one id for each MiB."""
    served = volcano_node.ledger.grants[2]
    volcano_node.ledger.grants = (
        msgspec.structs.replace(served, ids=tuple(f"a-{number}" for number in range(4096))),
    )
    (grant,) = answer(volcano_node, "allocations")["allocations"]
    assert (len(grant["ids"]), grant["ids"][0], grant["ids_total"]) == (64, "a-0", 4096)
    assert len(answer(volcano_node, "ledger")["grants"][0]["ids"]) == 64


def test_the_book_of_pods_shows_what_concerns_us(volcano_node: AgentStatus) -> None:
    """Limits of our resources, annotations of our families, and the served containers."""
    pods = answer(volcano_node, "pods")
    served, refused = pods["watched_pods"]
    assert (pods["synced"], pods["watch"]["last_event"]["seconds_ago"]) == (True, 3.0)
    assert served["annotations"] == {"volcano.sh/bind-phase": "success"}
    assert [(one["name"], one["kind"], one["served"]) for one in served["containers"]] == [
        ("setup", "init", False),
        ("main", "main", True),
    ]
    assert refused["containers"][0]["limits"] == {VGPU: 2, "volcano.sh/vgpu-memory": 4096}
    assert (refused["containers"][0]["served"], refused["containers"][0]["refused"]) == (
        False,
        "no GPU has 4096 MiB left",
    )


def test_a_huge_annotation_is_cut(volcano_node: AgentStatus) -> None:
    """A pod may bring 256 KiB of them."""
    pod = msgspec.structs.replace(
        volcano_node.cluster.pods[0], annotations={"volcano.sh/vgpu-ids-new": "x" * 200_000}
    )
    volcano_node.cluster.pods = (pod,)
    assert (
        answer(volcano_node, "pods")["watched_pods"][0]["annotations"]["volcano.sh/vgpu-ids-new"]
        == "x" * 400 + "… (200000 characters)"
    )


def test_config_says_how_grants_are_bound_and_why(volcano_node: AgentStatus) -> None:
    """The choice and its reason; and what the files of the replaced plugin came to."""
    config = answer(volcano_node, "config")
    assert (config["binding"]["mode"], config["binding"]["reason"]) == (
        "late",
        "the Node says containerd://2.0.1, which resolves CDI names",
    )
    assert [family["family"] for family in config["binding"]["families"]] == [
        "nvidia",
        "volcano-vgpu",
    ]
    assert (config["volcano_vgpu"], config["config_map"]) == (
        {"split": 10},
        "kube-system/volcano-vgpu-device-config",
    )
    assert config["file_problems"] == [
        "device-config.yaml: nvidia.deviceMemoryScaling is no number"
    ]


def test_the_api_server_is_described_without_secrets(volcano_node: AgentStatus) -> None:
    """The answer has the source of the credentials, the requests with their outcomes,
    and the waiting writers.
    """
    cluster = answer(volcano_node, "cluster")
    assert cluster["credentials"] == "service account in /var/run/secrets"
    assert {"verb": "patch", "resource": "pods", "outcome": "200", "count": 4} in cluster[
        "requests"
    ]
    assert [writer["name"] for writer in cluster["writers"]] == ["node", "pods", "events"]
    assert (cluster["watches"][0]["name"], cluster["watches"][0]["errors"]) == (
        "pods of this node",
        2,
    )
    assert cluster["restored"] == {"kubelet_version": "v1.30.0", "in_use": False}


def test_the_ledger_shows_the_rooms(volcano_node: AgentStatus) -> None:
    """The room left on each device for each resource explains why a pod did not fit."""
    (room,) = answer(volcano_node, "ledger")["rooms"][VGPU]
    assert (
        room["device"],
        room["memory_free_mib"],
        room["cores_free_percent"],
        room["holders_free"],
    ) == ("GPU-0", 77824, 70, 9)


def test_the_page_shows_families_and_refused_starts(volcano_node: AgentStatus) -> None:
    """Two small tables, each only where it has something to say."""
    text = page.as_text(views.overview(volcano_node, NOW))
    assert (
        "Families\n  FAMILY        STATE    BOUND        WHY\n"
        "  nvidia        offered  in Allocate  its ids name the GPU\n"
        "  volcano-vgpu  offered  late         the Node says containerd://2.0.1, which resolves "
        "CDI names\n"
    ) in text
    assert "  ml/refused  main       1m03s  5      no GPU has 4096 MiB left\n" in text


def test_a_family_that_is_not_offered_is_loud(volcano_node: AgentStatus) -> None:
    """With the reason in the same line. In a browser in colour."""
    volcano_node.binding.families = (
        FamilyStatus(
            "volcano-vgpu",
            decided_by_pod=True,
            offered=False,
            trouble="the Node has not been read yet",
        ),
    )
    volcano_node.binding.mode = None
    overview = views.overview(volcano_node, NOW)
    assert (
        "  volcano-vgpu  NOT OFFERED  not known yet  the Node has not been read yet\n"
        in page.as_text(overview)
    )
    rows = node.parts(volcano_node, NOW).whole("resources")
    assert "volcano-vgpu</b>" in rows
    assert 'pill bad">not offered</span> the Node has not been read yet' in rows


def test_a_family_for_which_the_node_has_no_device_is_no_alarm(volcano_node: AgentStatus) -> None:
    """The MIG instances of a family on a node whose GPUs are whole are an example."""
    volcano_node.binding.families = (
        FamilyStatus("slices", offered=False, trouble="none of its GPUs is divided", idle=True),
    )
    overview = views.overview(volcano_node, NOW)
    assert "  slices  nothing here  in Allocate  none of its GPUs is divided\n" in page.as_text(
        overview
    )
    assert "not offered" not in node.parts(volcano_node, NOW).whole("resources")


@pytest.mark.parametrize("late", [True, False])
def test_the_mode_is_one_word(volcano_node: AgentStatus, late: bool) -> None:
    """For scripts that compare nodes."""
    volcano_node.binding.mode = BindingMode(
        late=late, by_annotation=False, reason="binding.mode is set"
    )
    assert answer(volcano_node, "config")["binding"]["mode"] == ("late" if late else "early")


def known(status: AgentStatus) -> list[str]:
    """Return the problems listed under API server."""
    return [
        problem.reason for problem in problems.known(status, NOW) if problem.part == "API server"
    ]


def test_an_outage_is_a_problem_with_its_length_and_no_reason_to_be_unready(
    volcano_node: AgentStatus,
) -> None:
    """Pods that were seen have started, so the kubelet must not receive another answer."""
    volcano_node.cluster.watches = (
        WatchStatus("this node", failing_since=NOW - 20, last_error="no answer"),
        WatchStatus(
            "pods of this node", failing_since=NOW - 75, last_error="no answer within 15 s"
        ),
    )
    (reason,) = known(volcano_node)
    assert reason.startswith(
        "the watch of pods of this node has been failing for 75 s: no answer within 15 s; known "
        "pods are served"
    )
    assert views.overview(volcano_node, NOW).ready


def test_a_config_map_that_may_not_be_read_is_no_outage(volcano_node: AgentStatus) -> None:
    """In a namespace that is not used for it, that is as it should be."""
    volcano_node.cluster.watches = (
        WatchStatus("ConfigMap volcano-system/x", failing_since=NOW - 75, essential=False),
    )
    assert known(volcano_node) == []


def test_missing_rights_are_one_problem_with_the_manifests_that_grant_them(
    volcano_node: AgentStatus,
) -> None:
    """However many writers meet them, and however often."""
    volcano_node.cluster.missing_rights = {
        "create pods/eviction": "components/eviction",
        "patch nodes": "rbac.yaml",
        "patch nodes/status": "rbac.yaml",
    }
    (reason,) = known(volcano_node)
    assert reason == (
        "the service account may not create pods/eviction, patch nodes, patch nodes/status; apply "
        "manifests/components/eviction and manifests/rbac.yaml"
    )


def test_writes_that_wait_for_a_minute_are_a_problem(volcano_node: AgentStatus) -> None:
    """A scheduler waits for them."""
    volcano_node.cluster.writers = (
        WriterStatus("node", pending=1, oldest_pending_seconds=59),
        WriterStatus("pods", 0, 9, 0, 3, 61),
    )
    (reason,) = known(volcano_node)
    assert reason.startswith("writes about pods wait: 3, the oldest for 61 s;")


def test_a_share_of_a_gpu_that_is_gone_is_shown_by_its_uuid(volcano_node: AgentStatus) -> None:
    """The table of pods never loses a holder."""
    served = volcano_node.ledger.grants[2]
    volcano_node.ledger.grants = (
        msgspec.structs.replace(served, shares=(Share("GPU-lost", 1024),)),
    )
    assert (
        "  ml/served  main       volcano.sh/vgpu-number  GPU-lost  identified  not in force  50s\n"
        in page.as_text(views.overview(volcano_node, NOW))
    )
