"""NVML with types, our own exceptions, and a record of the call in flight.

pynvml has no types, its errors are not hashable, and its calls may block for seconds, or for ever
when a card dies. This wrapper is the only place that calls it: nearly every method is one NVML
function (or the two versions of it that drivers have), each failure is an `NvmlError`, and while a
call runs `Nvml.in_flight` names it and its GPU, so that another thread can tell which call hangs.

Used only in the thread that owns NVML (`thread`), by `session` and its callees. Optional facts are
None where a driver or card does not have them; that is normal, not an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from typing import TYPE_CHECKING, Any, NewType

import msgspec
import pynvml

from vgpu_agent.errors import DriverMissingError, NvmlError
from vgpu_agent.gpu import library, return_codes
from vgpu_agent.gpu.health import RecoveryAction

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

# A handle of a GPU or MIG device; valid until the next shutdown. An event set likewise.
Handle = NewType("Handle", object)
EventSet = NewType("EventSet", object)

_MIB = 1024 * 1024
# the answers about an NVLink that the card does not have
_NO_LINK = frozenset({return_codes.NOT_SUPPORTED, return_codes.INVALID_ARGUMENT})
_NO_INSTANCE = 0xFFFFFFFF  # the instance ids in an event that is about no instance
# the kernel's own limit; drivers of another struct layout have reported memory sizes as pids
_LARGEST_PID = 1 << 22

# Events that tell of a card's trouble, or that it was divided again. Only an XID can make a GPU
# Unhealthy by itself; after any other of them the agent just reads the card again.
XID_EVENT = pynvml.nvmlEventTypeXidCriticalError
_REREAD_EVENTS = (
    pynvml.nvmlEventMigConfigChange
    | pynvml.nvmlEventTypeGpuUnavailableError
    | pynvml.nvmlEventTypeGpuRecoveryAction
)


class CallInFlight(msgspec.Struct, frozen=True):
    """A driver call that has not returned: its name, its GPU's UUID if it has one (``index N``
    while the UUID is not known), and when it began (monotonic seconds).
    """

    name: str
    gpu: str
    started: float


class DeviceEvent(msgspec.Struct, frozen=True):
    """An event that the driver reported.

    Attributes:
        gpu: the GPU's UUID; empty when the driver names none.
        xid: the XID; None for an event of another kind.
        gpu_instance: the MIG GPU instance it hit; None for the whole GPU.
        compute_instance: the same for the MIG compute instance.
    """

    gpu: str
    xid: int | None
    gpu_instance: int | None = None
    compute_instance: int | None = None


class NvLinks(msgspec.Struct, frozen=True):
    """The active NVLinks of one GPU.

    Attributes:
        peers: the sysfs PCI address of the GPU at the far end, one entry per link.
        switch_links: number of links that lead to an NVSwitch.
    """

    peers: tuple[str, ...] = ()
    switch_links: int = 0


class Nvml:
    """The driver, usable between `init` and `shutdown`.

    State: what NVML keeps in this process. Handles die with `shutdown`. ``calls`` and ``errors``
    (their numbers so far) and ``in_flight`` may be read from any thread at any time.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.errors = 0
        self.last_error = ""
        self.in_flight: CallInFlight | None = None
        self.library = ""  # its path or soname once it is loaded; empty before
        # by handle, so that a lost card's calls and events can still be named
        self._uuids: dict[int, str] = {}
        self._uuid_by_index: dict[int, str] = {}

    # ---- the library as a whole

    def load(self, driver_root: Path) -> None:
        """Load the library and initialise the driver.

        Args:
            driver_root: root of the file system in which the driver is installed.

        Raises:
            DriverMissingError: no library, or it does not find a driver; the message has NVML's
                answer and the remedies, in three lines at most.
        """
        broken: list[str] = []
        if not self.library:  # it is never unloaded, so a second try is about the driver behind it
            with self.watched("dlopen"):
                self.library, broken = library.load(driver_root)
        try:
            self.init()
        except NvmlError as err:
            where = f"loaded {self.library}"
            if not self.library:
                where = "; ".join(broken) or f"there is no {library.SONAME}"
            remedies = return_codes.remedies(
                err.code, driver_root, in_container=library.in_container()
            )
            lines = (f"no usable NVIDIA driver: {where}; {err}", *remedies)
            raise DriverMissingError(".\n".join(lines)) from err

    def init(self) -> None:
        """Initialise NVML with the cards that are plugged in now.

        Raises:
            NvmlError: the driver is not there or not ready.
        """
        self._call("nvmlInit")

    def shutdown(self) -> None:
        """Release the driver; all handles and event sets become void.

        Raises:
            NvmlError: it was not initialised.
        """
        self._uuids.clear()
        self._call("nvmlShutdown")

    @property
    def simulated(self) -> bool:
        """Tell whether the loaded library is the simulation's: it exports a symbol that no driver
        has.
        """
        return pynvml.nvmlLib is not None and hasattr(pynvml.nvmlLib, "vgpusim_layout")

    def nvml_version(self) -> str:
        """The version of the library, e.g. ``13.580.65.06``; empty when it does not say."""
        return str(self._optional("nvmlSystemGetNVMLVersion") or "")

    def driver_version(self) -> str:
        """Return the driver's version, e.g. ``580.65.06``; empty when it reports none."""
        return str(self._optional("nvmlSystemGetDriverVersion") or "")

    def cuda_version(self) -> str:
        """Return the newest CUDA that the driver can run, e.g. ``13.0``; empty when it reports
        none.
        """
        version = self._optional("nvmlSystemGetCudaDriverVersion_v2")
        return f"{version // 1000}.{version % 1000 // 10}" if version else ""

    # ---- the GPUs

    def count(self) -> int:
        """The number of GPUs as of the last `init`."""
        return int(self._call("nvmlDeviceGetCount"))

    def handle(self, index: int) -> Handle:
        """The GPU at ``index``; a lost card fails here (code 15, GPU_IS_LOST)."""
        return Handle(
            self._call(
                "nvmlDeviceGetHandleByIndex",
                index,
                gpu=self._uuid_by_index.get(index, f"index {index}"),
            )
        )

    def uuid(self, handle: Handle, *, index: int | None = None) -> str:
        """Return ``GPU-…`` or ``MIG-…``; if ``index`` is given,
        later calls about that GPU are recorded with this UUID.
        """
        uuid = str(self._call("nvmlDeviceGetUUID", handle))
        if index is not None:
            self._uuid_by_index[index] = self._uuids[_address(handle)] = uuid
        return uuid

    def name(self, handle: Handle) -> str:
        """The product name."""
        return str(self._call("nvmlDeviceGetName", handle))

    def minor(self, handle: Handle) -> int:
        """The number in ``/dev/nvidia<minor>``; -1 where the GPU has no such node, as under WSL
        (k8s-device-plugin issue 332).
        """
        try:
            return int(self._call("nvmlDeviceGetMinorNumber", handle))
        except NvmlError as err:
            if err.code == return_codes.NOT_SUPPORTED:
                return -1
            raise

    def pci_bus_id(self, handle: Handle) -> str:
        """Return the PCI address as sysfs writes it, e.g. ``0000:07:00.0``."""
        return sysfs_address(self._call("nvmlDeviceGetPciInfo_v3", handle).busId)

    def compute_capability(self, handle: Handle) -> tuple[int, int]:
        """Return (major, minor); (0, 0) when the driver reports none."""
        answer = self._optional("nvmlDeviceGetCudaComputeCapability", handle)
        return (int(answer[0]), int(answer[1])) if answer else (0, 0)

    def memory_mib(self, handle: Handle) -> tuple[int, int]:
        """Return (total, used); used is without the driver's own reserve where the driver reports
        that apart.
        """
        memory = self._optional(
            "nvmlDeviceGetMemoryInfo", handle, pynvml.nvmlMemory_v2
        ) or self._call("nvmlDeviceGetMemoryInfo", handle)
        return int(memory.total) // _MIB, int(memory.used) // _MIB

    # ---- MIG

    def mig_mode(self, handle: Handle) -> bool | None:
        """Tell whether MIG mode is on now; None for a card that does not know MIG."""
        modes = self._optional("nvmlDeviceGetMigMode", handle)
        return None if modes is None else bool(modes[0] == pynvml.NVML_DEVICE_MIG_ENABLE)

    def mig_slots(self, handle: Handle) -> int:
        """Return the number of MIG devices that the GPU could have;
        fails where the driver does not permit the question (code 4, NO_PERMISSION), since there may
        be some.
        """
        try:
            return int(self._call("nvmlDeviceGetMaxMigDeviceCount", handle))
        except NvmlError as err:
            if err.code in {return_codes.NOT_SUPPORTED, return_codes.FUNCTION_NOT_FOUND}:
                return 0
            raise

    def mig_handle(self, handle: Handle, index: int) -> Handle | None:
        """The MIG device at ``index``, None where there is none."""
        try:
            mig = Handle(self._call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index))
        except NvmlError as err:
            if err.code in {return_codes.NOT_FOUND, return_codes.NOT_SUPPORTED}:
                return None
            raise
        # a call about a MIG instance is a call about its GPU
        self._uuids[_address(mig)] = self._uuids.get(_address(handle), "")
        return mig

    def mig_instance_ids(self, mig: Handle) -> tuple[int, int]:
        """Return (GPU instance id, compute instance id)."""
        return int(self._call("nvmlDeviceGetGpuInstanceId", mig)), int(
            self._call("nvmlDeviceGetComputeInstanceId", mig)
        )

    def mig_slices(self, mig: Handle) -> tuple[int, int, int]:
        """Return (compute slices of the GPU instance, of the compute instance, MiB)."""
        attributes = self._call("nvmlDeviceGetAttributes_v2", mig)
        return (
            int(attributes.gpuInstanceSliceCount),
            int(attributes.computeInstanceSliceCount),
            int(attributes.memorySizeMB),
        )

    # ---- how the GPUs are connected

    def common_ancestor(self, one: Handle, other: Handle) -> int | None:
        """Return NVML's level, from 0 (same board) to 50 (across CPUs); None if it is unknown."""
        level = self._optional("nvmlDeviceGetTopologyCommonAncestor", one, other)
        return None if level is None else int(level)

    def nvlinks(self, handle: Handle, gpus: Collection[str]) -> NvLinks:
        """The far ends of the active NVLinks; a link that the card does not have is left out.

        Args:
            handle: the GPU.
            gpus: the sysfs PCI addresses of all GPUs; the driver is asked for the type of any other
                far end.
        """
        peers: list[str] = []
        switches = 0
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            if not self._link_fact("nvmlDeviceGetNvLinkState", handle, link):
                continue
            remote = self._link_fact("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
            address = sysfs_address(remote.busId) if remote is not None else ""
            if address in gpus:
                peers.append(address)
                continue
            kind = self._link_fact("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            switches += kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
        return NvLinks(tuple(peers), switches)

    def _link_fact(self, name: str, handle: Handle, link: int) -> Any:
        """Return what the driver tells of a link; None where the card, or this driver, does not
        know the link.
        """
        try:
            return self._call(name, handle, link, normal=_NO_LINK)
        except NvmlError as err:
            if err.code in _NO_LINK or err.code in return_codes.ABSENT:
                return None
            raise

    # ---- the health of a card

    def temperature_celsius(self, handle: Handle) -> int | None:
        """Return the temperature of the GPU's core. A lost card fails here (code 15,
        GPU_IS_LOST).
        """
        value = self._optional("nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU)
        return None if value is None else int(value)

    def recovery_action(self, handle: Handle) -> RecoveryAction:
        """Return the action that the driver requires before the card is used again;
        NONE where it does not know the field.
        """
        values = self._optional(
            "nvmlDeviceGetFieldValues", handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        )
        if values is None or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
            return RecoveryAction.NONE
        return RecoveryAction(int(values[0].value.uiVal))

    def remap_pending(self, handle: Handle) -> bool:
        """Tell whether a row of memory waits for a reset to be replaced."""
        rows = self._optional("nvmlDeviceGetRemappedRows", handle)
        return bool(rows and rows[2])

    # ---- the use of a card

    def utilisation_percent(self, handle: Handle) -> int | None:
        """Return the percentage of the driver's last sample period in which at least one kernel
        ran.
        """
        rates = self._optional("nvmlDeviceGetUtilizationRates", handle)
        return None if rates is None else int(rates.gpu)

    def power_watts(self, handle: Handle) -> float | None:
        """Return the power that the whole board draws."""
        milliwatts = self._optional("nvmlDeviceGetPowerUsage", handle)
        return None if milliwatts is None else milliwatts / 1000

    def ecc_uncorrected_total(self, handle: Handle) -> int | None:
        """Uncorrectable memory errors over the life of the card."""
        value = self._optional(
            "nvmlDeviceGetTotalEccErrors",
            handle,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_AGGREGATE_ECC,
        )
        return None if value is None else int(value)

    def processes(self, handle: Handle) -> tuple[tuple[int, int], ...]:
        """Return (host pid, MiB) of each process that has memory on the GPU, by pid;
        implausible pids are left out.
        """
        memory: dict[int, int] = {}
        for name in (
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlDeviceGetGraphicsRunningProcesses_v3",
        ):
            for process in self._optional(name, handle) or ():
                if 0 < process.pid <= _LARGEST_PID:
                    memory[process.pid] = (
                        memory.get(process.pid, 0) + (process.usedGpuMemory or 0) // _MIB
                    )
        return tuple(sorted(memory.items()))

    def raw(self, name: str, handle: Handle, /, *arguments: Any) -> int:
        """Call an NVML function with the caller's buffers; return its code unchanged. This is for
        frequent calls with many rows in the answer, for which pynvml's objects are too slow.

        Raises:
            NvmlError: the library does not have the function.
        """
        self.calls += 1
        try:
            function = getattr(pynvml.nvmlLib, name)
        except AttributeError as err:
            raise self._failed(name, return_codes.FUNCTION_NOT_FOUND, "Function Not Found") from err
        with self.watched(name, self._uuids.get(_address(handle), "")):
            return int(function(handle, *arguments))

    # ---- events

    def create_event_set(self) -> EventSet:
        """Create a queue for events; earlier events are not in it."""
        return EventSet(self._call("nvmlEventSetCreate"))

    def free_event_set(self, events: EventSet) -> None:
        """Free the queue."""
        self._call("nvmlEventSetFree", events)

    def register(self, handle: Handle, events: EventSet) -> bool:
        """Have the GPU's errors put into the queue;
        return False when this card cannot report them, which is normal for some.
        """
        supported = self._optional("nvmlDeviceGetSupportedEventTypes", handle)
        if not supported or not supported & XID_EVENT:
            return False
        try:
            self._call(
                "nvmlDeviceRegisterEvents", handle, supported & (XID_EVENT | _REREAD_EVENTS), events
            )
        except NvmlError as err:
            if err.code == return_codes.NOT_SUPPORTED:
                return False
            raise
        return True

    def wait(self, events: EventSet, timeout_seconds: float) -> DeviceEvent | None:
        """The next event, None when none came in time."""
        try:
            event = self._call("nvmlEventSetWait_v2", events, int(timeout_seconds * 1000), gpu="")
        except NvmlError as err:
            if err.code == return_codes.TIMEOUT:
                return None
            raise
        return DeviceEvent(
            gpu=self._event_uuid(Handle(event.device)),
            xid=int(event.eventData) if event.eventType == XID_EVENT else None,
            gpu_instance=None if event.gpuInstanceId == _NO_INSTANCE else int(event.gpuInstanceId),
            compute_instance=(
                None if event.computeInstanceId == _NO_INSTANCE else int(event.computeInstanceId)
            ),
        )

    # ---- calls into pynvml

    @contextlib.contextmanager
    def watched(self, name: str, gpu: str = "") -> Iterator[None]:
        """Record the ``with`` block as a call in flight; used for NVML, and for the few other calls
        that could block this thread.
        """
        self.in_flight = CallInFlight(name, gpu, time.monotonic())
        try:
            yield
        finally:
            self.in_flight = None

    def _event_uuid(self, handle: Handle) -> str:
        """Return the UUID of the GPU that an event names; empty when the driver does not say."""
        known = self._uuids.get(_address(handle))
        if known is not None:
            return known
        try:
            return str(self._call("nvmlDeviceGetUUID", handle))
        except NvmlError:
            return ""

    def _optional(self, name: str, /, *arguments: Any) -> Any:
        """Call like `_call`, but return None for what this card, driver or container lacks."""
        try:
            return self._call(name, *arguments)
        except NvmlError as err:
            if err.code in return_codes.ABSENT:
                return None
            raise

    def _call(
        self,
        name: str,
        /,
        *arguments: Any,
        gpu: str | None = None,
        normal: frozenset[int] = frozenset(),
    ) -> Any:
        """Call one NVML function, counted and named while it runs. Codes in ``normal``, and those
        in `return_codes.NORMAL`, do not count as errors in the status.

        Raises:
            NvmlError: it answered anything but success.
        """
        self.calls += 1
        about = (
            self._uuids.get(_address(arguments[0]), "") if gpu is None and arguments else gpu or ""
        )
        with self.watched(name, about):
            try:
                return getattr(pynvml, name)(*arguments)
            except pynvml.NVMLError as err:
                raise self._failed(name, err.value, str(err), normal) from err
            except pynvml.NVMLLibraryMismatchError as err:
                raise self._failed(
                    name, return_codes.FUNCTION_NOT_FOUND, "Function Not Found"
                ) from err
            except UnicodeDecodeError as err:
                raise self._failed(
                    name, pynvml.NVML_ERROR_UNKNOWN, "answered with a text that is not UTF-8"
                ) from err

    def _failed(
        self, name: str, code: int, text: str, normal: frozenset[int] = frozenset()
    ) -> NvmlError:
        error = NvmlError(name, code, text)
        if code not in normal | return_codes.NORMAL:
            self.errors += 1
            self.last_error = str(error)
        return error


def sysfs_address(bus_id: str | bytes) -> str:
    """NVML's ``00000000:07:00.0`` as sysfs writes it:
    lower case, domain of four digits (nvidia §4).
    """
    text = (bus_id.decode(errors="replace") if isinstance(bus_id, bytes) else bus_id).lower()
    domain, colon, rest = text.partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}" if colon else text


def _address(handle: object) -> int:
    """The pointer behind a handle, 0 for anything else:
    NVML gives one card one pointer, pynvml wraps it again in each answer.
    """
    return (
        ctypes.cast(handle, ctypes.c_void_p).value or 0
        if isinstance(handle, pynvml.c_nvmlDevice_t)
        else 0
    )
