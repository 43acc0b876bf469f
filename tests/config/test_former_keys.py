"""Keys of earlier versions: each is named with what became of it."""

from __future__ import annotations

import argparse
import importlib

import pytest

from tests.config.conftest import Load, Problems
from vgpu_agent.config import options, schema
from vgpu_agent.config.former_keys import former_keys

# The constants that took the place of keys.
CONSTANTS = {
    "binding.allocateWaitSeconds": "allocation.early.binding:ALLOCATE_WAIT_SECONDS",
    "binding.podWaitSeconds": "allocation.identification:POD_WAIT_SECONDS",
    "binding.refusedEventSeconds": "cluster.reschedule:REFUSED_EVENT_SECONDS",
    "binding.startSeconds": "allocation.identification:START_SECONDS",
    "cdi.generateTimeoutSeconds": "cdi.nvidia_ctk:TIMEOUT_SECONDS",
    "cluster.backoffMaxSeconds": "cluster.retrying:BACKOFF_MAX_SECONDS",
    "cluster.backoffMinSeconds": "cluster.retrying:BACKOFF_MIN_SECONDS",
    "cluster.connectTimeoutSeconds": "cluster.client:CONNECT_TIMEOUT_SECONDS",
    "cluster.handshakeMinSeconds": "families.volcano_vgpu.offer:HANDSHAKE_SECONDS",
    "cluster.requestTimeoutSeconds": "cluster.api:REQUEST_TIMEOUT_SECONDS",
    "cluster.startWaitSeconds": "agent.api_server:START_WAIT_SECONDS",
    "cluster.startsFirstSeconds": "cluster.pod_publisher:STARTS_FIRST_SECONDS",
    "cluster.watchSeconds": "cluster.reflector:WATCH_SECONDS",
    "cluster.watchSilenceSeconds": "cluster.api:WATCH_SILENCE_SECONDS",
    "configReloadSeconds": "agent.reload:RELOAD_SECONDS",
    "gpu.callTimeoutSeconds": "gpu.thread:CALL_TIMEOUT_SECONDS",
    "gpu.eventWaitMilliseconds": "gpu.thread:EVENT_WAIT_SECONDS",
    "gpu.hungUnhealthySeconds": "gpu.watch:HUNG_UNHEALTHY_SECONDS",
    "gpu.initRetrySeconds": "gpu.watch:INIT_RETRY_SECONDS",
    "gpu.pollSeconds": "gpu.watch:POLL_SECONDS",
    "gpu.recovery.flapWindowSeconds": "gpu.health:FLAP_WINDOW_SECONDS",
    "gpu.recovery.maxQuietSeconds": "gpu.health:MAX_QUIET_SECONDS",
    "kubelet.coalesceSeconds": "kubelet.server:COALESCE_SECONDS",
    "kubelet.drainSeconds": "kubelet.server:DRAIN_SECONDS",
    "kubelet.messageBudgetBytes": "device_ids:MESSAGE_BUDGET_BYTES",
    "kubelet.podResourcesTimeoutSeconds": "kubelet.pod_resources:TIMEOUT_SECONDS",
    "kubelet.registerTimeoutSeconds": "kubelet.server:REGISTER_TIMEOUT_SECONDS",
    "kubelet.reservationSeconds": "agent.records.verification:RESERVATION_SECONDS",
    "kubelet.retryMaxSeconds": "kubelet.server:RETRY_MAX_SECONDS",
    "kubelet.retryMinSeconds": "kubelet.server:RETRY_MIN_SECONDS",
    "kubelet.socketPollSeconds": "kubelet.directory:POLL_SECONDS",
    "kubelet.streamOpenTimeoutSeconds": "kubelet.server:STREAM_OPEN_TIMEOUT_SECONDS",
    "kubelet.verifySeconds": "agent.records.verification:VERIFY_SECONDS",
    "mps.backoffMaxSeconds": "mps.daemon:BACKOFF_MAX_SECONDS",
    "mps.backoffMinSeconds": "mps.daemon:BACKOFF_MIN_SECONDS",
    "mps.commandTimeoutSeconds": "mps.host_tools:COMMAND_TIMEOUT_SECONDS",
    "mps.probeSeconds": "mps.daemon:PROBE_SECONDS",
    "shutdownSeconds": "agent.composition:SHUTDOWN_SECONDS",
    "tasks.backoffMaxSeconds": "agent.composition:TASK_BACKOFF_MAX_SECONDS",
    "tasks.backoffMinSeconds": "agent.composition:TASK_BACKOFF_MIN_SECONDS",
    "tasks.stuckSeconds": "concurrency:STUCK_SECONDS",
    "volcanoVgpu.migRetrySeconds": "agent.devices.mig:RETRY_SECONDS",
    "volcanoVgpu.migSettleSeconds": "agent.devices.mig:SETTLE_SECONDS",
    "web.maxBodyBytes": "agent.late_web:MAX_BODY_BYTES",
    "web.requestTimeoutSeconds": "agent.late_web:REQUEST_TIMEOUT_SECONDS",
}


@pytest.mark.parametrize("key", sorted(former_keys()))
def test_each_former_key_gets_its_sentence(load_text: Load, key: str) -> None:
    """The agent starts, in force is what stands beside it, and the line to remove is named."""
    *sections, name = key.split(".")
    lines = ["version: v1", *(f"{'  ' * depth}{one}:" for depth, one in enumerate(sections))]
    text = "\n".join([*lines, f"{'  ' * len(sections)}{name}: 1", "log: {level: debug}"])

    loaded = load_text(text + "\n")

    where = f"config.yaml:{len(lines) + 1}: {key}: is gone: "
    assert loaded.warnings == (f"{where}{former_keys()[key]}; remove the line",)
    assert loaded.settings.log.level == "debug"


def test_no_former_key_is_a_present_one() -> None:
    """A key that came back would be read, and its sentence would be wrong."""
    assert not set(former_keys()) & set(schema.value_paths())


@pytest.mark.parametrize("key", sorted(CONSTANTS))
def test_a_sentence_quotes_the_number_of_the_code(key: str) -> None:
    """Another number would be a promise that nothing keeps."""
    module, _, name = CONSTANTS[key].partition(":")
    number = getattr(importlib.import_module(f"vgpu_agent.{module}"), name)
    assert f" {number:.10g} " in f" {former_keys()[key]} "


def test_a_key_that_never_was_is_an_error_in_a_former_section(problems_of: Problems) -> None:
    """A slip of the pen is not taken for a key that is gone."""
    (problem,) = problems_of("version: v1\ntasks: {stuckSeconds: 5, stuckSecond: 5}\n")
    assert problem == "config.yaml:2: tasks.stuckSecond: unknown key, did you mean stuckSeconds?"


def test_a_former_section_without_keys_is_nothing(load_text: Load) -> None:
    """A copied example has such a section if every key in it is a comment."""
    assert load_text("version: v1\ntasks:\n").warnings == ()


@pytest.mark.parametrize(("value", "warned"), [("/sys", False), ("/host/sys", True)])
def test_a_former_flag_is_accepted_and_named(load_text: Load, value: str, warned: bool) -> None:
    """A DaemonSet that still passes it must come up."""
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    given = options.given(parser.parse_args([f"--sysfs-root={value}"]))

    loaded = load_text("version: v1\n", flags=given)

    sentence = f'--sysfs-root: "{value}" has no effect here; sysfs is read at /sys; remove the flag'
    assert loaded.warnings == ((sentence,) if warned else ())
    assert loaded.settings.sysfs_root == "/sys"
