"""The webhook's own certificate: made once for all replicas, kept in a Secret, renewed before it
expires, and written into the webhook configurations so that the API server trusts it.

Replicas agree through the Secret. Each write names the resource version that it replaces. If two
replicas write at once, the write of one is refused, and that replica reads the other's certificate.
A round compares the present state with the desired one, and writes only the difference. So the
process may end after any step, and other programs may change the Secret and the configurations.

An *authority* is a CA certificate; *the authorities* are the one that has signed and, while it is
valid, the previous one, as one PEM text.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import time
from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent.cluster.api import secret_path, webhook_configuration_path
from vgpu_agent.errors import AgentError, CertificateError, ClusterError, listed, shortened
from vgpu_agent.log import ChangeFilter
from vgpu_agent.webhook import certificates

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping

    from vgpu_agent.cluster.api import Api
    from vgpu_agent.journal import Journal
    from vgpu_agent.webhook.certificates import ServerCertificate
    from vgpu_agent.webhook.options import OwnCertificateOptions

# How often Secret and configurations are compared, and how soon a failed round is repeated.
CHECK_SECONDS, RETRY_SECONDS = 30.0, 5.0
# A failure that goes on is logged again after this time.
_AGAIN_SECONDS = 3600.0
# How long the previous authorities stay trusted after a change. The other replicas need two rounds
# to take over the new certificate, and more if the API server is slow.
_KEEP_SECONDS = 600.0
_CONFLICT, _NOT_FOUND = 409, 404
# Each conflict means that another replica has written, and there are two or three.
_MAX_TRIES = 5
_LONGEST_ERROR = 500
KINDS = ("mutating", "validating")  # of webhook configurations
# The keys in the Secret.
_AUTHORITIES, _AUTHORITY_KEY, _CERTIFICATE, _KEY = "ca.crt", "ca.key", "tls.crt", "tls.key"


class _Metadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _Secret(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    data: dict[str, str] | None = None


class OwnCertificate:
    """The certificate; see the module. `run` is the loop, `context` is for each new connection.

    State: the certificate in use, the authorities in the Secret and since when they are known, and
    the authorities in the webhook configurations after the last round. Until the first round has
    succeeded, a temporary certificate that no other replica has is in use, so that probes are
    answered.
    """

    def __init__(
        self,
        options: OwnCertificateOptions,
        api: Api,
        *,
        journal: Journal,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Make a certificate for the time until the Secret has been read.

        Raises:
            CertificateError: the name of the Service cannot be one in a certificate.
        """
        self._options, self._api, self._journal, self._clock = options, api, journal, clock
        self._in_use = certificates.make(options.names, clock())
        self._context = certificates.context_of(self._in_use)
        # those in the Secret, and since when they are known; those in the webhook configurations
        self._authorities, self._known_since = b"", 0.0
        self._published = b""
        # why the last round failed; empty after one that succeeded
        self._error = "it has not been stored in the Secret yet"
        # tells new failures from repeated ones, which are logged again after that time only
        self._failures = ChangeFilter(again_seconds=_AGAIN_SECONDS)

    async def context(self) -> ssl.SSLContext:
        """Return the TLS context for the next connection."""
        return self._context

    @property
    def expires_at(self) -> float:
        """The unix seconds at which the certificate in use expires."""
        return certificates.expires_at(self._in_use)

    @property
    def trouble(self) -> str:
        """The reason why the API server cannot call; empty once it can. A later failure does not
        count while the certificate in use is valid.
        """
        if not self._published:
            return f"the API server does not trust the certificate yet: {self._error}"
        if self.expires_at <= self._clock():
            return (
                "the certificate has expired and was not renewed: "
                f"{self._error or 'it is to be renewed soon'}"
            )
        return ""

    async def run(self, beat: Callable[[], None]) -> None:
        """Keep the Secret and the webhook configurations in the desired state, until cancelled;
        ``beat`` is called in each round.
        """
        while True:
            beat()
            try:
                await self.round()
            except AgentError as err:
                self._failed(str(err))
                pause = max(RETRY_SECONDS, getattr(err, "retry_after_seconds", 0.0))
                await asyncio.sleep(min(pause, CHECK_SECONDS))
            else:
                self._failures.forget("round")  # the next failure is a new one
                await asyncio.sleep(CHECK_SECONDS)

    def _failed(self, error: str) -> None:
        self._error = error
        if self._failures.is_new("round", error, now=self._clock()):
            self._journal.record(
                "webhook.certificate_failed",
                level="warning",
                error=shortened(error, _LONGEST_ERROR),
                in_use_until=int(self.expires_at),
            )

    async def round(self) -> None:
        """Run one round: bring the Secret, the webhook configurations and the server to the desired
        state.

        Raises:
            ClusterError: the API server did not answer, or refused.
            CertificateError: no certificate can be made.
        """
        stored = await self._stored()
        if stored.authorities != self._authorities:
            self._authorities, self._known_since = stored.authorities, self._clock()
        if self._may_be_served(stored):
            await self._serve(stored)
        wanted = [(kind, name) for name in self._options.configurations for kind in KINDS]
        found = [await self._publish(kind, name) for kind, name in wanted]
        if not any(found):
            raise ClusterError(
                f"there is no webhook configuration {listed(self._options.configurations)}, so the "
                "API server never calls; apply manifests/components/webhook, or correct "
                "--webhook-configurations"
            )
        self._published, self._error = stored.authorities, ""

    def _may_be_served(self, stored: ServerCertificate) -> bool:
        """Tell whether the server may use the stored certificate now.

        A certificate of a new authority is used one round after the webhook configurations have
        got the authority, because each API server takes a moment to see the change. It is used at
        once if the API server does not trust the present certificate anyway.
        """
        trusted = (self._in_use.authorities, self._published)
        return not self._published or stored.authorities in trusted

    async def _serve(self, stored: ServerCertificate) -> None:
        if stored != self._in_use:
            self._context = await asyncio.to_thread(certificates.context_of, stored)
            self._in_use = stored
            self._journal.record("webhook.certificate_in_use", until=int(self.expires_at))

    # -- the Secret --------------------------------------------------------------------------------

    async def _stored(self) -> ServerCertificate:
        """Return the certificate in the Secret; make or renew it first if need be."""
        for _ in range(_MAX_TRIES):
            secret = await self._read()
            found = _certificate_in(secret.data or {})
            now, names = self._clock(), self._options.names
            if found is None:
                wanted = self._in_use  # which the API server trusts, if the Secret was emptied
                if certificates.is_due(wanted, now):  # for renewal
                    wanted = await self._make(before=wanted)
            elif problem := await asyncio.to_thread(certificates.problem, found, names, now):
                self._journal.record(
                    "webhook.certificate_unusable",
                    level="warning",
                    secret=f"{self._options.namespace}/{self._options.secret}",
                    reason=problem,
                    remedy="it is replaced by a new one",
                )
                wanted = await self._replacement(found)
            elif certificates.is_due(found, now):
                wanted = await self._make(before=found)
            else:
                return found
            try:
                await self._write(secret, wanted)
            except ClusterError as err:
                if err.status != _CONFLICT:
                    raise
            else:
                self._journal.record(
                    "webhook.certificate_made", until=int(certificates.expires_at(wanted))
                )
                return wanted
        raise ClusterError(
            f"Secret {self._options.namespace}/{self._options.secret} is written by others all the "
            "time; look for a program that restores it"
        )

    async def _replacement(self, found: ServerCertificate) -> ServerCertificate:
        """Make a certificate in place of one that cannot be used: signed by the same authority if
        that is possible, otherwise by the authority in use, which the API server trusts.
        """
        now, names = self._clock(), self._options.names
        for before in (found, self._in_use):
            with contextlib.suppress(CertificateError):
                wanted = await self._make(before=before)
                if not certificates.problem(wanted, names, now):
                    return wanted
        return await self._make(before=None)

    async def _make(self, *, before: ServerCertificate | None) -> ServerCertificate:
        """Make a certificate; by the authority of ``before``, if there is one that is valid for
        long enough.
        """
        return await asyncio.to_thread(
            certificates.make, self._options.names, self._clock(), before
        )

    async def _read(self) -> _Secret:
        path = secret_path(self._options.namespace, self._options.secret)
        try:
            raw = await self._api.get(path)
        except ClusterError as err:
            if err.status == _NOT_FOUND:
                return _Secret()
            raise
        secret: _Secret = _decoded(raw, _Secret, path)
        return secret

    async def _write(self, secret: _Secret, wanted: ServerCertificate) -> None:
        options = self._options
        data = {
            key: base64.b64encode(pem).decode()
            for key, pem in (
                (_AUTHORITIES, wanted.authorities),
                (_AUTHORITY_KEY, wanted.authority_key),
                (_CERTIFICATE, wanted.certificate),
                (_KEY, wanted.key),
            )
        }
        if version := secret.metadata.resource_version:
            await self._api.patch(
                secret_path(options.namespace, options.secret),
                {"metadata": {"resourceVersion": version}, "data": data},
            )
            return
        await self._api.post(
            secret_path(options.namespace, name=""),  # all Secrets of the namespace
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": options.secret, "namespace": options.namespace},
                "type": "Opaque",
                "data": data,
            },
        )

    # -- the configurations ------------------------------------------------------------------------

    async def _publish(self, kind: str, name: str) -> bool:
        """Write the authorities into the ``caBundle`` of each webhook that calls this Service. Tell
        whether the configuration exists: an operator may want only one of the two kinds.
        """
        path = webhook_configuration_path(kind, name)
        for _ in range(_MAX_TRIES):
            try:
                raw = await self._api.get(path)
            except ClusterError as err:
                if err.status == _NOT_FOUND:
                    return False
                raise
            found = _decoded(raw, dict[str, Any], path)
            webhooks, ours, changed = self._with_bundle(found.get("webhooks"))
            if not ours:
                raise ClusterError(
                    f"no webhook of {kind} configuration {name} calls Service "
                    f"{self._options.namespace}/{self._options.service}; apply "
                    "manifests/components/webhook again, or correct --service-name or "
                    "--webhook-configurations"
                )
            if not changed:
                return True
            version = (found.get("metadata") or {}).get("resourceVersion", "")
            try:
                await self._api.patch(
                    path, {"metadata": {"resourceVersion": version}, "webhooks": webhooks}
                )
            except ClusterError as err:
                if err.status != _CONFLICT:
                    raise
            else:
                self._journal.record("webhook.authority_published", configuration=name, kind=kind)
                return True
        raise ClusterError(
            f"{kind} configuration {name} is written by others all the time; look for a program "
            "that restores it"
        )

    def _with_bundle(self, webhooks: object) -> tuple[list[Any], bool, bool]:
        """Return all webhooks, ours with the bundle; whether one is ours; whether one has changed.

        A merge patch replaces a list as a whole, so it must contain the other webhooks unchanged.
        """
        after: list[Any] = []
        ours = changed = False
        for webhook in webhooks if isinstance(webhooks, list) else ():
            found = webhook if isinstance(webhook, dict) else {}
            client = found.get("clientConfig") or {}
            service = client.get("service") or {}
            if (service.get("namespace"), service.get("name")) != (
                self._options.namespace,
                self._options.service,
            ):
                after.append(webhook)
                continue
            ours = True
            bundle = self._bundle(client.get("caBundle"))
            if client.get("caBundle") == bundle:
                after.append(webhook)
                continue
            changed = True
            after.append({**found, "clientConfig": {**client, "caBundle": bundle}})
        return after, ours, changed

    def _bundle(self, present: object) -> str:
        """Return ``caBundle``. The present authorities stay in it for a while, because other
        replicas serve the previous certificate until their next rounds.
        """
        now, authorities = self._clock(), self._authorities
        if isinstance(present, str) and now - self._known_since < _KEEP_SECONDS:
            with contextlib.suppress(ValueError):
                authorities = certificates.bundle_of(authorities, base64.b64decode(present), now)
        return base64.b64encode(authorities).decode()


def _certificate_in(data: Mapping[str, str]) -> ServerCertificate | None:
    """Return the certificate in the data of a Secret; None if it has none of the keys. A value that
    cannot be decoded becomes an empty text.
    """
    keys = (_AUTHORITIES, _AUTHORITY_KEY, _CERTIFICATE, _KEY)
    if not any(data.get(key) for key in keys):
        return None
    found = []
    for key in keys:
        try:
            found.append(base64.b64decode(data.get(key, ""), validate=True))
        except binascii.Error:
            found.append(b"")
    return certificates.ServerCertificate(*found)


def _decoded(raw: bytes, form: Any, path: str) -> Any:
    try:
        return msgspec.json.decode(raw, type=form)
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:
        # without the cause, because its text may quote the Secret
        raise ClusterError(
            f"GET {path}: the API server's answer is no such object ({type(err).__name__})"
        ) from None
