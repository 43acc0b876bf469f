"""The HTTP client for the API server. It returns bytes, and turns each failure into a
`ClusterError` of one sentence.

Built by `agent` when there are `credentials`. The watchers and writers of this package use it as
`api.Api`. No other code in the agent has an HTTP client. It adds to aiohttp:

* a time limit on everything,
* tokens and CAs that change while the agent runs,
* a limit on the bytes of each answer and of each line of a watch,
* no compression, no redirects, no proxy from the environment,
* a count of requests.

A request is repeated only once, with fresh credentials, when the API server has refused the old
ones or TLS has failed with them. Callers decide about all other retries.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import email.utils
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from vgpu_agent.cluster import answers, api
from vgpu_agent.cluster.connections import Connections
from vgpu_agent.cluster.lists import LONGEST_OBJECT_BYTES
from vgpu_agent.errors import ClusterError, quoted

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping

    from vgpu_agent.cluster.credentials import Access, Credentials

# How long connecting to the API server may take.
CONNECT_TIMEOUT_SECONDS = 5.0
LONGEST_LINE_BYTES = LONGEST_OBJECT_BYTES  # a line of a watch has one object
# Largest list, which is never in memory as a whole: 500 pods of the largest size, and some more.
LONGEST_LIST_BYTES = 2 * 1024 * 1024 * 1024
# A list may take this many times as long as other requests, while it keeps arriving.
_LIST_TIMES = 8
_WRITES = ("create", "patch", "delete")

_WATCH_SECONDS = 1800.0  # the API server's limit for a watch without a timeout of its own


class ApiClient:
    """The API server, as one HTTP client.

    State: the connections, made for one set of credentials. When anything but the token has
    changed, new requests get new connections. The old ones are closed when the last request on
    them has ended.

    Attributes:
        requests: their number since the start by verb (``get``, ``list``, ``watch``, ``patch``,
            ``create``, ``delete``), resource (``pods``, ``nodes/status``) and outcome: the HTTP
            status, or ``no answer``.
    """

    def __init__(self, credentials: Credentials) -> None:
        self.requests: collections.Counter[tuple[str, str, str]] = collections.Counter()
        # the rights that the last write of each kind lacked: verb and resource, e.g.
        # ``create pods/eviction``
        self.missing_rights: set[str] = set()
        self._credentials = credentials
        self._connections: Connections | None = None
        self._connecting = asyncio.Lock()

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> bytes:
        """Return the object or the list at ``path``, as JSON.

        Raises:
            ClusterError: anything but success, or more than `LONGEST_OBJECT_BYTES`.
        """
        return await self._ask("GET", path, params=params)

    async def patch(
        self, path: str, body: Mapping[str, Any], *, params: Mapping[str, str] | None = None
    ) -> bytes:
        """Change the object at ``path`` by a JSON merge patch (RFC 7386);
        return the changed object.

        Raises:
            ClusterError: anything but success; 409 when ``metadata.resourceVersion`` in the body is
                not the object's, 422 when ``metadata.uid`` is not.
        """
        return await self._ask(
            "PATCH", path, params=params, body=body, content_type="application/merge-patch+json"
        )

    async def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Create ``body`` in the collection or subresource at ``path``; return the answer.

        Raises:
            ClusterError: anything but success.
        """
        return await self._ask("POST", path, body=body, content_type="application/json")

    async def delete(self, path: str, *, uid: str) -> bytes:
        """Delete the object at ``path``, if it has that UID; return the answer.

        Raises:
            ClusterError: anything but success; 409 when it has another UID.
        """
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
        }
        return await self._ask("DELETE", path, body=options, content_type="application/json")

    async def server_seconds(self) -> float:
        """Return the API server's clock, in unix seconds. Its resolution is a second.

        Raises:
            ClusterError: no answer, or one without a time.
        """
        seconds = api.REQUEST_TIMEOUT_SECONDS
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_TIMEOUT_SECONDS)
        path = "/version"
        async with self._answered("GET", path, timeout) as response:
            date = response.headers.get("Date", "")
        try:
            return email.utils.parsedate_to_datetime(date).timestamp()
        except ValueError as err:
            raise ClusterError(
                f"GET {path}: the answer has no time ({quoted(date)}); look for a proxy between "
                "this node and the API server"
            ) from err

    async def chunks(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """Yield the list at ``path``, in pieces as they arrive, to save memory.

        Raises:
            ClusterError: anything but success, a pause as long as the time limit of a
                request, `_LIST_TIMES` of that for the whole, or more than `LONGEST_LIST_BYTES`.
        """
        seconds = api.REQUEST_TIMEOUT_SECONDS
        timeout = aiohttp.ClientTimeout(
            total=_LIST_TIMES * seconds,
            sock_connect=CONNECT_TIMEOUT_SECONDS,
            sock_read=seconds,
        )
        async with self._answered("GET", path, timeout, params=params) as response:
            with answers.failures("GET", path, seconds):  # turns aiohttp's errors into ours
                async for chunk in _limited(response.content, "GET", path, LONGEST_LIST_BYTES):
                    yield chunk

    async def lines(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a watch, until the API server ends it; close the iterator
        (``contextlib.aclosing``) to end it earlier.

        The first line is empty and does not come from the API server: it tells the caller that the
        watch was accepted, since the first event may take minutes.

        Args:
            path: of the collection.
            params: of the query; the connection counts as dead after a silence of
                ``timeoutSeconds`` and one minute.

        Raises:
            ClusterError: the watch could not begin, broke off, was silent for too long, or sent a
                line longer than `LONGEST_LINE_BYTES`.
        """
        silence = float(params.get("timeoutSeconds") or _WATCH_SECONDS) + api.WATCH_SILENCE_SECONDS
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_TIMEOUT_SECONDS, sock_read=silence
        )
        async with self._answered("GET", path, timeout, params=params) as response:
            yield b""
            with answers.failures("GET", path, silence):
                async with contextlib.aclosing(_split(response.content, path)) as lines:
                    async for line in lines:
                        yield line

    async def close(self) -> None:
        """Close all connections; twice is fine."""
        if self._connections is not None:
            connections, self._connections = self._connections, None
            await connections.close()

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "",
    ) -> bytes:
        seconds = api.REQUEST_TIMEOUT_SECONDS
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_TIMEOUT_SECONDS)
        encoded = None if body is None else msgspec.json.encode(body)
        async with self._answered(
            method, path, timeout, params=params, data=encoded, content_type=content_type
        ) as response:
            with answers.failures(method, path, seconds):
                kept = bytearray()
                async for chunk in _limited(response.content, method, path, LONGEST_OBJECT_BYTES):
                    kept += chunk
                return bytes(kept)

    @contextlib.asynccontextmanager
    async def _answered(
        self,
        method: str,
        path: str,
        limits: aiohttp.ClientTimeout,
        *,
        params: Mapping[str, str] | None = None,
        data: bytes | None = None,
        content_type: str = "",
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield its successful response; release the connection at the end.
        ``limits`` are the time limits for connecting, for the whole and for each pause in the body.
        """
        verb, resource = answers.verb_and_resource(method, path, params or {})

        async def ask(access: Access) -> tuple[Connections, aiohttp.ClientResponse]:
            connections = await self._connections_for(access)
            headers = {"Authorization": access.authorization} if access.authorization else {}
            if content_type:
                headers["Content-Type"] = content_type
            try:
                seconds = api.REQUEST_TIMEOUT_SECONDS
                response = await connections.request(
                    method, path, limits, seconds, params=params, data=data, headers=headers
                )
            except ClusterError as err:
                self.requests[verb, resource, str(err.status or "no answer")] += 1
                # Only the 403 about a missing right has this text; an admission policy, or a
                # namespace that is being deleted, forbids as well. Reads do not count: a ConfigMap
                # that may not be read is not used.
                if (
                    verb in _WRITES
                    and err.status == 403
                    and f" cannot {verb} resource " in str(err)
                ):
                    self.missing_rights.add(f"{verb} {resource}")
                raise
            self.requests[verb, resource, str(response.status)] += 1
            self.missing_rights.discard(f"{verb} {resource}")
            return connections, response

        access = await self._credentials.access()
        try:
            connections, response = await ask(access)
        except ClusterError as err:
            if (
                not answers.refuses_credentials(err)
                or (newer := await self._credentials.access(fresh=True)) == access
            ):
                raise
            connections, response = await ask(newer)
        try:
            yield response
        finally:
            response.close() if verb == "watch" else response.release()
            await connections.leave(response)  # counts the request as ended

    async def _connections_for(self, access: Access) -> Connections:
        """Return connections for ``access`` (the API server's address and the credentials): the
        current ones if only the token differs, or new ones.
        """
        async with self._connecting:
            current = self._connections
            if current is None or not current.suits(access):
                before, current = current, await Connections.opened(access)
                self._connections = current
                if before is not None:
                    await before.retire()
            current.users += 1  # before another request can replace and close them
            return current


async def _limited(
    content: aiohttp.StreamReader, method: str, path: str, most_bytes: int
) -> AsyncGenerator[bytes, None]:
    """Yield the pieces of a body, and fail when it is longer than ``most_bytes``."""
    read = 0
    async for chunk in content.iter_any():
        read += len(chunk)
        if read > most_bytes:
            text = f"the answer has more than {most_bytes >> 20} MiB; it is given up"
            raise ClusterError(
                f"{method} {path}: {text}; look for a proxy between this node and the API server"
            )
        yield chunk
        await asyncio.sleep(0)  # lets other tasks run during an endless answer


async def _split(content: aiohttp.StreamReader, path: str) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a body without line ends; skip empty lines."""
    rest = bytearray()
    async for chunk in content.iter_any():
        first, *others = chunk.split(b"\n")
        rest += first
        for part in others:
            # A line may be large, so no second copy is kept while the caller reads it.
            line, rest = bytes(rest), bytearray(part)
            if line.strip():
                yield line
            del line
        if len(rest) > LONGEST_LINE_BYTES:
            raise ClusterError(
                f"GET {path}: the watch sent a line of more than {LONGEST_LINE_BYTES >> 20} MiB; "
                "it is given up"
            )
    if rest.strip():
        yield bytes(rest)
