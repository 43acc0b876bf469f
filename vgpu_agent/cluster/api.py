"""The API server as every writer and watcher of this package needs it,
and the paths of the objects that may be touched.

The writers (`node_publisher`, `pod_publisher`, `events`, `reschedule`, `rescue`) know the API
server only through `Api`, so their tests replace it with a small object in memory. `client` is the
real one. Paths are those of core/v1 and admissionregistration.k8s.io/v1, as every Kubernetes since
1.22 serves them.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping


# How long one request may take; a watch is not one of them.
REQUEST_TIMEOUT_SECONDS = 15.0
# How long beyond its timeoutSeconds a watch may be silent before the connection counts as dead.
WATCH_SILENCE_SECONDS = 60.0


class Api(Protocol):
    """The API server. Every call has a time limit of its own (`REQUEST_TIMEOUT_SECONDS`).

    All methods raise `ClusterError`: status 409 for a failed precondition (422 for another UID in a
    patch), 404 for an object that is gone, 403 for a missing permission, 429 with
    ``retry_after_seconds`` for "later", 0 for no answer at all.
    """

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> bytes:
        """The object at ``path``, as JSON."""
        ...

    async def patch(
        self, path: str, body: Mapping[str, Any], *, params: Mapping[str, str] | None = None
    ) -> bytes:
        """Change the object at ``path`` by a merge patch (RFC 7386); return the changed object."""
        ...

    async def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Create ``body`` in the collection or subresource at ``path``; return the answer."""
        ...

    async def delete(self, path: str, *, uid: str) -> bytes:
        """Delete the object at ``path``, if it has that UID; return the answer."""
        ...


class ListingApi(Api, Protocol):
    """The API server for those who also read lists that may be long."""

    def chunks(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """Yield the list at ``path`` as it arrives, in pieces of the JSON text."""
        ...


def node_path(name: str) -> str:
    """The path of the Node of that name."""
    return f"/api/v1/nodes/{name}"


def pod_path(namespace: str, name: str) -> str:
    """The path of the pod of that name."""
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def pods_path(namespace: str) -> str:
    """The path of the pods of a namespace."""
    return f"/api/v1/namespaces/{namespace}/pods"


def events_path(namespace: str) -> str:
    """The path of the events of a namespace."""
    return f"/api/v1/namespaces/{namespace}/events"


def secret_path(namespace: str, name: str) -> str:
    """The path of the Secret of that name; without a name, that of the namespace's Secrets."""
    return f"/api/v1/namespaces/{namespace}/secrets{f'/{name}' if name else ''}"


def webhook_configuration_path(kind: str, name: str) -> str:
    """The path of the webhook configuration of that name; ``kind`` is ``mutating`` or
    ``validating``.
    """
    return f"/apis/admissionregistration.k8s.io/v1/{kind}webhookconfigurations/{name}"


def timestamp(unix_seconds: float) -> str:
    """The time as ``metav1.Time`` has it: RFC 3339, UTC, whole seconds."""
    return dt.datetime.fromtimestamp(int(unix_seconds), dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
