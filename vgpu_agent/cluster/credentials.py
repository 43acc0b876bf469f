"""The API server's address and the agent's credentials:
from a kubeconfig file, or from the service account of its pod.

`agent` asks `credentials` whether there are any, and passes them to `client`, which asks for an
`Access` before each request. Tokens of service accounts live an hour and their CA can be exchanged
while the agent runs. The files are therefore read again every minute in which there is a request,
and at once when the API server refuses the credentials.

A service account is one token file, one CA file and an address in the environment. A kubeconfig is
read by kubernetes_asyncio, which handles credential plugins and all else that it may contain. That
library is imported only then: it takes 38 MiB and some tenths of a second.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from vgpu_agent.errors import ClusterError, shortened
from vgpu_agent.redaction import conceal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vgpu_agent.config.settings import Settings

# Where the kubelet mounts a pod's service account: a path of the Kubernetes API, the same on every
# node.
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

# The kubelet renews a token when a fifth of its life is left, twelve minutes of an hour; a minute
# is far inside that.
_REREAD_SECONDS = 60.0
_LONGEST_REASON = 300  # characters


# A dataclass, because its representation leaves out the secrets.
@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """The way to reach the API server, from one reading.

    Attributes:
        server: its URL, without a slash at the end.
        authorization: value of the header of that name; empty for none.
        ca_file: CA certificates to trust; empty for those of the system.
        certificate_file: our client certificate; empty for none.
        key_file: its key.
        verify: the server's certificate is checked at all.
        server_name: the name that its certificate must have; empty for the host in ``server``.
        proxy: URL of a proxy that the kubeconfig names; empty for none. The environment is never
            read.
        tls_fingerprint: changes with the content of any of the files, so that the client then opens
            new connections.
    """

    server: str
    authorization: str = dataclasses.field(default="", repr=False)
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    verify: bool = True
    server_name: str = ""
    proxy: str = dataclasses.field(default="", repr=False)
    tls_fingerprint: str = ""


class Credentials:
    """An `Access` that is read again while the agent runs.

    State: the last one and when it was read, on the event loop's clock. A reading that fails leaves
    the last one in use for as long as the API server accepts it.

    Args:
        read: reads the files; called in a thread, raises `ClusterError`.
        origin: the kind of credentials, for messages.
    """

    def __init__(self, read: Callable[[], Access], origin: str) -> None:
        self.origin = origin
        self._read = read
        self._access: Access | None = None
        self._read_at = 0.0
        self._reading = asyncio.Lock()

    async def access(self, *, fresh: bool = False) -> Access:
        """Return the current way to reach the API server.

        Args:
            fresh: read the files although they were read within the last minute.

        Raises:
            ClusterError: they cannot be read, and never could.
        """
        async with self._reading:
            now = asyncio.get_running_loop().time()
            if self._access is None or fresh or now - self._read_at >= _REREAD_SECONDS:
                try:
                    self._access = await asyncio.to_thread(self._read)
                except ClusterError:
                    if self._access is None:
                        raise
                self._read_at = now
            return self._access


def credentials(
    settings: Settings,
    *,
    environment: Mapping[str, str] = os.environ,
    service_account: Path = SERVICE_ACCOUNT,
) -> Credentials | None:
    """Find the credentials of this agent; None when it has none, or must not use them.

    Not for the event loop's thread, because it looks at one file.

    Args:
        settings: ``kubeconfig`` and ``cluster.enabled``.
        environment: has the API server's address from the kubelet (``KUBERNETES_SERVICE_HOST``).
        service_account: where the kubelet mounts token and CA.
    """
    if settings.cluster.enabled == "never":
        return None
    return from_place(
        kubeconfig=settings.kubeconfig, environment=environment, service_account=service_account
    )


def from_place(
    *,
    kubeconfig: str,
    environment: Mapping[str, str] = os.environ,
    service_account: Path = SERVICE_ACCOUNT,
) -> Credentials | None:
    """Find the credentials in a kubeconfig, if one is named, or those of the pod; None when there
    are none. Not for the event loop's thread, because it looks at one file.
    """
    if kubeconfig:
        return Credentials(lambda: _from_kubeconfig(kubeconfig), f"kubeconfig {kubeconfig}")
    if environment.get("KUBERNETES_SERVICE_HOST") and (service_account / "token").is_file():
        return Credentials(
            lambda: _from_service_account(environment, service_account),
            f"service account in {service_account}",
        )
    return None


def _from_kubeconfig(path: str) -> Access:
    """Read a kubeconfig; a credential plugin that it names is run."""
    if not Path(path).is_file():
        raise ClusterError(
            f"kubeconfig {path} does not exist; set `kubeconfig` to a file that does, or leave it "
            "empty"
        )
    # see the module's docstring
    from kubernetes_asyncio.client import Configuration  # noqa: PLC0415
    from kubernetes_asyncio.config import load_kube_config  # noqa: PLC0415

    configuration = Configuration()
    try:
        # In a thread of its own, because the library reads files in its coroutine.
        asyncio.run(
            load_kube_config(
                config_file=path, client_configuration=configuration, persist_config=False
            )
        )
        files = [
            configuration.ssl_ca_cert or "",
            configuration.cert_file or "",
            configuration.key_file or "",
        ]
        return Access(
            server=(configuration.host or "").rstrip("/"),
            authorization=_authorization(configuration.api_key.get("BearerToken") or ""),
            ca_file=files[0],
            certificate_file=files[1],
            key_file=files[2],
            verify=configuration.verify_ssl,
            server_name=configuration.tls_server_name or "",
            proxy=configuration.proxy or "",
            tls_fingerprint=_fingerprint(files),
        )
    except Exception as err:  # noqa: BLE001
        # Any exception of the library means that the file cannot be used. It is not kept as the
        # cause: its text may quote the file, or the output of a credential plugin.
        raise ClusterError(
            f"kubeconfig {path} cannot be used: {_why(err)}; try it with kubectl --kubeconfig "
            f"{path} get nodes"
        ) from None


def _from_service_account(environment: Mapping[str, str], directory: Path) -> Access:
    """Read the files that the kubelet mounts into a pod; the API server's address is in the
    environment of every container.
    """
    host, port = (environment.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    ca_file = str(directory / "ca.crt")
    try:
        token = (directory / "token").read_text(encoding="ascii").strip()
        fingerprint = _fingerprint([ca_file])
    except (OSError, UnicodeError) as err:
        token = fingerprint = ""
        trouble = _why(err)
    else:
        trouble = (
            "its token is empty"
            if not token
            else ""
            if port
            else "KUBERNETES_SERVICE_PORT is not set"
        )
    if trouble:  # raised outside `except`, so that it is not chained to an error with the content
        raise ClusterError(
            f"the service account in {directory} cannot be used: {trouble}; the agent's pod needs "
            "automountServiceAccountToken: true"
        )
    return Access(
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        authorization=_authorization(f"Bearer {token}"),
        ca_file=ca_file,
        tls_fingerprint=fingerprint,
    )


# Beginnings of kubernetes_asyncio's errors that quote names in a kubeconfig, but no values.
_HARMLESS = re.compile(
    r"Invalid kube-config file\.|File does not |oidc: No valid |exec: process returned -?\d+"
)


def _why(err: Exception) -> str:
    """Return the reason why credentials cannot be used, without a value from them."""
    if isinstance(err, OSError):
        return ": ".join(
            filter(None, (str(err.filename or ""), err.strerror or type(err).__name__))
        )
    mark = getattr(err, "problem_mark", None)
    if mark is not None:  # of a YAML parser, whose text shows the line
        return f"line {mark.line + 1}, column {mark.column + 1} is not YAML"
    text = " ".join(str(err).split())
    if text.startswith("exec:"):
        return (
            "its credential plugin failed "
            f"({found[0] if (found := _HARMLESS.match(text)) else 'no usable answer'})"
        )
    return (
        shortened(text, _LONGEST_REASON)
        if _HARMLESS.match(text)
        else f"it is not in the expected form ({type(err).__name__})"
    )


def _authorization(value: str) -> str:
    """Return ``value`` as a header can carry it, hidden in every log line from now on; editors end
    files of tokens with newlines.
    """
    authorization = " ".join(value.split())
    conceal(authorization)
    return authorization


def _fingerprint(files: Iterable[str]) -> str:
    """Return a digest of what is in ``files``; empty names are left out."""
    digest = hashlib.sha256()
    for path in filter(None, files):
        digest.update(Path(path).read_bytes() + b"\0")
    return digest.hexdigest()
