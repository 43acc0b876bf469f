"""Requests to the API server: what is sent, what comes back, and how each failure reads."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.cluster.scripted import until
from vgpu_agent.cluster import client as client_module
from vgpu_agent.cluster.client import ApiClient
from vgpu_agent.cluster.credentials import Access, Credentials
from vgpu_agent.errors import ClusterError
from vgpu_agent.sim.api.faults import Fault, FaultKind
from vgpu_agent.sim.api.server import ApiServer

_NODE = "/api/v1/nodes/n1"
_WATCH = {"watch": "true", "resourceVersion": "1", "timeoutSeconds": "1"}


async def _lines(client: ApiClient, path: str = "/api/v1/nodes", **more: str) -> list[bytes]:
    async with contextlib.aclosing(client.lines(path, _WATCH | more)) as lines:
        assert await anext(lines) == b""  # accepted
        return [line async for line in lines]


async def test_a_patch_is_a_merge_patch(server: ApiServer, client: ApiClient) -> None:
    """Every object gets this content type and this user agent, and no proxy of the environment."""
    server.objects.create("nodes", {"metadata": {"name": "n1", "annotations": {"old": "1"}}})
    answer = await client.patch(_NODE, {"metadata": {"annotations": {"old": None, "new": "2"}}})
    (request,) = server.requests
    assert request.content_type == "application/merge-patch+json"
    assert request.user_agent.startswith("vgpu-agent/")
    assert server.objects.get("nodes", "n1")["metadata"]["annotations"] == {"new": "2"}
    assert b'"new":"2"' in answer


async def test_a_deletion_is_of_one_pod_and_not_of_another_with_its_name(
    server: ApiServer, client: ApiClient
) -> None:
    """The UID is a precondition: meanwhile the name may be another pod's."""
    path = "/api/v1/namespaces/default/pods/a"
    server.objects.create("pods", {"metadata": {"name": "a", "uid": "new"}}, "default")
    with pytest.raises(ClusterError) as caught:
        await client.delete(path, uid="old")
    assert caught.value.status == 409
    await client.delete(path, uid="new")
    assert server.objects.list("pods") == []
    assert client.requests == {("delete", "pods", "409"): 1, ("delete", "pods", "200"): 1}


