"""The search for the driver's library, and facts for the error of `nvml` when there is none.

The agent often runs in a container beside a driver that is installed elsewhere (`driverRoot`, e.g.
``/run/nvidia/driver``), so the dynamic loader alone would not find ``libnvidia-ml.so.1``. A library
that is loaded by its absolute path first is the one that pynvml gets when it asks the loader for
the bare name, because both carry the same soname.

Called by `nvml` before the driver is initialised.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SONAME = "libnvidia-ml.so.1"

# The usual places below a root file system, 64-bit distributions first (nvidia §9).
_DIRECTORIES = (
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib/wsl/lib",
    "usr/lib",
    "lib",
)


def candidates(driver_root: Path) -> list[Path]:
    """List where the library may lie below ``driver_root``, in search order."""
    return [driver_root / directory / SONAME for directory in _DIRECTORIES]


def load(driver_root: Path) -> tuple[str, list[str]]:
    """Load the driver's library into this process, unless one is loaded already.

    Returns:
        The loaded library (a path, or the soname for the loader's own choice, or empty when there
        is none), and the files that exist and cannot be loaded, each with the reason.
    """
    if _loaded():
        return SONAME, []
    broken: list[str] = []
    for path in candidates(driver_root):
        if not path.exists():
            continue
        try:
            ctypes.CDLL(str(path))
        except OSError as err:
            broken.append(f"{path} (cannot be loaded: {err})")
        else:
            return str(path), broken
    try:
        ctypes.CDLL(SONAME)
    except OSError:
        return "", broken
    return SONAME, broken


def in_container() -> bool:
    """Tell whether this process runs in a container, by the marks of Kubernetes, Docker and Podman.
    Blocks.
    """
    return "KUBERNETES_SERVICE_HOST" in os.environ or any(
        os.path.exists(mark) for mark in ("/.dockerenv", "/run/.containerenv")
    )


def _loaded() -> bool:
    """Tell whether the process has a library of that soname already: from an earlier try, or put
    there by ``--simulate``.
    """
    try:
        ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return True
