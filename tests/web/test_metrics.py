"""The scrape: what it says, that it parses, and how long it takes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from tests.patience import quickest_call
from tests.web.conftest import VGPU
from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.ledger.accounting import Overcommit
from vgpu_agent.ledger.claims import Claim
from vgpu_agent.ledger.uses import GpuUse
from vgpu_agent.model import (
    Cause,
    Gpu,
    GpuUsage,
    Grant,
    GrantState,
    Health,
    Inventory,
    Owner,
    Remedy,
    Share,
)
from vgpu_agent.status import AgentStatus, LedgerStatus, NvmlState, NvmlStatus, WatchStatus
from vgpu_agent.web.metric import Kind, Metric
from vgpu_agent.web.metrics import Exposition, catalogue, exported

NOW = 1_800_000_000.0
DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def scrape(status: AgentStatus) -> dict[tuple[str, ...], float]:
    """Every series as (name, label=value, …) → value; fails on a series that occurs twice."""
    body, _ = Exposition(lambda: status, clock=lambda: NOW).render()
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            key = (
                sample.name,
                *(f"{name}={value}" for name, value in sorted(sample.labels.items())),
            )
            assert key not in found, f"{key} occurs twice"
            found[key] = sample.value
    return found


def test_the_times_to_recovery_are_a_histogram() -> None:
    """Each bucket has all below it, and the last one all."""
    status = AgentStatus(nvml=NvmlStatus())
    for seconds in (1.0, 60.0, 61.0, 1_000_000.0):
        status.nvml.history.recovery_seconds.add(seconds)
    found = {
        key[1:] or key: value
        for key, value in scrape(status).items()
        if key[0].startswith("vgpu_agent_gpu_recovery_seconds")
    }
    assert {key[0]: value for key, value in found.items()} == {
        "le=30.0": 1,
        "le=60.0": 2,
        "le=120.0": 3,
        **{f"le={bound}": 3 for bound in ("300.0", "600.0", "1800.0", "3600.0", "14400.0")},
        "le=86400.0": 3,
        "le=+Inf": 4,
        "vgpu_agent_gpu_recovery_seconds_sum": 1_000_122.0,
        "vgpu_agent_gpu_recovery_seconds_count": 4,
    }


def test_more_xids_than_a_driver_knows_do_not_fill_the_memory() -> None:
    """The codes of a driver that writes nonsense are counted together."""
    status = AgentStatus(nvml=NvmlStatus())
    for code in range(10_000):
        status.nvml.history.count_xid("GPU-0", code)
    found = {key: value for key, value in scrape(status).items() if "xids" in key[0]}
    assert len(found) == 257
    assert found["vgpu_agent_gpu_xids_total", "gpu=", "xid=other"] == 10_000 - 256


@pytest.mark.parametrize(
    ("series", "value"),
    [
        (("vgpu_agent_simulated",), 1),
        (("vgpu_agent_ready",), 1),
        (("vgpu_agent_driver_info", "cuda=13.0", "driver=580.65.06"), 1),
        (("vgpu_agent_gpu_healthy", "gpu=GPU-0"), 1),
        (("vgpu_agent_gpu_healthy", "gpu=GPU-1"), 0),
        (("vgpu_agent_gpu_present", "gpu=GPU-1"), 1),
        (("vgpu_agent_gpu_enumeration_failures",), 1),
        (("vgpu_agent_gpu_memory_total_bytes", "gpu=GPU-0"), 81920 * 1024**2),
        (("vgpu_agent_gpu_memory_used_bytes", "gpu=GPU-0"), 1024**3),
        (("vgpu_agent_gpu_utilisation_ratio", "gpu=GPU-0"), 0.55),
        (("vgpu_agent_gpu_temperature_celsius", "gpu=GPU-0"), 41),
        (("vgpu_agent_gpu_power_watts", "gpu=GPU-0"), 250.5),
        (("vgpu_agent_gpu_ecc_uncorrected_total", "gpu=GPU-0"), 2),
        (("vgpu_agent_gpu_grants", "gpu=GPU-1"), 1),
        (("vgpu_agent_gpu_grants_allowed", "gpu=GPU-1"), 10),
        (("vgpu_agent_resource_ids", "resource=nvidia.com/gpu"), 20),
        (("vgpu_agent_resource_ids_healthy", "resource=nvidia.com/gpu"), 10),
        (("vgpu_agent_resource_ids_held", "resource=nvidia.com/gpu"), 2),
        (("vgpu_agent_resource_ids_free", "resource=nvidia.com/gpu"), 9),
        (("vgpu_agent_plugin_registered", "resource=nvidia.com/gpu"), 1),
        (("vgpu_agent_registrations_total", "resource=nvidia.com/gpu"), 2),
        (("vgpu_agent_registration_failures_total", "resource=nvidia.com/gpu"), 1),
        (("vgpu_agent_allocations_total", "resource=nvidia.com/gpu", "result=granted"), 3),
        (("vgpu_agent_allocations_total", "resource=nvidia.com/gpu", "result=refused"), 2),
        (("vgpu_agent_allocate_seconds_count", "resource=nvidia.com/gpu"), 5),
        (("vgpu_agent_allocate_seconds_sum", "resource=nvidia.com/gpu"), 0.004),
        (("vgpu_agent_kubelet_up",), 1),
        (("vgpu_agent_kubelet_restarts_total",), 1),
        (("vgpu_agent_ledger_drift_total",), 4),
        (("vgpu_agent_ledger_unknown_ids",), 1),
        (("vgpu_agent_ledger_verified_timestamp_seconds",), NOW - 12),
        (("vgpu_agent_nvml_up",), 1),
        (("vgpu_agent_nvml_hung_seconds",), 0),
        (("vgpu_agent_nvml_hangs_total",), 1),
        (("vgpu_agent_task_restarts_total", "task=health"), 3),
        (("vgpu_agent_task_stuck_seconds", "task=health"), 0),
        (("vgpu_agent_event_loop_lag_max_seconds",), 0.25),
        (("vgpu_agent_config_reload_failed",), 0),
        (("vgpu_agent_inventory_age_seconds",), 100),
        (("vgpu_agent_usage_age_seconds",), 5),
        (("process_start_time_seconds",), NOW - 3700),
    ],
)
def test_a_series_says_what_the_snapshot_says_in_base_units(
    node: AgentStatus, series: tuple[str, ...], value: float
) -> None:
    """Bytes, seconds and ratios, never MiB, milliseconds or percent."""
    assert scrape(node)[series] == value


def test_an_unhealthy_gpu_has_its_cause_its_remedy_and_its_return(node: AgentStatus) -> None:
    """An alert can be sent to those who reset GPUs, or to those who replace them."""
    health = Health(
        ok=False,
        reason="XID 48: …",
        causes=(Cause("XID 48", "XID 48: …", Remedy.RESET), Cause("XID 94", "", Remedy.RESTART)),
        remedy=Remedy.RESET,
        offered_at=NOW + 18,
    )
    healthy, broken = node.inventory.gpus
    node.inventory = msgspec.structs.replace(
        node.inventory, gpus=(healthy, msgspec.structs.replace(broken, health=health))
    )
    series = scrape(node)
    info = [key for key in series if key[0] == "vgpu_agent_gpu_unhealthy_info"]
    assert info == [("vgpu_agent_gpu_unhealthy_info", "cause=XID 48", "gpu=GPU-1", "remedy=reset")]
    returns = [key for key in series if key[0] == "vgpu_agent_gpu_offered_again_timestamp_seconds"]
    assert returns == [("vgpu_agent_gpu_offered_again_timestamp_seconds", "gpu=GPU-1")]
    assert series[returns[0]] == NOW + 18


@pytest.mark.parametrize(
    ("series", "value"),
    [
        (("vgpu_agent_binding_info", "mode=late"), 1),
        (("vgpu_agent_family_offered", "family=volcano-vgpu"), 1),
        (("vgpu_agent_grants", "family=volcano-vgpu", "state=identified"), 1),
        (("vgpu_agent_grants", "family=volcano-vgpu", "state=reserved"), 1),
        (("vgpu_agent_pre_starts_total", "resource=volcano.sh/vgpu-number", "result=granted"), 3),
        (("vgpu_agent_pre_starts_total", "resource=volcano.sh/vgpu-number", "result=refused"), 1),
        (("vgpu_agent_pre_start_seconds_sum", "resource=volcano.sh/vgpu-number"), 0.04),
        (("vgpu_agent_pre_start_seconds_count", "resource=volcano.sh/vgpu-number"), 4),
        (("vgpu_agent_refused_starts", "final=false"), 1),
        (("vgpu_agent_refused_starts", "final=true"), 0),
        (("vgpu_agent_ambiguous_starts_total",), 1),
        (("vgpu_agent_wrong_guesses_total",), 2),
        (("vgpu_agent_exchanged_guesses_total",), 3),
        (("vgpu_agent_config_file_problems",), 1),
        (("vgpu_agent_api_connected",), 1),
        (("vgpu_agent_api_requests_total", "outcome=200", "resource=pods", "verb=patch"), 4),
        (("vgpu_agent_api_requests_total", "outcome=no answer", "resource=nodes", "verb=get"), 1),
        (("vgpu_agent_watch_synced", "watch=pods of this node"), 1),
        (("vgpu_agent_watch_age_seconds", "watch=pods of this node"), 3),
        (("vgpu_agent_watch_failing_seconds", "watch=pods of this node"), 0),
        (("vgpu_agent_watch_errors_total", "watch=pods of this node"), 2),
        (("vgpu_agent_watch_events_total", "watch=pods of this node"), 12),
        (("vgpu_agent_watch_unreadable_total", "watch=pods of this node"), 1),
        (("vgpu_agent_writes_total", "result=failed", "writer=pods"), 1),
        (("vgpu_agent_writes_total", "result=dropped", "writer=events"), 5),
        (("vgpu_agent_writes_pending", "writer=pods"), 2),
        (("vgpu_agent_writes_pending_oldest_seconds", "writer=pods"), 1.5),
        (("vgpu_agent_evictions_total", "result=postponed"), 2),
    ],
)
def test_a_series_says_how_grants_are_bound_and_how_the_api_server_is_doing(
    volcano_node: AgentStatus, series: tuple[str, ...], value: float
) -> None:
    """Refusals, guesses, watches and writes, each by the few words that tell them apart."""
    assert scrape(volcano_node)[series] == value


def test_an_outage_is_a_number_of_seconds(volcano_node: AgentStatus) -> None:
    """An alert can then wait for the usual restart of an API server.
    A watch without any event has no age.
    """
    volcano_node.cluster.watches = (WatchStatus("this node", failing_since=NOW - 80),)
    found = scrape(volcano_node)
    assert found["vgpu_agent_watch_failing_seconds", "watch=this node"] == 80
    assert ("vgpu_agent_watch_age_seconds", "watch=this node") not in found


def test_a_node_without_families_that_bind_has_no_binding_mode(node: AgentStatus) -> None:
    """Ids that name GPUs are bound neither late nor early."""
    assert not [key for key in scrape(node) if key[0] == "vgpu_agent_binding_info"]


def test_a_share_names_its_holder_and_its_gpu(node: AgentStatus) -> None:
    """The metric names the holder of a GPU.
    A MIG instance is counted on its card, and an unknown holder is empty.
    """
    shares = {
        key: value for key, value in scrape(node).items() if key[0] == "vgpu_agent_grant_info"
    }
    assert shares == {
        (
            "vgpu_agent_grant_info",
            "container=main",
            "device=GPU-0",
            "gpu=GPU-0",
            "namespace=ml",
            "pod=train-0",
            "resource=nvidia.com/gpu",
            "state=granted",
        ): 1,
        (
            "vgpu_agent_grant_info",
            "container=",
            "device=MIG-1",
            "gpu=GPU-1",
            "namespace=",
            "pod=",
            "resource=nvidia.com/gpu",
            "state=reserved",
        ): 1,
    }


def test_two_grants_that_no_label_tells_apart_are_one_series(node: AgentStatus) -> None:
    """Prometheus drops a scrape with a repeated series,
    so two unnamed grants on one GPU are counted instead.
    """
    unnamed = next(grant for grant in node.ledger.grants if grant.owner is None)
    node.ledger.grants = (unnamed, msgspec.structs.replace(unnamed, number=3))
    assert [value for key, value in scrape(node).items() if key[0] == "vgpu_agent_grant_info"] == [
        2
    ]


def test_a_released_grant_is_not_a_share_any_more(node: AgentStatus) -> None:
    """Series vanish with the pod."""
    node.ledger.grants = tuple(
        msgspec.structs.replace(grant, state=GrantState.RELEASED) for grant in node.ledger.grants
    )
    found = scrape(node)
    assert not [key for key in found if key[0] == "vgpu_agent_grant_info"]
    assert found["vgpu_agent_gpu_grants", "gpu=GPU-0"] == 0


def test_what_the_driver_does_not_say_is_absent_rather_than_zero(node: AgentStatus) -> None:
    """GPU-1's usage is all None: a made-up 0 °C would lie."""
    assert ("vgpu_agent_gpu_temperature_celsius", "gpu=GPU-1") not in scrape(node)


