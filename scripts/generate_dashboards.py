#!/usr/bin/env python3
"""Write the Grafana dashboards of components/monitoring from the tables below,
or with --check say whether they are up to date (exit 1 when they are not).

A row of a table is a panel: title, kind, unit, queries with their legends. tests/monitoring asks
each query of a Prometheus that scrapes real agents.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "manifests" / "components" / "monitoring" / "dashboards"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS, _WIDTH, _HEIGHT = 24, 8, 7  # of Grafana's grid


class Panel(NamedTuple):
    """A panel and its queries, each with its legend; {{label}} in a legend is Grafana's."""

    title: str
    kind: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    description: str = ""
    value: bool = False
    """Show the value in a table, too."""


_ON_NODE = 'node="$node"'
_INFO = "on (node, gpu) group_left (index, name) vgpu_agent_gpu_info"


def _by_gpu(metric: str, scale: str = "") -> tuple[tuple[str, str], ...]:
    return ((f"{metric}{{{_ON_NODE}}}{scale} * {_INFO}", "{{index}} {{name}}"),)


def _one(query: str, legend: str = "") -> tuple[tuple[str, str], ...]:
    return ((query, legend),)


NODE = (
    Panel("Ready", "stat", "bool_yes_no", _one(f"vgpu_agent_ready{{{_ON_NODE}}}")),
    Panel("Healthy GPUs", "stat", "none", _one(f"sum (vgpu_agent_gpu_healthy{{{_ON_NODE}}})")),
    Panel(
        "Containers that may not start",
        "stat",
        "none",
        _one(f"sum (vgpu_agent_refused_starts{{{_ON_NODE}}})"),
        "vgpu-agent status names each with its reason.",
    ),
    Panel("GPU health", "state-timeline", "none", _by_gpu("vgpu_agent_gpu_healthy")),
    Panel("GPU present", "state-timeline", "none", _by_gpu("vgpu_agent_gpu_present")),
    Panel(
        "MPS control daemons",
        "state-timeline",
        "none",
        _one(f"vgpu_agent_mps_daemon_up{{{_ON_NODE}}}", "{{resource}}"),
    ),
    Panel("Utilisation", "timeseries", "percentunit", _by_gpu("vgpu_agent_gpu_utilisation_ratio")),
    Panel("Memory in use", "timeseries", "bytes", _by_gpu("vgpu_agent_gpu_memory_used_bytes")),
    Panel("Temperature", "timeseries", "celsius", _by_gpu("vgpu_agent_gpu_temperature_celsius")),
    Panel("Power", "timeseries", "watt", _by_gpu("vgpu_agent_gpu_power_watts")),
    Panel("Shares held", "timeseries", "none", _by_gpu("vgpu_agent_gpu_grants")),
    Panel(
        "Device ids",
        "timeseries",
        "none",
        (
            (f"vgpu_agent_resource_ids_healthy{{{_ON_NODE}}}", "{{resource}} healthy"),
            (f"vgpu_agent_resource_ids_held{{{_ON_NODE}}}", "{{resource}} held"),
            (f"vgpu_agent_resource_ids_free{{{_ON_NODE}}}", "{{resource}} free"),
        ),
    ),
    Panel(
        "Holders",
        "table",
        "none",
        _one(f"vgpu_agent_grant_info{{{_ON_NODE}}}"),
        "Who holds which share. The table is empty with web.podNames: debug.",
    ),
    Panel(
        "MIG instances",
        "state-timeline",
        "none",
        _one(f"vgpu_agent_mig_instance_healthy{{{_ON_NODE}}}", "{{gpu}} {{instance}} {{profile}}"),
    ),
    Panel(
        "Limits of shares",
        "timeseries",
        "none",
        _one(f"vgpu_agent_limits{{{_ON_NODE}}}", "{{family}} {{limit}}"),
    ),
    Panel(
        "Problems",
        "timeseries",
        "none",
        _one(f"vgpu_agent_problems{{{_ON_NODE}}} > 0", "{{kind}}"),
        "vgpu-agent status names each with its remedy.",
    ),
    Panel(
        "XIDs since the agent's start",
        "table",
        "none",
        _one(f"sum by (gpu, xid) (vgpu_agent_gpu_xids_total{{{_ON_NODE}}})"),
        "docs/troubleshooting.md says what each code means.",
        value=True,
    ),
    Panel(
        "Calls of the kubelet",
        "timeseries",
        "ops",
        (
            (
                f"rate(vgpu_agent_allocations_total{{{_ON_NODE}}}[$__rate_interval])",
                "Allocate {{resource}} {{result}}",
            ),
            (
                f"rate(vgpu_agent_pre_starts_total{{{_ON_NODE}}}[$__rate_interval])",
                "PreStartContainer {{resource}} {{result}}",
            ),
        ),
    ),
    Panel(
        "API server",
        "timeseries",
        "s",
        (
            (f"vgpu_agent_watch_failing_seconds{{{_ON_NODE}}}", "watch of {{watch}} failing"),
            (
                f"vgpu_agent_writes_pending_oldest_seconds{{{_ON_NODE}}}",
                "write about {{writer}} waiting",
            ),
        ),
    ),
    Panel(
        "The agent itself",
        "timeseries",
        "short",
        (
            (f"process_resident_memory_bytes{{{_ON_NODE}}}", "resident bytes"),
            (f"rate(process_cpu_seconds_total{{{_ON_NODE}}}[$__rate_interval])", "cores"),
            (f"vgpu_agent_nvml_hung_seconds{{{_ON_NODE}}}", "driver hangs for seconds"),
            (f"vgpu_agent_event_loop_lag_seconds{{{_ON_NODE}}}", "loop lag seconds"),
        ),
    ),
)

