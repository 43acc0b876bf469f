"""The device nodes of a MIG instance: ``/dev/nvidia-caps/nvidia-cap<N>``,
one for its GPU instance and one for its compute instance.

NVML does not report N. The driver lists it in ``driver/nvidia-caps/mig-minors`` below procfs, under
the *minor* of the parent GPU, not under NVML's index (nvidia §4). Where a line is missing or makes
no sense, no container gets its instances, and the inventory has the reason. All others are offered.

Called by `mig` in the thread that owns NVML, once for each GPU that has instances.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_LIMIT_BYTES = 1 << 20  # 32 GPUs take a tenth of it
_LARGEST_MINOR = (1 << 20) - 1  # the kernel's own limit
_REMEDY = (
    "check that gpu.procRoot shows the host's procfs and that the driver's MIG capabilities are "
    "intact (nvidia-smi mig -lgi)"
)


class CapabilityMinors(msgspec.Struct, frozen=True):
    """The driver's table at one moment.

    Attributes:
        path: of the file, for messages.
        numbers: key of the table, e.g. ``gpu1/gi7/ci0/access`` → N of the device node.
        troubles: key → the error in its line.
        trouble: why there is no table at all; empty when there is one.
    """

    path: str
    numbers: Mapping[str, int] = msgspec.field(default_factory=dict)
    troubles: Mapping[str, str] = msgspec.field(default_factory=dict)
    trouble: str = ""

    def nodes(
        self, gpu_minor: int, gpu_instance: int, compute_instance: int
    ) -> tuple[tuple[str, ...], str]:
        """The paths of the two device nodes of an instance, or none and the reason."""
        instance = f"gpu{gpu_minor}/gi{gpu_instance}"
        nodes: list[str] = []
        for key in (f"{instance}/access", f"{instance}/ci{compute_instance}/access"):
            if trouble := self.trouble or self.troubles.get(key, ""):
                return (), f"{trouble}; {_REMEDY}"
            if key not in self.numbers:
                return (), f"{self.path} has no line for {key}; {_REMEDY}"
            nodes.append(f"/dev/nvidia-caps/nvidia-cap{self.numbers[key]}")
        return tuple(nodes), ""


class Capabilities:
    """The driver's table of capabilities, which is its word for these device nodes.

    State: the last text and what was read in it; the table is the same for as long as the driver is
    loaded.
    """

    def __init__(self, proc_root: Path) -> None:
        self.path = proc_root / "driver" / "nvidia-caps" / "mig-minors"
        self._text: bytes | None = None
        self._minors = CapabilityMinors(str(self.path))

    def read(self) -> CapabilityMinors:
        """Read the current table; its faults are part of the answer."""
        try:
            with self.path.open("rb") as file:
                text = file.read(_LIMIT_BYTES + 1)
        except OSError as err:
            self._text = None
            return CapabilityMinors(
                str(self.path), trouble=f"cannot read {self.path}: {err.strerror or err}"
            )
        if text != self._text:
            self._text, self._minors = text, parse(text, str(self.path))
        return self._minors


def parse(text: bytes, path: str) -> CapabilityMinors:
    """Read the driver's lines, e.g. ``gpu0/gi1/access 30``;
    lines about things other than MIG instances are read as well, but never looked up.

    A last line without a newline is an error, because its number may be cut off.

    Args:
        text: the content of the file.
        path: its name in errors.
    """
    if len(text) > _LIMIT_BYTES:
        return CapabilityMinors(
            path, trouble=f"{path} is larger than {_LIMIT_BYTES} bytes, which no driver writes"
        )
    *lines, rest = text.decode(errors="replace").split("\n")
    numbers: dict[str, int] = {}
    troubles: dict[str, str] = {}
    for place, line in enumerate(lines, 1):
        key, _, value = line.strip().partition(" ")
        where = f"{path} line {place}: {line[:80]!r}"
        number = _number(value.strip())
        if number is None:
            troubles[key] = f"{where}: expected the number of a device node after {key[:40]}"
        elif numbers.setdefault(key, number) != number:
            troubles[key] = f"{where}: an earlier line says {numbers[key]}"
    if rest:
        troubles[rest.partition(" ")[0]] = (
            f"{path} line {len(lines) + 1}: {rest[:80]!r}: the line is cut off"
        )
    return CapabilityMinors(path, numbers, troubles)


def _number(text: str) -> int | None:
    plausible = (
        text.isascii()
        and text.isdigit()
        and len(text) <= len(str(_LARGEST_MINOR))
        and int(text) <= _LARGEST_MINOR
    )
    return int(text) if plausible else None
