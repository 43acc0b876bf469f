"""A simulated node: a directory with a state file, which describes the GPUs that the simulated
driver shows to each process.

Tests, the demo and ``vgpu-agent sim`` create and change such nodes; agents see each change at their
next NVML call. A GPU keeps the number that it has at creation (its minor number), while its NVML
index changes when a GPU with a lower number is unplugged.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final, Self

from vgpu_agent.errors import SimulationError
from vgpu_agent.sim import build, creation, layout, mig, trees
from vgpu_agent.sim.models import model_of
from vgpu_agent.sim.processes import ProcessUse, is_locked

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

# With the types and names that its methods take, so that a caller needs this module only.
__all__ = [
    "RECOVERY_ACTIONS",
    "STATE_FILE",
    "XID_EVENT",
    "GpuDescription",
    "ProcessUse",
    "SimulatedNode",
]

STATE_FILE: Final = "state"
XID_EVENT: Final = 0x8  # nvmlEventTypeXidCriticalError

# NVML_GPU_RECOVERY_ACTION_*; "unsupported" stands for a driver that does not know the field. In the
# state file, `layout.NONE` is what a field without a value has.
RECOVERY_ACTIONS: Final = {
    "none": 0,
    "reset": 1,
    "reboot": 2,
    "drain-p2p": 3,
    "drain-and-reset": 4,
    "unsupported": layout.NONE,
}
_MIB: Final = 1 << 20
_FUNCTION = re.compile(r"nvml\w+")
_LONGEST = 63  # characters of a function's name: struct sim_fault has 64 bytes for it


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDescription:
    """One GPU in words, for ``vgpu-agent sim list``.

    Attributes:
        number: the one that the GPU has from its creation (its minor number).
        condition: ``answers``, ``lost``, ``lost entirely`` or ``unplugged``.
        recovery_action: a key of `RECOVERY_ACTIONS`.
        mig_devices: the profiles of its MIG instances, e.g. ``3g.40gb``.
        processes: how many use it.
    """

    number: int
    uuid: str
    name: str
    memory_mib: int
    numa_node: int | None
    pci_address: str
    condition: str
    recovery_action: str
    mig_devices: tuple[str, ...]
    processes: int


class SimulatedNode:
    """The simulated GPUs in one directory.

    State: the mapped file; other processes change it too. A lock on a file beside it admits one
    writer at a time where changes must not mix (locks on the state file itself mark the slots of
    live processes; a slot is a row of the file). A crash between two writes can leave one half-made
    change, never more.
    """

    def __init__(self, directory: Path, memory: mmap.mmap) -> None:
        self.directory = directory
        self.state = layout.Node.from_buffer(memory)

    @classmethod
    def create(
        cls,
        directory: Path,
        *,
        model: str = "A100-SXM4-80GB",
        gpus: int = 2,
        numa: Sequence[int] | None = None,
        uuids: Sequence[str] | None = None,
        seed: str = "",
        driver_version: str = "580.95.05",
        cuda_version: int = 13000,
        force: bool = False,
    ) -> Self:
        """Make a new node in ``directory``, and sysfs, procfs and device nodes beside its state.

        Args:
            directory: made if need be.
            model: a key of models.toml.
            gpus: how many, 1 to 16.
            numa: NUMA node of each GPU, -1 for none; by default all on node 0.
            uuids: UUID of each GPU; by default derived from model, number and ``seed``.
            seed: differs between nodes that must not share UUIDs.
            driver_version: the version that NVML shows for the driver.
            cuda_version: as NVML encodes it, 1000 × major + 10 × minor.
            force: replace a node that is there. A process that has mapped the old one keeps seeing
                it until the next nvmlInit.

        Raises:
            SimulationError: a value cannot be used, a node is there already, or the directory
                cannot be written.
        """
        gpu_model = model_of(model)
        if not 1 <= gpus <= layout.GPUS:
            raise SimulationError(f"cannot simulate {gpus} GPUs; choose 1 to {layout.GPUS}")
        nodes = list(numa) if numa is not None else [0] * gpus
        if len(nodes) != gpus or not all(-1 <= node < 32 for node in nodes):
            raise SimulationError(
                f"NUMA nodes {','.join(map(str, nodes))} do not suit {gpus} GPUs; give one for "
                "each, -1 to 31"
            )
        gpu_uuids = (
            list(uuids) if uuids is not None else creation.default_uuids(gpu_model, gpus, seed)
        )
        if len(gpu_uuids) != gpus:
            raise SimulationError(
                f"{len(gpu_uuids)} UUIDs do not suit {gpus} GPUs; give one for each"
            )
        creation.check_uuids(gpu_uuids)
        state = directory / STATE_FILE
        if state.exists() and not force:
            raise SimulationError(
                f"{directory} holds a simulated node already; choose another directory, or replace "
                "it with --force"
            )
        fresh = layout.Node()
        creation.fill(
            fresh,
            gpu_model,
            numa_nodes=nodes,
            uuids=gpu_uuids,
            driver_version=driver_version,
            cuda_version=cuda_version,
        )
        try:
            directory.mkdir(parents=True, exist_ok=True)
            trees.clear(directory)  # sysfs, procfs and device nodes of an earlier node
            unfinished = directory / f".{STATE_FILE}.{os.getpid()}"
            unfinished.write_bytes(bytes(fresh))
            unfinished.replace(state)
        except OSError as err:
            raise SimulationError(
                f"cannot create a simulated node in {directory}: {err.strerror}"
            ) from err
        trees.write(directory, fresh)
        return cls.open(directory)

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Open the node that `create` made.

        Raises:
            SimulationError: there is none, or it is not readable and writable, or of another
                version of this program.
        """
        path, size = directory / STATE_FILE, ctypes.sizeof(layout.Node)
        remedy = f"create one with: vgpu-agent sim create {shlex.quote(str(directory))}"
        try:
            with path.open("r+b") as file:
                if os.fstat(file.fileno()).st_size < size:
                    raise SimulationError(
                        f"{path} is not the state of a simulated node (too short); {remedy} --force"
                    )
                memory = mmap.mmap(file.fileno(), size)
        except FileNotFoundError as err:
            raise SimulationError(f"{directory} holds no simulated node; {remedy}") from err
        except OSError as err:
            raise SimulationError(
                f"cannot open {path} for reading and writing: {err.strerror}"
            ) from err
        node = cls(directory, memory)
        if node.state.magic != layout.MAGIC:
            raise SimulationError(f"{path} is not the state of a simulated node; {remedy} --force")
        if node.state.layout != layout.LAYOUT or node.state.bytes != size:
            raise SimulationError(
                f"{path} has layout {node.state.layout}, this program writes layout "
                f"{layout.LAYOUT}; {remedy} --force"
            )
        return node

    # What is there --------------------------------------------------------------------------------

    @property
    def state_path(self) -> Path:
        """The file that every client maps."""
        return self.directory / STATE_FILE

    @property
    def uuids(self) -> tuple[str, ...]:
        """UUIDs of all GPUs, unplugged ones too, by number."""
        return tuple(gpu.uuid.decode() for gpu in self.state.gpus[: self.state.gpu_count])

    def mig_uuids(self, gpu: int | str) -> tuple[str, ...]:
        """UUIDs of the MIG instances of a GPU, in NVML's order."""
        return tuple(mig.uuid.decode() for mig in self._gpu(gpu).mig_devices if mig.used)

    def gpu_number(self, gpu: int | str) -> int:
        """The number of a GPU given by number or UUID.

        Raises:
            SimulationError: there is no such GPU.
        """
        text = str(gpu)
        if text in self.uuids:
            return self.uuids.index(text)
        if text.isdecimal() and int(text) < self.state.gpu_count:
            return int(text)
        raise SimulationError(
            f"{self.directory} has no GPU {text}; it has 0 to {self.state.gpu_count - 1}"
        )

    def describe(self) -> list[GpuDescription]:
        """Describe every GPU in words."""
        return [self._describe(number) for number in range(self.state.gpu_count)]

    def _gpu(self, gpu: int | str) -> layout.Gpu:
        row: layout.Gpu = self.state.gpus[self.gpu_number(gpu)]
        return row

    def _describe(self, number: int) -> GpuDescription:
        gpu = self.state.gpus[number]
        conditions = {
            layout.Gpu.ANSWERS: "answers",
            layout.Gpu.LOST_BUT_KNOWN: "lost",
            layout.Gpu.LOST_ENTIRELY: "lost entirely",
        }
        actions = {code: name for name, code in RECOVERY_ACTIONS.items()}
        return GpuDescription(
            number=number,
            uuid=gpu.uuid.decode(),
            name=gpu.name.decode(),
            memory_mib=gpu.memory_total // _MIB,
            numa_node=None if gpu.numa_node == layout.NONE else gpu.numa_node,
            pci_address=trees.pci_address(gpu),
            condition=conditions[gpu.lost] if gpu.present else "unplugged",
            recovery_action=actions[gpu.recovery_action],
            mig_devices=tuple(
                mig.name.decode().rpartition(" ")[2] for mig in gpu.mig_devices if mig.used
            ),
            processes=sum(self._is_running(number, slot) for slot in range(layout.PROCESSES)),
        )

    def _is_running(self, gpu: int, slot: int) -> bool:
        """Tell whether a slot's process exists: one of `add_process` always, one of `start_process`
        as long as a process holds the slot's lock.
        """
        kind = self.state.gpus[gpu].processes[slot].kind
        if kind != layout.Process.LIVE:
            return bool(kind == layout.Process.FIXED)
        return is_locked(self.state_path, gpu, slot)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock for changes that must not mix with those of other processes.

        Raises:
            SimulationError: the lock's file cannot be made.
        """
        try:
            with (self.directory / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as err:
            raise SimulationError(f"cannot lock {self.directory}: {err.strerror}") from err

    # Errors, and their end ------------------------------------------------------------------------

    def xid(
        self,
        gpu: int | str,
        code: int,
        *,
        gpu_instance: int | None = None,
        compute_instance: int | None = None,
    ) -> None:
        """Raise XID ``code``, on one MIG instance where its ids are given."""
        self.event(
            gpu, XID_EVENT, code, gpu_instance=gpu_instance, compute_instance=compute_instance
        )

    def event(
        self,
        gpu: int | str,
        event_type: int,
        payload: int = 0,
        *,
        gpu_instance: int | None = None,
        compute_instance: int | None = None,
    ) -> None:
        """Raise an event of type ``nvmlEventType…``, with NVML's event data ``payload`` (for an XID
        its code); every event set that registered for it gets it once.
        """
        number = self.gpu_number(gpu)
        with self.writing():
            sequence = self.state.event_head
            row = self.state.events[sequence % layout.EVENTS]
            row.type, row.payload, row.gpu = event_type, payload, number
            row.gpu_instance = layout.NONE if gpu_instance is None else gpu_instance
            row.compute_instance = layout.NONE if compute_instance is None else compute_instance
            row.sequence = sequence
            self.state.event_head = sequence + 1

    def lose(self, gpu: int | str, *, entirely: bool = False) -> None:
        """Make the GPU fall off the bus: queries fail with "GPU is lost". Old handles keep its
        identity, unless ``entirely``.
        """
        self._gpu(gpu).lost = layout.Gpu.LOST_ENTIRELY if entirely else layout.Gpu.LOST_BUT_KNOWN

    def restore(self, gpu: int | str) -> None:
        """Undo `lose`."""
        self._gpu(gpu).lost = layout.Gpu.ANSWERS

    def unplug(self, gpu: int | str) -> None:
        """Take the GPU away: old handles fail with "GPU is lost",
        and after the next nvmlInit it is not counted.
        """
        self._gpu(gpu).present = 0

    def plug(self, gpu: int | str) -> None:
        """Undo `unplug`; clients that initialised meanwhile see it after their next nvmlInit."""
        self._gpu(gpu).present = 1

    def recovery_action(self, gpu: int | str, action: str) -> None:
        """Set the action that the driver requires: one of `RECOVERY_ACTIONS`.

        Raises:
            SimulationError: unknown action.
        """
        if action not in RECOVERY_ACTIONS:
            raise SimulationError(
                f"unknown recovery action {action!r}; there are {', '.join(RECOVERY_ACTIONS)}"
            )
        self._gpu(gpu).recovery_action = RECOVERY_ACTIONS[action]

    def remap(
        self,
        gpu: int | str,
        *,
        corrected: int = 0,
        uncorrected: int = 0,
        pending: bool = False,
        failed: bool = False,
    ) -> None:
        """Set the counts of remapped memory rows, and whether a remapping waits for a reset
        or has failed.
        """
        row = self._gpu(gpu)
        row.remap_corrected, row.remap_uncorrected = corrected, uncorrected
        row.remap_pending, row.remap_failed = int(pending), int(failed)

    def ecc_errors(self, gpu: int | str, *, corrected: int = 0, uncorrected: int = 0) -> None:
        """Set the volatile ECC counts, and add the same to the aggregate ones."""
        with self.writing():
            row = self._gpu(gpu)
            row.ecc_volatile_corrected, row.ecc_volatile_uncorrected = corrected, uncorrected
            row.ecc_aggregate_corrected += corrected
            row.ecc_aggregate_uncorrected += uncorrected

    def temperature(self, gpu: int | str, celsius: int) -> None:
        """Set the GPU's temperature in degrees Celsius."""
        self._gpu(gpu).temperature = celsius

    def fault(
        self,
        function: str,
        *,
        gpu: int | str | None = None,
        code: int | None = None,
        times: int = -1,
        delay_ms: int = 0,
    ) -> None:
        """Make NVML calls fail or be slow.

        Args:
            function: the name of an NVML function (``nvmlDeviceGetHandleByIndex``), which stands
                for all its versions, or a prefix and ``*``.
            gpu: only for calls about this GPU.
            code: nvmlReturn_t to answer with; without it the call is only slow.
            times: how often, -1 for ever.
            delay_ms: how long each such call takes first.

        Raises:
            SimulationError: no such function, nothing to do, or the state file's 32 rows for
                faults are all in use.
        """
        _check_function(function)
        if (code is None and delay_ms <= 0) or times == 0 or times < -1 or delay_ms < 0:
            raise SimulationError(
                f"a fault of {function} needs a code or a delay, and times -1 or at least 1"
            )
        number = layout.NONE if gpu is None else self.gpu_number(gpu)
        with self.writing():
            free = [row for row in self.state.faults if not row.function or row.times_left == 0]
            if not free:
                raise SimulationError(
                    f"all {layout.FAULTS} fault rows are in use; clear them first"
                )
            row = free[0]
            row.times_left, row.gpu, row.delay_ms = 0, number, delay_ms
            row.code = layout.NONE if code is None else code
            row.function = function.encode()
            row.times_left = times

    def clear_faults(self) -> None:
        """Forget every fault; a call that is being delayed now continues at once."""
        with self.writing():
            for row in self.state.faults:
                row.times_left, row.function = 0, b""

    # Use of the GPUs ------------------------------------------------------------------------------

    def set_mig(
        self, gpu: int | str, profiles: Sequence[str], *, uuids: Sequence[str] | None = None
    ) -> None:
        """Divide the GPU into instances of these profiles (``3g.40gb``, ``1c.3g.40gb``); an empty
        sequence switches MIG mode off.

        Raises:
            SimulationError: unknown profile, or they do not fit; nothing is changed then.
        """
        with self.writing():
            planned = layout.Node.from_buffer_copy(self.state)
            number = self.gpu_number(gpu)
            mig.cut(planned.gpus[number], profiles, uuids)
            # as with a real driver, the device nodes of an instance exist before it is visible;
            # `tidy=False` leaves the files of the former instances until then
            trees.write(self.directory, planned, tidy=False)
            mig.copy(planned.gpus[number], self.state.gpus[number])
            trees.write(self.directory, self.state)

    def utilisation(self, gpu: int | str, percent: int | None) -> None:
        """Set the GPU's utilisation to a fixed value, and that of its memory to half of it; with
        None, both follow from its processes.

        Raises:
            SimulationError: not 0 to 100.
        """
        if percent is not None and not 0 <= percent <= 100:
            raise SimulationError(f"utilisation is 0 to 100 percent, not {percent}")
        row = self._gpu(gpu)
        row.utilisation = layout.NONE if percent is None else percent
        row.memory_utilisation = layout.NONE if percent is None else percent // 2

    def add_process(self, gpu: int | str, pid: int, use: ProcessUse) -> int:
        """Show a process that need not exist, under exactly this pid;
        return its slot for `remove_process`.

        Raises:
            SimulationError: all slots are taken.
        """
        with self.writing():
            # From the far end: live processes take the first free slot.
            for slot in reversed(range(layout.PROCESSES)):
                row = self._gpu(gpu).processes[slot]
                if not self._is_running(self.gpu_number(gpu), slot):
                    use.fill(row, pid=pid)
                    row.kind = layout.Process.FIXED
                    return slot
        raise SimulationError(
            f"all {layout.PROCESSES} process slots of GPU {gpu} are taken; remove one first"
        )

    def remove_process(self, gpu: int | str, slot: int) -> None:
        """Forget what `add_process` added."""
        self._gpu(gpu).processes[slot].kind = layout.Process.FREE

    def start_process(self, gpu: int | str, use: ProcessUse) -> subprocess.Popen[str]:
        """Start a real process that uses the GPU until it ends; return once NVML shows it.
        The caller ends and reaps it.

        Raises:
            SimulationError: the process could not take a slot; the message has its output.
        """
        command = [
            sys.executable,
            "-m",
            "vgpu_agent.sim.holder",
            str(self.directory),
            "--gpu",
            str(gpu),
            "--use",
            use.to_json(),
        ]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        if process.stdout is None or not process.stdout.readline():
            _, complaint = process.communicate()
            raise SimulationError(f"the process on GPU {gpu} did not start: {complaint.strip()}")
        return process


@cache
def _known_functions() -> frozenset[str]:
    """Return the names that begin with ``nvml`` in the sources of the simulated driver: functions,
    and a few types and constants.
    """
    text = "".join(source.read_text(encoding="utf-8") for source in build.sources())
    return frozenset(_FUNCTION.findall(text))


def _check_function(function: str) -> None:
    """Check that NVML has a function of this name, exactly, without its version, or with the prefix
    before a ``*``.

    A fault of a function that does not exist has no effect, which would look as if the agent could
    cope with it.

    Raises:
        SimulationError: there is none; the message has the name.
    """
    prefix = function.removesuffix("*")
    known = _known_functions()
    versions = re.compile(re.escape(prefix) + r"(_v\d)?")
    fits = any(
        name.startswith(prefix) if function != prefix else versions.fullmatch(name)
        for name in known
    )
    if not function.startswith("nvml") or not fits or len(function) > _LONGEST:
        raise SimulationError(
            f"NVML has no function {function!r}; give a name like nvmlDeviceGetMemoryInfo, or a "
            "prefix and *"
        )
