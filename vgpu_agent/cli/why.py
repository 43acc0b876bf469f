"""``vgpu-agent why``: ask the scheduler extender why a pod does not start, or where it is.

It needs nothing but the extender's port, so it works inside the extender's pod and through a port
forward. Like ``status`` it uses plain http.client: no proxy from the environment, and no library
that takes long to import.
"""

from __future__ import annotations

import argparse
import http.client
import os
import re
import ssl
import urllib.parse
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import AgentError, ConfigError, quoted
from vgpu_agent.scheduler import page
from vgpu_agent.scheduler.explain import Explanation, Situation

if TYPE_CHECKING:
    from typing import Any

ENVIRONMENT = "VGPU_AGENT_SCHEDULER"
_DEFAULT = "http://127.0.0.1:3456"
_POD = re.compile(r"[^/\s]+/[^/\s]+\Z")
_EXIT_FAILED = 1
_LONGEST_BODY_BYTES = 64 * 1024 * 1024
_EXAMPLES = f"""examples:
  kubectl -n vgpu-agent port-forward deploy/vgpu-scheduler 3456 &
  vgpu-agent why ml/train-0                                the extender at {_DEFAULT}
  vgpu-agent why ml/train-0 --all                          a row for each Node
  vgpu-agent why ml/train-0 --json | jq .situation         for scripts
  vgpu-agent why ml/train-0 --scheduler https://127.0.0.1:3456 --ca-file ca.crt

Without an address it also tries https, because the extender may serve with TLS.
The exit status is 0 when the extender explained the pod, 1 when it could not be reached, was not
ready or knows no such pod, 2 for wrong flags.
{ENVIRONMENT} replaces the default address."""


def add_parser(subparsers: Any) -> None:
    """Declare the command below ``subparsers`` (argparse's special action,
    which has no public type).
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "why",
        help="ask the scheduler extender why a pod does not start, or where its cards are",
        description=(
            "Ask the scheduler extender why a pod does not start: the reason of each Node, what "
            "would have to change, and how many such pods fit; or where the pod's cards are."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("pod", metavar="NAMESPACE/NAME", type=_pod, help="the pod")
    parser.add_argument(
        "--scheduler", metavar="URL", help=f"where the extender listens (default {_DEFAULT})"
    )
    parser.add_argument("--all", action="store_true", help="show a row for each Node")
    parser.add_argument("--json", action="store_true", help="print the extender's answer as JSON")
    parser.add_argument(
        "--ca-file", metavar="FILE", help="trust the certificates in this file, for https"
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="accept any certificate, for https; the answer may then be another server's",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_seconds,
        default=30.0,
        help="how long to wait for the extender (default 30)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation of a pod.

    Raises:
        ConfigError: the address or the file of certificates is invalid.
        AgentError: the extender cannot be reached or is not ready, or another program answers; one
            line with the remedy.
    """
    url = _url(arguments.scheduler)
    query = urllib.parse.urlencode({"pod": arguments.pod, "all": int(arguments.all)}, safe="/")
    path = f"{url.path.rstrip('/')}/explain?{query}"
    try:
        status, body = _fetch(url, path, arguments)
    except AgentError:
        found_with_tls = None
        if not (arguments.scheduler or os.environ.get(ENVIRONMENT)):
            found_with_tls = _with_tls(url, path, arguments)
        if found_with_tls is None:
            raise
        status, body = found_with_tls
    found = _decoded(status, body, url)
    print(
        msgspec.json.format(body, indent=2).decode().strip()
        if arguments.json
        else page.explanation(found).rstrip("\n")
    )
    # `UNKNOWN`: the extender knows no such pod
    return _EXIT_FAILED if found.situation == Situation.UNKNOWN.value else 0


