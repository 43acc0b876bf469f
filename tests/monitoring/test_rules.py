"""Each alert by promtool: raised when it should be, not before its time, and never on a good day;
and each has a summary, a description and a section of the troubleshooting page.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.monitoring.prometheus import MONITORING, rules

DOCS = MONITORING.parents[2] / "docs"
GROUPS = yaml.safe_load((MONITORING / "prometheusrule.yaml").read_text())["spec"]["groups"]
ALERTS: dict[str, Any] = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
NODE = 'node="n"'


class Case(NamedTuple):
    """The series of one alert: its values, a minute apart, on a bad day and on a good one, and the
    summary that a bad day has.
    """

    series: str
    bad: str
    good: str
    summary: str
    labels: dict[str, str] = {"node": "n"}  # noqa: RUF012 - read only
    beside: str = ""
    """A series that is 1 all the time."""


def _gpu(metric: str, bad: str, good: str, summary: str) -> Case:
    return Case(
        f'{metric}{{{NODE}, gpu="GPU-1"}}', bad, good, summary, {"node": "n", "gpu": "GPU-1"}
    )


def _agent(metric: str, bad: str, good: str, summary: str) -> Case:
    return Case(f"{metric}{{{NODE}}}", bad, good, summary)


_RESOURCE = {"node": "n", "resource": "nvidia.com/gpu"}
_ON = f'{{{NODE}, resource="nvidia.com/gpu"}}'
_MIG = {"node": "n", "gpu": "GPU-1", "instance": "3", "profile": "1g.5gb"}
_OVER = {"node": "n", "gpu": "GPU-1", "resource": "r", "kind": "cores"}
CASES = {
    "VgpuAgentDown": Case(
        f'up{{job="vgpu-agent", {NODE}}}',
        "0x300",
        "1x300",
        "The agent on node n does not answer.",
        {"node": "n", "job": "vgpu-agent"},
    ),
    "VgpuAgentNotReady": _agent(
        "vgpu_agent_ready", "0x300", "1x300", "The agent on node n is not ready."
    ),
    "VgpuAgentProblems": Case(
        f'vgpu_agent_problems{{{NODE}, kind="files"}}',
        "2x300",
        "0x300",
        "2 problems of node n have lasted for half an hour.",
    ),
    "VgpuAgentResourceNotRegistered": Case(
        f"vgpu_agent_plugin_registered{_ON}",
        "0x300",
        "1x300",
        "The kubelet of node n does not know nvidia.com/gpu.",
        _RESOURCE,
    ),
    "VgpuAgentRegistersOften": Case(
        f"vgpu_agent_registrations_total{_ON}",
        "0+1x300",
        "4x300",
        "nvidia.com/gpu was registered more than five times in 15 minutes on node n.",
        _RESOURCE,
    ),
    "VgpuAgentGpuLost": _gpu(
        "vgpu_agent_gpu_present", "0x300", "1x300", "GPU GPU-1 of node n is lost."
    ),
    "VgpuAgentGpuUnhealthy": _gpu(
        "vgpu_agent_gpu_healthy", "0x300", "1x300", "GPU GPU-1 of node n is Unhealthy."
    ),
    "VgpuAgentMigInstanceUnhealthy": Case(
        f'vgpu_agent_mig_instance_healthy{{{NODE}, gpu="GPU-1", instance="3", profile="1g.5gb"}}',
        "0x300",
        "1x300",
        "MIG instance 3 of GPU GPU-1 on node n is Unhealthy.",
        _MIG,
    ),
    "VgpuAgentGpuDoesNotAnswer": _agent(
        "vgpu_agent_gpu_enumeration_failures",
        "2x300",
        "0x300",
        "2 GPUs of node n do not answer.",
    ),
    "VgpuAgentDriverHangs": _agent(
        "vgpu_agent_nvml_hung_seconds",
        "90x300",
        "2x300",
        "The driver of node n has not returned from a call for 1m 30s.",
    ),
    "VgpuAgentDriverGone": _agent(
        "vgpu_agent_nvml_up", "0x300", "1x300", "The driver of node n does not answer."
    ),
    "VgpuAgentMpsDaemonDown": Case(
        f"vgpu_agent_mps_daemon_up{_ON}",
        "0x300",
        "1x300",
        "The MPS control daemon for nvidia.com/gpu on node n does not run.",
        _RESOURCE,
    ),
    "VgpuAgentMpsClientsLost": Case(
        f"vgpu_agent_mps_clients_lost_total{_ON}",
        "0+1x300",
        "4x300",
        "An MPS control daemon on node n ended under its clients.",
        _RESOURCE,
    ),
    "VgpuAgentStartsRefused": Case(
        f'vgpu_agent_refused_starts{{{NODE}, final="false"}}',
        "2x300",
        "0x300",
        "2 containers on node n may not start.",
    ),
    "VgpuAgentClaimWaits": Case(
        f'vgpu_agent_gpu_claims_oldest_seconds{{{NODE}, gpu="GPU-1", family="f"}}',
        "900x300",
        "0x300",
        "On node n a pod of f has been waiting for a GPU of another family for 15m 0s.",
        {"node": "n", "gpu": "GPU-1", "family": "f"},
        f'vgpu_agent_gpu_serves_since_timestamp_seconds{{{NODE}, gpu="GPU-1", family="g"}}',
    ),
    "VgpuAgentPodsFailedWhileDown": _agent(
        "vgpu_agent_pods_failed_while_down",
        "3x300",
        "0x300",
        "The kubelet of node n failed 3 pods while no agent was registered.",
    ),
    "VgpuAgentLimitNotInForce": Case(
        f'vgpu_agent_limits{{{NODE}, family="f", limit="not in force"}}',
        "1x300",
        "0x300",
        "The limits of 1 shares on node n are not in force.",
        {"node": "n", "family": "f", "limit": "not in force"},
    ),
    "VgpuAgentOvercommitted": Case(
        f'vgpu_agent_scheduler_overcommitted{{{NODE}, gpu="GPU-1", resource="r", kind="cores"}}',
        "20x300",
        "0x300",
        "A scheduler has given out more of GPU GPU-1 on node n than it has.",
        _OVER,
    ),
    "VgpuAgentGrantsOnMissingDevices": Case(
        f"vgpu_agent_grants_on_missing_devices{_ON}",
        "1x300",
        "0x300",
        "1 shares of nvidia.com/gpu on node n are of devices that are gone.",
        _RESOURCE,
    ),
    "VgpuAgentLedgerDrift": _agent(
        "vgpu_agent_ledger_drift_total",
        "0+1x300",
        "4x300",
        "The ledger of node n differed from the kubelet's records.",
    ),
    "VgpuAgentLedgerNotVerified": _agent(
        "vgpu_agent_ledger_verified_timestamp_seconds",
        "1x300",
        "1+60x300",
        "The ledger of node n has not been verified for 24m 59s.",
    ),
    "VgpuAgentApiServerAway": Case(
        f'vgpu_agent_watch_failing_seconds{{{NODE}, watch="pods"}}',
        "600x300",
        "0x300",
        "The agent on node n has not reached the API server for 10m 0s.",
    ),
    "VgpuAgentWritesWait": Case(
        f'vgpu_agent_writes_pending_oldest_seconds{{{NODE}, writer="pods"}}',
        "600x300",
        "0x300",
        "A write about pods on node n has been waiting for 10m 0s.",
        {"node": "n", "writer": "pods"},
    ),
    "VgpuAgentConfigurationRefused": _agent(
        "vgpu_agent_config_reload_failed",
        "1x300",
        "0x300",
        "The newest configuration on node n is refused.",
    ),
    "VgpuAgentRestartNeeded": _agent(
        "vgpu_agent_config_restart_needed",
        "1x300",
        "0x300",
        "1 changed settings on node n wait for a restart of the agent.",
    ),
    "VgpuAgentSimulated": _agent(
        "vgpu_agent_simulated", "1x300", "0x300", "The agent on node n shows simulated GPUs."
    ),
    "VgpuAgentFilesLeftOver": _agent(
        "vgpu_agent_files_left_over",
        "1x300",
        "0x300",
        "1 directories of ended containers on node n cannot be removed.",
    ),
    "VgpuSchedulerDown": Case(
        'up{job="vgpu-scheduler"}',
        "0x300",
        "1x300",
        "A replica of the scheduler does not answer.",
        {"job": "vgpu-scheduler"},
    ),
    "VgpuSchedulerNobodyLeads": Case(
        'vgpu_scheduler_leader{job="vgpu-scheduler"}',
        "0x300",
        "1x300",
        "No replica of vgpu-scheduler leads.",
        {"job": "vgpu-scheduler"},
    ),
    "VgpuSchedulerCallsFail": Case(
        'vgpu_scheduler_verb_total{job="vgpu-scheduler", verb="filter", result="error"}',
        "0+1x300",
        "4x300",
        "Calls of the verb filter fail.",
        {"job": "vgpu-scheduler", "verb": "filter"},
    ),
    "VgpuSchedulerApiServerAway": Case(
        'vgpu_scheduler_watch_failing_seconds{job="vgpu-scheduler", watch="pods"}',
        "120x300",
        "0x300",
        "The scheduler has not seen changes of pods for 2m 0s.",
        {"job": "vgpu-scheduler", "watch": "pods"},
    ),
}


def _minutes(duration: str) -> int:
    number, unit = int(duration[:-1]), duration[-1]
    return number * {"s": 0, "m": 1, "h": 60}[unit]


def _times(alert: str) -> tuple[int, int]:
    """Minutes at which it must not be raised yet, and at which it must be."""
    lasting = _minutes(ALERTS[alert].get("for", "0s"))
    # A rate and an age take some minutes to say anything.
    slow = 20 if re.search(r"rate\(|time\(|increase\(", ALERTS[alert]["expr"]) else 1
    return max(0, lasting - 1), lasting + slow


def _test(alert: str, *, bad: bool) -> dict[str, Any]:
    case, rule = CASES[alert], ALERTS[alert]
    before, after = _times(alert)
    raised = {
        "exp_labels": case.labels | rule["labels"],
        "exp_annotations": rule["annotations"]
        | {
            "summary": case.summary,
            "description": _rendered(rule["annotations"]["description"], case),
        },
    }
    times = [{"eval_time": f"{after}m", "alertname": alert, "exp_alerts": [raised] if bad else []}]
    if bad and before:
        times.insert(0, {"eval_time": f"{before}m", "alertname": alert, "exp_alerts": []})
    if not bad:
        times[0]["eval_time"] = "100m"  # the longest lasts an hour
    series = [{"series": case.series, "values": case.bad if bad else case.good}]
    if case.beside:
        series.append({"series": case.beside, "values": "1x300"})
    return {
        "interval": "1m",
        "input_series": series,
        "alert_rule_test": times,
    }


def _tests(*, bad: bool) -> list[dict[str, Any]]:
    """A test for each alert of a bad day, and one for all of a good day: its series raise nothing,
    whatever stands beside them, and one test of all takes a tenth of the time.
    """
    tests = [_test(alert, bad=bad) for alert in ALERTS]
    if bad:
        return tests
    return [
        {
            "interval": "1m",
            "input_series": [one for test in tests for one in test["input_series"]],
            "alert_rule_test": [one for test in tests for one in test["alert_rule_test"]],
        }
    ]


def _rendered(text: str, case: Case) -> str:
    """A description with its labels and its value, where it has any."""
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: case.labels[found[1]], text)
    return text.replace("{{ $value }}", case.bad.split("x")[0])


@pytest.mark.parametrize("bad", [True, False], ids=["bad day", "good day"])
def test_every_alert_is_raised_when_it_should_be(bad: bool, promtool: Path, tmp_path: Path) -> None:
    """Each with its own series, so that a failure names the alert; with the summary that a person
    reads at night.
    """
    rules(tmp_path)
    text = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": _tests(bad=bad),
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(text, sort_keys=False))
    result = subprocess.run(
        [str(promtool), "test", "rules", "test.yaml"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_promtool_finds_nothing_wrong(promtool: Path, tmp_path: Path) -> None:
    """Names, durations and templates of all rules."""
    command = [str(promtool), "check", "rules", str(rules(tmp_path))]
    said = subprocess.run(command, text=True, capture_output=True, check=False)
    assert said.returncode == 0, said.stderr
    assert f"SUCCESS: {len(ALERTS)} rules found" in said.stdout


def test_every_alert_has_a_test_and_there_is_none_without_an_alert() -> None:
    """An alert that nobody has seen fire is a guess."""
    assert CASES.keys() == ALERTS.keys()


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_says_what_to_do(alert: str) -> None:
    """Its runbook is a section that exists, and its two texts are sentences."""
    annotations = ALERTS[alert]["annotations"]
    assert annotations.keys() == {"summary", "description", "runbook_url"}
    assert annotations["summary"].endswith(".")
    assert annotations["description"].endswith(".")
    page, _, anchor = annotations["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (DOCS.parent / page).read_text(), flags=re.MULTILINE)
    assert anchor in {_anchor(heading) for heading in headings}
    assert ALERTS[alert]["labels"]["severity"] in {"critical", "warning", "info"}


def test_every_metric_of_an_alert_is_documented() -> None:
    """A renamed metric would silence its alert for ever."""
    documented = (DOCS / "metrics.md").read_text() + (DOCS / "scheduling.md").read_text()
    for alert, rule in ALERTS.items():
        names = set(re.findall(r"\b(vgpu_(?:agent|scheduler)_\w+)", rule["expr"]))
        assert names or rule["expr"].startswith("up{"), alert
        assert [name for name in names if f"`{name}`" not in documented] == []
