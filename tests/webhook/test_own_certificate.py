"""The life of the webhook's own certificate, against a simulated API server over HTTP."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tests import constants
from tests.cluster.scripted import QUICK
from tests.patience import eventually
from vgpu_agent.cluster.client import ApiClient
from vgpu_agent.cluster.credentials import Access, Credentials
from vgpu_agent.errors import ClusterError
from vgpu_agent.journal import Journal
from vgpu_agent.sim.api.faults import Fault, FaultKind
from vgpu_agent.sim.api.server import ApiServer
from vgpu_agent.webhook import certificates
from vgpu_agent.webhook.options import OwnCertificateOptions
from vgpu_agent.webhook.own_certificate import OwnCertificate

pytestmark = pytest.mark.component

OPTIONS = OwnCertificateOptions("ns", "hook-tls", "hook", ("hook",))
KINDS = ("mutatingwebhookconfigurations", "validatingwebhookconfigurations")
DAY = 86400.0


def webhook(name: str, service: str = "hook", **client: Any) -> dict[str, Any]:
    """A webhook of a configuration."""
    found = {"service": {"namespace": "ns", "name": service, "path": "/pods/mutate"}, **client}
    return {"name": name, "clientConfig": found, "sideEffects": "None"}


class World:
    """An API server, and the clock of all replicas."""

    def __init__(self, server: ApiServer) -> None:
        self.server, self.now = server, time.time()
        self.clients: list[ApiClient] = []

    def replica(self) -> OwnCertificate:
        """One more process of the webhook."""
        client = ApiClient(Credentials(lambda: Access(self.server.url), "test"))
        self.clients.append(client)
        return OwnCertificate(OPTIONS, client, journal=Journal(), clock=lambda: self.now)

    @property
    def secret(self) -> dict[str, bytes]:
        """The decoded data of the Secret, key → bytes."""
        data = self.server.objects.get("secrets", "hook-tls", "ns")["data"]
        return {key: base64.b64decode(text) for key, text in data.items()}

    def write_secret(self, data: dict[str, bytes]) -> None:
        """Change the Secret, as a person would."""
        texts = {key: base64.b64encode(text).decode() for key, text in data.items()}
        self.server.objects.patch("secrets", "hook-tls", {"data": texts}, "ns")

    def bundles(self, kind: str = KINDS[0]) -> list[bytes]:
        """The CA bundles that the API server trusts, one for each webhook."""
        found = self.server.objects.get(kind, "hook")["webhooks"]
        return [base64.b64decode(each["clientConfig"].get("caBundle", "")) for each in found]

    @property
    def writes(self) -> list[tuple[str, str]]:
        """Verb and resource of each write."""
        return [(request.verb, request.resource) for request in self.server.writes]


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """A cluster with an empty Secret and both configurations, as the component makes them."""
    constants.use(monkeypatch, QUICK)
    async with ApiServer() as server:
        server.objects.create("secrets", {"metadata": {"name": "hook-tls"}}, "ns")
        for kind in KINDS:
            webhooks = [webhook("pods.hook"), webhook("theirs", "other", caBundle="eA==")]
            server.objects.create(kind, {"metadata": {"name": "hook"}, "webhooks": webhooks})
        found = World(server)
        yield found
        for client in found.clients:
            await client.close()


async def test_the_first_replica_makes_a_certificate_that_the_api_server_trusts(
    world: World,
) -> None:
    """In one round: the Secret, and both configurations; other webhooks stay as they are."""
    replica = world.replica()
    assert replica.trouble
    await replica.round()
    assert replica.trouble == ""
    secret = world.secret
    assert set(secret) == {"ca.crt", "ca.key", "tls.crt", "tls.key"}
    for kind in KINDS:
        assert world.bundles(kind) == [secret["ca.crt"], b"x"]
    (first, _) = world.server.objects.get(KINDS[0], "hook")["webhooks"]
    assert first == webhook("pods.hook", caBundle=base64.b64encode(secret["ca.crt"]).decode())
    assert replica.expires_at == pytest.approx(world.now + 90 * DAY, abs=2)


async def test_a_round_that_finds_everything_right_writes_nothing(world: World) -> None:
    """Neither the same replica nor another one."""
    await world.replica().round()
    world.server.requests.clear()
    other = world.replica()
    await other.round()
    await other.round()
    assert world.writes == []


async def test_replicas_that_start_at_once_agree(world: World) -> None:
    """All serve what one of them has written."""
    replicas = [world.replica() for _ in range(4)]
    await asyncio.gather(*(replica.round() for replica in replicas))
    assert {replica._in_use.certificate for replica in replicas} == {world.secret["tls.crt"]}
    assert world.bundles() == [world.secret["ca.crt"], b"x"]
    refused = [request for request in world.server.writes if request.status == 409]
    assert refused  # otherwise nothing was at once


async def test_a_secret_that_is_not_there_is_created(world: World) -> None:
    """Also where two do it at once."""
    world.server.objects.delete("secrets", "hook-tls", "ns")
    replicas = [world.replica() for _ in range(3)]
    await asyncio.gather(*(replica.round() for replica in replicas))
    assert {replica._in_use.certificate for replica in replicas} == {world.secret["tls.crt"]}


async def test_a_certificate_is_renewed_before_it_expires(world: World) -> None:
    """By the same authority, so no configuration changes; the other replicas follow."""
    one, other = world.replica(), world.replica()
    await one.round()
    await other.round()
    before = world.secret
    world.server.requests.clear()
    world.now += 61 * DAY
    await one.round()
    await other.round()
    assert world.writes == [("patch", "secrets")]
    assert world.secret["ca.crt"] == before["ca.crt"]
    assert world.secret["tls.crt"] != before["tls.crt"]
    assert one._in_use == other._in_use
    assert one.expires_at == pytest.approx(world.now + 90 * DAY, abs=2)


async def test_a_new_authority_is_published_before_it_is_served(world: World) -> None:
    """While the configurations cannot be written, the certificate that is trusted stays."""
    replica = world.replica()
    await replica.round()
    before = replica._in_use
    world.now += 9.5 * 365 * DAY
    world.server.faults.append(Fault(FaultKind.STATUS, "patch", KINDS[0], code=500, times=1))
    with pytest.raises(ClusterError):
        await replica.round()
    assert replica._in_use == before
    await replica.round()
    assert world.bundles()[0] == world.secret["ca.crt"]
    assert replica._in_use == before  # the API server may take a moment to see its configurations
    await replica.round()
    assert replica._in_use.certificate == world.secret["tls.crt"] != before.certificate
    assert world.secret["ca.crt"].endswith(before.authorities)


@pytest.mark.parametrize(
    "data",
    [
        {"tls.crt": b"nonsense"},
        {"tls.key": b""},
        {"ca.crt": b"\xff", "ca.key": b"", "tls.crt": b"", "tls.key": b"x"},
        {"ca.key": b""},
    ],
)
async def test_a_damaged_secret_is_repaired(world: World, data: dict[str, bytes]) -> None:
    """And the reason is logged."""
    replica = world.replica()
    await replica.round()
    before = world.secret
    world.write_secret({**before, **data})
    await replica.round()
    secret = world.secret
    assert secret["ca.crt"] == before["ca.crt"]  # so replicas that come later stay trusted
    repaired = certificates.ServerCertificate(
        *(secret[key] for key in ("ca.crt", "ca.key", "tls.crt", "tls.key"))
    )
    assert certificates.problem(repaired, OPTIONS.names, world.now) == ""
    assert replica._in_use == repaired
    assert world.bundles()[0] == secret["ca.crt"]
    events = [entry.event for entry in replica._journal.entries]
    assert events.count("webhook.certificate_unusable") == 1


async def test_a_secret_that_was_emptied_gets_the_certificate_that_is_served(world: World) -> None:
    """The API server trusts it, and nothing changes for it."""
    replica = world.replica()
    await replica.round()
    before = world.secret
    world.server.objects.delete("secrets", "hook-tls", "ns")
    await replica.round()
    assert world.secret == before


async def test_a_certificate_that_is_due_is_renewed_where_the_secret_was_emptied(
    world: World,
) -> None:
    """By the authority in use, which the API server trusts."""
    replica = world.replica()
    await replica.round()
    before = world.secret
    world.server.objects.delete("secrets", "hook-tls", "ns")
    world.now += 61 * DAY
    await replica.round()
    assert world.secret["ca.crt"] == before["ca.crt"]
    assert world.secret["tls.crt"] != before["tls.crt"]
    assert replica.expires_at == pytest.approx(world.now + 90 * DAY, abs=2)


async def test_replicas_that_serve_the_former_certificate_stay_trusted(world: World) -> None:
    """A replica that starts and finds nothing must not shut the others out; later, only what is in
    the Secret is trusted.
    """
    old = world.replica()
    await old.round()
    before = world.secret["ca.crt"]
    world.server.objects.delete("secrets", "hook-tls", "ns")
    new = world.replica()
    await new.round()
    now = world.secret["ca.crt"]
    assert now != before
    await new.round()
    assert world.bundles(KINDS[0]) == [now + before, b"x"]
    assert world.bundles(KINDS[1]) == [now + before, b"x"]
    await old.round()
    assert old._in_use.authorities == before
    await old.round()
    assert old._in_use == new._in_use
    world.now += 601
    await old.round()
    assert world.bundles(KINDS[0]) == world.bundles(KINDS[1]) == [now, b"x"]
    world.server.requests.clear()
    await new.round()
    assert world.writes == []


async def test_the_bundle_does_not_grow_without_end(world: World) -> None:
    """The newest three stay, and what is no certificate does not."""
    await world.replica().round()
    oldest = world.secret["ca.crt"]
    for _ in range(5):
        world.now += 60
        world.server.objects.delete("secrets", "hook-tls", "ns")
        await world.replica().round()
    (bundle, _) = world.bundles()
    assert bundle.startswith(world.secret["ca.crt"])
    assert bundle.count(b"BEGIN CERTIFICATE") == 4
    assert oldest not in bundle
    world.server.objects.patch(
        KINDS[0], "hook", {"webhooks": [webhook("pods.hook", caBundle="bm9uZQ==")]}
    )
    await world.replica().round()
    assert world.bundles() == [world.secret["ca.crt"]]


async def test_a_replica_without_the_former_authority_makes_a_new_one(world: World) -> None:
    """Nobody else has its key."""
    await world.replica().round()
    before = world.secret
    world.write_secret({**before, "ca.key": b"x"})
    await world.replica().round()
    assert world.secret["ca.crt"] != before["ca.crt"]
    assert world.bundles()[0] == world.secret["ca.crt"] + before["ca.crt"]


async def test_a_bundle_that_somebody_took_away_is_written_again(world: World) -> None:
    """The API server does not trust the webhook after ``kubectl replace`` removed the bundle."""
    replica = world.replica()
    await replica.round()
    world.server.objects.patch(KINDS[1], "hook", {"webhooks": [webhook("pods.hook")]})
    await replica.round()
    assert world.bundles(KINDS[1]) == [world.secret["ca.crt"]]


async def test_one_kind_of_configuration_is_enough(world: World) -> None:
    """An operator may want no validation."""
    world.server.objects.delete(KINDS[1], "hook")
    replica = world.replica()
    await replica.round()
    assert replica.trouble == ""


async def test_a_configuration_of_another_service_is_a_clear_error(world: World) -> None:
    """And so is none at all; nothing of others is written."""
    for kind in KINDS:
        theirs = {"webhooks": [webhook("theirs", "other")]}
        world.server.objects.patch(kind, "hook", theirs)
    replica = world.replica()
    with pytest.raises(ClusterError, match="no webhook of mutating configuration hook calls"):
        await replica.round()
    for kind in KINDS:
        world.server.objects.delete(kind, "hook")
    with pytest.raises(ClusterError, match="there is no webhook configuration hook, so"):
        await replica.round()
    assert world.writes == [("patch", "secrets")]


async def test_a_configuration_that_changes_meanwhile_is_read_again(world: World) -> None:
    """Another webhook that was added must not be lost."""
    added = False

    def before_write(request: Any) -> None:
        nonlocal added
        if request.resource == KINDS[0] and not added:
            added = True
            now = world.server.objects.get(KINDS[0], "hook")["webhooks"]
            patch = {"webhooks": [*now, webhook("new", "newer")]}
            world.server.objects.patch(KINDS[0], "hook", patch)

    world.server.before_write = before_write
    await world.replica().round()
    assert world.bundles() == [world.secret["ca.crt"], b"x", b""]


async def test_an_outage_is_logged_once_and_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop goes on; what is served stays."""
    monkeypatch.setattr("vgpu_agent.webhook.own_certificate.RETRY_SECONDS", 0.01)
    monkeypatch.setattr("vgpu_agent.webhook.own_certificate.CHECK_SECONDS", 0.01)
    await world.server.down()
    replica, beats = world.replica(), 0

    def beat() -> None:
        nonlocal beats
        beats += 1

    running = asyncio.ensure_future(replica.run(beat))
    try:
        await eventually(lambda: beats > 5)
        assert "cannot be reached" in replica.trouble
        assert [entry.event for entry in replica._journal.entries] == ["webhook.certificate_failed"]
        await world.server.up()
        await eventually(lambda: not replica.trouble)
        await world.server.down()
        now = beats
        await eventually(lambda: beats > now + 5)
        assert replica.trouble == ""
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def test_a_certificate_that_has_expired_is_trouble(world: World) -> None:
    """Only what cannot be renewed expires; the reason is said to whoever asks."""
    replica = world.replica()
    await replica.round()
    world.now += 89 * DAY
    assert replica.trouble == ""
    await world.server.down()
    running = asyncio.ensure_future(replica.run(lambda: None))
    try:
        await eventually(lambda: replica._journal.entries[-1].event == "webhook.certificate_failed")
        assert replica.trouble == ""
        world.now += 2 * DAY
        assert replica.trouble.startswith("the certificate has expired and was not renewed: ")
        assert "cannot be reached" in replica.trouble
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    await world.server.up()
    await replica.round()
    assert replica.trouble == ""


async def test_no_secret_is_in_the_log(world: World) -> None:
    """Neither in events nor in errors."""
    replica = world.replica()
    await replica.round()
    world.server.faults.append(Fault(FaultKind.TRUNCATED, "get", "secrets", times=1))
    with pytest.raises(ClusterError) as caught:
        await replica.round()
    text = str(caught.value) + repr(msgspec.to_builtins(replica._journal.entries))
    assert "PRIVATE" not in text
    assert base64.b64encode(world.secret["tls.key"]).decode()[:40] not in text
