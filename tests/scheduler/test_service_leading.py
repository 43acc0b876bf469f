"""The process of the extender as one of several, with TLS, and what it says of itself, against a
simulated API server over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests import constants
from tests.cluster.scripted import QUICK
from tests.families.vgpu_manager.scheduling.nodes import KEYS, entry, node_texts
from tests.patience import PATIENCE_SECONDS, eventually
from tests.scheduler.test_extender import SMALL, a_pod
from vgpu_agent.cluster.credentials import Access, Credentials
from vgpu_agent.errors import ListenError
from vgpu_agent.families.vgpu_manager.keys import Keys
from vgpu_agent.families.vgpu_manager.scheduling.family import ROLE_LABEL, VgpuManagerScheduling
from vgpu_agent.scheduler.service import MAX_BODY_BYTES, Lease, Options, Service
from vgpu_agent.sim.api.faults import Fault, FaultKind
from vgpu_agent.sim.api.server import ApiServer

pytestmark = pytest.mark.component

CERTIFICATES = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is missing")


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    """An API server with one Node and the pods of two extenders."""
    constants.use(monkeypatch, QUICK)
    async with ApiServer() as found:
        a_node(found, KEYS)
        for name in ("one", "two"):
            found.objects.create(
                "pods", {"metadata": {"name": name}, "spec": {"containers": []}}, "gpu"
            )
        yield found


def a_node(server: ApiServer, keys: Keys) -> None:
    """Create a Node with two cards."""
    texts = {
        key.replace(KEYS.domain, keys.domain): text
        for key, text in node_texts([entry(card) for card in range(2)]).items()
    }
    server.objects.create(
        "nodes",
        {
            "metadata": {"name": "n0", "annotations": texts},
            "status": {"allocatable": {keys.number: "20"}},
        },
    )


@contextlib.asynccontextmanager
async def serving(
    server: ApiServer, options: Options, keys: Keys = KEYS
) -> AsyncIterator[tuple[Service, asyncio.Future[None]]]:
    """A service that has read its cluster."""
    credentials = Credentials(lambda: Access(server.url), "test")
    service = Service(options, VgpuManagerScheduling(keys), credentials)
    running = asyncio.ensure_future(service.run())
    try:
        await eventually(lambda: running.done() or (service.address and service.is_ready))
        if running.done():
            await running
        yield service, running
    finally:
        service.stop()
        if not running.done():
            await asyncio.wait_for(running, PATIENCE_SECONDS)


def elected(name: str) -> Options:
    """The options of one of two extenders."""
    lease = Lease("gpu", "vgpu-scheduler", f"{name}_1")
    return Options(port=0, lease=lease, pod_namespace="gpu", pod_name=name)


async def post(
    service: Service, verb: str, body: bytes, tls: ssl.SSLContext | None = None
) -> tuple[int, str]:
    """The status and the text of an answer."""
    scheme = "http" if tls is None else "https"
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            f"{scheme}://{service.address}/scheduler/{verb}", data=io.BytesIO(body), ssl=tls or True
        ) as answer,
    ):
        return answer.status, await answer.text()


async def get(service: Service, path: str) -> tuple[int, str]:
    """The status and the text of an answer."""
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://{service.address}{path}") as answer,
    ):
        return answer.status, await answer.text()


def asking(**more: Any) -> bytes:
    """The body of a filter for a small pod."""
    return json.dumps({"Pod": a_pod(**SMALL), "NodeNames": ["n0"], **more}).encode()


def role(server: ApiServer, name: str) -> str:
    """The label of an extender's pod."""
    labels = server.objects.get("pods", name, "gpu")["metadata"].get("labels") or {}
    return str(labels.get(ROLE_LABEL, ""))


async def until_role(server: ApiServer, name: str, expected: str) -> None:
    """Wait for a label."""
    await eventually(lambda: role(server, name) == expected)


