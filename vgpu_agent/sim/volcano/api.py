"""The simulated Volcano scheduler's client of an API server, a real one or `sim.api.server`:
requests, and current lists.

Called by `scheduler`. Simple on purpose, and independent of the agent's own client. Any unexpected
answer leads to a new list.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import dataclasses
import json
import ssl
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import yaml

from vgpu_agent import log
from vgpu_agent.errors import ClusterError, SimulationError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from vgpu_agent.sim.volcano.resources import Object

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
_MAX_LINE_BYTES = 16 * 1024 * 1024
_logger = log.get(__name__)


@dataclasses.dataclass(frozen=True)
class ApiAccess:
    """The API server's address and the client's credentials. ``tls`` is None for plain HTTP."""

    url: str
    token: str = ""
    tls: ssl.SSLContext | None = None

    @classmethod
    def from_kubeconfig(cls, path: Path) -> Self:
        """Read the current context of a kubeconfig file; reads files, so not for the event loop.

        Understood: server, certificate authority and client certificate as file or inline, token as
        file or inline.

        Raises:
            SimulationError: the file cannot be read or lacks such an entry; the message names it.
        """
        try:
            content = yaml.safe_load(path.read_text())
            context = _named(content["contexts"], content["current-context"])["context"]
            cluster = _named(content["clusters"], context["cluster"])["cluster"]
            user = _named(content["users"], context["user"])["user"] or {}
            token = user.get("token") or (
                Path(user["tokenFile"]).read_text().strip() if "tokenFile" in user else ""
            )
            url = str(cluster["server"]).rstrip("/")
            return cls(url, token, _tls(cluster, user) if url.startswith("https:") else None)
        except (
            OSError,
            KeyError,
            TypeError,
            AttributeError,
            ValueError,
            yaml.YAMLError,
            binascii.Error,
        ) as err:
            raise SimulationError(
                f"kubeconfig {path} cannot be used: {err!r}; it needs a current context with "
                "server and user"
            ) from err


class ApiClient:
    """Requests to one API server; an async context."""

    def __init__(self, access: ApiAccess, *, timeout_seconds: float) -> None:
        self._access = access
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._quiet_seconds = timeout_seconds
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        headers = {"Authorization": f"Bearer {self._access.token}"} if self._access.token else {}
        connector = aiohttp.TCPConnector(ssl=self._access.tls or True)
        self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        content_type: str = "application/json",
    ) -> Object:
        """Make one request and return the JSON of its answer.

        Raises:
            ClusterError: it was refused, or there was no answer; then it may have been done
                nevertheless.
        """
        try:
            async with self._request(
                method, path, body, content_type, {}, self._timeout
            ) as response:
                text = await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as err:
            raise ClusterError(f"{method} {path}: {type(err).__name__}: {err}") from err
        if response.status >= 400:
            raise ClusterError(
                f"{method} {path} answered {response.status}: {text[:300]}", status=response.status
            )
        try:
            answer = json.loads(text)
        except ValueError as err:
            raise ClusterError(f"{method} {path} answered no JSON: {text[:100]!r}") from err
        if not isinstance(answer, dict):
            raise ClusterError(f"{method} {path} answered no JSON object: {text[:100]!r}")
        return answer

    async def watch(
        self, path: str, version: str, lasting_seconds: int
    ) -> AsyncGenerator[Object, None]:
        """Yield the events since ``version``, until the server ends the watch.

        Raises:
            ClusterError: it was refused, broke, was silent for longer than it should last, or sent
                something else than an event.
        """
        query = {
            "watch": "1",
            "resourceVersion": version,
            "timeoutSeconds": str(lasting_seconds),
            "allowWatchBookmarks": "true",
        }
        silence = aiohttp.ClientTimeout(
            total=None,
            sock_connect=self._quiet_seconds,
            sock_read=lasting_seconds + self._quiet_seconds,
        )
        try:
            async with self._request("GET", path, None, "", query, silence) as response:
                if response.status >= 400:
                    raise ClusterError(
                        f"watch of {path} answered {response.status}", status=response.status
                    )
                pending = b""
                async for chunk in response.content.iter_any():
                    *lines, pending = (pending + chunk).split(b"\n")
                    for line in lines:
                        yield json.loads(line)
                    if len(pending) > _MAX_LINE_BYTES:
                        raise ClusterError(
                            f"watch of {path}: a line of more than {_MAX_LINE_BYTES} bytes"
                        )
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as err:
            raise ClusterError(f"watch of {path}: {type(err).__name__}: {err}") from err

    def _request(
        self,
        method: str,
        path: str,
        body: Object | None,
        content_type: str,
        query: Mapping[str, str],
        timeout: aiohttp.ClientTimeout,
    ) -> Any:
        if self._session is None:
            raise SimulationError("the API client is used outside of its context; enter it first")
        content = None if body is None else json.dumps(body)
        headers = {"Content-Type": content_type} if content_type else {}
        return self._session.request(
            method,
            self._access.url + path,
            data=content,
            headers=headers,
            params=query,
            timeout=timeout,
        )


class Collection:
    """All objects of one kind, kept up to date by a list and a watch.

    State: a copy of the API server's objects. It counts only while ``synced``. Any failure makes it
    not synced until the next list.

    Attributes:
        items: by UID.
        synced: ``items`` came from a list, and nothing has failed since.
    """

    def __init__(
        self,
        client: ApiClient,
        path: str,
        changed: Callable[[], None],
        *,
        watch_seconds: int,
        retry_seconds: float,
    ) -> None:
        self.items: dict[str, Object] = {}
        self.synced = False
        self._client, self._path, self._changed = client, path, changed
        self._watch_seconds, self._retry_seconds = watch_seconds, retry_seconds
        self._invalidated = asyncio.Event()

    async def run(self) -> None:
        """List and watch, again and again, until cancelled."""
        while True:
            self.synced = False
            self._invalidated.clear()
            broken = False
            try:
                async with asyncio.TaskGroup() as group:
                    following = group.create_task(self._follow())
                    invalidated = group.create_task(self._invalidated.wait())
                    await asyncio.wait(
                        {following, invalidated}, return_when=asyncio.FIRST_COMPLETED
                    )
                    following.cancel()
                    invalidated.cancel()
            except* ClusterError as errors:
                broken = True
                _logger.warning(
                    "sim.volcano.watch_broken", path=self._path, error=str(errors.exceptions[0])
                )
            if broken:
                # Not inside `except*`: before Python 3.11.4 a cancellation there becomes an
                # exception group.
                await asyncio.sleep(self._retry_seconds)

    def invalidate(self) -> None:
        """Mark the copy as outdated, and list the objects again."""
        self.synced = False
        self._invalidated.set()

    def put(self, thing: Object) -> None:
        """Store the object in the answer to a write, unless the watch has shown something newer, or
        the end of the object.
        """
        uid = thing["metadata"]["uid"]
        if uid in self.items and int(thing["metadata"]["resourceVersion"]) > int(
            self.items[uid]["metadata"]["resourceVersion"]
        ):
            self.items[uid] = thing

    async def _follow(self) -> None:
        listed = await self._client.request("GET", self._path)
        try:
            version = listed["metadata"]["resourceVersion"]
            self.items = {thing["metadata"]["uid"]: thing for thing in listed["items"]}
        except (KeyError, TypeError) as err:
            raise ClusterError(f"GET {self._path} answered no list") from err
        self.synced = True
        self._changed()
        _logger.debug("sim.volcano.listed", path=self._path, objects=len(self.items))
        while True:
            async with contextlib.aclosing(
                self._client.watch(self._path, version, self._watch_seconds)
            ) as events:
                async for event in events:
                    version = self._take(event)
                    self._changed()

    def _take(self, event: Object) -> str:
        """Apply one event, and return its resource version."""
        try:
            kind, thing = event["type"], event["object"]
            if kind == "ERROR":
                raise ClusterError(
                    f"watch of {self._path} ended: {thing.get('message')}",
                    status=int(thing.get("code") or 0),
                )
            if kind == "DELETED":
                self.items.pop(thing["metadata"]["uid"], None)
            elif kind != "BOOKMARK":
                self.items[thing["metadata"]["uid"]] = thing
            return str(thing["metadata"]["resourceVersion"])
        except (KeyError, TypeError, AttributeError) as err:
            raise ClusterError(f"watch of {self._path}: not an event: {str(event)[:100]}") from err


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    for entry in entries:
        if entry["name"] == name:
            return entry
    raise KeyError(name)


def _tls(cluster: Mapping[str, Any], user: Mapping[str, Any]) -> ssl.SSLContext:
    authority = (
        base64.b64decode(cluster["certificate-authority-data"]).decode()
        if "certificate-authority-data" in cluster
        else None
    )
    context = ssl.create_default_context(
        cafile=cluster.get("certificate-authority"), cadata=authority
    )
    # a client certificate can only be loaded from files
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for key in ("client-certificate", "client-key"):
            if f"{key}-data" in user:
                inline = Path(folder, key)
                inline.write_bytes(base64.b64decode(user[f"{key}-data"]))
                files.append(str(inline))
            elif key in user:
                files.append(str(user[key]))
        if len(files) == 2:
            context.load_cert_chain(*files)
    return context
