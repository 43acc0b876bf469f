"""The faults in answers of the simulated API server, and the entries of its log of requests.

A `Fault` selects requests and an effect on them. Tests put some into ``ApiServer.faults``. The
first that matches a request takes effect, as often as its ``times`` say. The kinds are those that
clusters show their clients: load balancers that answer HTML, watches that end at once or never,
histories that were compacted, answers that got lost although the write was done.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class FaultKind(enum.StrEnum):
    """The effect on a request. Those for watches act after its headers were sent."""

    STATUS = "status"  # an HTTP error with a Status object: `code`, `reason`, `retry_after_seconds`
    HTML = "html"  # a proxy in between: `code` (502 by default) with a page of HTML
    SILENCE = "silence"  # a half-open connection: nothing comes, and the connection stays
    # the connection is reset before anything is answered; of a watch, after its headers
    RESET = "reset"
    LOST_ANSWER = "lost answer"  # the write is done, then the connection is reset
    GARBAGE = "garbage"  # 200 with a body that is no JSON
    TRUNCATED = "truncated"  # 200 with half of the answer
    CLOSE = "close"  # a watch that ends at once, cleanly
    # a watch that sends an ERROR event with a Status: `code`, 410 by default
    ERROR_EVENT = "error event"
    GIANT_LINE = "giant line"  # a watch that sends a line of `size` bytes


@dataclasses.dataclass
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: the effect.
        verb: ``get``, ``list``, ``watch``, ``create``, ``patch``, ``delete``; empty for any.
        resource: with its subresource, e.g. ``pods`` or ``nodes/status``; empty for any.
        name: of the object; empty for any.
        namespace: of the object; empty for any.
        times: how many requests it hits; -1 for all of them until it is removed.
        skip: how many matching requests pass unharmed before that.
        code: HTTP status of an error; 0 takes the usual one of the kind.
        reason: of the Status object.
        retry_after_seconds: of the Retry-After header; 0 sends none.
        size: bytes of a giant line.
    """

    kind: FaultKind
    verb: str = ""
    resource: str = ""
    name: str = ""
    namespace: str = ""
    times: int = -1
    skip: int = 0
    code: int = 0
    reason: str = ""
    retry_after_seconds: int = 0
    size: int = 16 * 1024 * 1024

    def matches(self, request: Request) -> bool:
        """Tell whether the fault selects that request."""
        return (
            self.times != 0
            and self.verb in ("", request.verb)
            and self.resource in ("", request.resource)
            and self.name in ("", request.name)
            and self.namespace in ("", request.namespace)
        )


@dataclasses.dataclass
class Request:
    """One line of the log of requests.

    Attributes:
        method: of HTTP.
        path: without its query.
        verb: as in Kubernetes' audit log: ``get``, ``list``, ``watch``, ``create``, ``patch``,
            ``delete``.
        resource: with its subresource, e.g. ``pods/binding``.
        body: the JSON that came with it, or None.
        at: unix seconds at which it came.
        status: the HTTP status that it was answered with; 0 while it was not.
    """

    method: str
    path: str
    verb: str
    resource: str
    namespace: str = ""
    name: str = ""
    query: Mapping[str, str] = dataclasses.field(default_factory=dict)
    body: Any = None
    at: float = 0.0
    status: int = 0
    content_type: str = ""
    authorization: str = ""
    user_agent: str = ""

    @property
    def is_write(self) -> bool:
        """Tell whether the request is meant to change something."""
        return self.method != "GET"


def take(faults: list[Fault], request: Request) -> Fault | None:
    """Return the fault that hits this request, and count its ``times`` down; None when the request
    passes unharmed.
    """
    for fault in faults:
        if not fault.matches(request):
            continue
        if fault.skip > 0:
            fault.skip -= 1
            continue
        if fault.times > 0:
            fault.times -= 1
        return fault
    return None
