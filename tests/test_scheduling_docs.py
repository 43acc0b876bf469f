"""docs/scheduling.md: its tables are complete, and what they say is what the command does."""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import Counter, Histogram
from prometheus_client.metrics import MetricWrapperBase

from vgpu_agent.cli import scheduler
from vgpu_agent.placement.nodes.reasons import Reason
from vgpu_agent.scheduler import pod_events
from vgpu_agent.scheduler.metrics import Metrics

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "scheduling.md").read_text()
GUIDE = (ROOT / "docs" / "coming-from-vgpu-manager.md").read_text()
CONTRACT = (ROOT / "docs" / "contracts" / "vgpu-manager.md").read_text()
COMPONENT = ROOT / "manifests" / "components" / "scheduler"


def _section(text: str, heading: str) -> str:
    found = text.partition(f"\n{heading}\n")[2]
    assert found, heading
    return re.split(rf"\n{'#' * heading.count('#')} ", found, maxsplit=1)[0]


def _flags(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]+|--v\b", text))


@pytest.fixture(scope="module")
def actions() -> dict[str, argparse.Action]:
    """The flags of the command."""
    parsers = argparse.ArgumentParser().add_subparsers()
    scheduler.add_parser(parsers)
    parser = parsers.choices["scheduler"]
    return {
        flag: action
        for action in parser._actions
        for flag in action.option_strings
        if flag.startswith("--") and flag != "--help"
    }


def test_each_flag_has_a_row_and_those_without_effect_are_told_apart(
    actions: dict[str, argparse.Action],
) -> None:
    """An admin has to guess the effect of a flag that the page leaves out."""
    effective, _, without = _section(PAGE, "## Flags").partition("Accepted without effect")
    rows = "\n".join(line.split("|")[1] for line in effective.splitlines() if line.startswith("|"))
    idle = {name for name, each in actions.items() if "without effect" in (each.help or "")}
    assert _flags(rows) == actions.keys() - idle
    rows = "\n".join(line.split("|")[1] for line in without.splitlines() if line.startswith("|"))
    assert _flags(rows) == idle


def test_each_flag_of_the_replaced_one_is_on_the_page_of_the_change(
    actions: dict[str, argparse.Action],
) -> None:
    """vgpu-manager §1.3."""
    contract = CONTRACT.partition("### 1.3 ")[2].partition("\n### ")[0]
    flags = _flags(contract) | {"--kubeconfig", "--master"}
    assert len(flags) > 15
    assert flags - actions.keys() == set()
    assert flags - _flags(_section(GUIDE, "## The scheduler")) == set()


def test_each_metric_has_a_row() -> None:
    """And each row a metric, with its labels."""
    rows = dict(
        re.findall(r"^\| `(vgpu_scheduler_\w+)` \| [a-z]+ \| ([^|]*) \|", PAGE, re.MULTILINE)
    )
    metrics = _metrics()
    found = {
        name: ", ".join(f"`{each}`" for each in metric._labelnames) or "–"
        for name, metric in metrics.items()
    }
    assert rows == found
    asked = set(re.findall(r"vgpu_scheduler_\w+", PAGE))
    assert {name.removesuffix("_bucket") for name in asked} <= found.keys()


def _metrics() -> dict[str, MetricWrapperBase]:
    """The extender's own metrics by name; those of its process are prometheus_client's."""
    return {
        each._name + ("_total" if isinstance(each, Counter) else ""): each
        for each in Metrics()._registry._collector_to_names
        if isinstance(each, MetricWrapperBase)
    }


def test_each_metric_of_the_replaced_one_exists() -> None:
    """vgpu-manager §5.10: with its labels and its type, so that dashboards stay."""
    section = CONTRACT.partition("### 5.10 ")[2].partition("\n## ")[0]
    listed = re.findall(r"`([a-z_]{8,}\w)(?:\{([a-z_,]+)\})?`( \(hist\)|\s+\(buckets)?", section)
    assert len(listed) > 10
    metrics = _metrics()
    for name, labels, is_histogram in listed:
        if name == "vgpu_scheduler_":  # the heading
            continue
        metric = metrics[f"vgpu_scheduler_{name}"]
        assert metric._labelnames == tuple(filter(None, labels.split(","))), name
        assert isinstance(metric, Histogram if is_histogram else Counter), name
    text = Metrics().text("")[0].decode()
    assert {"process_cpu_seconds_total", "process_resident_memory_bytes"} <= set(
        re.findall(r"^(\w+) [0-9]", text, re.MULTILINE)
    )


