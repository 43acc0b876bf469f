"""The messages between the API server and a webhook (``AdmissionReview`` of admission.k8s.io;
vgpu-manager §6).

Version v1 is what our webhook configurations ask for. Those of vgpu-manager ask for v1beta1, whose
messages have the same form, so both are answered, each in its own version.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from vgpu_agent.errors import RequestRefusedError, quoted, shortened

VERSIONS = ("admission.k8s.io/v1", "admission.k8s.io/v1beta1")
KIND = "AdmissionReview"
# Lengths of texts in characters: a decoder's error inside a message, and an answer's message and
# warnings.
_LONGEST_ERROR = 500
_LONGEST_MESSAGE = 2000
_LONGEST_WARNING = 240  # the API server cuts them at 256
_MAX_WARNINGS = 8
FORBIDDEN, BAD_REQUEST, TOO_LARGE, INTERNAL_ERROR = 403, 400, 413, 500  # HTTP statuses
# The API server writes the version first, and the request's UID before everything else of it.
_VERSION = re.compile(rb'"apiVersion"\s*:\s*"(admission\.k8s\.io/v1(?:beta1)?)"')
_UID = re.compile(rb'"uid"\s*:\s*"([0-9A-Za-z-]{1,128})"')
START_BYTES = 1024
"""The number of first bytes of a review that contain its version and its UID."""

Operation = dict[str, Any]
"""One operation of a JSON Patch (RFC 6902)."""


class _Group(msgspec.Struct):
    """A kind of API objects by its group and its name in paths; here, a *resource* is not one that
    containers have limits for.
    """

    group: str = ""
    resource: str = ""


class Request(msgspec.Struct, rename="camel"):
    """A request to the API server that is to be reviewed.

    Attributes:
        uid: of the review; the answer must repeat it.
        resource: the API group of the object and its name in paths, such as ``pods``.
        sub_resource: such as ``status``; empty or None for the object itself.
        namespace: of the object.
        operation: ``CREATE``, ``UPDATE`` and so on.
        object: the object in JSON, as it would be stored.
    """

    uid: str = ""
    resource: _Group = msgspec.field(default_factory=_Group)
    sub_resource: str | None = None
    namespace: str | None = None
    operation: str = ""
    object: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)

    @property
    def is_new_pod(self) -> bool:
        """Tell whether a pod is to be created."""
        return (
            self.operation == "CREATE"
            and (self.resource.group, self.resource.resource) == ("", "pods")
            and not self.sub_resource
        )


class Review(msgspec.Struct, rename="camel"):
    """A review, with the parts of it that can be read.

    Attributes:
        version: of the message, one of `VERSIONS`.
        uid: of the request; empty where not even that can be read.
        request: the request; None where it cannot be used.
        problem: why it cannot be used.
    """

    version: str = VERSIONS[0]
    uid: str = ""
    request: Request | None = None
    problem: str = ""


class _Envelope(msgspec.Struct, rename="camel"):
    kind: str = ""
    api_version: str = ""
    request: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class _Uid(msgspec.Struct):
    uid: str = ""


class _Status(msgspec.Struct):
    code: int
    message: str
    status: str = "Failure"


class _Response(msgspec.Struct, rename="camel", omit_defaults=True):
    uid: str
    allowed: bool
    status: _Status | None = None
    patch_type: str = ""
    patch: bytes = b""
    warnings: list[str] = msgspec.field(default_factory=list)


class _Answer(msgspec.Struct, rename="camel"):
    api_version: str
    kind: str
    response: _Response


def read_review(body: bytes) -> Review:
    """Decode a review; never raises."""
    try:
        envelope = msgspec.json.decode(body, type=_Envelope)
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:
        return cut_review(body, f"no {KIND}: {shortened(str(err), _LONGEST_ERROR)}")
    review = Review()
    if envelope.api_version in VERSIONS:
        review.version = envelope.api_version
    raw = bytes(envelope.request)
    if raw not in {b"", b"null"}:
        review.uid = _uid_in(raw)
    try:
        review.request = _request(envelope, raw)
    except RequestRefusedError as err:
        review.problem = str(err)
    return review


def cut_review(start: bytes, problem: str) -> Review:
    """Read the version and the UID from the first bytes of a review that cannot be read as a whole,
    for the reason ``problem``: an answer needs no more.
    """
    version, uid = (pattern.search(start[:START_BYTES]) for pattern in (_VERSION, _UID))
    return Review(
        version=version[1].decode() if version else VERSIONS[0],
        uid=uid[1].decode() if uid else "",
        problem=problem,
    )


def _request(envelope: _Envelope, raw: bytes) -> Request:
    if envelope.kind != KIND or envelope.api_version not in VERSIONS:
        raise RequestRefusedError(
            f"expected {KIND} of {' or '.join(VERSIONS)}, got {quoted(envelope.kind, 80)} of "
            f"{quoted(envelope.api_version, 80)}; set admissionReviewVersions: [v1] in the webhook "
            "configuration"
        )
    if raw in {b"", b"null"}:
        raise RequestRefusedError(f"no request in the {KIND}")
    try:
        return msgspec.json.decode(raw, type=Request)
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:
        raise RequestRefusedError(
            f"the request of the {KIND} cannot be read: {shortened(str(err), _LONGEST_ERROR)}"
        ) from err


def _uid_in(raw: bytes) -> str:
    try:
        return msgspec.json.decode(raw, type=_Uid).uid
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""


def allowed(
    review: Review, patch: list[Operation] | None = None, warnings: tuple[str, ...] = ()
) -> bytes:
    """Return the answer that lets the request pass, changed by ``patch``."""
    response = _Response(
        review.uid,
        allowed=True,
        warnings=[shortened(text, _LONGEST_WARNING) for text in warnings[:_MAX_WARNINGS]],
    )
    if patch:
        response.patch_type, response.patch = "JSONPatch", msgspec.json.encode(patch)
    return _encoded(review, response)


def denied(review: Review, reason: str, *, code: int = FORBIDDEN) -> bytes:
    """Return the answer that refuses the request.

    Args:
        review: the review.
        reason: the sentence that the user who sent the request sees.
        code: the HTTP status that this user gets.
    """
    status = _Status(code, shortened(reason, _LONGEST_MESSAGE))
    return _encoded(review, _Response(review.uid, allowed=False, status=status))


def _encoded(review: Review, response: _Response) -> bytes:
    return msgspec.json.encode(_Answer(review.version, KIND, response))