def test_a_hung_nvml_call_is_measured_from_its_start(node: AgentStatus) -> None:
    """The gauge grows while the call does not return, and nvml_up falls."""
    node.nvml = NvmlStatus(NvmlState.HUNG, "nvmlDeviceGetMemoryInfo", "GPU-1", since=NOW - 42)
    found = scrape(node)
    assert (found["vgpu_agent_nvml_hung_seconds",], found["vgpu_agent_nvml_up",]) == (42, 0)


def test_an_agent_that_knows_nothing_yet_can_be_scraped() -> None:
    """The servers start first. A scrape before the first inventory is valid and invents nothing."""
    found = scrape(AgentStatus())
    assert found["vgpu_agent_nvml_up",] == 0
    assert ("vgpu_agent_inventory_age_seconds",) not in found


def test_label_values_are_escaped(node: AgentStatus) -> None:
    """A foreign text in a label cannot break the format."""
    node.inventory = Inventory(gpus=(Gpu("GPU-0", 0, 0, 'A "new"\nline\\', 1),))
    assert [key for key in scrape(node) if 'name=A "new"\nline\\' in key]


def test_openmetrics_is_served_to_those_who_ask_for_it(node: AgentStatus) -> None:
    """Prometheus asks for OpenMetrics first. Its stricter parser accepts the answer."""
    body, content_type = Exposition(lambda: node, clock=lambda: NOW).render(
        "application/openmetrics-text; version=1.0.0"
    )
    assert content_type.startswith("application/openmetrics-text")
    # the library's parser is untyped
    families = list(openmetrics.text_string_to_metric_families(body.decode()))  # type: ignore[no-untyped-call]  # the library has no types there
    assert len(families) == len(catalogue())


