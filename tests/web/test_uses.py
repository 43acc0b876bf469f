"""A node of several families: which GPU serves which, since when, which pods wait, what frees it,
and why ids are held back.
"""

from __future__ import annotations

import re

import msgspec
import pytest

from tests.web.conftest import LENT, NOW, VGPU, a_gpu, a_pod, wants_vgpus
from vgpu_agent.allocation.refusals import Refusal
from vgpu_agent.ledger.claims import Claim
from vgpu_agent.ledger.uses import GpuUse, HeldBack
from vgpu_agent.pods import PodContainer
from vgpu_agent.status import AgentStatus, PluginStatus
from vgpu_agent.web import debug, explain, page, uses, views


def lines(status: AgentStatus, title: str) -> list[str]:
    """The lines of one table of ``vgpu-agent status``, without its title and header;
    empty when there is no such table.
    """
    _, found, rest = page.as_text(views.overview(status, NOW)).partition(f"\n{title}\n")
    return rest.partition("\n\n")[0].splitlines()[1:] if found else []


def table(status: AgentStatus, title: str) -> list[list[str]]:
    """Its cells."""
    return [re.split(r"\s{2,}", line.strip()) for line in lines(status, title)]


def answer(status: AgentStatus, pod: str) -> str:
    """The sentences about ``ml/<pod>``."""
    return "\n".join(explain.explain(status, NOW, f"ml/{pod}").answer)


def test_the_page_says_of_each_gpu_whom_it_serves_who_waits_and_what_frees_it(
    mixed_node: AgentStatus,
) -> None:
    """``HEALTHY 0`` stood beside four Healthy GPUs, without a reason."""
    assert table(mixed_node, "GPUs by family") == [
        [
            "0",
            "nvidia",
            "10m00s",
            "2",
            "ml/waits (volcano-vgpu, 3m10s) and 1 more",
            "the end of 2 pods (ml/a, ml/b)",
        ],
        [
            "1",
            "nvidia",
            "5m00s or longer",
            "5",
            "-",
            "the end of 5 pods (ml/a, ml/c, ml/d and 2 more)",
        ],
        [
            "2",
            "volcano-vgpu",
            "50s",
            "1",
            "ml/other (volcano-gpushare, 30s)",
            "the end of 1 pod (ml/served)",
        ],
        ["3", "-", "-", "0", "-", "-"],
    ]


def test_each_resource_says_why_it_has_fewer_healthy_ids_than_ids(mixed_node: AgentStatus) -> None:
    """One line a reason, the most ids first."""
    vgpu = (
        "GPU 2 has served volcano-vgpu (1 pod) since 2027-01-15T07:59:10Z; it is free again when "
        "its last pod ends"
    )
    nvidia = (
        "GPUs 0 and 1 have served nvidia (6 pods), the first since 2027-01-15T07:50:00Z; each is "
        "free again when its last pod ends"
    )
    assert table(mixed_node, "Held back") == [
        ["nvidia.com/gpu", "10 of 20", vgpu],
        [VGPU, "20 of 40", nvidia],
        [VGPU, "1 of 40", "GPU 3: XID 79"],
    ]


def test_a_node_of_one_family_has_no_such_tables(node: AgentStatus) -> None:
    """They would repeat what the others say."""
    node.ledger.uses = (GpuUse("GPU-0", "nvidia", NOW - 60, pods=("ml/train-0",)), GpuUse("GPU-1"))
    assert table(node, "GPUs by family") == []
    assert table(node, "Held back") == []


def test_a_gpu_that_serves_a_family_which_was_switched_off_is_shown(node: AgentStatus) -> None:
    """Its pods run on, and no other family gets it."""
    node.ledger.uses = (
        GpuUse("GPU-0", "aws", NOW - 60, pods=("ml/old",)),
        GpuUse("GPU-1", "nvidia", NOW - 60, pods=("ml/new",)),
    )
    assert [cells[1] for cells in table(node, "GPUs by family")] == ["aws", "nvidia"]


