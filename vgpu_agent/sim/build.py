"""Compiling the simulated libnvidia-ml.so.1 at first use, so that the wheel stays pure Python and
real nodes need no compiler.

`preload` calls it. The library is stored in the user's cache, in a directory named by the hash of
its sources, options and platform. So a changed source makes a new file, a library is never replaced
while a process uses it, and two processes may build at the same time.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vgpu_agent.errors import SimulationError

if TYPE_CHECKING:
    from collections.abc import Sequence

LIBRARY: Final = "libnvidia-ml.so.1"
_NATIVE: Final = Path(__file__).with_name("native")
_COMPILERS: Final = ("cc", "gcc", "clang")
_FLAGS: Final = (
    "-std=gnu11",
    "-O2",
    "-Wall",
    "-Wextra",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    f"-Wl,-soname,{LIBRARY}",
    "-pthread",
)
_SHOWN_ERROR: Final = 2000  # characters of the compiler's error output in a message


def build(*, timeout_seconds: float = 120.0) -> Path:
    """Return the path of the compiled library; compile only when needed.

    Raises:
        SimulationError: there is no compiler, it fails, or the cache cannot be written; the message
            has the remedy.
    """
    directory = cache_directory() / _content_hash()
    library = directory / LIBRARY
    if library.exists():
        return library
    command = compiler()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second process finds the first one's library
            if not library.exists():
                _compile(command, library, timeout_seconds)
    except OSError as err:
        raise SimulationError(
            f"cannot write the simulated driver to {directory}: {err.strerror}; set XDG_CACHE_HOME "
            "to a writable directory"
        ) from err
    return library


def compiler() -> list[str]:
    """Find the first of cc, gcc, clang and PyPI's ziglang; return it as the start of a command
    line.

    Raises:
        SimulationError: none of them is.
    """
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return [path]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise SimulationError(
        "no C compiler found for the simulated driver (looked for cc, gcc, clang and Python's "
        "ziglang); install one, for example with: pip install ziglang"
    )


def cache_directory() -> Path:
    """Return ``$XDG_CACHE_HOME/vgpu-agent/sim``, by default below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "vgpu-agent" / "sim"


def sources() -> list[Path]:
    """List the C files and their includes, in a fixed order."""
    return sorted(path for path in _NATIVE.iterdir() if path.suffix in {".c", ".h", ".inc"})


def _content_hash() -> str:
    """Hash the library's sources, options and platform. The compiler is left out, so that a library
    that was built elsewhere can be used without one.
    """
    digest = hashlib.sha256()
    for word in (*_FLAGS, platform.machine(), platform.libc_ver()[0]):
        digest.update(word.encode() + b"\0")
    for source in sources():
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


def _compile(command: Sequence[str], library: Path, timeout_seconds: float) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        unfinished = Path(scratch) / LIBRARY
        files = [str(source) for source in sources() if source.suffix == ".c"]
        try:
            done = subprocess.run(
                [*command, *_FLAGS, "-o", str(unfinished), *files],
                capture_output=True,
                text=True,
                timeout=timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as err:
            raise SimulationError(
                f"{' '.join(command)} did not compile the simulated driver within "
                f"{timeout_seconds:g} s; try again on an idle machine"
            ) from err
        if done.returncode != 0:
            raise SimulationError(
                f"{' '.join(command)} cannot compile the simulated driver (exit "
                f"{done.returncode}); install a C11 compiler with its headers, or pip install "
                f"ziglang: {done.stderr.strip()[:_SHOWN_ERROR]}"
            )
        unfinished.replace(library)
