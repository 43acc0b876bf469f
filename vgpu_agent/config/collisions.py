"""Conflicts of families and MPS control daemons: over one resource name, one directory, one GPU.

Each such rule concerns several families, of which one can be served. So an agent starts nevertheless, withholds the
resources in conflict and logs the sentences from here, and ``config check`` refuses the configuration with the same
sentences. Conflicts that depend on the node's GPUs, on Volcano's ConfigMap or on its node configuration are found
while the agent runs (`agent.offers.families`, `agent.devices.mps`).
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from vgpu_agent.config import iktos
from vgpu_agent.config.checks import Conflict
from vgpu_agent.config.problems import shown
from vgpu_agent.config.sharing import NVIDIA_GPU

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vgpu_agent.config.settings import Settings
    from vgpu_agent.config.volcano import VolcanoVgpu

_MIG_PREFIX = "nvidia.com/mig-"
_SHARED_SUFFIX = ".shared"
# By strategy. Both belong to that family, whichever it offers: it writes the other one into the Node's capacity.
_GPUSHARE_NAMES = {"share": "volcano.sh/gpu-memory", "number": "volcano.sh/gpu-number"}
_CHOSEN = ("aws", "volcano-vgpu", "volcano-vgpu-mig")  # families whose names are settings, that with the freest first
# The default place of MPS's pipes; containers of the family `aws` have it mounted.
_AWS_PIPES = PurePosixPath("/tmp/nvidia-mps")  # noqa: S108 - a path that others have chosen
ONE_DAEMON = "takes one only; offer it by one of the two (families, aws.mps, sharing.mps)"


class _Name(NamedTuple):
    """A resource name that a family has.

    Attributes:
        text: the name.
        family: which offers it.
        path: the setting that it comes from.
        prefix: all names that begin so are meant.
        counted: the family does not offer it, and writes a number under it into the Node's capacity.
    """

    text: str
    family: str
    path: str
    prefix: bool = False
    counted: bool = False

    def meets(self, other: _Name) -> bool:
        """Tell whether one resource can have both names."""
        if self.prefix and other.prefix:
            return self.text.startswith(other.text) or other.text.startswith(self.text)
        if self.prefix or other.prefix:
            prefix, name = (self, other) if self.prefix else (other, self)
            return name.text.startswith(prefix.text)
        return self.text == other.text


def collisions(settings: Settings) -> Iterator[Conflict]:
    """Every rule that ``settings`` breaks."""
    yield from _equal_names(settings)
    yield from _mps(settings)
    yield from _divided_gpus(settings)


def crowding(settings: Settings) -> Iterator[str]:
    """A sentence for each setting by which one family begins more GPUs than it needs, while others are on that could use them."""
    families = settings.families
    on = {
        "nvidia": families.nvidia,
        "aws": families.aws,
        "volcano-vgpu": families.volcano_vgpu,
        "volcano-gpushare": families.volcano_gpushare,
    }
    for path, value, family, default in (
        ("plugin.sharedDevicesAllocationPolicy", settings.plugin.shared_devices_allocation_policy, "nvidia", "auto"),
        ("binding.policy", settings.binding.policy, "volcano-vgpu", "binpack"),
    ):
        others = [name for name, is_on in on.items() if is_on and name != family]
        if on[family] and others and value in ("distributed", "spread"):
            yield (
                f"{path}: {value} spreads pods of {family} over all GPUs, and a GPU with one of them is no use to {', '.join(others)}; "
                f"set {default} to keep {family} on few GPUs"
            )


def without(family: str) -> str:
    """The consequence of two equal names or ids for the family that comes second, and the remedy."""
    return f"the kubelet would take one for the other, so {family} offers nothing; choose another name, or turn one of the families off"


def static_mig_strategy(settings: Settings, vgpu: VolcanoVgpu) -> tuple[str, str]:
    """Return how Volcano's names offer existing MIG instances, and why not as requested; empty where it is.

    Args:
        settings: of the other families.
        vgpu: with the files of the replaced plugin already laid over it.
    """
    strategy = vgpu.mig_strategy or ("none" if settings.families.nvidia else settings.plugin.mig_strategy)
    instead = ""
    if strategy != "none" and vgpu.operating_mode == "mig":
        instead = "in the operating mode mig instances are given through volcano.sh/vgpu-number; they are not offered by their own names"
    elif strategy != "none" and settings.families.nvidia and settings.plugin.mig_strategy != "none":
        instead = "the family nvidia offers the same instances (plugin.migStrategy); turn one of the two off"
    return ("none", f"{strategy}: {instead}") if instead else (strategy, "")


def exposed_mps_directory(settings: Settings) -> tuple[str, str] | None:
    """The path of a directory of MPS control daemons that containers of the family `aws` could change, with a sentence; None in order."""
    if not settings.families.aws or settings.aws.mps == "none":
        return None
    for path, value in (("mps.root", settings.mps.root), ("mps.containerRoot", settings.mps.container_root)):
        if value and PurePosixPath(value).is_relative_to(_AWS_PIPES):
            return path, (
                f"{shown(value)} lies in {_AWS_PIPES}, which aws.mps: {settings.aws.mps} mounts into containers, so that they could change "
                "the files of other MPS control daemons; choose another directory such as /run/nvidia/mps"
            )
    return None


# -- names ----------------------------------------------------------------------------------------------------------------------------


def _equal_names(settings: Settings) -> Iterator[Conflict]:
    """Every name with an earlier one that is the same; the families in the order in which the agent offers them."""
    names: list[_Name] = []
    for name in _names(settings):
        if (twin := next((earlier for earlier in names if name.meets(earlier)), None)) is not None:
            text = shown(name.text if twin.prefix else twin.text)
            sentence = f"{text} is offered by {twin.family} and by {name.family}; {without(name.family)}"
            if name.counted:
                sentence = (
                    f"{text} is offered by {twin.family}, and {name.family} counts GPUs under it in the Node's capacity; "
                    "choose another name, or turn one of the families off"
                )
            yield Conflict(tuple((each.path, sentence) for each in sorted((twin, name), key=_place_of_blame)))
        names.append(name)


def _place_of_blame(name: _Name) -> int:
    """Place among the settings that could be changed: first the names that an operator can choose freely."""
    return _CHOSEN.index(name.family) if name.family in _CHOSEN else len(_CHOSEN)


def _names(settings: Settings) -> Iterator[_Name]:
    families, vgpu = settings.families, settings.volcano_vgpu
    if families.nvidia:
        yield from _nvidia_names(settings)
    if families.aws:
        yield _Name(settings.aws.resource_name, "aws", "aws.resourceName")
    if families.volcano_vgpu:
        strategy, _ = static_mig_strategy(settings, vgpu)
        if strategy != "none":
            last = "gpu" if strategy == "single" else "mig-"
            yield _Name(
                f"{vgpu.mig_resource_prefix}/{last}", "volcano-vgpu-mig", "volcanoVgpu.migResourcePrefix", prefix=strategy == "mixed"
            )
        yield _Name(vgpu.number_resource, "volcano-vgpu", "volcanoVgpu.numberResource")
        yield _Name(vgpu.memory_resource, "volcano-vgpu", "volcanoVgpu.memoryResource")
        yield _Name(vgpu.cores_resource, "volcano-vgpu", "volcanoVgpu.coresResource")
        if vgpu.offer_memory_percentage:
            yield _Name(vgpu.memory_percentage_resource, "volcano-vgpu", "volcanoVgpu.memoryPercentageResource")
    if families.volcano_gpushare:
        for strategy, name in _GPUSHARE_NAMES.items():
            counted = strategy != settings.volcano_gpushare.strategy
            yield _Name(name, "volcano-gpushare", "volcanoGpushare.strategy", counted=counted)


def _nvidia_names(settings: Settings) -> Iterator[_Name]:
    """Yield all names under which the family can offer GPUs of some node. A name given twice selects the devices of both."""
    gpus, strategy = settings.resources.gpus, settings.plugin.mig_strategy
    names = {pattern.name for pattern in gpus}
    if strategy == "single" or not any(set(pattern.pattern) == {"*"} for pattern in gpus):
        names.add(NVIDIA_GPU)
    if strategy != "none":
        names.update(pattern.name for pattern in settings.resources.mig)
    mixed = strategy == "mixed"
    renamed, published = set[str](), set[str]()
    for name, new, everything in _shared(settings):
        if name in names or (mixed and name.startswith(_MIG_PREFIX)):
            published.add(new)
            if everything:
                renamed.add(name)
    for text in sorted((names - renamed) | published):
        if not (mixed and text.startswith(_MIG_PREFIX)):
            yield _Name(text, "nvidia", "families.nvidia")
    if mixed:
        yield _Name(_MIG_PREFIX, "nvidia", "families.nvidia", prefix=True)


def _shared(settings: Settings) -> Sequence[tuple[str, str, bool]]:
    """Each entry about sharing that has an effect: the resource, the name it is offered by, and whether all of its devices are meant."""
    if entries := iktos.entries(settings.iktos.resource_config):
        return [(entry.original, entry.new, True) for entry in entries]
    mps, slicing = settings.sharing.mps, settings.sharing.time_slicing
    block = mps if mps.resources else slicing
    suffix = _SHARED_SUFFIX if block.rename_by_default else ""
    return [(entry.name, entry.rename or entry.name + suffix, entry.devices == "all") for entry in block.resources]


# -- MPS ------------------------------------------------------------------------------------------------------------------------------


def _mps(settings: Settings) -> Iterator[Conflict]:
    if not settings.families.aws or settings.aws.mps == "none":
        return
    if exposed := exposed_mps_directory(settings):
        yield Conflict((exposed,))
    by_nvidia = settings.families.nvidia and settings.sharing.mps.resources and not settings.iktos.resource_config
    if not by_nvidia:
        return
    if settings.aws.mps == "supervised":
        text = f"supervised starts an MPS control daemon on GPUs that sharing.mps has one for already, and a GPU {ONE_DAEMON}"
    else:
        text = f"host needs somebody else's MPS control daemon on GPUs that sharing.mps starts one for, and a GPU {ONE_DAEMON}"
    yield Conflict((("aws.mps", text), ("sharing.mps.resources", text)))


# -- MIG ------------------------------------------------------------------------------------------------------------------------------


def _divided_gpus(settings: Settings) -> Iterator[Conflict]:
    """Families that offer one MIG instance twice, or a divided GPU as if it were whole."""
    if not settings.families.volcano_vgpu:
        return
    _, problem = static_mig_strategy(settings, settings.volcano_vgpu)
    if problem:
        yield Conflict((("volcanoVgpu.migStrategy", problem), ("plugin.migStrategy", problem)))
    if settings.families.nvidia and settings.volcano_vgpu.operating_mode == "mig" and settings.plugin.mig_strategy != "mixed":
        strategy = settings.plugin.mig_strategy
        why = "the family nvidia would offer a GPU that is divided for a Volcano pod as a whole one, on which work fails"
        if strategy == "single":
            why = "the family nvidia would offer nothing while the GPUs are divided differently"
        yield Conflict(
            (
                ("plugin.migStrategy", f"expected mixed with volcanoVgpu.operatingMode: mig, got {shown(strategy)}; {why}"),
                ("volcanoVgpu.operatingMode", f"mig goes with plugin.migStrategy: mixed, and that is {shown(strategy)}; {why}"),
            )
        )
