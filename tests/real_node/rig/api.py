"""A small client of the rig's API server: JSON in, JSON out, on connections that stay open.

From the standard library alone, so that nothing the agent uses to talk to the API server can hide
its own mistakes in the tests of it.

Called by inside.py and node.py during the start, and by tests as `Rig.api`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import ssl
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from tests.real_node.rig import netns
from tests.real_node.rig.errors import RigError
from tests.real_node.rig.layout import API_SERVER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.real_node.rig.layout import Layout

_TIMEOUT_SECONDS = 30.0
_MAX_IDLE_SECONDS = 30.0
_ADDRESS = (str(urlsplit(API_SERVER).hostname), 443)

Json = dict[str, Any]


class ApiError(RigError):
    """The API server answered with an error; ``status`` is the HTTP status, ``reason`` and the
    message are those of its Status object.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason


class _Connection(http.client.HTTPSConnection):
    """An HTTPS connection whose socket is made in the rig's network namespace,
    when there is one to join.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        network_namespace: str | None,
        *,
        timeout_seconds: float = _TIMEOUT_SECONDS,
    ) -> None:
        super().__init__(*_ADDRESS, context=context, timeout=timeout_seconds)
        self._tls = context
        self._network_namespace = network_namespace
        self.used_at = time.monotonic()

    def connect(self) -> None:
        if self._network_namespace is None:
            plain = socket.create_connection(_ADDRESS, timeout=self.timeout)
        else:
            plain = netns.connect(
                self._network_namespace, _ADDRESS, timeout_seconds=_TIMEOUT_SECONDS
            )
            plain.settimeout(self.timeout)
        self.sock = self._tls.wrap_socket(plain, server_hostname=_ADDRESS[0])

    def is_usable(self) -> bool:
        """Tell whether the next request may go here. The server sends nothing between two requests,
        so what can be read is the end. One that is idle for long may be ended at any moment.
        """
        if self.sock is None or time.monotonic() - self.used_at > _MAX_IDLE_SECONDS:
            return False
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)


class _Connections:
    """The open connections to one API server that no request uses now. They belong to no user: the
    headers of each request say who asks.
    """

    def __init__(self, context: ssl.SSLContext, network_namespace: str | None) -> None:
        self._context = context
        self._network_namespace = network_namespace
        self._idle: list[_Connection] = []
        weakref.finalize(self, _close, self._idle)

    def new(self, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> _Connection:
        """A connection of the caller's own, which the caller closes."""
        return _Connection(self._context, self._network_namespace, timeout_seconds=timeout_seconds)

    def take(self) -> _Connection:
        """An idle connection, or a new one. Close it or `give_back`."""
        with contextlib.suppress(IndexError):
            while True:
                connection = self._idle.pop()
                if connection.is_usable():
                    return connection
                connection.close()
        return self.new()

    def give_back(self, connection: _Connection) -> None:
        """Keep it for the next request; its answer has been read to the end."""
        connection.used_at = time.monotonic()
        self._idle.append(connection)

    def close(self) -> None:
        """Close all that are idle."""
        _close(self._idle)


def _close(connections: list[_Connection]) -> None:
    with contextlib.suppress(IndexError):
        while True:
            connections.pop().close()


