"""The JSON shapes for the binding of grants: the families, the mode (late or early) with its
reason, and the containers that may not start.

Used by `views` for `/debug/status`, and by `debug`. Fields may be added; they are never renamed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.errors import with_advice
from vgpu_agent.web.shapes import When, view

if TYPE_CHECKING:
    from vgpu_agent.status import AgentStatus, BindingStatus


class FamilyView(msgspec.Struct, frozen=True):
    """A family that is switched on; ``decided_by`` is ``ids`` or ``pod``, and ``trouble`` gives the
    reason why it is not offered. ``idle``: it is not offered because the node has no device for it,
    which is no fault.
    """

    family: str
    decided_by: str = ""
    offered: bool = False
    trouble: str = ""
    idle: bool = False


class BindingView(msgspec.Struct, frozen=True):
    """The binding of this node's grants.

    Attributes:
        mode: ``late``, ``early``, or empty while it is not known.
        by_annotation: the CDI name of a grant reaches the runtime as an annotation.
        reason: why it is this mode.
        families: those that are switched on.
        ambiguities: how many starts were refused because the kubelet's records name several holders
            of the ids.
        wrong_guesses: how many were refused because the answer to Allocate was meant for another
            container.
        exchanges: how often the grants of two pods with equal shares were exchanged, because each
            had got the answer that was meant for the other.
    """

    mode: str = ""
    by_annotation: bool = False
    reason: str = ""
    families: tuple[FamilyView, ...] = ()
    ambiguities: int = 0
    wrong_guesses: int = 0
    exchanges: int = 0


class RefusalView(msgspec.Struct, frozen=True):
    """A container that may not start now, ``since`` its first refusal and after ``count`` refusals
    in a row; ``final`` when trying again cannot help.
    """

    namespace: str = ""
    pod: str = ""
    pod_uid: str = ""
    container: str = ""
    resource: str = ""
    reason: str = ""
    # the remedies, and what the pod and the kubelet's records lacked at the last refusal
    advice: str = ""
    since: When = When()
    count: int = 0
    final: bool = False

    @property
    def text(self) -> str:
        """The reason with the advice."""
        return with_advice(self.reason, self.advice)

    @property
    def pod_name(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.pod}"


def binding_view(status: BindingStatus, now: float) -> BindingView:
    """Show how grants are bound; ``now`` is unix seconds. (`view` takes the fields that are not
    given here from the attributes of the same name.)
    """
    mode = status.mode
    families = tuple(
        view(
            FamilyView,
            family,
            now,
            family=family.name,
            decided_by="pod" if family.decided_by_pod else "ids",
        )
        for family in status.families
    )
    return view(
        BindingView,
        status,
        now,
        mode=mode_word(status),
        by_annotation=mode.by_annotation if mode else False,
        reason=mode.reason if mode else "",
        families=families,
    )


def mode_word(status: BindingStatus) -> str:
    """``late``, ``early``, or empty while it is not known."""
    if status.mode is None:
        return ""
    return "late" if status.mode.late else "early"


def refusals(status: AgentStatus, now: float) -> tuple[RefusalView, ...]:
    """List the current refusals, the longest refused first."""
    return tuple(
        view(
            RefusalView,
            refusal,
            now,
            namespace=refusal.pod.namespace,
            pod=refusal.pod.name,
            # for a static pod the API server has another UID
            pod_uid=refusal.pod.kubelet_uid,
        )
        for refusal in status.binding.refusals
    )
