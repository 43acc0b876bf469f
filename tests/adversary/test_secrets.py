"""A canary in every place where the agent has credentials, and every error path there is:
it must come out nowhere.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests import constants
from tests.adversary.api_server_parts import (
    CHUNKED,
    Answer,
    always,
    answer,
    asked,
    send_chunk,
    served,
)
from tests.cluster.scripted import IMPATIENT, json_event, json_pod, running, until
from tests.settings import settings as settings_of
from vgpu_agent import log
from vgpu_agent.cluster import credentials as credentials_module
from vgpu_agent.cluster.client import ApiClient
from vgpu_agent.cluster.credentials import Access, credentials
from vgpu_agent.cluster.events import Events
from vgpu_agent.cluster.node_publisher import NodePublisher
from vgpu_agent.cluster.pod_publisher import PodPublisher
from vgpu_agent.cluster.watching import NodeWatch, PodWatch
from vgpu_agent.concurrency import Latest, Revision, Supervisor
from vgpu_agent.errors import ClusterError
from vgpu_agent.journal import Journal
from vgpu_agent.nodes import DesiredNode, Node
from vgpu_agent.pods import DesiredPod, Pod, PodCache
from vgpu_agent.redaction import HIDDEN, conceal, redacted
from vgpu_agent.web import debug

CANARY = "canary-5a1f9c-of-the-token"
NODE = "/api/v1/nodes/n1"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    constants.use(monkeypatch, IMPATIENT)


@pytest.fixture(params=["json", "console"])
def lines(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """All that the log wrote, at debug level."""
    stream = io.StringIO()
    log.configure(stream=stream, level="debug", log_format=request.param)
    yield stream
    log.configure(level="debug", stream=io.StringIO())


@pytest.fixture(autouse=True)
def _library_reads_files(loop_may_block: None) -> None:
    """kubernetes_asyncio reads files in its coroutine, in a thread and a loop of its own,
    where that blocks no other task.
    """


@pytest.fixture
def service_account(tmp_path: Path) -> Path:
    """Write a service account as kubelet mounts it, with the canary for a token."""
    folder = tmp_path / "serviceaccount"
    folder.mkdir()
    (folder / "token").write_text(CANARY)
    (folder / "ca.crt").write_text("no certificate, but not empty")
    return folder


async def _echo(writer: asyncio.StreamWriter, request: bytes, *, status: str, kind: str) -> None:
    """A server, or a proxy, that shows the request in its complaint."""
    header = request.decode()
    if kind == "html":
        writer.write(
            answer(f"<html><pre>{header}</pre></html>".encode(), status=status, kind="text/html")
        )
    else:
        # So that a cut of the message would fall into the token.
        message = "x" * (980 - len("Unauthorized: ")) + " " + header.partition("Authorization: ")[2]
        body = {
            "kind": "Status",
            "code": int(status[:3]),
            "reason": "Unauthorized",
            "message": message if kind == "cut" else header,
        }
        writer.write(answer(msgspec.json.encode(body), status=status))


def _echoing(status: str, kind: str) -> Answer:
    async def write(writer: asyncio.StreamWriter, request: bytes) -> None:
        await _echo(writer, request, status=status, kind=kind)

    return write


async def _garbled(writer: asyncio.StreamWriter, request: bytes) -> None:
    writer.write(b"HTTP/1.1 200 " + request.replace(b"\r\n", b" ") + b"\r\n\r\n")


async def _echoing_watch(writer: asyncio.StreamWriter, request: bytes) -> None:
    """A list, then a watch whose ERROR event shows the request."""
    if b"watch=true" in request:
        writer.write(CHUNKED)
        status = {
            "kind": "Status",
            "code": 500,
            "reason": "InternalError",
            "message": request.decode(),
        }
        await send_chunk(writer, json_event("ERROR", status) + b"\n")
        writer.write(b"0\r\n\r\n")
    else:
        thing = json_pod(f"pod-{CANARY}", annotations=None)
        thing["metadata"]["resourceVersion"] = 7  # unreadable, and named in the complaint
        writer.write(
            answer(msgspec.json.encode({"metadata": {"resourceVersion": "7"}, "items": [thing]}))
        )


ANSWERS: dict[str, Answer] = {
    "401": _echoing("401 Unauthorized", "status"),
    "401 cut": _echoing("401 Unauthorized", "cut"),
    "403": _echoing("403 Forbidden", "status"),
    "409": _echoing("409 Conflict", "status"),
    "422": _echoing("422 Unprocessable", "status"),
    "429": _echoing("429 Too Many Requests", "cut"),
    "500": _echoing("500 Internal Server Error", "status"),
    "502 page": _echoing("502 Bad Gateway", "html"),
    "200 page": _echoing("200 OK", "html"),
    "garbled": _garbled,
    "junk": always(answer(b"}no JSON " + CANARY.encode())),
    "watch": _echoing_watch,
    "userinfo": always(
        answer(b"", status="302 Found", headers=f"Location: https://user:{CANARY}@elsewhere/\r\n")
    ),
}


@dataclasses.dataclass
class Agent:
    """The parts that talk with the API server, and all that comes out of them."""

    api: ApiClient
    journal: Journal = dataclasses.field(default_factory=Journal)
    texts: list[str] = dataclasses.field(default_factory=list)

    async def drive(self) -> None:
        """Every request there is, once at least, with its errors;
        a task that dies of one, with a traceback.
        """
        node, book = Node("n1", "uid"), PodCache()
        book.put(Pod("uid-a", "default", "a", node="n1"))
        nodes: Latest[Node | None] = Latest(node)
        watches = [PodWatch(self.api, "n1", PodCache(), journal=self.journal)]
        pods = PodPublisher(
            self.api,
            book,
            lambda: {"uid-a": DesiredPod({"a": "b"})},
            Revision(),
            self.journal,
        )
        conditions = {"Vgpu": ("True", "r", "m")}
        desired_state = DesiredNode(
            annotations={"a": "b", "c": None}, capacity={"volcano.sh/x": "1"}, conditions=conditions
        )
        publisher = NodePublisher(
            self.api, "n1", nodes, lambda *_: desired_state, Revision(), self.journal
        )
        events = Events(self.api, "vgpu-agent", "n1", self.journal)
        events.raise_event(node, "Reason", "message")
        node_watch = NodeWatch(self.api, "n1", journal=self.journal)
        async with running(watches[0].run), running(node_watch.run), running(pods.run):
            await publisher.publish_once()
            await events.write_once()
            await until(
                lambda: watches[0].status.errors and (pods.counts.failed or pods.counts.written)
            )
        self.texts += [
            watches[0].status.last_error,
            node_watch.status.last_error,
            str(self.api.requests),
        ]

        async def dies() -> None:
            await self.api.get(NODE)
            raise RuntimeError("it was answered")

        async with Supervisor(backoff_min_seconds=60, backoff_max_seconds=60) as supervisor:
            supervisor.start("dying", dies)
            await until(lambda: any(task.last_error for task in supervisor.reports))
            self.texts += [str(task) for task in supervisor.reports]
        for ask in (
            self.api.get(NODE),
            self.api.patch(NODE, {}),
            self.api.post("/api/v1/namespaces/default/events", {}),
        ):
            try:
                await ask
            except ClusterError as err:
                self.texts.append(f"{err} {err!r}")
        self.texts.append(debug.to_json([entry.facts for entry in self.journal.entries]).decode())


@pytest.mark.parametrize("case", ANSWERS)
async def test_no_error_of_the_api_server_shows_the_token(
    case: str, lines: io.StringIO, service_account: Path
) -> None:
    """Servers and proxies repeat requests in their complaints,
    and a token in the log is a token for every reader of logs.
    """
    async with served(ANSWERS[case]) as url:
        access = Access(url, authorization=f"Bearer {CANARY}")
        conceal(access.authorization)  # as `_access` does with whatever it has read
        api = ApiClient(credentials_module.Credentials(lambda: access, "test"))
        agent = Agent(api)
        try:
            await agent.drive()
        finally:
            await api.close()
    assert lines.getvalue()
    assert CANARY not in lines.getvalue()
    assert CANARY not in "".join(agent.texts)
    assert CANARY not in repr(access)


async def test_no_silence_or_broken_connection_shows_the_token(lines: io.StringIO) -> None:
    """Time limits, resets, and TLS where there is none."""

    async def silent(_: asyncio.StreamWriter, __: bytes) -> None:
        await asyncio.Event().wait()

    async def reset(writer: asyncio.StreamWriter, _: bytes) -> None:
        writer.transport.abort()

    for answers in (silent, reset):
        async with asked(answers, others=IMPATIENT, token=CANARY) as api:
            with pytest.raises(ClusterError) as caught:
                await api.get(NODE)
            log.get("x").error("failed", exc_info=caught.value)
    async with served(always(answer(b"{}"))) as url:
        for server in (
            url.replace("http:", "https:"),
            f"https://user:{CANARY}@127.0.0.1:1",
            f"http://[::{CANARY}",
        ):
            access = Access(
                server,
                authorization=f"Bearer {CANARY}\nX-Injected: 1",
                proxy=f"http://user:{CANARY}@127.0.0.1:1",
            )
            # mypy knows no default of a lambda
            api = ApiClient(credentials_module.Credentials(lambda access=access: access, "test"))  # type: ignore[misc]  # mypy does not infer a lambda with a default
            with pytest.raises(ClusterError) as caught:
                await api.get(NODE)
            await api.close()
            log.get("x").error("failed", exc_info=caught.value, access=access)
            assert CANARY not in str(caught.value)
    assert CANARY not in lines.getvalue()


def _kubeconfig(tmp_path: Path, user: dict[str, Any], **cluster: str) -> Path:
    path = tmp_path / "config"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1", **cluster}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    path.write_text(json.dumps(config, indent=1))
    return path


def _plugin(tmp_path: Path, script: str) -> dict[str, Any]:
    path = tmp_path / "plugin"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": str(path),
            "interactiveMode": "Never",
        }
    }


def _spoiled(tmp_path: Path, case: str) -> Path:
    """A kubeconfig with the canary that cannot be used."""
    other = f'{{"apiVersion":"{CANARY}","kind":"ExecCredential","status":{{"token":"{CANARY}"}}}}'
    encoded = base64.b64encode(CANARY.encode()).decode()
    scripts = {
        "plugin fails": f"echo token {CANARY} >&2; exit 3",
        "plugin says no JSON": f"echo {CANARY}",
        "plugin says another version": f"echo '{other}'",
    }
    users: dict[str, dict[str, Any]] = {
        "client key is none": {"client-certificate-data": encoded, "client-key-data": encoded},
        "client key is no base64": {
            "client-certificate-data": "%" + CANARY,
            "client-key-data": "%" + CANARY,
        },
        "token file is missing": {"tokenFile": str(tmp_path / "missing"), "password": CANARY},
    }
    files = {
        "no YAML": f"users:\n- name: u\n  user: {{token: {CANARY}: [\n".encode(),
        "binary": f"token: {CANARY}\n".encode() + b"\xff\x00",
        "a list": f"- {CANARY}\n- users: {CANARY}\n".encode(),
    }
    if case in files:
        path = tmp_path / "config"
        path.write_bytes(files[case])
        return path
    if case == "proxy":
        return _kubeconfig(
            tmp_path, {"token": CANARY}, **{"proxy-url": f"http://user:{CANARY}@127.0.0.1:1"}
        )
    if "plugin" in case:
        return _kubeconfig(tmp_path, _plugin(tmp_path, scripts[case]))
    return _kubeconfig(tmp_path, users[case])


_EXPECTED = {
    "plugin fails": "its credential plugin failed (exec: process returned 3)",
    "plugin says no JSON": "its credential plugin failed",
    "plugin says another version": "its credential plugin failed",
    "client key is none": "TLS files for the API server",
    "client key is no base64": "not in the expected form",
    "token file is missing": "No such file",
    "proxy": "cannot be reached",
    "no YAML": "line 3, column",
    "binary": "not in the expected form",
    "a list": "not in the expected form",
}


@pytest.mark.parametrize("case", _EXPECTED)
def test_no_kubeconfig_that_is_no_good_shows_what_is_in_it(
    case: str, tmp_path: Path, lines: io.StringIO
) -> None:
    """Parsers quote the line at which they stumble, credential plugins write what they like,
    and the library logs it.
    """
    path = _spoiled(tmp_path, case)
    found = credentials(settings_of(kubeconfig=str(path)))
    assert found is not None

    async def ask() -> ClusterError:
        api = ApiClient(found)
        with pytest.raises(ClusterError) as caught:
            await api.get(NODE)
        await api.close()
        return caught.value

    err = asyncio.run(ask())
    log.get("x").error("failed", exc_info=err)
    journal = Journal()
    journal.record("cluster.failed", error=str(err), err=err)
    shown = lines.getvalue() + str(err) + repr(journal.entries)
    assert _EXPECTED[case] in str(err)
    assert CANARY not in shown
    assert base64.b64encode(CANARY.encode()).decode() not in shown


async def test_no_service_account_shows_its_token(
    service_account: Path, lines: io.StringIO
) -> None:
    """Its CA is no certificate."""
    environment = {
        **os.environ,
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": "1",
    }
    found = await asyncio.to_thread(
        lambda: credentials(settings_of(), environment=environment, service_account=service_account)
    )
    assert found is not None
    api = ApiClient(found)
    with pytest.raises(ClusterError) as caught:
        await api.get(NODE)
    await api.close()
    access = await found.access()
    log.get("x").error(
        "failed",
        exc_info=caught.value,
        access=access,
        header=access.authorization,
        text=f"{access.authorization}.",
    )
    assert access.authorization == f"Bearer {CANARY}"
    assert CANARY not in lines.getvalue()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Bearer abc.def", f"Authorization: Bearer {HIDDEN}"),
        ("token eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.c2ln is old", f"token {HIDDEN} is old"),
        ("https://user:pass@host/path", f"https://{HIDDEN}@host/path"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----", HIDDEN),
        (
            "GET https://10.0.0.1:6443/api/v1/pods?x=1: basic thing",
            "GET https://10.0.0.1:6443/api/v1/pods?x=1: basic (hidden)",
        ),
        ("authorization: bEaReR abc.def", f"authorization: bEaReR {HIDDEN}"),
        ("-----begin private key-----\nMIIE\n-----end private key-----", HIDDEN),
        ("nothing of interest", "nothing of interest"),
    ],
)
def test_no_text_shows_what_has_the_form_of_credentials(text: str, shown: str) -> None:
    """This includes those of other programs, which are not named here."""
    assert redacted(text) == shown
