"""The specs that this agent has made for its node: a file for the GPUs, and one each for IMEX
channels, GDRCopy, GDS and Mellanox devices.

They are made only when the GPUs that containers can get, or the settings, have changed, because
that takes a run of NVIDIA's tool, about a second. A file that was removed or changed is written
again from memory. After any failure the agent tries again with growing pauses, and the earlier
specs stay in use meanwhile. `controller` sets the desired specs, has the loop run, and withholds
the resources whose names are missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from vgpu_agent.cdi import rules
from vgpu_agent.cdi.document import LARGEST_BYTES, Spec, decode, encode
from vgpu_agent.cdi.imex import channel_spec
from vgpu_agent.cdi.nvidia_ctk import CtkOptions, Stuck, generate
from vgpu_agent.concurrency import Backoff, Latest, Revision
from vgpu_agent.config.types import DEVICE_MODES
from vgpu_agent.errors import CdiError
from vgpu_agent.families.device_lists import GENERATED_KIND as GPU_KIND
from vgpu_agent.status import CdiSpecStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from vgpu_agent.journal import Journal

# not the toolkit's nvidia.com: `GPU_KIND` is k8s.device-plugin.nvidia.com/gpu here
_VENDOR = GPU_KIND.partition("/")[0]
_CHANNEL_KIND = f"{_VENDOR}/imex-channel"

# One for each file, so that nothing can pile up. Not the form of `host_files.is_temporary`: what
# has that form is removed while an agent starts, and its loop may be writing here by then.
_TEMPORARY = ".{}.new"

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


class Wanted(msgspec.Struct, frozen=True):
    """The desired content of the generated specs.

    Attributes:
        device_facts: all facts about the GPUs and the driver on which the GPUs' spec depends: the
            spec is made again when they differ.
        driver_version: of the driver that runs now; empty when unknown.
        id_strategy: ``uuid`` or ``index``: what GPUs and MIG instances are named by.
        modes: the devices beside GPUs that get a spec, e.g. ``gds`` (`config.types.DEVICE_MODES`).
        channels: the numbers of the IMEX channels that get a device.
        channel_root: directory on the node below which their device nodes are.
        ctk: how NVIDIA's tool, nvidia-ctk, is run.
    """

    device_facts: Hashable
    driver_version: str = ""
    id_strategy: str = "uuid"
    modes: tuple[str, ...] = ()
    channels: tuple[int, ...] = ()
    channel_root: str = "/"
    ctk: CtkOptions = msgspec.field(default_factory=CtkOptions)


class _EarlierSpec(NamedTuple):
    """A spec, and when its file was written (unix seconds)."""

    spec: Spec
    at: float


class _Made(msgspec.Struct):
    """The content of one file.

    Attributes:
        made_for: the fields of `Wanted` that it depends on; None for a file of an earlier agent.
        device_facts: those of `Wanted` at that time; None for a file of an earlier agent.
        spec: None where the node has no devices of the kind; nothing is written then.
        at: unix seconds at which it was made.
        written: the file has this content, so runtimes can find it.
    """

    made_for: Hashable
    device_facts: Hashable
    spec: Spec | None
    at: float
    written: bool = True


class GeneratedSpecs:
    """The generated specs in the files of one directory.

    State: the specs that were made, by kind. Files of an earlier agent are replaced. That of the
    GPUs is used until then.
    """

    def __init__(
        self,
        directory: str,
        journal: Journal,
        *,
        look_seconds: float,
        retry_min_seconds: float,
        retry_max_seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Build it.

        Args:
            directory: where runtimes look for specs.
            journal: each spec that is made and each new failure are recorded there.
            look_seconds: the interval between two checks of the files.
            retry_min_seconds: first pause after a failure; it doubles each time.
            retry_max_seconds: longest pause.
            clock: unix seconds.
        """
        self._directory = directory
        self._journal = journal
        self._look_seconds = look_seconds
        self._retry_min_seconds, self._retry_max_seconds = retry_min_seconds, retry_max_seconds
        self._clock = clock
        self._wanted: Latest[Wanted | None] = Latest(None)
        self._made: dict[str, _Made] = {}
        self._unwritten: dict[str, _Made] = {}  # made, but not in their files yet
        self._errors: dict[str, str] = {}  # kind → why its spec is not as desired
        # a killed run of the tool that does not end; no other is started until it has
        self._stuck = Stuck()
        self._knows_earlier = False  # true once the file of an earlier agent was looked for
        # the current desired state was tried at least once; the agent's start waits for that
        self.tried = asyncio.Event()
        self.revision = Revision()  # of the names and errors

    def want(self, wanted: Wanted) -> None:
        """Have the specs made for this desired content, unless they already are."""
        if wanted != self._wanted.value:
            self.tried.clear()
            self._wanted.publish(wanted)

    @property
    def names(self) -> frozenset[str]:
        """The qualified names that runtimes can resolve."""
        return frozenset(name for spec in self.specs for name in spec.names)

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The specs that are in their files."""
        return tuple(
            made.spec for made in self._made.values() if made.spec is not None and made.written
        )

    @property
    def gpu_spec_facts(self) -> Hashable:
        """`Wanted.device_facts` of the GPUs' spec that is there now; None while there is none.
        Where names are indices, `controller` learns from them which device each one stood for.
        """
        made = self._made.get(GPU_KIND)
        return made.device_facts if made is not None else None

    @property
    def error(self) -> str:
        """The reason why the GPUs' spec is not as desired; empty when it is."""
        return self._errors.get(GPU_KIND, "")

    @property
    def statuses(self) -> tuple[CdiSpecStatus, ...]:
        """The status of each desired spec."""
        kinds = dict.fromkeys([*self._kinds(self._wanted.value), *self._made, *self._errors])
        return tuple(self._status(kind) for kind in kinds)

    def knows(self, mode: str) -> bool:
        """Tell whether ``mode``, e.g. ``gds``, has a spec on this node."""
        return f"{_VENDOR}/{mode}=all" in self.names

    async def run(self, beat: Callable[[], None]) -> None:
        """Make the desired specs, until cancelled."""
        backoff = Backoff(self._retry_min_seconds, self._retry_max_seconds)
        while True:
            beat()
            version, wanted = self._wanted.version, self._wanted.value
            all_made = wanted is None or await self._bring_about(wanted, beat)
            if version == self._wanted.version and wanted is not None:
                self.tried.set()
            if all_made:
                backoff.reset()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_seconds if all_made else backoff.pause()):
                    await self._wanted.newer_than(version)
                    backoff.reset()

    async def remove(self) -> None:
        """Remove all files that this or an earlier agent has made here;
        for a node that the agent leaves for good.

        Raises:
            CdiError: one cannot be removed.
        """
        for kind in (
            GPU_KIND,
            _CHANNEL_KIND,
            *(f"{_VENDOR}/{mode}" for mode in DEVICE_MODES),
        ):
            await asyncio.to_thread(_remove, self._path(kind))
        self._made = {}

    # -- how it is done ----------------------------------------------------------------------------

    async def _bring_about(self, wanted: Wanted, beat: Callable[[], None]) -> bool:
        """Make and write the specs that are not as desired; tell whether all are now.
        A `CdiError` of one does not stop the others.
        """
        before = self.statuses
        await self._use_earlier_spec(wanted)
        errors: dict[str, str] = {}
        # first what needs no tool, which may hang
        for kind in sorted(self._kinds(wanted), key=lambda kind: kind != _CHANNEL_KIND):
            beat()
            try:
                await self._bring_about_one(kind, wanted)
            except CdiError as err:
                errors[kind] = str(err)
                if self._errors.get(kind) != errors[kind]:
                    self._journal.record(
                        "cdi.trouble", level="error", kind=kind, error=errors[kind]
                    )
        self._errors = errors
        wanted_kinds = set(self._kinds(wanted))
        self._made = {kind: made for kind, made in self._made.items() if kind in wanted_kinds}
        if self.statuses != before:
            self.revision.advance()
        return not errors

    async def _use_earlier_spec(self, wanted: Wanted) -> None:
        """Take, once and before anything is made, the GPUs' spec that an earlier agent has left;
        it is used until it is replaced.
        """
        if self._knows_earlier:
            return
        self._knows_earlier = True
        path = self._path(GPU_KIND)
        if found := await asyncio.to_thread(_read_earlier, path, GPU_KIND, wanted.driver_version):
            self._made[GPU_KIND] = _Made(
                made_for=None, device_facts=None, spec=found.spec, at=found.at
            )
            self._journal.record(
                "cdi.spec_found", kind=GPU_KIND, path=path, devices=len(found.spec.devices)
            )

    async def _bring_about_one(self, kind: str, wanted: Wanted) -> None:
        made_for, made = self._made_for(kind, wanted), self._made.get(kind)
        if made is not None and made.spec is not None:
            made.written = await self._is_written(kind, made.spec)
            if not made.written:
                await self._write(kind, made.spec)
                made.written = True
        if made is not None and made.made_for == made_for:
            return
        fresh = self._unwritten.get(kind)
        if fresh is None or fresh.made_for != made_for:
            fresh = self._unwritten[kind] = _Made(
                made_for=made_for,
                device_facts=wanted.device_facts,
                spec=await self._make(kind, wanted),
                at=self._clock(),
            )
        if fresh.spec is not None and not await self._is_written(kind, fresh.spec):
            # the old file is good until this one has taken its place
            await self._write(kind, fresh.spec)
        self._made[kind] = self._unwritten.pop(kind)
        devices = len(fresh.spec.devices) if fresh.spec else 0
        self._journal.record("cdi.spec_made", kind=kind, path=self._path(kind), devices=devices)

    async def _make(self, kind: str, wanted: Wanted) -> Spec | None:
        if kind == _CHANNEL_KIND:
            return channel_spec(kind, wanted.channels, wanted.channel_root)
        name = kind.partition("/")[2]
        mode = "auto" if kind == GPU_KIND else name
        return await generate(
            wanted.ctk,
            vendor=_VENDOR,
            name=name,
            mode=mode,
            id_strategy=wanted.id_strategy,
            stuck=self._stuck,
        )

    async def _is_written(self, kind: str, spec: Spec) -> bool:
        return await asyncio.to_thread(_has, self._path(kind), encode(spec))

    async def _write(self, kind: str, spec: Spec) -> None:
        await asyncio.to_thread(_write, self._path(kind), encode(spec))

    def _kinds(self, wanted: Wanted | None) -> list[str]:
        if wanted is None:
            return []
        channels = [_CHANNEL_KIND] if wanted.channels else []
        return [
            GPU_KIND,
            *channels,
            *(f"{_VENDOR}/{mode}" for mode in DEVICE_MODES if mode in wanted.modes),
        ]

    def _made_for(self, kind: str, wanted: Wanted) -> Hashable:
        """Return the fields of ``wanted`` on which the spec of ``kind`` depends."""
        if kind == GPU_KIND:
            return wanted.device_facts, wanted.id_strategy, wanted.ctk
        return (wanted.channels, wanted.channel_root) if kind == _CHANNEL_KIND else wanted.ctk

    def _path(self, kind: str) -> str:
        return os.path.join(self._directory, f"{kind.replace('/', '-')}.json")

    def _status(self, kind: str) -> CdiSpecStatus:
        made = self._made.get(kind)
        devices = (
            tuple(device.name for device in made.spec.devices)
            if made and made.spec and made.written
            else ()
        )
        return CdiSpecStatus(
            kind=kind,
            path=self._path(kind),
            devices=devices,
            made_at=made.at if made else 0.0,
            error=self._errors.get(kind, ""),
        )