async def test_a_follower_refuses_verbs_and_leads_when_the_leader_ends(server: ApiServer) -> None:
    """Its probes are well, so it is no broken pod; the labels say who leads."""
    async with serving(server, elected("one")) as (one, ended):
        await eventually(lambda: one.leads and role(server, "one") == "leader")
        async with serving(server, elected("two")) as (two, _):
            await eventually(lambda: role(server, "two") == "follower")
            for verb in ("filter", "bind"):
                status, text = await post(two, verb, asking())
                assert (status, "another extender leads" in text) == (503, True)
            assert (await get(two, "/readyz"))[0] == (await get(two, "/healthz"))[0] == 200
            assert "vgpu_scheduler_leader 0.0" in (await get(two, "/metrics"))[1]
            assert json.loads((await post(one, "filter", asking()))[1])["NodeNames"] == ["n0"]
            one.stop()
            await asyncio.wait_for(ended, PATIENCE_SECONDS)
            await eventually(lambda: two.leads and role(server, "two") == "leader")
            # what the last one has promised is not known to this one
            bind = {"PodName": "train", "PodNamespace": "default", "PodUID": "x", "Node": "n0"}
            assert (await post(two, "bind", json.dumps(bind).encode()))[0] == 200
            assert json.loads((await post(two, "filter", asking()))[1])["NodeNames"] == ["n0"]
            assert "vgpu_scheduler_leader 1.0" in (await get(two, "/metrics"))[1]


