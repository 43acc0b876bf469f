"""The settings of the family `aws`: its section, its flag, its rules. The default and the largest
number of containers that share a GPU are those of the replaced plugin (aws §II.1).
"""

# Without `from __future__ import annotations`, which makes each annotation a string that msgspec
# evaluates twice at each start.

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vgpu_agent.config.checks import Conflict
from vgpu_agent.config.collisions import two_daemons_remedy
from vgpu_agent.config.families import FamilySettings, OfferedName, switched_on
from vgpu_agent.config.mps import MAX_MPS_CLIENTS
from vgpu_agent.config.options import Option
from vgpu_agent.config.settings import Settings

FAMILY = "aws"
_NAME = r"\A[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?\Z"


class Aws(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The family `aws`."""

    resource_name: Annotated[
        str,
        Meta(
            pattern=_NAME,
            extra={"expected": "a resource name with a DNS name before the slash"},
            description="The name of the resource.",
        ),
    ] = "k8s.amazonaws.com/vgpu"
    vgpus: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_MPS_CLIENTS,
            description=(
                "How many containers may share one GPU; MPS serves no more than 48 clients."
            ),
        ),
    ] = 10
    mps: Annotated[
        Literal["none", "host", "supervised"],
        Meta(
            description=(
                "none: the agent does nothing about MPS. host: somebody else runs the daemon, with "
                "its pipe in `/tmp/nvidia-mps`, which containers get mounted; the agent looks for "
                "it every 5 s. supervised: the agent runs the daemon. For host and supervised, "
                "pods need no hostIPC."
            )
        ),
    ] = "none"


def _names(settings: Settings) -> Iterator[OfferedName]:
    # `change_order`: of two equal names, the operator is asked to change the one with the lower
    # number
    yield OfferedName(
        settings.section(Aws).resource_name, FAMILY, "aws.resourceName", change_order=0
    )


def _collisions(settings: Settings) -> Iterator[Conflict]:
    mps = settings.section(Aws).mps
    # the setting by which another family shares its GPUs with MPS
    other = next(
        (family.mps_key for family in switched_on(settings) if family.runs_mps_daemons(settings)),
        "",
    )
    if mps != "none" and other:
        text = f"supervised would start MPS control daemons beside those that {other} starts"
        if mps == "host":
            text = (
                f"host needs somebody else's MPS control daemons beside those that {other} starts"
            )
        # the setting that could be changed, with its sentence
        yield Conflict(
            (("aws.mps", f"{text}, and a GPU can have only one; {two_daemons_remedy()}"),)
        )


def _mounted_mps_directory(settings: Settings) -> tuple[str, str]:
    """Return the directory of MPS that containers have mounted, and the setting that causes it."""
    mps = settings.section(Aws).mps
    # The default directory of MPS's pipes, so not a predictable name of ours (S108).
    return ("", "") if mps == "none" else ("/tmp/nvidia-mps", f"aws.mps: {mps}")  # noqa: S108


SETTINGS = FamilySettings(
    FAMILY,
    "`k8s.amazonaws.com/vgpu`, as AWS's virtual GPU device plugin offers it.",
    sections={"aws": Aws},
    # AWS's virtual GPU device plugin has a flag of this name.
    options=(
        Option(
            "aws.vgpus",
            "--vgpu",
            "VGPU_AGENT_VGPU",
            "COUNT",
            "how many containers may share one GPU, with families.aws",
        ),
    ),
    names=_names,
    mps_key="aws.mps",
    collisions=_collisions,
    mounted_mps_directory=_mounted_mps_directory,
)
