"""The rig's needs of this machine: root, and a handful of Debian packages that it installs itself.

Called by conftest.py to say in one line why there are no cluster tests, and by lifecycle.py before
a start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.real_node.rig import build
from tests.real_node.rig.errors import RequirementError

if TYPE_CHECKING:
    from collections.abc import Callable

_INSTANCES, _ENOUGH_INSTANCES = Path("/proc/sys/fs/inotify/max_user_instances"), 1024
CNI_PLUGINS = Path("/usr/lib/cni")
BUSYBOX = Path("/bin/busybox")
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PROGRAMS = {
    "runc": "runc",
    "ip": "iproute2",
    "openssl": "openssl",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
}
_FILES = {CNI_PLUGINS / "bridge": "containernetworking-plugins", BUSYBOX: "busybox-static"}


def program_path(*first: Path) -> str:
    """A PATH for the rig's processes: ``first``, then the system's own folders,
    which a service or a CI job may lack.
    """
    return ":".join([*map(str, first), _SYSTEM_PATH])


def missing_requirement() -> str | None:
    """Return why this machine cannot hold a rig, in one sentence with the remedy;
    None when it can.
    """
    if os.geteuid() != 0:
        return (
            "the cluster tests need root (namespaces, mounts, cgroups); run them with sudo or in CI"
        )
    if shutil.which("go") is None and not all(build.cached(part) for part in build.BUILDS):
        return (
            "the cluster tests need Go 1.26 or newer in PATH to build Kubernetes, and nothing is "
            "in the cache yet"
        )
    missing = _missing_packages()
    if missing and shutil.which("apt-get") is None:
        return (
            f"the cluster tests need {', '.join(missing)} (Debian's package names), and there is "
            "no apt-get to install them"
        )
    return None


def ensure_packages(say: Callable[[str], None]) -> None:
    """Install what is missing of the rig's packages.

    Raises:
        RequirementError: not root, no apt-get, or it fails; the message names the packages.
    """
    reason = missing_requirement()
    if reason is not None:
        raise RequirementError(reason)
    missing = _missing_packages()
    if not missing:
        return
    say(f"installing {', '.join(missing)}")
    install = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    # package lists are often absent or stale, and fetching them is slow
    attempts = (install, ["apt-get", "update"], install)
    for command in attempts:
        result = _apt(command)
        if command is install and result.returncode == 0:
            break
    if still := _missing_packages():
        raise RequirementError(
            f"apt-get could not install {', '.join(still)}: "
            f"{' '.join(result.stderr.strip().splitlines()[-3:])}"
        )


def allow_watches() -> None:
    """Raise how many inotify instances this machine's root may have, where that is little.

    A rig has 17 and each further node 10, and several rigs are up at once; many systems allow 128.
    Where it may not be raised, a kubelet that finds none left says so.
    """
    with contextlib.suppress(OSError):
        if int(_INSTANCES.read_text()) < _ENOUGH_INSTANCES:
            _INSTANCES.write_text(str(_ENOUGH_INSTANCES))


def _apt(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        text=True,
        capture_output=True,
        check=False,
    )


def _missing_packages() -> list[str]:
    programs = {
        package
        for program, package in _PROGRAMS.items()
        if shutil.which(program, path=_SYSTEM_PATH) is None
    }
    files = {package for path, package in _FILES.items() if not path.exists()}
    # Debian's other busybox is dynamic, and an image has no libc
    if BUSYBOX.exists() and not is_static(BUSYBOX):
        files.add(_FILES[BUSYBOX])
    return sorted(programs | files)


def is_static(program: Path) -> bool:
    """Tell whether an ELF program runs without a dynamic linker.

    Such a program has no PT_INTERP segment (elf(5), 64-bit little-endian layout).
    """
    content = program.read_bytes()
    table = int.from_bytes(content[32:40], "little")
    entry_size, entries = (
        int.from_bytes(content[54:56], "little"),
        int.from_bytes(content[56:58], "little"),
    )
    kinds = [
        int.from_bytes(content[at : at + 4], "little")
        for at in range(table, table + entries * entry_size, entry_size)
    ]
    return 3 not in kinds