def test_a_free_gpu_that_is_kept_says_for_whom(mixed_node: AgentStatus) -> None:
    """It is idle and Unhealthy for the others at once."""
    use = GpuUse(
        "GPU-3", claims=(Claim("GPU-3", "volcano-vgpu", "ml/waits", "uid-waits", NOW - 5, 3),)
    )
    assert uses.freed_by(use) == "the start or the end of ml/waits, for which it is kept"


def test_sixteen_gpus_are_one_line_and_many_reasons_are_few(mixed_node: AgentStatus) -> None:
    """A page must not grow with what tenants do."""
    mixed_node.inventory = msgspec.structs.replace(
        mixed_node.inventory, gpus=tuple(map(a_gpu, range(16)))
    )
    gpus = tuple(f"GPU-{place}" for place in range(16))
    mixed_node.ledger.uses = tuple(
        GpuUse(
            gpu, "nvidia", NOW - 60, pods=tuple(f"ml/{'p' * 250}-{number}" for number in range(100))
        )
        for gpu in gpus
    )
    mixed_node.ledger.held_back = {VGPU: (HeldBack(LENT, "nvidia", gpus, 160),)}
    ((_, ids, reason),) = table(mixed_node, "Held back")
    assert ids == "160 of 40"
    assert reason.startswith(
        "GPUs 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14 and 15 have served nvidia (100 "
        "pods), the first since"
    )
    assert len(reason) < 250
    assert all(len(line) < 1000 for line in lines(mixed_node, "GPUs by family"))
    mixed_node.ledger.held_back = {
        VGPU: tuple(HeldBack(f"XID {number}", "", (gpu,), 10) for number, gpu in enumerate(gpus))
    }
    *_, last = shown = table(mixed_node, "Held back")
    assert len(shown) == 9
    assert last[1:] == ["80 of 40", "GPUs 8, 9, 10, 11, 12, 13, 14 and 15: 8 more reasons"]
    assert len(views.gpus(mixed_node, NOW)[0].use.pods) == 64


def test_a_pod_that_waits_for_its_gpu_is_told_who_has_it_and_what_to_do(
    mixed_node: AgentStatus,
) -> None:
    """It reads this even before the first refusal, while images are pulled."""
    assert (
        "Its scheduler has named GPU 0 (GPU-0); the pod has waited for it since "
        "2027-01-15T07:56:50Z.\n"
        "That GPU has served nvidia since 2027-01-15T07:50:00Z and is freed by the end of 2 pods "
        "(ml/a, ml/b); no new pod of nvidia gets any of it meanwhile.\n"
        "To have the pod scheduled anew, delete it; GPU 3 is idle."
    ) in answer(mixed_node, "waits")


def test_a_pod_that_waits_behind_others_is_told_so(mixed_node: AgentStatus) -> None:
    """The oldest goes first, so the end of the holders alone is not enough."""
    text = answer(mixed_node, "later")
    assert (
        "Pods of other families that were sent to it earlier get it first: ml/waits (volcano-vgpu)."
        in text
    )
    assert "no new pod of nvidia" not in text


def test_a_pod_that_nothing_keeps_from_its_gpu_is_not_told_to_be_deleted(
    mixed_node: AgentStatus,
) -> None:
    """Its image is being pulled."""
    claim = Claim("GPU-2", "volcano-vgpu", "ml/waits", "uid-waits", NOW - 5, 3)
    mixed_node.ledger.uses = (msgspec.structs.replace(mixed_node.ledger.uses[2], claims=(claim,)),)
    text = answer(mixed_node, "waits")
    assert "Its scheduler has named GPU 2 (GPU-2)" in text
    assert "delete" not in text