def _url(flag: str | None) -> urllib.parse.SplitResult:
    source = "--scheduler" if flag else f"environment variable {ENVIRONMENT}"
    text = flag or os.environ.get(ENVIRONMENT) or _DEFAULT
    try:
        url = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
        valid = url.scheme in {"http", "https"} and url.hostname and url.port != 0
    except ValueError:  # a port that is no number, or brackets that do not match
        valid = False
    if not valid or url.query or url.fragment or url.username is not None:
        raise ConfigError(
            [f"{source}: {quoted(text, 100)} is no address; write http://HOST:PORT or https://…"]
        )
    return url


def _with_tls(
    url: urllib.parse.SplitResult, path: str, arguments: argparse.Namespace
) -> tuple[int, bytes] | None:
    """Return the answer of an extender at the default address that serves with TLS; None without
    one. No certificate is needed to believe what would be believed there without TLS.
    """
    try:
        return _fetch(url._replace(scheme="https"), path, arguments, insecure=True)
    except AgentError:
        return None


def _fetch(
    url: urllib.parse.SplitResult,
    path: str,
    arguments: argparse.Namespace,
    *,
    insecure: bool = False,
) -> tuple[int, bytes]:
    where = f"{url.scheme}://{url.netloc}"
    connection = _connection(url, arguments, insecure=insecure or arguments.insecure)
    try:
        connection.request("GET", path, headers={"Accept": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read(_LONGEST_BODY_BYTES)
    except ConnectionRefusedError as err:
        raise AgentError(
            f"cannot reach the extender at {where}: connection refused; forward its port with "
            "kubectl port-forward, or name its address with --scheduler"
        ) from err
    except TimeoutError as err:
        raise AgentError(
            f"the extender at {where} did not answer within {arguments.timeout:g} s; look into its "
            "log, or wait longer with --timeout"
        ) from err
    except ssl.SSLCertVerificationError as err:
        raise AgentError(
            f"the certificate of {where} is not accepted: {err.verify_message}; name its CA with "
            "--ca-file, use the host name that it is made for, or accept it with --insecure"
        ) from err
    except ssl.SSLError as err:
        raise AgentError(
            f"TLS with {where} failed: {err.reason or err}; if the extender serves without TLS, "
            "write http:// in --scheduler"
        ) from err
    except http.client.HTTPException as err:
        raise AgentError(
            f"the server at {where} does not speak HTTP ({type(err).__name__}); check --scheduler, "
            "and write https:// if the extender serves with TLS"
        ) from err
    except OSError as err:
        raise AgentError(
            f"cannot reach the extender at {where}: {err.strerror or err}; check --scheduler"
        ) from err
    finally:
        connection.close()


def _connection(
    url: urllib.parse.SplitResult, arguments: argparse.Namespace, *, insecure: bool
) -> http.client.HTTPConnection:
    host = url.hostname or ""
    if url.scheme == "http":
        return http.client.HTTPConnection(host, url.port or 80, timeout=arguments.timeout)
    try:
        context = ssl.create_default_context(cafile=arguments.ca_file)
    except (OSError, ssl.SSLError) as err:  # a missing file, or one without certificates
        raise ConfigError(
            [f"--ca-file: {arguments.ca_file}: {err.strerror or err}; expected certificates in PEM"]
        ) from err
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(
        host, url.port or 443, timeout=arguments.timeout, context=context
    )


class _Error(msgspec.Struct):
    error: str = ""


def _decoded(status: int, body: bytes, url: urllib.parse.SplitResult) -> Explanation:
    where = f"{url.scheme}://{url.netloc}"
    try:
        if error := msgspec.json.decode(body, type=_Error).error:
            raise AgentError(f"the extender at {where} answers {status}: {error}")
        return msgspec.json.decode(body, type=Explanation)
    except msgspec.DecodeError as err:  # covers ValidationError
        raise AgentError(
            f"{where} answers {status} with something that is not an extender's explanation; check "
            "--scheduler, and write https:// if the extender serves with TLS"
        ) from err


def _pod(text: str) -> str:
    if not _POD.match(text):
        raise argparse.ArgumentTypeError(
            f"expected NAMESPACE/NAME, for example default/train-0, got {text[:60]!r}"
        )
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds above 0 and up to 3600, got {text!r}")
    return seconds