def test_what_schedulers_overcommitted_is_a_number_for_each_gpu(volcano_node: AgentStatus) -> None:
    """An alert is written on it. A GPU of which nothing is overcommitted has no series."""
    assert not [
        key for key in scrape(volcano_node) if key[0] == "vgpu_agent_scheduler_overcommitted"
    ]
    volcano_node.ledger.overcommitted = (Overcommit(VGPU, "GPU-0", 111, 100, 9, 10),)
    volcano_node.binding.overcommitted_starts = 2
    found = scrape(volcano_node)
    labels = ("gpu=GPU-0", f"resource={VGPU}")
    assert found["vgpu_agent_scheduler_overcommitted", labels[0], "kind=cores", labels[1]] == 11
    assert found["vgpu_agent_scheduler_overcommitted", labels[0], "kind=holders", labels[1]] == 0
    assert found["vgpu_agent_overcommitted_starts_total",] == 2


def test_the_family_of_each_gpu_and_who_waits_for_it_are_series_while_they_are_so(
    mixed_node: AgentStatus,
) -> None:
    """An alert on a pod that waits too long needs GPU and family, and no name of a pod.
    An idle GPU has no series.
    """
    found = {
        key: value
        for key, value in scrape(mixed_node).items()
        if key[0].startswith(("vgpu_agent_gpu_serves", "vgpu_agent_gpu_claims"))
    }
    vgpu, gpushare = "family=volcano-vgpu", "family=volcano-gpushare"
    assert found == {
        ("vgpu_agent_gpu_serves_since_timestamp_seconds", "family=nvidia", "gpu=GPU-0"): NOW - 600,
        ("vgpu_agent_gpu_serves_since_timestamp_seconds", "family=nvidia", "gpu=GPU-1"): NOW - 300,
        ("vgpu_agent_gpu_serves_since_timestamp_seconds", vgpu, "gpu=GPU-2"): NOW - 50,
        ("vgpu_agent_gpu_claims", vgpu, "gpu=GPU-0"): 1,
        ("vgpu_agent_gpu_claims", gpushare, "gpu=GPU-0"): 1,
        ("vgpu_agent_gpu_claims", gpushare, "gpu=GPU-2"): 1,
        ("vgpu_agent_gpu_claims_oldest_seconds", vgpu, "gpu=GPU-0"): 190,
        ("vgpu_agent_gpu_claims_oldest_seconds", gpushare, "gpu=GPU-0"): 60,
        ("vgpu_agent_gpu_claims_oldest_seconds", gpushare, "gpu=GPU-2"): 30,
    }


