#!/usr/bin/env python3
"""Write docs/metrics.md from the catalogue of metrics,
or with --check say whether it is up to date (exit 1 when it is not).

Run by scripts/generate and, with --check, by scripts/lint: the documentation of a metric cannot
fall behind its code.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vgpu_agent.families.registry import FAMILIES  # noqa: E402 - the path is set above
from vgpu_agent.web.metric import Kind, Metric  # noqa: E402 - likewise
from vgpu_agent.web.metrics import catalogue, exported  # noqa: E402 - the checkout need not be installed

DOCUMENT = ROOT / "docs" / "metrics.md"

HEAD = """# Metrics

<!-- Generated from vgpu_agent/web/catalogue.py by scripts/generate_metrics_docs.py. Do not edit. -->

`GET /metrics` on the public address (`:9394`). Prometheus' text format, or OpenMetrics for a
scraper that asks for it. A scrape reads values that are already in memory: it never calls the
driver, the kubelet or the API server, so it is safe at any interval and during any failure.

* Names and labels are a contract: new ones may be added, none is renamed.
* `gpu` is always the UUID of the physical card. For the index and the product name, join:
  `vgpu_agent_gpu_utilisation_ratio * on (gpu) group_left (index, name) vgpu_agent_gpu_info`.
* Series are bounded: one a GPU, a resource, a loop, a watch, a kind of request, a family that has a
  GPU or waits for it, or a share that is held now; a pod's series vanish with the pod.
  `vgpu_agent_share_seconds_total` stays an hour longer.
* What the driver does not say is absent, not 0. Values that are read periodically keep their last
  reading; the two `…_age_seconds` metrics say how old it is.
* `HostGPUMemoryUsage` and the other names of volcano-vgpu-device-plugin's monitor are there with
  `families.volcanoVgpu`. What they say of a
  container is what its libvgpu.so counts, read every `gpu.usageSeconds`. The memory of a process
  that was killed is counted until the next one starts in its container, unless the agent's pod has
  `hostPID: true` and so can see that it is gone.
* `namespace`, `pod` and `container` are those of the pod that *holds* a share. Prometheus'
  Kubernetes service discovery sets labels of the same names for the scraped pod (the agent's own),
  so set `honor_labels: true` (`honorLabels` in a PodMonitor) to keep ours.
"""

TAIL = """
## Questions and their queries

| question | query |
|---|---|
| Who holds this GPU? | `vgpu_agent_grant_info{gpu="GPU-…"}` |
| Which GPUs does this pod hold? | `vgpu_agent_grant_info{namespace="ml", pod="train-0"}` |
| Which GPUs must not be given to anybody? | `vgpu_agent_gpu_healthy == 0` |
| Does kubelet know every resource? | `vgpu_agent_plugin_registered == 0` |
| How long does Allocate take? | `rate(vgpu_agent_allocate_seconds_sum[5m]) / rate(vgpu_agent_allocate_seconds_count[5m])` |
| Does the driver hang? | `vgpu_agent_nvml_hung_seconds > 10` |
| Did the ledger and kubelet disagree? | `increase(vgpu_agent_ledger_drift_total[15m]) > 0` |
| What does a namespace owe for GPU-hours, from 30 days? | `sum by (namespace, resource) (increase(vgpu_agent_share_seconds_total[30d])) / 3600` |
| Which XIDs has this cluster had? | `sum by (xid) (increase(vgpu_agent_gpu_xids_total[7d]))` |
| How long do GPUs take to recover? | `histogram_quantile(0.9, sum by (le) (rate(vgpu_agent_gpu_recovery_seconds_bucket[7d])))` |
| Is the ledger still verified? | `time() - vgpu_agent_ledger_verified_timestamp_seconds > 120` |
| How long does PreStartContainer take? | `rate(vgpu_agent_pre_start_seconds_sum[5m]) / rate(vgpu_agent_pre_start_seconds_count[5m])` |
| Are containers kept from starting? | `sum (vgpu_agent_refused_starts) > 0` |
| Was a guess wrong? | `increase(vgpu_agent_wrong_guesses_total[1h]) > 0` |
| Was it not certain who holds ids? | `increase(vgpu_agent_ambiguous_starts_total[1h]) > 0` |
| Is the API server away? | `vgpu_agent_watch_failing_seconds > 60` |
| Do annotations of pods wait? | `vgpu_agent_writes_pending_oldest_seconds{writer="pods"} > 60` |
| How much does this node ask the API server? | `sum by (verb, resource, outcome) (rate(vgpu_agent_api_requests_total[5m]))` |
| Are GPUs simulated where they should not be? | `vgpu_agent_simulated == 1` |
"""

EXPORTER = """
## Under the names of vgpu-manager's device-monitor

Served at an address of their own while `vgpuManager.exporter.address` is set (device-monitor's is
`:3456`), at `/metrics`, beside `/healthz` and `/readyz`. All are gauges with the constant label
`service="vGPU"`. What is given out comes from the agent's ledger and not from annotations, so it is
there without the API server.

* A scrape within `minScrapeIntervalSeconds` after another one gets the same answer, with the header
  `X-Rate-Limited: true`.
* With `authorised`, a scraper sends a token (`Authorization: Bearer …`) of an account that may `get`
  the non-resource URL `/metrics`. With `certificateFile` and `keyFile`, HTTPS.
* `assigned_…` counts shares from the moment they are booked at the container's start;
  device-monitor counts a claim from its annotation on.
* What is not known is absent, not 0. The memory that a container uses is known where its processes
  are listed, as with `DevicePluginClientMode`; what `VirtualMemoryTracking` counts is added. Its
  compute is known once its library has sampled it.
* `branch` and `date` of `exporter_build_info` are empty, because the agent's builds have neither.
* MIG instances and whole MIG GPUs have the `device_idx` `GPU:instance`, as in NVIDIA's tools.
* The metrics of `--enable-dra-monitor` do not exist: the agent gives nothing out through DRA.
"""


def row(metric: Metric) -> str:
    """One line of the table."""
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
    scraped = {
        Kind.SUMMARY: " Scraped as `_sum` and `_count`.",
        Kind.HISTOGRAM: " Scraped as `_bucket`, `_sum` and `_count`.",
    }
    text = metric.help + scraped.get(metric.kind, "")
    return f"| `{metric.name}` | {metric.kind} | {labels} | {text} |"


def exported_row(metric: Metric) -> str:
    """One line of the other table, without the label that all of them have."""
    labels = ", ".join(f"`{label}`" for label in metric.labels if label != "service")
    return f"| `{metric.name}` | {labels} | {metric.help} |"


def document() -> str:
    """The whole file."""
    return "\n".join(
        [
            HEAD,
            "| name | type | labels | meaning |",
            "|---|---|---|---|",
            *map(row, catalogue()),
            EXPORTER,
            "| name | labels | meaning |",
            "|---|---|---|",
            *(exported_row(metric) for family in FAMILIES for metric in exported(family)),
            TAIL,
        ]
    )


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when the file is out of date"
    )
    if not parser.parse_args().check:
        DOCUMENT.write_text(document())
    elif not DOCUMENT.exists() or DOCUMENT.read_text() != document():
        print(
            f"{DOCUMENT.relative_to(ROOT)} is out of date: run scripts/generate_metrics_docs.py",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
