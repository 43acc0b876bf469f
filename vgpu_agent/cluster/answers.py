"""The meaning of an unexpected answer of the API server:
one sentence each, with the HTTP status and the pause before a retry, as far as they are known.

Used by `client` around every request. The server may answer with a Status object, a proxy before it
with a page of HTML, the network with nothing. Each becomes a `ClusterError` whose text names the
request, the cause and, where there is one, the remedy.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import email.utils
import os
import re
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from vgpu_agent.errors import ClusterError, quoted, shortened
from vgpu_agent.redaction import redacted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_LONGEST_BODY_BYTES = 64 * 1024  # of an error; a Status is far below that
_LONGEST_MESSAGE = 1000  # characters of a Status; it may hold the whole difference of two pods
_LONGEST_QUOTE = 200  # characters of a page that is not a Status
_LONGEST_RETRY_SECONDS = 3600.0
_LONGEST_RETRY_HEADER = 40  # characters; a date has 29
_LONGEST_CAUSE = 500  # characters of aiohttp's text, which may quote a URL or a header
_RESOURCE = re.compile(
    r"/(?:api|apis/[^/]+)/[^/]+(?:/namespaces/[^/]+)?/(?P<resource>[^/]+)(?:/(?P<name>[^/]+))?(?:/"
    r"(?P<sub>[^/]+))?"
)
_REMEDIES = {
    401: (
        "the API server does not accept the agent's token or certificate; look at its service "
        "account, or at `kubeconfig`"
    ),
    403: "the agent's service account may not do that; its ClusterRole (manifests/) must allow it",
}


class _Details(msgspec.Struct):
    seconds: int | None = msgspec.field(default=None, name="retryAfterSeconds")


class _Status(msgspec.Struct):
    """metav1.Status, with only the used fields."""

    kind: str = ""
    message: str = ""
    reason: str = ""
    code: int = 0
    details: _Details | None = None


def verb_and_resource(method: str, path: str, params: Mapping[str, str]) -> tuple[str, str]:
    """Name a request in the words of Kubernetes' audit log: ``("watch", "pods")``,
    ``("patch", "nodes/status")``.
    """
    found = _RESOURCE.fullmatch(path)
    resource, name, sub = (
        (found["resource"], found["name"], found["sub"]) if found else (path, "", "")
    )
    verbs = {
        "POST": "create",
        "PATCH": "patch",
        "GET": "watch" if params.get("watch") == "true" else "get" if name else "list",
    }
    return verbs.get(method, method.lower()), f"{resource}/{sub}" if sub else resource


@contextlib.contextmanager
def failures(
    method: str, path: str, seconds: float, *, server: str = "the API server"
) -> Iterator[None]:
    """Turn what aiohttp raises into `ClusterError`.

    Args:
        method: of the request.
        path: of the request.
        seconds: the time limit that has passed when aiohttp raises TimeoutError.
        server: the name of the server in messages.
    """
    try:
        yield
    except aiohttp.ClientConnectorCertificateError as err:
        why = (
            "its certificate is not trusted: "
            f"{shortened(str(err.certificate_error), _LONGEST_CAUSE)}"
        )
        raise ClusterError(
            f"{method} {path}: {server}: {why}; compare it with the CA in `kubeconfig` or the "
            "service account"
        ) from err
    except aiohttp.ClientSSLError as err:
        raise ClusterError(f"{method} {path}: TLS with {server} failed: {_cause(err)}") from err
    except aiohttp.ClientConnectorDNSError as err:
        raise ClusterError(
            f"{method} {path}: the name of {server} cannot be resolved: {_cause(err)}"
        ) from err
    except aiohttp.ConnectionTimeoutError as err:
        raise ClusterError(
            f"{method} {path}: {server} did not accept a connection in time"
        ) from err
    except TimeoutError as err:
        raise ClusterError(
            f"{method} {path}: {server} has been silent for {seconds:g} s; the connection is closed"
        ) from err
    except aiohttp.ClientConnectorError as err:
        # asyncio writes its own text over the system's.
        why = os.strerror(err.os_error.errno) if err.os_error.errno else _cause(err)
        raise ClusterError(f"{method} {path}: {server} cannot be reached: {why}") from err
    except (aiohttp.ClientError, OSError) as err:
        raise ClusterError(
            f"{method} {path}: the connection to {server} broke: {_cause(err)}"
        ) from err
    except ValueError as err:
        # aiohttp's error for a URL or a header that it cannot send, and for HTTP that it cannot
        # read
        raise ClusterError(f"{method} {path}: cannot be asked of {server}: {_cause(err)}") from err


async def check(response: aiohttp.ClientResponse, method: str, path: str) -> None:
    """Raise an error unless the answer is a success. Reading the body may also raise aiohttp's
    errors, which `failures` turns into `ClusterError`.

    Raises:
        ClusterError: anything but success, with the HTTP status and the time that the server asked
            us to wait.
    """
    kind = response.content_type[:100]
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise ClusterError(
            f"{method} {path}: the answer is compressed ({quoted(encoding, 40)}), which was not "
            "asked for; it is not read, because a small body could unfold into gigabytes; look for "
            "a proxy between this node and the API server",
            # an error has no status of success; 0 stands for no usable answer
            status=0 if response.status // 100 == 2 else response.status,
        )
    if response.status // 100 == 2 and "html" not in kind:
        return
    body = await response.content.read(_LONGEST_BODY_BYTES)
    try:
        status = msgspec.json.decode(body, type=_Status)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        status = _Status()
    if status.kind == "Status":
        # Our own token, which a server may repeat, is removed before the text is cut: half a token
        # could not be recognised.
        reply = redacted(
            " ".join(": ".join(filter(None, (status.reason, status.message))).split())
        )[:_LONGEST_MESSAGE]
        remedy = f"; {_REMEDIES[response.status]}" if response.status in _REMEDIES else ""
        text = f"{method} {path}: the API server answered {response.status} {reply}{remedy}"
    else:
        quote = redacted(
            " ".join(re.sub(rb"<[^>]*>", b" ", body).decode(errors="replace").split())
        )[:_LONGEST_QUOTE]
        text = (
            f"{method} {path}: an answer that is not the API server's: HTTP {response.status}, "
            f"{kind}, {quote!r}; look for a proxy or a load balancer between this node and the API "
            "server"
        )
    raise ClusterError(
        text,
        status=response.status,
        retry_after_seconds=_retry_after(response.headers.get("Retry-After", ""), status),
    )


def refuses_credentials(err: ClusterError) -> bool:
    """Tell whether fresh credentials could turn this failure into success."""
    return err.status == 401 or isinstance(err.__cause__, aiohttp.ClientSSLError)


def _retry_after(header: str, status: _Status) -> float:
    """Return the seconds to wait by the header (a number, or a date) or the Status;
    an hour at most.
    """
    seconds = _seconds(header.strip())
    if status.details is not None and status.details.seconds:
        # Compared as whole numbers: one of 400 digits cannot be a float.
        seconds = max(
            seconds, float(max(0, min(status.details.seconds, int(_LONGEST_RETRY_SECONDS))))
        )
    return min(seconds, _LONGEST_RETRY_SECONDS)


def _seconds(header: str) -> float:
    if header.isascii() and header.isdigit():
        return float(header) if len(header) <= _LONGEST_RETRY_HEADER else _LONGEST_RETRY_SECONDS
    if not header or len(header) > _LONGEST_RETRY_HEADER:
        return 0.0
    try:
        at = email.utils.parsedate_to_datetime(header)
        at = at if at.tzinfo else at.replace(tzinfo=dt.UTC)
        return max(0.0, (at - dt.datetime.now(dt.UTC)).total_seconds())
    except (ValueError, OverflowError):
        return 0.0


def _cause(err: BaseException) -> str:
    return shortened(redacted(" ".join(str(err).split())), _LONGEST_CAUSE) or type(err).__name__