@pytest.mark.parametrize("name", ["wants-nvidia", "nowhere"])
def test_whoever_waits_for_ids_reads_why_there_are_none(mixed_node: AgentStatus, name: str) -> None:
    """The default scheduler says ``Insufficient nvidia.com/gpu``.
    The node says which family has the GPUs.
    """
    mixed_node.ledger.rooms |= {"nvidia.com/gpu": ()}
    mixed_node.ledger.grants = ()
    pod = a_pod("wants-nvidia", PodContainer("main", limits={"nvidia.com/gpu": 1}), bound=10)
    mixed_node.cluster.pods = (*mixed_node.cluster.pods, pod)
    assert (
        "nvidia.com/gpu has 20 ids here, 9 of them free; not available: GPU 2 has served "
        "volcano-vgpu (1 pod) since 2027-01-15T07:59:10Z; it is free again when its last pod "
        "ends."
    ) in answer(mixed_node, name)


def test_a_refused_pod_is_told_the_remedy_on_every_page(mixed_node: AgentStatus) -> None:
    """The reason alone left its reader waiting."""
    pod = a_pod("refused", wants_vgpus("main", 2), bound=2)
    mixed_node.binding.refusals = (
        Refusal(
            pod,
            "main",
            VGPU,
            "GPU-0 is not available",
            NOW - 63,
            5,
            final=False,
            advice="Delete it.",
        ),
    )
    assert (
        "Container main may not start: GPU-0 is not available. Delete it. Refused 5 times, first "
        "63 s ago"
    ) in answer(mixed_node, "refused")
    assert "GPU-0 is not available. Delete it." in table(mixed_node, "Refused starts")[0]


def test_scripts_read_the_same(mixed_node: AgentStatus) -> None:
    """`/debug/status` for each GPU and resource, `/debug/ledger` by UUID and resource."""
    overview = msgspec.to_builtins(views.overview(mixed_node, NOW))
    use = overview["gpus"][0]["use"]
    assert (use["family"], use["since"]["seconds_ago"], use["pods"], use["pods_total"]) == (
        "nvidia",
        600.0,
        ("ml/a", "ml/b"),
        2,
    )
    assert [claim["pod"] for claim in use["waiting"]] == ["ml/waits", "ml/later"]
    assert overview["resources"][0]["held_back"][0]["gpus"] == ("GPU-2",)
    (ledger,) = (entry for entry in debug.PATHS if entry.path == "/debug/ledger")
    found = msgspec.json.decode(
        debug.to_json(ledger.answer(debug.DebugRequest(mixed_node, NOW, {})))
    )
    assert found["uses"]["GPU-1"]["or_earlier"]
    assert found["held_back"][VGPU][0]["ids"] == 20


def test_an_older_command_line_reads_a_newer_agent_and_the_other_way_round(
    mixed_node: AgentStatus,
) -> None:
    """A status without these fields is one of an agent before them."""
    old = {"uuid": "GPU-0", "index": 0}
    assert msgspec.convert(old, views.GpuView).use == uses.UseView()
    assert msgspec.convert({"resource": VGPU}, views.ResourceView).held_back == ()
    mixed_node.plugins = (PluginStatus("nvidia.com/gpu", "nvidia"),)
    assert (
        msgspec.json.decode(
            msgspec.json.encode(views.overview(mixed_node, NOW)), type=views.Overview
        )
        .gpus[0]
        .use.family
        == "nvidia"
    )


def test_a_pod_whose_ids_must_come_from_a_gpu_is_told_that_it_is_kept(
    mixed_node: AgentStatus,
) -> None:
    """No scheduler has named that GPU."""
    claim = Claim("GPU-2", "nvidia", "ml/waits", "uid-waits", NOW - 5, 3, named=False)
    mixed_node.ledger.uses = (msgspec.structs.replace(mixed_node.ledger.uses[2], claims=(claim,)),)
    text = answer(mixed_node, "waits")
    assert "GPU 2 (GPU-2) has been kept for the pod since" in text
    assert "has named" not in text
