"""The files in the directory where runtimes look for CDI specs:
replaced as a whole, never seen by halves.

Used by `generated_specs`, from threads. The directory is shared with the toolkit, with other
plugins and with the specs of our own grants; only the names that are given here are ever touched.
"""

from __future__ import annotations

import contextlib
import errno
import os

from vgpu_agent.errors import CdiError

# As those of grants, so that what a killed agent leaves behind is cleared away with theirs at the
# next start.
_TEMPORARY = ".vgpu-agent-{}.tmp"

_REMEDIES = {
    errno.ENOSPC: "free some space on that file system",
    errno.EROFS: "mount it writable for the agent, or set another binding.cdiDirectory",
    errno.EACCES: "give the agent write access (owner, mode, security policy)",
    errno.EPERM: "give the agent write access (owner, mode, security policy)",
    errno.ENOTDIR: "move away the file that is in the place of a directory",
    errno.EEXIST: "move away the file that is in the place of a directory",
    errno.EISDIR: "move away the directory that stands in the place of the file",
    errno.ENOENT: "mount the directory into the agent under the same path",
}


def file_name(kind: str) -> str:
    """The name of the file of a kind; upstream's (nvidia §8)."""
    return f"{kind.replace('/', '-')}.json"


def has(path: str, content: bytes) -> bool:
    """Tell whether the file exists with exactly this content."""
    try:
        with open(path, "rb") as file:
            return file.read(len(content) + 1) == content
    except OSError:
        return False


def write(path: str, content: bytes) -> None:
    """Write ``content`` durably; readers see the old file or the new one.
    The directory is made if need be.

    Raises:
        CdiError: it cannot be written; names path, reason and remedy.
    """
    directory = os.path.dirname(path)
    # always the same, so that nothing can pile up
    temporary = os.path.join(directory, _TEMPORARY.format(os.path.basename(path)))
    try:
        os.makedirs(directory, mode=0o755, exist_ok=True)
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
        )
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
                # whatever the umask: runtimes of users read it as well
                os.fchmod(file.fileno(), 0o644)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as err:
        raise CdiError(
            f"cannot write {path}: {err.strerror or err}; "
            f"{_REMEDIES.get(err.errno or 0, 'check that file system')}"
        ) from err


def remove(path: str) -> None:
    """Remove the file; fine when it is gone already.

    Raises:
        CdiError: it cannot be removed.
    """
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as err:
        raise CdiError(
            f"cannot remove {path}: {err.strerror or err}; remove it by hand, so that no runtime "
            "uses it"
        ) from err
