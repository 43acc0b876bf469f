"""The overview in words, for terminals and browsers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
import pytest

from tests.web.conftest import MEMORY
from vgpu_agent.status import (
    AgentStatus,
    CdiSpecStatus,
    CdiStatus,
    MpsState,
    MpsStatus,
    PluginState,
    PluginStatus,
    Problem,
    ProblemKind,
    WriteFailure,
)
from vgpu_agent.web import page, problems, views

if TYPE_CHECKING:
    from vgpu_agent.web.views import Overview

NOW = 1_800_000_000.0


@pytest.fixture
def overview(node: AgentStatus) -> Overview:
    """The node as its readers see it."""
    return views.overview(node, NOW)


def test_the_table_answers_who_holds_what(overview: Overview) -> None:
    """The whole page, as a person sees it."""
    assert page.as_text(overview) == (
        "node node-a · ready · vgpu-agent 0.1.0 (abc1234) · up 1h01m · driver 580.65.06, CUDA "
        "13.0\n*** SIMULATED GPUs: nothing here is real hardware ***\n\nGPUs\n  INDEX  NAME      "
        "             HEALTH     MEMORY (MiB)  USE   SHARES  UUID   HELD BY\n  0      NVIDIA "
        "A100-SXM4-80GB  Healthy    1024/81920    55 %  1/10    GPU-0  ml/train-0/main\n  1      "
        "NVIDIA A100-SXM4-80GB  Unhealthy  -/81920       -     1/10    GPU-1  (not named yet)\n\n"
        "Resources\n  NAME            STATE       IDS  HEALTHY  HELD  FREE\n  nvidia.com/gpu  "
        "registered  20   10       2     9\n\nPods\n  POD              CONTAINER  RESOURCE       "
        " GPU  STATE     LIMIT     KNOWN FOR\n  (not named yet)  -          nvidia.com/gpu  1    "
        "reserved  in force  2m00s\n  ml/train-0       main       nvidia.com/gpu  0    granted   "
        "no limit  1m00s\n\nProblems\n  PART    REASON\n  gpu 1   GPU-1 has been unhealthy since "
        "2027-01-15T07:59:30Z (30 s): XID 79: the GPU has fallen off the bus; it does not answer; "
        "it is offered again at 2027-01-15T08:00:30Z, in 30 s, if it stays quiet; drain the node "
        "and reboot it; if the GPU is lost again, check its slot and its power, and replace the "
        "card\n  gpu     a GPU did not answer: 2: GPU is lost\n  "
        "ledger  the kubelet's records hold ids that this node does not offer: GPU-9::0\n"
    )


def test_shares_of_memory_and_compute_are_summed_up(volcano_node: AgentStatus) -> None:
    """The column sums up the shares of a GPU.
    Ids that only count something are never called free.
    """
    lines = page.as_text(views.overview(volcano_node, NOW)).splitlines()
    header, first, second = lines[lines.index("GPUs") + 1 : lines.index("GPUs") + 4]
    column = header.index("GIVEN")
    assert first[column:].startswith("4096 MiB, 30 %  GPU-0")
    assert second[column:].startswith("0 MiB, 0 %      GPU-1")
    memory = PluginStatus(
        MEMORY,
        "volcano-vgpu",
        PluginState.REGISTERED,
        stream_open=True,
        ids_sent=100,
        healthy_sent=100,
    )
    volcano_node.plugins = (*volcano_node.plugins, memory)
    (row,) = [
        line
        for line in page.as_text(views.overview(volcano_node, NOW)).splitlines()
        if MEMORY in line
    ]
    assert row.split() == [MEMORY, "registered", "100", "100", "-", "-"]


def test_what_will_go_wrong_for_some_pods_is_a_problem(volcano_node: AgentStatus) -> None:
    """Before the first of them is there."""
    volcano_node.binding.cautions = ("volcano.sh/vgpu-memory: a GPU has 40960 ids",)
    lines = page.as_text(views.overview(volcano_node, NOW)).splitlines()
    assert ["config", "volcano.sh/vgpu-memory:", "a", "GPU", "has", "40960", "ids"] in [
        line.split() for line in lines
    ]


def test_many_holders_do_not_tear_the_table_apart(overview: Overview) -> None:
    """A GPU of ten shares is one line still. The table of pods has them all."""
    crowded = msgspec.structs.replace(
        overview.gpus[0], holders=tuple(f"ml/train-{number}/main" for number in range(10))
    )
    text = page.as_text(msgspec.structs.replace(overview, gpus=(crowded,)))
    assert "  ml/train-0/main, ml/train-1/main and 8 more\n" in text


def test_an_empty_node_says_so_instead_of_showing_empty_tables() -> None:
    """A fresh agent on a node without GPUs."""
    text = page.as_text(views.overview(AgentStatus(node="node-b", version="0.1.0"), NOW))
    assert text == (
        "node node-b · ready · vgpu-agent 0.1.0\n\nGPUs\n  none\n\nResources\n  none offered\n"
        "\nPods\n  no pod holds a share\n\nProblems\n  none known\n"
    )


def test_a_node_that_is_not_ready_says_so_first(node: AgentStatus) -> None:
    """In the headline in capitals, and as the first problem, once."""
    node.not_ready = (
        Problem(ProblemKind.RESOURCE, "nvidia.com/gpu", "kubelet closed\nthe stream"),
    )
    node.plugins = (
        msgspec.structs.replace(node.plugins[0], state=PluginState.REGISTERED, stream_open=False),
    )
    lines = page.as_text(views.overview(node, NOW)).splitlines()
    assert "NOT READY" in lines[0]
    assert lines[lines.index("Problems") + 2].split(maxsplit=1) == [
        "resource",
        "nvidia.com/gpu  kubelet closed the stream",
    ]
    assert any("registered, stream closed" in line for line in lines)


def test_real_gpus_are_not_called_simulated(node: AgentStatus) -> None:
    """The banner appears for simulated nodes only."""
    node.simulated = False
    assert "SIMULATED" not in page.as_text(views.overview(node, NOW))


def test_a_lost_gpu_is_gone_and_explained(node: AgentStatus) -> None:
    """It keeps its line as long as it is in the book."""
    lost = msgspec.structs.replace(node.inventory.gpus[1], present=False)
    node.inventory = msgspec.structs.replace(node.inventory, gpus=(node.inventory.gpus[0], lost))
    text = page.as_text(views.overview(node, NOW))
    assert "  Gone " in text
    assert "GPU-1 has been gone since 2027-01-15T07:59:30Z (30 s): XID 79" in text


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"config_problems": ("config.yaml:3: no",)},
            "the newest configuration is not in force: config.yaml:3: no",
        ),
        (
            {"config_problems": ("config.yaml:3: no", "config.yaml:4: nor")},
            "  config  the newest configuration is not in force: config.yaml:4: nor",
        ),
        (
            {"config_collisions": ("config.yaml:3: aws.mps: supervised …",)},
            "  config  config.yaml:3: aws.mps: supervised …",
        ),
        (
            {"config_needs_restart": ("listen", "simulate")},
            "takes effect after a restart: listen, simulate",
        ),
        (
            {
                "plugins": (
                    PluginStatus(
                        "nvidia.com/gpu", "nvidia", rival="another plugin offers it as well"
                    ),
                )
            },
            "another plugin offers it as well",
        ),
        (
            {
                "write_failures": (
                    WriteFailure("/state", "a.json", "No space left on device", "a is lost"),
                    WriteFailure("/state", "b.json", "No space left on device", "b is lost"),
                )
            },
            (
                "  files  cannot write a.json, b.json in /state: No space left on device; make it "
                "a directory with room in which the agent can write; until then a is lost, and b "
                "is lost"
            ),
        ),
        (
            {"unreadable_regions": {"ml/a/main": "it has 7 bytes", "ml/b/main": "it has 8 bytes"}},
            (
                "  limits  the region of ml/a/main and 1 more containers cannot be read, so "
                "nothing shows that its limits are in force: it has 7 bytes"
            ),
        ),
        (
            {
                "cdi": CdiStatus(
                    specs=tuple(
                        CdiSpecStatus(
                            kind, f"/cdi/{kind}.json", error=f"cannot write /cdi/{kind}.json"
                        )
                        for kind in ("gpu", "gds")
                    )
                )
            },
            "  cdi  cannot write /cdi\n",
        ),
        (
            {
                "mps": (
                    MpsStatus("a/b", MpsState.FAILED, "no program"),
                    MpsStatus("a/c", MpsState.FAILED, "no program"),
                )
            },
            "  mps a/b, a/c  no program",
        ),
    ],
)
def test_what_stops_nothing_yet_is_a_problem_too(
    node: AgentStatus, change: dict[str, object], sentence: str
) -> None:
    """It would be forgotten otherwise. Each cause is one line."""
    before = len(problems.known(node, NOW))
    for name, value in change.items():
        setattr(node, name, value)
    text = re.sub("  +", "  ", page.as_text(views.overview(node, NOW)))
    assert re.sub("  +", "  ", sentence) in text
    assert len(problems.known(node, NOW)) - before == (2 if "config.yaml:4" in sentence else 1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (-3, "0s"), (59.9, "59s"), (61, "1m01s"), (3600, "1h00m"), (90000, "1d1h")],
)
def test_an_age_is_short(node: AgentStatus, seconds: float, text: str) -> None:
    """Two units are enough. A clock that was set back is no negative age."""
    node.started_at = NOW - seconds
    assert f" · up {text} · " in page.as_text(views.overview(node, NOW))