class Api:
    """Requests as one user. Paths are the API's own, e.g. ``/api/v1/namespaces/default/pods``.

    Several threads may use it at once. `close` it before its API server's network goes away: an
    open connection would keep the network alive.
    """

    def __init__(self, connections: _Connections, token: str, user: str = "") -> None:
        self._connections = connections
        self._token = token
        self._user = user

    def close(self) -> None:
        """Close the connections that no request uses now, those of `as_bearer` and `as_user` as
        well.
        """
        self._connections.close()

    @classmethod
    def of(
        cls, layout: Layout, *, user: str = "admin", network_namespace: str | None = None
    ) -> Self:
        """The client of ``user``; without ``network_namespace`` the caller must already be
        inside.
        """
        context = ssl.create_default_context(cafile=str(layout.pki / "ca.crt"))
        kubeconfig = json.loads(layout.kubeconfig(user).read_text())
        token = kubeconfig["users"][0]["user"]["token"]
        return cls(_Connections(context, network_namespace), token)

    def as_bearer(self, token: str) -> Api:
        """The same server, asked with another token, such as a service account's."""
        return Api(self._connections, token)

    def as_user(self, name: str) -> Api:
        """The same server, asked as a user whom this one impersonates. A service account of that
        name need not exist.
        """
        return Api(self._connections, self._token, name)

    def get(self, path: str) -> Json:
        """Raises: ApiError, as do all of these."""
        return self._json("GET", path)

    def find(self, path: str) -> Json | None:
        """Return what `get` does, but None for an object that does not exist."""
        try:
            return self.get(path)
        except ApiError as err:
            if err.status == http.HTTPStatus.NOT_FOUND:
                return None
            raise

    def exists(self, path: str) -> bool:
        """Tell whether there is such an object."""
        return self.find(path) is not None

    def names(self, path: str) -> list[str]:
        """The names of the objects behind a path of a collection;
        the API server sends their metadata only.
        """
        body = self._request(
            "GET",
            path,
            None,
            "application/json",
            "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1",
        )
        return [item["metadata"]["name"] for item in json.loads(body)["items"] or ()]

    @contextlib.contextmanager
    def watching_names(self, path: str, *, timeout_seconds: float) -> Iterator[Iterator[str]]:
        """The names of objects behind a path of a collection as they come to match its selectors,
        those that do already first.

        The API server sends their metadata only, and nothing is asked for again and again. The
        iteration ends when the API server ends the watch after ``timeout_seconds``; leave the
        context to stop earlier.
        """
        accept = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
        connection = self._connections.new(timeout_seconds=timeout_seconds + _TIMEOUT_SECONDS)
        try:
            connection.request(
                "GET",
                f"{path}{'&' if '?' in path else '?'}watch=1&timeoutSeconds={timeout_seconds:.0f}",
                headers=self._headers(accept),
            )
            response = connection.getresponse()
            if response.status >= http.HTTPStatus.BAD_REQUEST:
                raise _error(response.status, response.read())
            changes = (json.loads(line) for line in response)
            yield (
                change["object"]["metadata"]["name"]
                for change in changes
                if change["type"] == "ADDED"
            )
        finally:
            connection.close()

    def post(self, path: str, body: Json) -> Json:
        return self._json("POST", path, body)

    def put(self, path: str, body: Json) -> Json:
        return self._json("PUT", path, body)

    def patch(
        self, path: str, body: Json, *, content_type: str = "application/merge-patch+json"
    ) -> Json:
        return self._json("PATCH", path, body, content_type)

    def delete(self, path: str, body: Json | None = None) -> Json:
        return self._json("DELETE", path, body)

    def send_all(self, requests: Iterable[tuple[str, str, Json]], *, connections: int = 8) -> None:
        """Make many requests, each (method, path, body), on up to ``connections`` at once.

        Raises:
            ApiError: the first one that is refused; others may have been made by then.
        """
        todo = iter(list(requests))
        lock = threading.Lock()

        def work(_: int) -> None:
            while True:
                with lock:
                    each = next(todo, None)
                if each is None:
                    return
                method, path, body = each
                kind = "merge-patch+json" if method == "PATCH" else "json"
                self._request(method, path, body, f"application/{kind}")

        with ThreadPoolExecutor(max_workers=connections) as threads:
            list(threads.map(work, range(connections)))

    def text(self, path: str) -> str:
        """The body of a GET as it is, for logs and probes."""
        return self._request("GET", path, None, "application/json").decode(errors="replace")

    def is_ready(self) -> bool:
        """Tell whether the API server answers and calls itself ready;
        false while it cannot be reached.
        """
        try:
            return self.text("/readyz") == "ok"
        except (OSError, http.client.HTTPException, ApiError):
            return False

    def _json(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> Json:
        answer: Json = json.loads(self._request(method, path, body, content_type))
        return answer

    def _request(
        self,
        method: str,
        path: str,
        body: Json | None,
        content_type: str,
        accept: str = "application/json, */*",
    ) -> bytes:
        headers = {**self._headers(accept), "Content-Type": content_type}
        connection = self._connections.take()
        try:
            connection.request(
                method, path, body=None if body is None else json.dumps(body), headers=headers
            )
            response = connection.getresponse()
            content = response.read()
        except BaseException:
            connection.close()  # the rest of the answer would be taken for the next one
            raise
        self._connections.give_back(connection)
        if response.status >= http.HTTPStatus.BAD_REQUEST:
            raise _error(response.status, content)
        return content

    def _headers(self, accept: str) -> dict[str, str]:
        """Return the headers that say who asks, and for what."""
        headers = {"Authorization": f"Bearer {self._token}", "Accept": accept}
        if self._user:
            headers["Impersonate-User"] = self._user
        return headers


def _error(status: int, content: bytes) -> ApiError:
    try:
        told = json.loads(content)
        return ApiError(status, told.get("reason", ""), told.get("message", ""))
    except (ValueError, AttributeError):
        # the kubelet behind a proxied request answers in plain text
        return ApiError(
            status, http.HTTPStatus(status).phrase, content.decode(errors="replace").strip()
        )
