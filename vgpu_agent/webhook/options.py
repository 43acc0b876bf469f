"""The options of the webhook; `cli` makes them of its flags."""

from __future__ import annotations

import msgspec

from vgpu_agent.webhook.new_pod import Pinned

# etcd takes a pod of at most 1.5 MiB. A review of it, in JSON, is larger than this limit only if
# the pod has very many < > &, which take six bytes each there.
MAX_BODY_BYTES = 8 * 1024 * 1024
# Less than timeoutSeconds of the webhook configurations: the API server does not wait longer.
BODY_SECONDS = 4.0


class OwnCertificateOptions(msgspec.Struct, frozen=True):
    """The Secret of the webhook's own certificate, and the names that the certificate is for.

    Attributes:
        namespace: of the Secret and of the Service.
        secret: the name of the Secret.
        service: the name of the Service by which the API server calls.
        configurations: the names of the webhook configurations that call it.
    """

    namespace: str
    secret: str
    service: str
    configurations: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The Service's names in DNS; the API server uses the first one."""
        short = f"{self.service}.{self.namespace}"
        return (f"{short}.svc", short, f"{short}.svc.cluster.local")


class CertificateFiles(msgspec.Struct, frozen=True):
    """A certificate that something else renews, such as cert-manager.

    Attributes:
        certificate: a file in PEM, with its chain.
        key: a file in PEM.
    """

    certificate: str
    key: str


class Options(msgspec.Struct, frozen=True):
    """The options of the webhook.

    Attributes:
        certificate: where the server's certificate comes from.
        host: the address to listen on; empty for all of the machine.
        port: the port; 0 takes a free one.
        pinned: the treatment of ``spec.nodeName`` of pods that a scheduler must place; by default a
            node affinity replaces it.
        watches_nodes: warn of requests that are larger than the largest Node that was seen.
        assumed_largest_node: GPUs of the largest Node that there is or may come, unless a larger
            one was seen; a request of more is refused. 0 where the operator does not say.
        max_body_bytes: of a review; a larger one is refused.
        body_seconds: how long a review may take to arrive.
        drain_seconds: how long the server goes on after a signal to stop, so that it is removed
            from the Service's endpoints first.
        stop_seconds: how long answers under way may take after that.
    """

    certificate: CertificateFiles | OwnCertificateOptions
    host: str = ""
    port: int = 9443
    pinned: Pinned = Pinned.AFFINITY
    watches_nodes: bool = True
    assumed_largest_node: int = 0
    max_body_bytes: int = MAX_BODY_BYTES
    body_seconds: float = BODY_SECONDS
    drain_seconds: float = 5.0
    stop_seconds: float = 10.0