def test_each_event_of_the_replaced_one_exists_and_has_a_row() -> None:
    """vgpu-manager §5.2: operators search for these words."""
    listed = CONTRACT.partition("Event reasons:")[2].partition("(`pkg")[0]
    reasons = set(re.findall(r"\w+", listed))
    assert len(reasons) == 9
    raised = {text for text in vars(pod_events).values() if isinstance(text, str)}
    assert reasons <= raised
    rows = set(re.findall(r"^\| `(\w+)` \| the extender \|", PAGE, re.MULTILINE))
    assert rows == reasons


def test_each_reason_has_a_row() -> None:
    """An SRE searches for the phrase in the pod's condition."""
    rows = [
        phrase
        for line in _section(PAGE, "### A reason of Nodes").splitlines()
        if line.startswith("| `")
        for phrase in re.findall(r"`([^`]+)`", line.split("|")[1])
    ]
    assert sorted(rows) == sorted(reason.value for reason in Reason)


def test_each_message_is_the_command_s_own() -> None:
    """A message that is worded anew must be worded anew there as well."""
    spoken = []
    for file in sorted((ROOT / "vgpu_agent" / "scheduler").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                spoken.append(
                    "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "…"
                        for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                spoken.append(node.value)
    messages = [
        line.split("`")[1]
        for line in _section(PAGE, "### A call fails").splitlines()
        if line.startswith("| `") and "kube-scheduler's events" not in line.split("|")[1]
    ]
    assert len(messages) > 4
    for message in messages:
        for piece in (each.strip() for each in message.split("…")):
            assert any(piece in text for text in spoken), piece


def test_each_component_for_an_old_version_has_a_row() -> None:
    """And the page says of each that no kube-scheduler of that version has read it."""
    section = _section(PAGE, "## Older versions of Kubernetes")
    rows = set(re.findall(r"^\| [0-9. to]+ \| `components/([^`]+)` \|", section, re.MULTILINE))
    assert rows == {each.name for each in COMPONENT.parent.glob("scheduler-*")}
    assert "none of the three was run with a kube-scheduler of its version" in section
    for each in rows:
        maps = yaml.safe_load((COMPONENT.parent / each / "configmap.yaml").read_text())["data"]
        for version in re.findall(r"apiVersion: (\S+)", maps.get("config.yaml") or ""):
            assert f"`components/{each}` | `{version}` |" in section


def test_each_right_of_the_component_has_a_row() -> None:
    """A right without a reason is one to take away."""
    rows = "\n".join(
        line.split("|")[1]
        for line in _section(PAGE, "## Rights").splitlines()
        if line.startswith("| ")
    )
    for file in ("rbac.yaml", "kube-scheduler-rbac.yaml"):
        for document in yaml.safe_load_all((COMPONENT / file).read_text()):
            for rule in document.get("rules", ()):
                for resource in rule["resources"]:
                    named = " ".join(row for row in rows.splitlines() if f"`{resource}`" in row)
                    assert {verb for verb in rule["verbs"] if verb not in named} == set(), resource
            if (role := document.get("roleRef", {}).get("name", "")) != "vgpu-scheduler":
                assert role in rows


def test_every_link_leads_to_a_section() -> None:
    """Also those that point here from other pages and from comments of the manifests."""

    def slugs(page: str) -> set[str]:
        text = (ROOT / "docs" / page).read_text()
        return {
            re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        }

    for page, anchor in re.findall(r"\]\(([a-z-]*\.md)?#([a-z0-9-]+)\)", PAGE):
        assert anchor in slugs(page or "scheduling.md"), (page, anchor)
    pointing = [GUIDE, (ROOT / "docs" / "events.md").read_text()]
    pointing += [file.read_text() for file in sorted(COMPONENT.iterdir())]
    anchors = set(re.findall(r"scheduling\.md#([a-z0-9-]+)", "\n".join(pointing)))
    assert len(anchors) >= 3
    assert anchors <= slugs("scheduling.md")