async def test_a_label_that_cannot_be_written_costs_no_lead_and_is_tried_again(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A webhook on pods may be slow or refuse."""
    monkeypatch.setattr("vgpu_agent.scheduler.service._LEASE_READ_SECONDS", 0.1)
    server.faults.append(Fault(FaultKind.STATUS, verb="patch", resource="pods", times=3, code=403))
    async with serving(server, elected("one")) as (one, _):
        await eventually(lambda: one.leads)
        await eventually(lambda: role(server, "one") == "leader")
        assert one.leads


async def test_beside_a_kube_scheduler_the_label_follows_its_lease(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vgpu-manager §1.3: ``--watch-lease``. Verbs are answered in any case."""
    monkeypatch.setattr("vgpu_agent.scheduler.service._LEASE_READ_SECONDS", 0.1)
    lease = Lease("kube-system", "vgpu-scheduler", "one", is_schedulers=True)
    options = Options(port=0, lease=lease, pod_namespace="gpu", pod_name="one")
    holders = ("one_0a", "other_0b", "", "one_0c", "oneself_0d")
    async with serving(server, options) as (service, _):
        for number, holder in enumerate(holders):
            body = {"metadata": {"name": "vgpu-scheduler"}, "spec": {"holderIdentity": holder}}
            if number:
                server.objects.delete("leases", "vgpu-scheduler", "kube-system", grace_seconds=0)
            server.objects.create("leases", body, "kube-system")
            expected = "leader" if holder.startswith("one_") else "follower"
            await until_role(server, "one", expected)
            assert (await post(service, "filter", asking()))[0] == 200


async def test_bodies_of_the_largest_size_and_one_byte_more(server: ApiServer) -> None:
    """vgpu-manager §5.1: 7 MiB."""
    async with serving(server, Options(port=0)) as (service, _):
        small = asking()
        largest = small[:-1] + b" " * (MAX_BODY_BYTES - len(small)) + b"}"
        assert len(largest) == MAX_BODY_BYTES
        status, text = await post(service, "filter", largest)
        assert (status, json.loads(text)["NodeNames"]) == (200, ["n0"])
        for verb in ("filter", "bind", "preempt", "filter-dryrun"):
            assert (await post(service, verb, largest + b" "))[0] == 413
        assert (await get(service, "/healthz"))[0] == 200


async def test_a_million_names_are_one_sentence(server: ApiServer) -> None:
    """They hold up no other call for long."""
    async with serving(server, Options(port=0)) as (service, _):
        names = [f"{number:x}" for number in range(850_000)]
        body = asking(NodeNames=names).replace(b'", "', b'","')
        assert len(body) <= MAX_BODY_BYTES
        status, text = await post(service, "filter", body)
        assert status == 200
        assert json.loads(text)["Error"] == "850000 Nodes; expected at most 50000"


@pytest.mark.parametrize("body", [b"", b"\xff", b'{"Pod": null, "NodeNames": ["\xff"]}', b"[[["])
async def test_what_is_no_json_is_answered_and_never_a_failure_of_the_server(
    server: ApiServer, body: bytes
) -> None:
    """kube-scheduler shows the sentence; a 500 would show nothing."""
    async with serving(server, Options(port=0)) as (service, _):
        for verb in ("filter", "bind"):
            status, text = await post(service, verb, body)
            assert status == 200
            assert json.loads(text)["Error"].startswith(
                "no ExtenderArgs" if verb == "filter" else "no "
            )


async def test_a_victim_that_is_no_utf_8_is_refused_in_a_sentence(server: ApiServer) -> None:
    """A preemption has no field for an error, so the status is that of a bad request."""
    victims = b'{"n0": {"Pods": [{"metadata": {"uid": "\xff"}}]}}'
    body = asking()[:-1] + b', "NodeNameToVictims": ' + victims + b"}"
    async with serving(server, Options(port=0)) as (service, _):
        await eventually(service._budgets.synced.is_set)
        status, text = await post(service, "preempt", body)
    assert status == 400
    assert text.startswith("a victim: ")


async def test_metrics_have_the_names_of_the_contract(server: ApiServer) -> None:
    """vgpu-manager §5.10; alerts and dashboards name them."""
    async with serving(server, Options(port=0)) as (service, _):
        await post(service, "filter", asking())
        await post(service, "filter", asking(NodeNames=["unknown"], Pod=a_pod("b", **SMALL)))
        await post(service, "filter", b"nonsense")
        await post(service, "bind", b"nonsense")
        status, text = await get(service, "/metrics")
    assert status == 200
    for line in (
        'vgpu_scheduler_verb_total{result="success",verb="filter"} 1.0',
        'vgpu_scheduler_verb_total{result="refused",verb="filter"} 1.0',
        'vgpu_scheduler_verb_total{result="error",verb="filter"} 1.0',
        'vgpu_scheduler_verb_total{result="error",verb="bind"} 1.0',
        'vgpu_scheduler_node_reject_total{code="NodeCacheMiss",verb="filter"} 1.0',
        'vgpu_scheduler_verb_duration_seconds_count{stage="total",verb="filter"} 3.0',
        'vgpu_scheduler_nodes{state="usable"} 1.0',
        "vgpu_scheduler_promises 1.0",
        "vgpu_scheduler_leader 1.0",
    ):
        assert line in text, line
    placed = [
        line for line in text.splitlines() if line.startswith("vgpu_scheduler_pod_policy_tot")
    ]
    (line,) = placed
    words = 'device_policy="none",node_policy="none",topology_mode="none"'
    assert line == f"vgpu_scheduler_pod_policy_total{{{words}}} 1.0"


async def test_keys_of_another_domain_count(server: ApiServer) -> None:
    """Read with those of the default one, a bound pod would hold nothing, and its cards would be
    given away.
    """
    keys = Keys("gpu.example.com")
    server.objects.delete("nodes", "n0", grace_seconds=0)
    a_node(server, keys)
    limits = {keys.number: "2"}
    spec = {"containers": [{"name": "main", "resources": {"limits": limits}}]}
    for name in ("a", "b"):
        server.objects.create("pods", {"metadata": {"name": name}, "spec": spec}, "default")
    async with serving(server, Options(port=0), keys) as (service, _):

        async def placed(name: str) -> list[str]:
            pod = server.objects.get("pods", name, "default")
            body = json.dumps({"Pod": pod, "NodeNames": ["n0"]}).encode()
            found: list[str] = json.loads((await post(service, "filter", body))[1])["NodeNames"]
            return found

        assert await placed("a") == ["n0"]
        uid = server.objects.get("pods", "a", "default")["metadata"]["uid"]
        bind = {"PodName": "a", "PodNamespace": "default", "PodUID": uid, "Node": "n0"}
        _, text = await post(service, "bind", json.dumps(bind).encode())
        assert json.loads(text) == {"Error": ""}
        await eventually(lambda: not service._extender._promises)  # the watch has shown it
        assert await placed("b") == []


async def test_the_first_list_of_pods_is_not_one_that_may_be_behind(server: ApiServer) -> None:
    """From the API server's cache, cards of pods that were bound a moment ago would look free. That
    of Nodes may be.
    """
    async with serving(server, Options(port=0)):
        lists = {
            request.resource: request.query.get("resourceVersion")
            for request in reversed(server.requests)
            if request.verb == "list"
        }
    assert lists["pods"] is None
    assert lists["nodes"] == "0"


async def test_the_policy_over_nodes_is_read_from_a_pod(server: ApiServer) -> None:
    """The agent on a node has no use for it; the extender has."""
    texts = node_texts([entry(card, uuid=f"GPU-{card}") for card in range(2)])
    for name in ("m0", "m1"):
        server.objects.create(
            "nodes",
            {
                "metadata": {"name": name, "annotations": texts},
                "status": {"allocatable": {KEYS.number: "20"}},
            },
        )
    async with serving(server, Options(port=0)) as (service, _):
        first = a_pod("first", **SMALL)
        await post(service, "filter", asking(Pod=first, NodeNames=["m1"]))
        for policy, expected in (("binpack", "m1"), ("spread", "m0")):
            pod = a_pod(policy, **SMALL)
            pod["metadata"]["annotations"] = {KEYS.node_policy: policy}
            _, text = await post(service, "filter", asking(Pod=pod, NodeNames=["m0", "m1"]))
            assert json.loads(text)["NodeNames"] == [expected]


# -- TLS ------------------------------------------------------------------------------------------


def _certificate(directory: Path, name: str) -> ssl.SSLContext:
    """Mount a new certificate for 127.0.0.1; return what trusts it."""
    made = directory / f"{name}.crt", directory / f"{name}.key"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -addext "
        "subjectAltName=IP:127.0.0.1"
    )
    subprocess.run(
        [*command.split(), "-subj", f"/CN={name}", "-keyout", made[1], "-out", made[0]],
        check=True,
        capture_output=True,
    )
    trusting = ssl.create_default_context(cafile=str(made[0]))
    for file, where in zip(made, ("tls.crt", "tls.key"), strict=True):
        os.replace(file, directory / where)
    return trusting


