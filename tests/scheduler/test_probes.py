"""The second port of the extender, for the kubelet's probes and Prometheus."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import time
from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests import constants
from tests.cluster.scripted import QUICK
from tests.families.vgpu_manager.scheduling.nodes import KEYS
from tests.patience import PATIENCE_SECONDS, eventually
from vgpu_agent.cli import scheduler as command
from vgpu_agent.cluster.credentials import Access, Credentials
from vgpu_agent.errors import ListenError
from vgpu_agent.families.vgpu_manager.scheduling.family import VgpuManagerScheduling
from vgpu_agent.scheduler.service import Lease, Options, Service
from vgpu_agent.sim.api.server import ApiServer

pytestmark = pytest.mark.component

_VERBS = ("filter", "bind", "preempt", "filter-dryrun")


@contextlib.asynccontextmanager
async def _serving(
    url: str, probe_port: int | None, lease: Lease | None = None
) -> AsyncIterator[Service]:
    """A service that runs until the context ends. Its watches may be ready before it listens.
    ``probe_port`` is 0 for a free one, None for none.
    """
    credentials = Credentials(lambda: Access(url), "test")
    options = Options(port=0, probe_port=probe_port, lease=lease)
    service = Service(options, VgpuManagerScheduling(KEYS), credentials)
    running = asyncio.ensure_future(service.run())
    try:
        await eventually(
            lambda: (
                running.done()
                or (
                    service.is_ready
                    and service.address
                    and (probe_port is None or service.probe_port)
                )
            )
        )
        if running.done():
            await running
        yield service
    finally:
        service.stop()
        if not running.done():
            await asyncio.wait_for(running, PATIENCE_SECONDS)


async def test_probes_and_metrics_are_reached_from_outside_the_pod_and_no_verb_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kubelet cannot reach 127.0.0.1 of a pod; and a tenant who reached a verb could have any
    pod bound.
    """
    constants.use(monkeypatch, QUICK)
    async with (
        ApiServer() as server,
        _serving(server.url, 0) as service,
        aiohttp.ClientSession(f"http://127.0.0.1:{service.probe_port}") as http,
    ):
        for path in ("/healthz", "/readyz", "/version", "/metrics"):
            async with http.get(path) as answer:
                assert answer.status == 200, path
        for verb in _VERBS:
            async with http.post(f"/scheduler/{verb}", data=b"{}") as answer:
                assert answer.status == 404, verb
        for path in ("/explain", "/capacity"):
            async with http.get(path) as answer:
                assert answer.status == 404, path


async def test_a_loop_that_is_stuck_fails_the_probe_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kubelet starts the extender again; nothing else would notice."""
    constants.use(monkeypatch, QUICK)
    async with (
        ApiServer() as server,
        _serving(server.url, 0) as service,
        aiohttp.ClientSession(f"http://127.0.0.1:{service.probe_port}") as http,
    ):
        never = asyncio.Event()
        assert service._supervisor is not None
        service._supervisor.start("extra", never.wait, stuck_after_seconds=0.0)  # type: ignore[arg-type]  # a loop that sends no heartbeat
        async with http.get("/healthz") as answer:
            text = await answer.text()
            assert answer.status == 503
        assert text.startswith("extra: no heartbeat for ")
        assert text.endswith(" s; it will not recover by itself\n")
        await service._supervisor.stop("extra")
        async with http.get("/healthz") as answer:
            assert (answer.status, await answer.text()) == (200, "ok\n")


async def test_a_watch_that_fails_is_in_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it fails, pods that have ended still count."""
    constants.use(monkeypatch, QUICK)
    async with ApiServer() as server, _serving(server.url, None) as service:
        service._pods.status.failing_since = time.time() - 100
        service._update_gauges()
        text = service.metrics.text("")[0].decode()
    name = "vgpu_scheduler_watch_failing_seconds"
    shown = dict(re.findall(name + r'\{watch="(\w+)"\} ([0-9.]+)', text))
    assert shown.keys() == {"nodes", "pods", "budgets"}
    assert shown["nodes"] == "0.0"
    assert 100 <= float(shown["pods"]) < 100 + PATIENCE_SECONDS


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a kube-scheduler"])
async def test_the_metrics_of_an_extender_show_that_it_leads_only_if_it_is_known(
    monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    """An alert that nobody leads would never come. Here the Lease of kube-scheduler is missing."""
    constants.use(monkeypatch, QUICK)
    lease = Lease("kube-system", "vgpu-scheduler", "pod-a", is_schedulers=True) if beside else None
    async with (
        ApiServer() as server,
        _serving(server.url, 0, lease) as service,
        aiohttp.ClientSession(f"http://127.0.0.1:{service.probe_port}") as http,
        http.get("/metrics") as answer,
    ):
        assert f"vgpu_scheduler_leader {0 if beside else 1}.0\n" in await answer.text()


async def test_silent_connections_to_the_probes_shut_nobody_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any pod that reaches the port can open them. They must not take all of the process's file
    descriptors, with which kube-scheduler is answered.
    """
    constants.use(monkeypatch, QUICK)
    async with (
        ApiServer() as server,
        _serving(server.url, 0) as service,
        aiohttp.ClientSession() as http,
    ):
        port = service.probe_port
        before = len(os.listdir("/proc/self/fd"))
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        await eventually(lambda: any(reader.at_eof() for reader, _ in silent))
        for where in (f"127.0.0.1:{port}/healthz", f"{service.address}/readyz"):
            async with http.get(f"http://{where}") as answer:
                assert answer.status == 200
        # 200 of them are this test's own
        assert len(os.listdir("/proc/self/fd")) - before < 200 + 150
        for _, writer in silent:
            writer.transport.abort()


async def test_a_port_for_probes_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the flag that chooses another one."""
    constants.use(monkeypatch, QUICK)
    async with ApiServer() as server, _serving(server.url, None) as service:
        assert service.probe_port == 0
        port = int(service.address.rpartition(":")[2])
        with pytest.raises(ListenError, match=f":{port}: .*--probe-bind-port"):
            async with _serving(server.url, port):
                pass


@pytest.mark.parametrize(
    ("flags", "port"), [([], None), (["--probe-bind-port", "3457"], 3457)], ids=["none", "one"]
)
def test_the_port_for_probes_is_off_unless_it_is_named(flags: list[str], port: int | None) -> None:
    """The replaced extender has no such port, so a switch to this one opens none unasked."""
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    assert command._options(parser.parse_args(["scheduler", *flags]), {}).probe_port == port


def test_the_arguments_of_the_replaced_chart_are_understood() -> None:
    """An operator pastes them: with klog's flags, and, from old charts, seconds without a unit."""
    pasted = [
        *("--domain=nvidia.com", "--kube-api-qps=20", "--kube-api-burst=30"),
        *("--server-bind-port=3456", "--pprof-bind-port=0", "--feature-gates=GPUTopology=true"),
        *("--enable-tls=true", "--tls-key-file=k", "--tls-cert-file=c"),
        *("--cert-refresh-interval=5", "--v=3"),
    ]
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    options = command._options(parser.parse_args(["scheduler", *pasted]), {})
    assert (options.certificate_file, options.key_file) == ("c", "k")
    assert options.certificate_seconds == 5
