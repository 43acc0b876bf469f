"""A small client of the rig's API server: JSON in, JSON out, one connection per request.

From the standard library alone, so that nothing the agent uses to talk to the API server can hide
its own mistakes in the tests of it.

Called by inside.py and node.py during the start, and by tests as `Rig.api`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
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

    def connect(self) -> None:
        if self._network_namespace is None:
            plain = socket.create_connection(_ADDRESS, timeout=self.timeout)
        else:
            plain = netns.connect(
                self._network_namespace, _ADDRESS, timeout_seconds=_TIMEOUT_SECONDS
            )
            plain.settimeout(self.timeout)
        self.sock = self._tls.wrap_socket(plain, server_hostname=_ADDRESS[0])


class Api:
    """Requests as one user. Paths are the API's own, e.g. ``/api/v1/namespaces/default/pods``."""

    def __init__(
        self, context: ssl.SSLContext, token: str, network_namespace: str | None, user: str = ""
    ) -> None:
        self._context = context
        self._token = token
        self._network_namespace = network_namespace
        self._user = user

    @classmethod
    def of(
        cls, layout: Layout, *, user: str = "admin", network_namespace: str | None = None
    ) -> Self:
        """The client of ``user``; without ``network_namespace`` the caller must already be
        inside.
        """
        context = ssl.create_default_context(cafile=str(layout.pki / "ca.crt"))
        kubeconfig = json.loads(layout.kubeconfig(user).read_text())
        return cls(context, kubeconfig["users"][0]["user"]["token"], network_namespace)

    def as_bearer(self, token: str) -> Api:
        """The same server, asked with another token, such as a service account's."""
        return Api(self._context, token, self._network_namespace)

    def as_user(self, name: str) -> Api:
        """The same server, asked as a user whom this one impersonates. A service account of that
        name need not exist.
        """
        return Api(self._context, self._token, self._network_namespace, name)

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
        connection = _Connection(
            self._context,
            self._network_namespace,
            timeout_seconds=timeout_seconds + _TIMEOUT_SECONDS,
        )
        try:
            headers = {"Authorization": f"Bearer {self._token}", "Accept": accept}
            connection.request(
                "GET",
                f"{path}{'&' if '?' in path else '?'}watch=1&timeoutSeconds={timeout_seconds:.0f}",
                headers=headers,
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
        """Make many requests, each (method, path, body), on connections that stay open.

        Raises:
            ApiError: the first one that is refused; others may have been made by then.
        """
        todo = iter(list(requests))
        lock = threading.Lock()

        def work(_: int) -> None:
            connection = _Connection(self._context, self._network_namespace)
            headers = {"Authorization": f"Bearer {self._token}"}
            try:
                while True:
                    with lock:
                        each = next(todo, None)
                    if each is None:
                        return
                    method, path, body = each
                    headers["Content-Type"] = (
                        "application/merge-patch+json" if method == "PATCH" else "application/json"
                    )
                    connection.request(method, path, body=json.dumps(body), headers=headers)
                    response = connection.getresponse()
                    content = response.read()
                    if response.status >= http.HTTPStatus.BAD_REQUEST:
                        raise _error(response.status, content)
            finally:
                connection.close()

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
        connection = _Connection(self._context, self._network_namespace)
        try:
            headers = {
                "Authorization": f"Bearer {self._token}",
                "Content-Type": content_type,
                "Accept": accept,
            }
            if self._user:
                headers["Impersonate-User"] = self._user
            connection.request(
                method, path, body=None if body is None else json.dumps(body), headers=headers
            )
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        if response.status >= http.HTTPStatus.BAD_REQUEST:
            raise _error(response.status, content)
        return content


def _error(status: int, content: bytes) -> ApiError:
    try:
        told = json.loads(content)
        return ApiError(status, told.get("reason", ""), told.get("message", ""))
    except (ValueError, AttributeError):
        # the kubelet behind a proxied request answers in plain text
        return ApiError(
            status, http.HTTPStatus(status).phrase, content.decode(errors="replace").strip()
        )