def test_every_metric_of_the_catalogue_appears_with_its_labels_and_nothing_else_does(
    volcano_node: AgentStatus,
) -> None:
    """A node on which everything happened once shows every documented metric,
    with exactly the documented labels.
    """
    claim = Claim("GPU-0", "volcano-vgpu", "ml/waits", "uid-waits", NOW - 190, 3)
    volcano_node.ledger.uses = (GpuUse("GPU-0", "nvidia", NOW - 60, claims=(claim,)),)
    volcano_node.ledger.overcommitted = (Overcommit(VGPU, "GPU-0", 111, 100, 12, 10),)
    expected = set()
    for metric in catalogue():
        both = metric.kind in {Kind.SUMMARY, Kind.HISTOGRAM}
        suffixes = ("_sum", "_count") if both else ("",)
        expected |= {(metric.name + suffix, *sorted(metric.labels)) for suffix in suffixes}
        if metric.kind is Kind.HISTOGRAM:
            expected.add((f"{metric.name}_bucket", *sorted((*metric.labels, "le"))))
    assert {
        (name, *(label.partition("=")[0] for label in labels))
        for name, *labels in scrape(volcano_node)
    } == expected


def test_the_documentation_lists_exactly_the_metrics_that_exist() -> None:
    """docs/metrics.md is generated; a metric added without regenerating it fails here."""
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    exporters = [metric.name for family in FAMILIES for metric in exported(family)]
    assert [line.split("`")[1] for line in lines] == [
        *(metric.name for metric in catalogue()),
        *exporters,
    ]