FLEET = (
    Panel("Nodes with an agent", "stat", "none", _one("count (vgpu_agent_build_info)")),
    Panel("GPUs", "stat", "none", _one("count (vgpu_agent_gpu_info)")),
    Panel("Healthy GPUs", "stat", "none", _one("sum (vgpu_agent_gpu_healthy)")),
    Panel(
        "Alerts",
        "table",
        "none",
        _one('ALERTS{alertname=~"Vgpu.*"}'),
        "Pending and firing.",
    ),
    Panel(
        "GPUs that must not be given out",
        "table",
        "none",
        _one(f"(vgpu_agent_gpu_healthy == 0) * {_INFO}"),
    ),
    Panel("Agents that are not ready", "table", "none", _one("vgpu_agent_ready == 0")),
    Panel(
        "Problems by node",
        "table",
        "none",
        _one("sum by (node, kind) (vgpu_agent_problems) > 0"),
        value=True,
    ),
    Panel(
        "XIDs since the agents' starts",
        "table",
        "none",
        _one("sum by (xid) (vgpu_agent_gpu_xids_total)"),
        "docs/troubleshooting.md says what each code means.",
        value=True,
    ),
    Panel(
        "Recoveries of GPUs since the agents' starts",
        "table",
        "none",
        _one("sum by (node) (vgpu_agent_gpu_recovery_seconds_count) > 0"),
        value=True,
    ),
    Panel(
        "Time until nine of ten GPUs are back",
        "timeseries",
        "s",
        _one(
            "histogram_quantile(0.9, sum by (le) (vgpu_agent_gpu_recovery_seconds_bucket)) >= 0",
        ),
        "Of GPUs that have come back since the agents' starts.",
    ),
    Panel(
        "Held by namespace",
        "timeseries",
        "none",
        _one(
            "sum by (namespace, resource) (rate(vgpu_agent_share_seconds_total[$__rate_interval]))",
            "{{namespace}} {{resource}}",
        ),
        "Its increase over a month, divided by 3,600, is the bill in hours.",
    ),
    Panel(
        "Device ids held",
        "timeseries",
        "percentunit",
        _one(
            "sum by (resource) (vgpu_agent_resource_ids_held)"
            " / sum by (resource) (vgpu_agent_resource_ids > 0)",
            "{{resource}}",
        ),
    ),
    Panel(
        "Device ids free",
        "timeseries",
        "none",
        _one("sum by (resource) (vgpu_agent_resource_ids_free)", "{{resource}}"),
    ),
    Panel(
        "Shares by family",
        "timeseries",
        "none",
        _one("sum by (family) (vgpu_agent_grants)", "{{family}}"),
    ),
    Panel(
        "Utilisation by model",
        "timeseries",
        "percentunit",
        _one(f"avg by (name) (vgpu_agent_gpu_utilisation_ratio * {_INFO})", "{{name}}"),
    ),
    Panel(
        "Memory in use by model",
        "timeseries",
        "percentunit",
        _one(
            f"sum by (name) (vgpu_agent_gpu_memory_used_bytes * {_INFO})"
            f" / sum by (name) (vgpu_agent_gpu_memory_total_bytes * {_INFO})",
            "{{name}}",
        ),
    ),
    Panel(
        "Containers that may not start",
        "timeseries",
        "none",
        _one("sum by (node) (vgpu_agent_refused_starts)", "{{node}}"),
    ),
    Panel(
        "Calls refused",
        "timeseries",
        "ops",
        _one(
            'sum by (node, resource) (rate(vgpu_agent_allocations_total{result="refused"}'
            "[$__rate_interval]))",
            "{{node}} {{resource}}",
        ),
    ),
    Panel(
        "API server failing",
        "timeseries",
        "s",
        _one("max by (node) (vgpu_agent_watch_failing_seconds)", "{{node}}"),
    ),
    Panel(
        "MPS clients lost",
        "timeseries",
        "none",
        _one(
            "sum by (node, resource) (increase(vgpu_agent_mps_clients_lost_total[15m]))",
            "{{node}} {{resource}}",
        ),
    ),
    Panel(
        "Versions",
        "table",
        "none",
        _one("count by (version, commit) (vgpu_agent_build_info)"),
    ),
    Panel(
        "Drivers",
        "table",
        "none",
        _one("count by (driver, cuda) (vgpu_agent_driver_info)"),
    ),
    Panel(
        "Scheduler: calls",
        "timeseries",
        "ops",
        _one(
            "sum by (verb, result) (rate(vgpu_scheduler_verb_total[$__rate_interval]))",
            "{{verb}} {{result}}",
        ),
    ),
    Panel(
        "Scheduler: time of a filter",
        "timeseries",
        "s",
        _one(
            "histogram_quantile(0.99, sum by (le) (rate("
            'vgpu_scheduler_verb_duration_seconds_bucket{verb="filter"}[$__rate_interval])))',
            "99 %",
        ),
    ),
    Panel(
        "Scheduler: Nodes",
        "timeseries",
        "none",
        _one("max by (state) (vgpu_scheduler_nodes)", "{{state}}"),
    ),
    Panel(
        "Scheduler: reasons for no room",
        "timeseries",
        "ops",
        _one(
            "sum by (code) (rate(vgpu_scheduler_node_reject_total[$__rate_interval]))", "{{code}}"
        ),
    ),
)


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    table = panel.kind == "table"
    per_row = _COLUMNS // _WIDTH
    made: dict[str, Any] = {
        "id": number + 1,
        "title": panel.title,
        "type": panel.kind,
        "datasource": DATASOURCE,
        "gridPos": {
            "x": number % per_row * _WIDTH,
            "y": number // per_row * _HEIGHT,
            "w": _WIDTH,
            "h": _HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": DATASOURCE,
                "expr": expression,
                "legendFormat": legend or "__auto",
                "instant": table,
                "range": not table,
                "format": "table" if table else "time_series",
            }
            for place, (expression, legend) in enumerate(panel.queries)
        ],
    }
    if panel.description:
        made["description"] = panel.description
    if table:
        # One row for each series, and none of the columns that every series has.
        columns = ["Time", "__name__", "instance", "job", "endpoint"]
        hidden = dict.fromkeys([*columns, *([] if panel.value else ["Value"])], True)
        made["transformations"] = [{"id": "organize", "options": {"excludeByName": hidden}}]
    return made


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "includeAll": False,
        "multi": False,
    }


def dashboard(uid: str, title: str, panels: tuple[Panel, ...]) -> str:
    """The JSON that Grafana imports."""
    variables: list[dict[str, Any]] = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "refresh": 1}
    ]
    if any("$node" in query for panel in panels for query, _ in panel.queries):
        variables.append(_variable("node", "label_values(vgpu_agent_build_info, node)"))
    made = {
        "uid": uid,
        "title": title,
        "tags": ["gpu", "vgpu-agent"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": variables},
        "annotations": {"list": []},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def dashboards() -> dict[str, str]:
    """The text of each file by its name."""
    return {
        "vgpu-agent-fleet.json": dashboard("vgpu-agent-fleet", "vgpu-agent: fleet", FLEET),
        "vgpu-agent-node.json": dashboard("vgpu-agent-node", "vgpu-agent: node", NODE),
    }


def main() -> int:
    """Write what differs, or name it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    check, stale = parser.parse_args().check, 0
    for name, text in dashboards().items():
        path = FOLDER / name
        if path.exists() and path.read_text() == text:
            continue
        if check:
            print(f"{path.relative_to(ROOT)} is stale: run scripts/generate")
            stale = 1
        else:
            path.write_text(text)
    return stale


if __name__ == "__main__":
    sys.exit(main())
