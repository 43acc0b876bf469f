"""The identity and the rights of a client, by its token, as the API server reports them
(TokenReview, SubjectAccessReview), and the rights of this process (SelfSubjectAccessReview).

Used by `agent` for clients that scrape its metrics, and by ``vgpu-agent doctor``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from vgpu_agent.errors import ClusterError

if TYPE_CHECKING:
    from vgpu_agent.cluster.api import Api

TOKEN_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"  # noqa: S105 - a path
ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
OWN_ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"

_Answer = TypeVar("_Answer")


class Right(msgspec.Struct, frozen=True):
    """A right at the API server: one verb on one resource of a group.

    Attributes:
        verb: as in RBAC, e.g. ``patch``.
        resource: with its subresource, e.g. ``nodes/status``.
        group: the API group; empty for the core group.
        namespace: empty for all namespaces, or for a resource that has none.
        name: of the one object; empty for all.
    """

    verb: str
    resource: str
    group: str = ""
    namespace: str = ""
    name: str = ""


class _User(msgspec.Struct):
    username: str = ""
    uid: str = ""
    groups: list[str] | None = None
    extra: dict[str, list[str]] | None = None


class _TokenStatus(msgspec.Struct):
    authenticated: bool = False
    user: _User | None = None


class _TokenReview(msgspec.Struct):
    status: _TokenStatus


class _AccessStatus(msgspec.Struct):
    allowed: bool = False
    denied: bool = False


class _AccessReview(msgspec.Struct):
    status: _AccessStatus


async def may_get(api: Api, token: str, path: str) -> bool:
    """Tell whether the owner of ``token`` may get the non-resource URL ``path``.

    Raises:
        ClusterError: no answer, or one that cannot be read.
    """
    body: dict[str, Any] = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": token},
    }
    review = _decoded(await api.post(TOKEN_REVIEWS, body), _TokenReview).status
    if not review.authenticated or review.user is None or not review.user.username:
        return False
    user = review.user
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": user.username,
            "uid": user.uid,
            "groups": user.groups or [],
            "extra": user.extra or {},
            "nonResourceAttributes": {"path": path, "verb": "get"},
        },
    }
    access = _decoded(await api.post(ACCESS_REVIEWS, body), _AccessReview).status
    return access.allowed and not access.denied


async def have(api: Api, right: Right) -> bool:
    """Tell whether this process has ``right``.

    Raises:
        ClusterError: no answer, or one that cannot be read.
    """
    resource, _, subresource = right.resource.partition("/")
    body: dict[str, Any] = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {
            "resourceAttributes": {
                "verb": right.verb,
                "group": right.group,
                "resource": resource,
                "subresource": subresource,
                "namespace": right.namespace,
                "name": right.name,
            }
        },
    }
    access = _decoded(await api.post(OWN_ACCESS_REVIEWS, body), _AccessReview).status
    return access.allowed and not access.denied


def _decoded(answer: bytes, kind: type[_Answer]) -> _Answer:
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:
        raise ClusterError("the API server sent a review that cannot be read") from err
