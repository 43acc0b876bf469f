"""The parser of requests to the simulated API server: the resource of the path, the verb, and the
selected objects.

Called by `sim.api.server` for each request. Unknown parts are refused by name rather than guessed,
so that a test never passes because a selector was ignored.
"""

from __future__ import annotations

import dataclasses
import re
import time
from typing import TYPE_CHECKING, Any, Self

import msgspec

from vgpu_agent.sim.api.faults import Request
from vgpu_agent.sim.api.objects import KINDS, ApiRefusalError

if TYPE_CHECKING:
    from aiohttp import web

    from vgpu_agent.sim.api.objects import Object

_PATH = re.compile(
    r"/(?:api/v1|apis/(?:(?:events|admissionregistration|coordination)\.k8s\.io|policy)/v1)"
    r"(?:/namespaces/(?P<namespace>[^/]+))?/"
    r"(?P<resource>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?"
)
_SUBRESOURCES = {"nodes": ("status",), "pods": ("status", "binding", "eviction")}
_FIELDS = (
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.schedulerName",
    "status.phase",
)
_TERM = re.compile(r"(?P<field>[\w.]+)(?P<operator>!=|==|=)(?P<value>[^,]*)")
_TRUE = ("true", "1", "True")


@dataclasses.dataclass(frozen=True)
class Selector:
    """A fieldSelector: terms that must all hold. Each has the dotted path of a field, whether the
    field must be equal (or else unequal), and the value.
    """

    terms: tuple[tuple[str, bool, str], ...] = ()

    @classmethod
    def of(cls, request: Request) -> Self:
        """The selector of a list or a watch.

        Raises:
            ApiRefusalError: 400, a field, an operator or a kind of selector that is not known here.
        """
        if request.query.get("labelSelector"):
            raise ApiRefusalError(
                400,
                "BadRequest",
                "the simulated API server knows no labelSelector; select by fields",
            )
        terms = []
        for text in filter(None, request.query.get("fieldSelector", "").split(",")):
            term = _TERM.fullmatch(text)
            if term is None or term["field"] not in _FIELDS:
                raise ApiRefusalError(
                    400,
                    "BadRequest",
                    f"field label not supported: {text}; use one of {', '.join(_FIELDS)}",
                )
            terms.append((term["field"], term["operator"] != "!=", term["value"]))
        return cls(tuple(terms))

    def matches(self, item: Object) -> bool:
        """Tell whether the object is selected."""
        return all((_field(item, field) == value) is equal for field, equal, value in self.terms)


async def parse_request(web_request: web.Request) -> Request:
    """Return the request in Kubernetes' terms, with its body.

    Raises:
        ApiRefusalError: 404, no such path; 400, a body that is no JSON object.
    """
    found = _PATH.fullmatch(web_request.path)
    resource = found["resource"] if found else ""
    subresource = (found["sub"] or "") if found else ""
    if (
        found is None
        or resource not in KINDS
        or (subresource and subresource not in _SUBRESOURCES.get(resource, ()))
    ):
        raise ApiRefusalError(
            404, "NotFound", f"the server could not find the requested resource: {web_request.path}"
        )
    query, name = dict(web_request.query), found["name"] or ""
    body = await _body(web_request)
    return Request(
        method=web_request.method,
        path=web_request.path,
        verb=_verb(web_request.method, name=name, watching=query.get("watch", "") in _TRUE),
        resource=f"{resource}/{subresource}" if subresource else resource,
        namespace=found["namespace"] or "",
        name=name,
        query=query,
        body=body,
        at=time.time(),
        content_type=web_request.content_type,
        authorization=web_request.headers.get("Authorization", ""),
        user_agent=web_request.headers.get("User-Agent", ""),
    )


async def _body(web_request: web.Request) -> Any:
    raw = await web_request.read()
    if not raw:
        return None
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError as err:
        raise ApiRefusalError(
            400, "BadRequest", f"the body of the request is no JSON: {err}"
        ) from err
    if not isinstance(body, dict):
        raise ApiRefusalError(400, "BadRequest", "the body of the request is no JSON object")
    return body


def _verb(method: str, *, name: str, watching: bool) -> str:
    if method == "GET":
        return "watch" if watching else "get" if name else "list"
    return {"POST": "create", "PATCH": "patch", "DELETE": "delete", "PUT": "update"}.get(
        method, method.lower()
    )


def _field(item: Object, path: str) -> str:
    value: Any = item
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return "" if value is None else str(value)
