"""The delivery of a decided grant to its container, as `allocation` sees it. The package
`vgpu_agent.runtime` implements it, in `runtime/grants.py`.

The CDI name identifies the ids, not a pod. The kubelet gets it before the owner of the ids is
known. The spec of that name is written once the kubelet's records have named the pod. The spec file
also contains a record of the grant. So after a restart of the agent the decisions are known from
the files, even while the API server is away.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vgpu_agent.isolation.edits import Provision
    from vgpu_agent.model import Grant, Owner, Share

# .internal is reserved for private use, so this kind cannot collide with another vendor's.
CDI_KIND = "vgpu-agent.internal/grant"


def grant_token(resource: str, ids: Iterable[str]) -> str:
    """Return the token of these ids: 32 hexadecimal digits, independent of their order, and the
    same after a restart.
    """
    digest = hashlib.sha256(resource.encode())
    for id_ in sorted(ids):
        digest.update(b"\0" + id_.encode())
    return digest.hexdigest()[:32]


def tokens_of(pod_uid: str, grants: Iterable[Grant]) -> tuple[str, ...]:
    """Return the tokens of those of ``grants`` whose shares were decided for a pod;
    ``pod_uid`` is the UID that the kubelet knows it by, which differs from the API server's for
    static pods.

    They connect the log lines about a pod, from its Allocate to the last patch of its annotations.
    """
    decided = (
        grant
        for grant in grants
        if grant.decided_for is not None and grant.decided_for[0] == pod_uid
    )
    return tuple(dict.fromkeys(grant_token(grant.resource, grant.ids) for grant in decided))


def cdi_name(token: str) -> str:
    """Return the CDI name that stands for the ids of ``token``."""
    return f"{CDI_KIND}={token}"


class GrantRecord(msgspec.Struct, frozen=True):
    """The decision for one container, as it is kept beside its CDI spec.

    Attributes:
        token: see `grant_token`.
        id_count: how many ids there are; the ids themselves are in the kubelet's checkpoint.
        owner: with UID, namespace and names.
        shares: in the order of the family's decision.
        decider: who has decided on the shares, in words, e.g. ``decided by the agent, binpack``.
        decided_at: unix seconds.
        own_directory: the grant's own host directory, which is removed once the pod is gone.
        may_overcommit: a scheduler decided, so the shares may exceed the device's compute or its
            number of holders.
        inits_not_running: the init containers of the pod that had ended, or were still to start,
            when this one started (`holdings.ruled_out`). Their records from before this one no
            longer count. Main containers are left out: one may start again while the agent is away,
            and then its old record is the only one.
    """

    token: str
    family: str
    resource: str
    id_count: int
    owner: Owner
    shares: tuple[Share, ...]
    decider: str
    decided_at: float
    own_directory: str = ""
    may_overcommit: bool = False
    inits_not_running: tuple[str, ...] = ()


class InlinedEdits(NamedTuple):
    """The edits behind CDI names. A grant's spec gets them instead of the names, because a spec
    cannot refer to another one.

    Attributes:
        version: the lowest CDI version that knows all of these edits.
        container_edits: the JSON object ``containerEdits`` of a CDI spec.
    """

    version: str
    container_edits: Mapping[str, Any]


class Carrier(Protocol):
    """The delivery of grants to where the container runtime and the container find them."""

    @property
    def records(self) -> Sequence[GrantRecord]:
        """The grants whose specs are there now."""
        ...

    @property
    def has_outdated_spec(self) -> bool:
        """Tell whether there is a spec of an earlier version of the agent, which must be rewritten
        before a container starts with it.
        """
        ...

    async def has_usable_spec(self, token: str) -> bool:
        """Tell whether the spec of that name is where the container runtime looks for it."""
        ...

    async def deliver(self, record: GrantRecord, provision: Provision) -> None:
        """Write the files on the host, then the spec, each atomically; a repetition with the same
        content changes nothing.

        Raises:
            HostFileError: something could not be written; the text names path, reason and remedy.
        """
        ...

    async def write_host_files(self, record: GrantRecord, provision: Provision) -> None:
        """Write the files on the host only, for answers that were complete in Allocate.

        Raises:
            HostFileError: as for `deliver`.
        """
        ...