@pytest.mark.parametrize("metric", catalogue(), ids=lambda metric: metric.name)
def test_a_name_follows_the_conventions_of_prometheus(metric: Metric) -> None:
    """Counters end in _total and nothing else does. A help text is a sentence."""
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert metric.help.endswith(".")


def a_large_node() -> AgentStatus:
    """8 GPUs × 10 replicas, all 80 held."""
    return AgentStatus(
        inventory=Inventory(
            gpus=tuple(
                Gpu(f"GPU-{index:036}", index, index, "NVIDIA H100 80GB HBM3", 81559)
                for index in range(8)
            )
        ),
        usage=tuple(
            GpuUsage(f"GPU-{index:036}", 1000, 81559, 50, 60, 500.0, 0) for index in range(8)
        ),
        ledger=LedgerStatus(
            grants=tuple(
                Grant(
                    number,
                    "nvidia",
                    "nvidia.com/gpu",
                    (f"GPU-{number % 8:036}::{number // 8}",),
                    (Share(f"GPU-{number % 8:036}"),),
                    GrantState.GRANTED,
                    Owner("main", f"uid-{number}", "team-a", f"train-{number}"),
                )
                for number in range(80)
            ),
        ),
    )


def test_a_full_node_is_scraped_within_20_milliseconds() -> None:
    """``/metrics`` with 8 GPUs × 10 replicas and 80 grants."""
    large = a_large_node()
    exposition = Exposition(lambda: large, clock=lambda: NOW)
    assert exposition.render()[0].count(b"vgpu_agent_grant_info{") == 80
    assert quickest_call(exposition.render, within_seconds=0.020) < 0.020