@CERTIFICATES
async def test_a_renewed_certificate_is_served_and_a_broken_one_is_not(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a restart, within ``--cert-refresh-interval``."""
    monkeypatch.setattr("vgpu_agent.scheduler.service._PROMISE_CHECK_SECONDS", 0.05)
    old = await asyncio.to_thread(_certificate, tmp_path, "old")
    options = Options(
        port=0,
        certificate_file=str(tmp_path / "tls.crt"),
        key_file=str(tmp_path / "tls.key"),
        certificate_seconds=0.05,
    )
    async with serving(server, options) as (service, _):
        assert (await post(service, "filter", asking(), old))[0] == 200
        with pytest.raises(aiohttp.ClientError):
            await post(service, "filter", asking())  # plain HTTP
        new = await asyncio.to_thread(_certificate, tmp_path, "new")

        async def is_served(tls: ssl.SSLContext) -> bool:
            try:
                return (await post(service, "filter", asking(), tls))[0] == 200
            except aiohttp.ClientConnectorCertificateError:
                return False

        for _ in range(200):
            if await is_served(new):
                break
            await asyncio.sleep(0.05)
        assert not await is_served(old)
        await asyncio.to_thread((tmp_path / "tls.key").write_text, "no key")
        await asyncio.sleep(0.3)
        assert await is_served(new)


@CERTIFICATES
async def test_a_certificate_that_cannot_be_used_is_told_at_the_start(
    server: ApiServer, tmp_path: Path
) -> None:
    """With the flags that name its files."""
    options = Options(
        port=0, certificate_file=str(tmp_path / "none.crt"), key_file=str(tmp_path / "none.key")
    )
    with pytest.raises(ListenError, match="--tls-cert-file and --tls-key-file"):
        async with serving(server, options):
            pass