def _read_earlier(path: str, kind: str, driver_version: str) -> _EarlierSpec | None:
    """Read the spec of ``kind`` that an earlier agent has made, if it was for that driver.

    NVIDIA's tool describes all GPUs or none, so one lost GPU would keep a restarted agent from
    offering the others. A sound spec of the current driver, which the names of its libraries show,
    is used for as long as no new one can be made. `controller` checks, as for any spec, that each
    name in it still opens its device.
    """
    try:
        at = os.stat(path).st_mtime
        with open(path, "rb") as file:
            spec = decode(file.read(LARGEST_BYTES + 1))
    except (OSError, CdiError):
        return None  # it will be replaced; if that fails, the writer reports why
    if spec.kind != kind or rules.problems(spec) or not driver_version:
        return None
    library = f".so.{driver_version}"  # libcuda.so.580.95.05, and a dozen others
    mounts = [
        *spec.container_edits.mounts,
        *(mount for device in spec.devices for mount in device.container_edits.mounts),
    ]
    return (
        _EarlierSpec(spec, at)
        if any(mount.container_path.endswith(library) for mount in mounts)
        else None
    )


def _has(path: str, content: bytes) -> bool:
    """Tell whether the file exists with exactly this content."""
    try:
        with open(path, "rb") as file:
            return file.read(len(content) + 1) == content
    except OSError:
        return False


def _write(path: str, content: bytes) -> None:
    """Write ``content`` durably; readers see the old file or the new one.
    The directory is made if need be.

    Raises:
        CdiError: it cannot be written; names path, reason and remedy.
    """
    temporary = _temporary(path)
    try:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
        )
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
                # whatever the umask: runtimes that do not run as root read it as well
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


def _temporary(path: str) -> str:
    return os.path.join(os.path.dirname(path), _TEMPORARY.format(os.path.basename(path)))


def _remove(path: str) -> None:
    """Remove the file, and the unfinished one that a killed agent has left; fine when they are gone
    already.

    Raises:
        CdiError: the file cannot be removed.
    """
    with contextlib.suppress(OSError):
        os.unlink(_temporary(path))
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as err:
        raise CdiError(
            f"cannot remove {path}: {err.strerror or err}; remove it by hand, so that no runtime "
            "uses it"
        ) from err
