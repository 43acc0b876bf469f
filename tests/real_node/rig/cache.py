"""Things that take long to make, kept outside the checkout under the hash
of what they were made from.

Clones and branches of the project share them; a change of the input gives a new entry, and nothing
ever has to be invalidated.

Called by build.py and images.py.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def root() -> Path:
    """The cache folder of the cluster rig, below the user's."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vgpu-agent" / "cluster"
    )


def digest(parts: Iterable[bytes]) -> str:
    """A short content hash; the borders between ``parts`` count."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "big"))
        whole.update(part)
    return whole.hexdigest()[:16]


def find(pattern: str) -> Path | None:
    """The newest finished entry whose name matches ``pattern``."""
    entries = sorted(root().glob(pattern), key=lambda entry: entry.stat().st_mtime)
    return entries[-1] if entries else None


def get(name: str, make: Callable[[Path], None]) -> Path:
    """The folder of entry ``name``, which ``make`` fills when it is not there yet.

    A second caller waits for the first. The folder gets its name only when it is complete, so a
    killed maker leaves nothing that could be mistaken for an entry. Whatever ``make`` raises goes
    through.
    """
    entry = root() / name
    if entry.is_dir():
        return entry
    root().mkdir(parents=True, exist_ok=True)
    with (root() / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if entry.is_dir():
            return entry
        for abandoned in root().glob(f".{name}.making-*"):
            shutil.rmtree(abandoned)
        making = Path(tempfile.mkdtemp(prefix=f".{name}.making-", dir=root()))
        make(making)
        making.chmod(0o755)
        making.rename(entry)
    return entry