async def test_a_proxy_of_the_environment_is_not_asked(
    server: ApiServer, client: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HTTPS_PROXY on a node is for image pulls and not for us."""
    server.objects.create("nodes", {"metadata": {"name": "n1"}})
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert b'"n1"' in await client.get(_NODE)


async def test_requests_are_counted_by_verb_resource_and_outcome(
    server: ApiServer, client: ApiClient
) -> None:
    """In the words of the API server's own audit log."""
    server.objects.create("nodes", {"metadata": {"name": "n1"}})
    await client.get(_NODE)
    await client.get("/api/v1/pods", {"fieldSelector": "spec.nodeName=n1"})
    await client.patch(f"{_NODE}/status", {"status": {}})
    await client.post("/api/v1/namespaces/default/events", {"metadata": {"name": "e"}})
    with pytest.raises(ClusterError):
        await client.get("/api/v1/namespaces/default/pods/none")
    await _lines(client)
    await server.down()
    with pytest.raises(ClusterError):
        await client.get(_NODE)
    assert client.requests == {
        ("get", "nodes", "200"): 1,
        ("list", "pods", "200"): 1,
        ("patch", "nodes/status", "200"): 1,
        ("create", "events", "201"): 1,
        ("get", "pods", "404"): 1,
        ("watch", "nodes", "200"): 1,
        ("get", "nodes", "no answer"): 1,
    }


async def test_a_right_is_missing_until_it_is_granted(server: ApiServer, client: ApiClient) -> None:
    """By the words of RBAC. A policy that forbids one write takes no right away, and what may not
    be read is not needed.
    """

    async def refused(reason: str) -> None:
        server.faults = [Fault(FaultKind.STATUS, code=403, reason=reason)]
        for request in (client.patch(_NODE, {}), client.get(_NODE)):
            with pytest.raises(ClusterError):
                await request

    server.objects.create("nodes", {"metadata": {"name": "n1"}})
    await refused("nodes \"n1\" is forbidden: ValidatingAdmissionPolicy 'own' denied request")
    assert client.missing_rights == set()
    user = 'nodes "n1" is forbidden: User "system:serviceaccount:vgpu-agent:vgpu-agent"'
    await refused(f'{user} cannot patch resource "nodes" in API group ""')
    await refused(f'{user} cannot get resource "nodes" in API group ""')
    assert client.missing_rights == {"patch nodes"}
    server.faults = []
    await client.patch(_NODE, {"metadata": {"labels": {"a": "1"}}})
    assert client.missing_rights == set()


@pytest.mark.parametrize(
    ("fault", "status", "text"),
    [
        (
            Fault(FaultKind.STATUS, code=403, reason="Forbidden"),
            403,
            r"GET /api/v1/nodes/n1: .* 403 Forbidden.*ClusterRole",
        ),
        (Fault(FaultKind.STATUS, code=500, reason="InternalError"), 500, "500 InternalError"),
        (
            Fault(FaultKind.HTML),
            502,
            r"HTTP 502, text/html, '502 Bad Gateway Bad Gateway'; look for a proxy",
        ),
        (Fault(FaultKind.HTML, code=200), 200, "an answer that is not the API server's"),
        (Fault(FaultKind.RESET), 0, "broke"),
    ],
    ids=lambda value: str(getattr(value, "kind", "")) or None,
)
async def test_each_failure_is_one_sentence_with_its_status(
    server: ApiServer, client: ApiClient, fault: Fault, status: int, text: str
) -> None:
    """Naming the request and the cause, on one line."""
    server.faults = [fault]
    with pytest.raises(ClusterError, match=text) as raised:
        await client.get(_NODE)
    assert raised.value.status == status
    assert "\n" not in str(raised.value)


async def test_a_server_that_does_not_answer_is_given_up(
    server: ApiServer, impatient: ApiClient
) -> None:
    """A half-open connection must not hold a caller for longer than the settings allow."""
    server.faults = [Fault(FaultKind.SILENCE)]
    with pytest.raises(ClusterError, match=r"GET /api/v1/nodes/n1: .* silent for 0\.2 s"):
        await impatient.get(_NODE)


async def test_a_watch_that_is_silent_beyond_its_time_is_given_up(
    server: ApiServer, impatient: ApiClient
) -> None:
    """It asked for one second and should have ended by itself."""
    server.faults = [Fault(FaultKind.SILENCE)]
    with pytest.raises(ClusterError, match=r"silent for 1\.1 s"):
        await _lines(impatient)


async def test_a_message_of_many_lines_becomes_one(server: ApiServer, client: ApiClient) -> None:
    """A refused change of a pod's specification comes with a difference of hundreds of lines."""
    server.faults = [
        Fault(FaultKind.STATUS, code=422, reason="Invalid:\n@@ -140 +140 @@\n" + "- line\n" * 1000)
    ]
    with pytest.raises(ClusterError, match=r"422 Invalid: @@ -140 \+140 @@ - line") as raised:
        await client.patch(_NODE, {})
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1200


async def test_a_conflict_and_an_absence_can_be_told_apart(
    server: ApiServer, client: ApiClient
) -> None:
    """409 and 404, with the API server's own words."""
    server.objects.create("nodes", {"metadata": {"name": "n1"}})
    with pytest.raises(ClusterError, match="the object has been modified") as conflict:
        await client.patch(_NODE, {"metadata": {"resourceVersion": "1"}})
    with pytest.raises(ClusterError, match='nodes "n2" not found') as absence:
        await client.get("/api/v1/nodes/n2")
    assert (conflict.value.status, absence.value.status) == (409, 404)


async def test_the_time_that_a_busy_server_asks_for_is_handed_on(
    server: ApiServer, client: ApiClient
) -> None:
    """429 with Retry-After."""
    server.faults = [
        Fault(FaultKind.STATUS, code=429, reason="TooManyRequests", retry_after_seconds=7)
    ]
    with pytest.raises(ClusterError) as raised:
        await client.get(_NODE)
    assert (raised.value.status, raised.value.retry_after_seconds) == (429, 7.0)


async def test_a_server_that_is_away_and_a_name_that_does_not_resolve() -> None:
    """Both are named, with the address."""
    nobody = ApiClient(Credentials(lambda: Access("http://127.0.0.1:9"), "test"))
    nowhere = ApiClient(
        Credentials(lambda: Access("http://no-such-host.invalid:6443"), "test"),
    )
    with pytest.raises(ClusterError, match=r"http://127.0.0.1:9 cannot be reached: .*refused"):
        await nobody.get(_NODE)
    with pytest.raises(
        ClusterError,
        match=r"no-such-host.invalid:6443 (cannot be resolved|did not|has been silent)",
    ):
        await nowhere.get(_NODE)
    await nobody.close()
    await nowhere.close()


async def test_a_watch_yields_its_lines_until_its_time_is_over(
    server: ApiServer, client: ApiClient
) -> None:
    """A clean end is no error."""
    for number in range(3):
        server.objects.create("nodes", {"metadata": {"name": f"n{number}"}})
    lines = await _lines(client)
    assert len(lines) == 3
    assert all(line.startswith(b'{"type":"ADDED"') for line in lines)


@pytest.mark.parametrize(
    ("fault", "status", "text"),
    [
        (Fault(FaultKind.STATUS, code=410, reason="Expired"), 410, "410 Expired"),
        (Fault(FaultKind.HTML), 502, "look for a proxy"),
        (Fault(FaultKind.RESET), 0, "broke"),
        (Fault(FaultKind.GIANT_LINE, size=1024 * 1024), 0, "a line of more than"),
    ],
    ids=lambda value: str(getattr(value, "kind", "")) or None,
)
async def test_a_watch_that_breaks_says_how(
    server: ApiServer,
    client: ApiClient,
    fault: Fault,
    status: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Giant lines included, which libraries choke on."""
    monkeypatch.setattr(client_module, "LONGEST_LINE_BYTES", 512 * 1024)
    server.faults = [fault]
    with pytest.raises(ClusterError, match=text) as raised:
        await _lines(client)
    assert raised.value.status == status


async def test_a_large_line_below_the_limit_arrives_whole(
    server: ApiServer, client: ApiClient
) -> None:
    """aiohttp's own line reader would give up at twice its buffer."""
    server.objects.create(
        "nodes", {"metadata": {"name": "n1", "annotations": {"large": "x" * 6_000_000}}}
    )
    (line,) = await _lines(client)
    assert len(line) > 6_000_000


async def test_a_token_that_was_rotated_is_read_again_and_the_request_repeated(
    server: ApiServer,
) -> None:
    """401 leads to a fresh look at the file. The caller does not notice."""
    server.objects.create("nodes", {"metadata": {"name": "n1"}})
    server.tokens, tokens = {"new"}, ["Bearer old", "Bearer new"]
    client = ApiClient(Credentials(lambda: Access(server.url, tokens.pop(0)), "test"))
    assert b'"n1"' in await client.get(_NODE)
    assert [request.status for request in server.requests] == [401, 200]
    await client.close()


async def test_a_token_that_stays_refused_is_an_error_at_once(server: ApiServer) -> None:
    """One try, since the file says the same.
    The message says where to look, and never the token.
    """
    server.tokens = {"right"}
    client = ApiClient(Credentials(lambda: Access(server.url, "Bearer wr0ng"), "test"))
    with pytest.raises(ClusterError, match="service account") as raised:
        await client.get(_NODE)
    assert raised.value.status == 401
    assert "wr0ng" not in str(raised.value)
    assert len(server.requests) == 1
    await client.close()


async def test_other_tls_files_lead_to_new_connections_and_leave_running_watches_alone(
    server: ApiServer,
) -> None:
    """A CA that was exchanged: the watch that runs goes on over the old connection,
    the next request uses a new one.
    """
    server.objects.create("nodes", {"metadata": {"name": "n1"}})
    reads = iter(["old", "new", "new"])
    credentials = Credentials(lambda: Access(server.url, tls_fingerprint=next(reads)), "test")
    client = ApiClient(credentials)
    async with contextlib.aclosing(
        client.lines("/api/v1/nodes", _WATCH | {"timeoutSeconds": "60"})
    ) as lines:
        assert await anext(lines) == b""
        await anext(lines)
        old = client._connections
        await credentials.access(fresh=True)
        await client.get(_NODE)
        assert client._connections is not old
        server.objects.create("nodes", {"metadata": {"name": "n2"}})
        assert b'"n2"' in await anext(lines)
        assert old is not None
        assert not old.closed
    assert old.closed
    await client.close()


async def test_closing_ends_what_runs(server: ApiServer, client: ApiClient) -> None:
    """A watch that ends by itself is an error for its reader, not a hang."""
    reading = asyncio.ensure_future(_lines(client))
    await until(lambda: server.requests)
    await client.close()
    with pytest.raises(ClusterError):
        await reading
