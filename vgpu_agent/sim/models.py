"""The GPU models that can be simulated: typed access to models.toml.

`creation` fills the state file of a simulated node from a model, `sim.cli.sim` lists them. Adding a
model means adding a table to models.toml.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from vgpu_agent.errors import SimulationError

# how the GPUs of a node are linked: "cube-mesh" as on a board of V100, "switch" each to each
# other, directly on nodes of up to four GPUs and through NVSwitches on larger ones
NvLink = Literal["none", "cube-mesh", "switch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MigProfile:
    """One way to cut an instance out of a GPU: ``profile`` is its NVML_GPU_INSTANCE_PROFILE_*,
    ``id`` the profile id that instances carry, ``slices`` its compute slices, ``instances``
    how many fit on a GPU. ``size`` is the number of memory slices (eighths of the GPU's memory) of
    an instance, ``starts`` the numbers of the slices at which one can begin.
    """

    name: str
    profile: int
    id: int
    slices: int
    instances: int
    multiprocessors: int
    memory_mib: int
    size: int
    starts: tuple[int, ...]
    copy_engines: int
    decoders: int = 0
    encoders: int = 0
    jpegs: int = 0
    ofas: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One kind of GPU; ``key`` is the name of its table in models.toml, ``name`` that of NVML.
    Power is in watts, temperatures are in degrees Celsius, and clocks in MHz, in the order
    graphics, SM, memory, video. ``brand``, ``architecture`` and ``nvlink_version`` are NVML's
    codes. ``fabric``: NVML reports that the GPU has joined an NVLink fabric.

    ``reserved_mib`` is the part of ``memory_mib`` that the driver keeps for itself. The keys of
    ``power_watts`` are idle, minimum and maximum, those of ``temperature_limits`` shutdown,
    slowdown, gpu_max and memory_max. ``nvlink_count`` is of one GPU, ``nvswitches`` of a node.
    """

    key: str
    name: str
    brand: int
    architecture: int
    compute_capability: tuple[int, int]
    multiprocessors: int
    cores_per_multiprocessor: int
    memory_mib: int
    reserved_mib: int
    bar1_mib: int
    pci_device_id: int
    pcie_generation: int
    power_watts: dict[str, int]
    temperature_limits: dict[str, int]
    clocks_idle: tuple[int, int, int, int]
    clocks_max: tuple[int, int, int, int]
    row_remapping: bool
    fabric: bool
    nvlink: NvLink
    nvlink_version: int = 0
    nvlink_count: int = 0
    nvswitches: int = 0
    mig: tuple[MigProfile, ...] = ()


def _model(key: str, table: dict[str, Any]) -> Model:
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in table.items()
    }
    fields["mig"] = tuple(
        MigProfile(**{**row, "starts": tuple(row["starts"])}) for row in table.get("mig", ())
    )
    return Model(key=key, **fields)


@cache
def models() -> dict[str, Model]:
    """Every model by its key, in the order of the file."""
    # an agent on simulated GPUs reads no models, and should start as quickly as a real one
    import tomllib  # noqa: PLC0415

    text = Path(__file__).with_name("models.toml").read_text(encoding="utf-8")
    return {key: _model(key, table) for key, table in tomllib.loads(text).items()}


def model_of(key: str) -> Model:
    """The model of that key, upper or lower case.

    Raises:
        SimulationError: there is none; the message lists those there are.
    """
    known = {name.lower(): model for name, model in models().items()}
    if key.lower() not in known:
        raise SimulationError(f"unknown GPU model {key!r}; there are {', '.join(models())}")
    return known[key.lower()]
