"""The plain facts that all packages share:
devices, what may be granted of them, and to which container.

Words as in the glossary of docs/architecture.md. All values are immutable plain data, so they can
be passed to any task, kept in a snapshot and compared in a test.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vgpu_agent.device_ids import DeviceId

# The text that the kubelet expects in a Device message; anything else counts as unhealthy (kubelet
# §4).
HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"

# What NVIDIA's plugin calls the one GPU of a Tegra processor (Jetson), which has no UUID (nvidia
# §4).
INTEGRATED = "tegra"


class Remedy(enum.StrEnum):
    """The action that helps an Unhealthy device. The value is its short name, for metrics.

    Ordered from the mildest trouble to the worst. `sentence` explains it to an operator. The peers
    of a GPU are here the GPUs that it exchanges data with (P2P).
    """

    WAIT = "none"
    APPLICATION = "application"
    FOLLOW_DRIVER = "ask driver"  # do what it names as its recovery action
    RESTART = "restart pods"
    DRAIN_PEERS = "drain peers"
    LOOK_UP = "look up"
    CHECK_SLOT = "check slot"
    REPLACE_LATER = "replace later"
    RESET_LATER = "reset later"
    RESET = "reset"
    RESET_LINKED = "reset linked"
    RESET_OR_REPLACE = "reset or replace"
    CHECK_DRIVER = "driver"  # see dmesg, and reboot if the driver does not answer soon
    REBOOT = "reboot"
    REBOOT_OR_REPLACE = "reboot or replace"

    @property
    def rank(self) -> int:
        """The place in the order, 0 for the mildest."""
        return list(Remedy).index(self)

    def sentence(self, gpu: str) -> str:
        """Explain the action in one sentence, without its full stop.

        Args:
            gpu: the UUID of the GPU, for commands that can be copied.
        """
        reset = f"reset it (nvidia-smi --gpu-reset -i {gpu})"
        return {
            Remedy.WAIT: (
                "nothing needs to be done unless it happens again; dmesg has what happened"
            ),
            Remedy.APPLICATION: (
                "look at the program that used the GPU at that time: its own error is the most "
                "likely cause"
            ),
            Remedy.FOLLOW_DRIVER: (
                f"do what the driver names: see GPU Recovery Action in nvidia-smi -q -i {gpu}, and "
                "dmesg"
            ),
            Remedy.RESTART: (
                "restart the pod that was hit; the GPU needs a reset only if the driver asks for it"
            ),
            Remedy.DRAIN_PEERS: "drain the pods that use the GPU together with other GPUs",
            Remedy.LOOK_UP: (
                "see dmesg and NVIDIA's XID catalogue; if the error comes back, drain the GPU's "
                f"pods and {reset}"
            ),
            Remedy.REPLACE_LATER: (
                "plan to replace the card, because its memory fails more and more often"
            ),
            Remedy.RESET_LATER: (
                f"when the GPU's pods have ended, {reset}: that replaces the bad row of memory"
            ),
            Remedy.RESET: (
                f"drain the GPU's pods and {reset}; replace the card if the error comes back"
            ),
            Remedy.RESET_LINKED: (
                f"drain the pods of this GPU and of the GPUs that NVLink joins to it, and {reset} "
                "with them; if the error comes back, check the NVLink bridge or the switches"
            ),
            Remedy.RESET_OR_REPLACE: (
                f"drain the GPU's pods and {reset}; if the driver reports it again, replace the "
                "card, because it has no spare memory rows left"
            ),
            Remedy.CHECK_DRIVER: (
                "see dmesg; if the driver does not answer within minutes, drain the node and "
                "reboot it"
            ),
            Remedy.REBOOT: "drain the node and reboot it",
            Remedy.CHECK_SLOT: (
                "see dmesg, check the slot and the power of the card, and replace the card if it "
                "is lost again"
            ),
            Remedy.REBOOT_OR_REPLACE: (
                "drain the node and reboot it; if the GPU is lost again, check its slot and its "
                "power, and replace the card"
            ),
        }[self]


class Cause(msgspec.Struct, frozen=True):
    """One cause of an Unhealthy device.

    Attributes:
        code: short name for metrics, such as ``XID 79`` or ``hang``.
        text: a sentence without its full stop, in the past tense once it is over.
        remedy: what helps against this cause alone.
        since: unix seconds of its first occurrence since the device became Unhealthy.
    """

    code: str
    text: str
    remedy: Remedy
    since: float = 0.0


class Health(msgspec.Struct, frozen=True):
    """The health of a device: usable for new containers, or the reason against it.

    Attributes:
        ok: True when new containers may use the device.
        reason: one sentence for an operator: the worst cause, and the condition that recovery
            waits for; empty when ``ok``.
        since: unix seconds of the last change; 0 when it never changed.
        causes: all causes since it became Unhealthy, the worst first; the mildest are left out when
            there are many.
        remedy: what helps, by the worst cause and by what the driver asks for; None when ``ok``.
        answers: the device answered the last reading; None when there was none since the last
            error that is no mere repetition.
        offered_at: unix seconds from which it is offered again if nothing else happens; 0 where
            more than time is missing.
    """

    ok: bool = True
    reason: str = ""
    since: float = 0.0
    causes: tuple[Cause, ...] = ()
    remedy: Remedy | None = None
    answers: bool | None = None
    offered_at: float = 0.0

    @property
    def word(self) -> str:
        """The kubelet's word for the state."""
        return HEALTHY if self.ok else UNHEALTHY


class MigInstance(msgspec.Struct, frozen=True):
    """A hardware partition of a GPU (NVML: one compute instance inside one GPU instance).

    Attributes:
        uuid: ``MIG-…``.
        index: position below its GPU, the ``j`` of NVIDIA's ``i:j``.
        gpu_instance_id: NVML's GI id.
        compute_instance_id: NVML's CI id.
        profile: e.g. ``1g.10gb``, as NVML names it.
        memory_mib: memory of the MIG instance.
        gpu_slices: compute slices of its GPU instance, the ``1`` of ``1g``.
        compute_slices: those of its compute instance; fewer where the GPU instance is divided
            (``1c.2g.20gb``).
        capability_nodes: device nodes below ``/dev/nvidia-caps`` that open it, of the GPU instance
            and of the compute instance; empty while ``trouble`` says why they are not known.
        trouble: why its device nodes are not known.
        health: of the MIG instance; that of its GPU counts as well.
    """

    uuid: str
    index: int
    gpu_instance_id: int
    compute_instance_id: int
    profile: str
    memory_mib: int
    gpu_slices: int = 0
    compute_slices: int = 0
    capability_nodes: tuple[str, ...] = ()
    trouble: str = ""
    health: Health = Health()


class Gpu(msgspec.Struct, frozen=True):
    """A physical card as NVML and sysfs describe it, or the GPU of a Tegra processor.

    Attributes:
        uuid: ``GPU-…``; the identity everywhere in the agent. `INTEGRATED` where the GPU is part of
            the processor.
        index: NVML's order at the last enumeration; it shifts when a card is unplugged.
        minor: the number in ``/dev/nvidia<minor>``; it does not shift. -1 where there is no such
            node: the GPU is part of the processor, or this is the Windows Subsystem for Linux.
        name: product name.
        memory_mib: total memory; 0 where it has none of its own.
        pci_bus_id: ``0000:07:00.0``, lower case, four-digit domain, as in sysfs.
        numa_node: the NUMA node of its slot; None when the kernel does not report one.
        compute_capability: (major, minor).
        mig_enabled: MIG mode is on; ``mig_instances`` may still be empty.
        mig_instances: those that could be read.
        mig_trouble: why some could not be read, with the remedy; empty when all could be.
        mig_capable: the card supports MIG.
        present: False for a card that answered earlier and no longer does or is gone.
    """

    uuid: str
    index: int
    minor: int
    name: str
    memory_mib: int
    pci_bus_id: str = ""
    numa_node: int | None = None
    compute_capability: tuple[int, int] = (0, 0)
    mig_enabled: bool = False
    mig_instances: tuple[MigInstance, ...] = ()
    health: Health = Health()
    present: bool = True
    mig_trouble: str = ""
    mig_capable: bool = False

    @property
    def integrated(self) -> bool:
        """Tell whether the GPU is part of the processor: no memory of its own, no device node, and
        nothing that NVML could report.
        """
        return self.uuid == INTEGRATED


class Link(msgspec.Struct, frozen=True):
    """The distance between two GPUs.

    Attributes:
        pci: NVML's common-ancestor level: 0 same board, 10 single switch, 20 multi switch, 30 host
            bridge, 40 same CPU, 50 cross-CPU.
        nvlinks: number of active direct NVLink connections.
        switch_links: number of active NVLinks to NVSwitches, of the GPU that has fewer; 0 unless
            both have some.
    """

    pci: int
    nvlinks: int = 0
    switch_links: int = 0


class Inventory(msgspec.Struct, frozen=True):
    """Everything known about the node's GPUs at one moment;
    published as a whole, replaced and never changed.

    Attributes:
        version: grows by one with each published change.
        gpus: by index; lost cards keep their place with ``present=False``.
        links: by pair of UUIDs, both directions.
        driver_version: e.g. ``580.65.06``; empty before the driver answered.
        cuda_version: e.g. ``13.0``.
        nvml_version: e.g. ``13.580.65.06``; empty where the driver does not say.
        simulated: the NVML library is the simulator's (`sim`).
        failures: cards that did not answer at enumeration: ``index: text``.
    """

    version: int = 0
    gpus: tuple[Gpu, ...] = ()
    links: dict[tuple[str, str], Link] = msgspec.field(default_factory=dict)
    driver_version: str = ""
    cuda_version: str = ""
    simulated: bool = False
    failures: tuple[str, ...] = ()
    nvml_version: str = ""

    def gpu(self, uuid: str) -> Gpu | None:
        """The GPU of that UUID, or None."""
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)

    @property
    def numbered(self) -> dict[int, Gpu]:
        """Number → GPU, ascending, for annotations, files and metrics that name GPUs by index over
        a long time.

        A lost card keeps its number, although NVML moves the indices after it up as soon as it is
        gone from the bus.
        """
        numbers: dict[int, Gpu] = {}
        for gpu in self.gpus:
            numbers[max(gpu.index, max(numbers, default=-1) + 1)] = gpu
        return numbers

    @property
    def devices(self) -> frozenset[str]:
        """The UUIDs of all GPUs and MIG instances."""
        return frozenset(
            uuid
            for gpu in self.gpus
            for uuid in (gpu.uuid, *(instance.uuid for instance in gpu.mig_instances))
        )

    def device(self, uuid: str) -> tuple[Gpu, MigInstance | None] | None:
        """The device of that UUID: a GPU (and no instance), or a MIG instance with the GPU that it
        is part of; None when unknown.
        """
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu, None
            for instance in gpu.mig_instances:
                if instance.uuid == uuid:
                    return gpu, instance
        return None


class GpuUsage(msgspec.Struct, frozen=True):
    """The present use of a GPU; None where the driver reports nothing.
    ``ecc_uncorrected_total`` counts memory errors that ECC could not correct, over the card's life.
    """

    uuid: str
    memory_used_mib: int | None = None
    memory_total_mib: int | None = None
    utilisation_percent: int | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    ecc_uncorrected_total: int | None = None
    processes: tuple[tuple[int, int], ...] = ()  # (host pid, MiB)
    instances_used_mib: tuple[tuple[str, int], ...] = ()  # MIG instance and memory in use


class Decider(enum.StrEnum):
    """The source of the decision on what the holder of an id gets."""

    IDS = "ids"  # each id names its device; `Allocate` can answer completely
    # the pod's limits and annotations; its ids are only counted and decide nothing
    POD = "pod"
    # the resource is only there for schedulers to count; its ids are neither booked nor answered
    NOBODY = "nobody"


class SharingMode(enum.StrEnum):
    """The way in which several containers use one device."""

    NONE = "none"  # each device has one container
    TIME_SLICING = "time-slicing"  # in turns; nothing is limited
    MPS = "mps"  # at the same time, through an MPS control daemon that limits each of them
    # the same through a daemon that others run, whose limits are not known
    MPS_OF_HOST = "mps-host"


class Resource(msgspec.Struct, frozen=True):
    """A name that containers put into ``limits``, and the ids behind it.

    Attributes:
        name: ``nvidia.com/gpu``.
        family: the family whose vocabulary it belongs to, e.g. ``nvidia``.
        ids: in the order in which kubelet sees them; deterministic. `NumberedIds`, which keeps only
            prefix and number of the ids of each device, where there are tens of thousands.
        holders_per_device: how many ids of one device may be held at once (replicas); where the pod
            decides, how many containers.
        holders: the same by device, where devices differ; ``holders_per_device`` is then the
            largest of them.
        offers_preference: the kubelet is to ask which ids suit best (GetPreferredAllocation). Where
            the pod decides, these are the ids of the GPUs that a scheduler has given to the pod
            (`PodFamily.named_gpus`).
        ids_setting: the setting that determines the number of ids, for the error when there are too
            many, e.g. ``volcanoVgpu.gpuMemoryFactor``; empty for replicas.
        memory_scaling: how many times a device's memory may be booked; 1.0 never exceeds it.
        cores_scaling: the same for compute.
        pre_start_required: the kubelet is to call PreStartContainer before each start.
        sharing: how the holders of one device share it.
        requires_mig_off: nothing of a GPU is granted while it is in MIG mode.
        init_shares: init containers have shares of their own; otherwise they use those of the
            containers after them.
        never_granted: device → why nothing of it is ever granted, although its ids are listed.
    """

    name: str
    family: str
    ids: Sequence[DeviceId]
    holders_per_device: int = 1
    memory_scaling: float = 1.0
    cores_scaling: float = 1.0
    pre_start_required: bool = False
    decided_by: Decider = Decider.IDS
    offers_preference: bool = True
    ids_setting: str = ""
    sharing: SharingMode = SharingMode.NONE
    requires_mig_off: bool = False
    init_shares: bool = False
    holders: Mapping[str, int] = msgspec.field(default_factory=dict)
    never_granted: Mapping[str, str] = msgspec.field(default_factory=dict)

    def holders_of(self, device: str) -> int:
        """Return how many ids of ``device`` may be held at once."""
        return self.holders.get(device, self.holders_per_device)


class Share(msgspec.Struct, frozen=True):
    """A part of one device: ``memory_mib`` and ``cores_percent`` are what is booked,
    0 where nothing is limited; ``exclusive``: no other container may have a part of the device.
    """

    device: str
    memory_mib: int = 0
    cores_percent: int = 0
    exclusive: bool = False


class GrantState(enum.StrEnum):
    """The life of a grant, in order (docs/architecture.md, "The ledger")."""

    # booked; the kubelet's records do not name the container yet, or its pod is still to decide
    RESERVED = "reserved"
    # they name it, but only one of their two sources does (checkpoint and pod-resources), or, where
    # the pod decides, the shares were decided for another container, by a guess
    GRANTED = "granted"
    # it is certain which container holds it; whether its limits are in force is another question
    IDENTIFIED = "identified"
    RELEASED = "released"  # removed from the ledger; seen in events only


class Owner(msgspec.Struct, frozen=True):
    """The container that holds a grant, as far as it is known.

    Attributes:
        pod_uid: from the kubelet's checkpoint; empty when only pod-resources knew the container.
        namespace: from pod-resources; empty when only the checkpoint knew it.
        pod: the pod's name; from the same source as ``namespace``.
        container: the container's name.
    """

    container: str
    pod_uid: str = ""
    namespace: str = ""
    pod: str = ""

    @property
    def pod_name(self) -> str:
        """``namespace/name`` for logs and metrics; the UID while the name is not known."""
        return f"{self.namespace}/{self.pod}" if self.pod else self.pod_uid

    def may_be(self, other: Owner) -> bool:
        """Tell whether both can describe one container: no field that both of them know differs."""
        ours = (self.pod_uid, self.namespace, self.pod, self.container)
        theirs = (other.pod_uid, other.namespace, other.pod, other.container)
        return all(
            not mine or not his or mine == his for mine, his in zip(ours, theirs, strict=True)
        )

    def may_be_in_pod_of(self, other: Owner) -> bool:
        """Tell whether both can be containers of one pod."""
        return self.may_be(msgspec.structs.replace(other, container=self.container))

    def filled_from(self, other: Owner) -> Owner:
        """Return this owner with the fields added that only ``other`` knows."""
        return Owner(
            self.container,
            self.pod_uid or other.pod_uid,
            self.namespace or other.namespace,
            self.pod or other.pod,
        )


class Grant(msgspec.Struct, frozen=True):
    """The shares that one container holds through one resource.

    Attributes:
        number: unique in this process; the correlation id of its log lines.
        ids: the device ids the kubelet gave, in the kubelet's order.
        shares: one for each distinct device behind the ids.
        owner: None until the kubelet's records name it.
        reserved_at: unix seconds of the Allocate call, or of the time at which the agent found it
            in the kubelet's records, e.g. after a restart; to be shown only, since the wall clock
            may be set.
        decided_for: (UID of the pod, container) that ``shares`` were decided for, where the pod
            decides; None before. An early guess may differ from ``owner``, which the kubelet
            reports.
        evidence: how the owner was proven and what decided the shares, one sentence each.
        reserved_at_monotonic: ``reserved_at`` by the ledger's own clock, which only grows.
        may_overcommit: a scheduler decided it, so it is booked even if the device then has more
            compute in use, or more holders, than it may.
        found: it was found in the kubelet's records, so it is older than ``reserved_at``.
    """

    number: int
    family: str
    resource: str
    ids: tuple[str, ...]
    shares: tuple[Share, ...]
    state: GrantState = GrantState.RESERVED
    owner: Owner | None = None
    reserved_at: float = 0.0
    decided_for: tuple[str, str] | None = None
    evidence: tuple[str, ...] = ()
    reserved_at_monotonic: float = 0.0
    may_overcommit: bool = False
    found: bool = False

    @property
    def proven(self) -> bool:
        """Tell whether the shares were decided for the container that the kubelet names."""
        return self.owner is not None and self.decided_for == (
            self.owner.pod_uid,
            self.owner.container,
        )


class DeviceRoom(msgspec.Struct, frozen=True):
    """The rest of a device that new containers of one resource may get;
    memory and cores with the resource's scaling.

    Attributes:
        trouble: why no container may get anything of it now; empty when containers may.
        holders: how many containers have a share of it.
        holders_free: how many more may get one.
        exclusive: a container has it for itself alone.
    """

    device: str
    trouble: str = ""
    memory_mib: int = 0
    memory_free_mib: int = 0
    cores_free_percent: int = 0
    holders: int = 0
    holders_free: int = 0
    exclusive: bool = False


class Holding(msgspec.Struct, frozen=True):
    """One line of the kubelet's own records: this container holds these ids of this resource."""

    resource: str
    ids: tuple[str, ...]
    owner: Owner


class KubeletRecords(msgspec.Struct, frozen=True):
    """The kubelet's records of the holders of all ids,
    joined from its checkpoint and pod-resources.

    Attributes:
        holdings: for every resource on the node, also those of other plugins.
        complete: pod-resources answered, so a holder that is not mentioned is gone. Incomplete
            records may add grants to the ledger but never remove any.
        trouble: which source was missing or unreadable, and why; empty when both could be read.
        entries: the lines of the checkpoint as they are, also of ended pods and of init containers;
            None when it could not be read. Of containers with the same ids, the one that holds them
            is found from these.
    """

    holdings: tuple[Holding, ...] = ()
    complete: bool = True
    trouble: str = ""
    entries: tuple[Holding, ...] | None = None


class ContainerUsage(msgspec.Struct, frozen=True):
    """The use that one container makes of one of its devices,
    as counted by the container's own library.

    Attributes:
        index: the device's place in the container.
        limit_bytes: 0 when nothing limits it.
        cores_percent: compute in use, by the library's own measurement.
        last_kernel_at: when the container launched a kernel last, unix seconds; 0 when it never
            did, or its library does not report it.
        cores_limit_percent: 100 when nothing limits compute.
        processes: how many live processes of the container have the library open.
        limits_cores: the region's switch for the limit of compute is on.
    """

    namespace: str
    pod: str
    container: str
    index: int
    uuid: str
    used_bytes: int
    limit_bytes: int
    cores_percent: int = 0
    last_kernel_at: int = 0
    cores_limit_percent: int = 100
    processes: int = 0
    limits_cores: bool = True


class WrittenLimit(msgspec.Struct, frozen=True):
    """The limit of one card, as it is written for a container's library of vgpu-control.

    Attributes:
        memory_bytes: 0 when nothing limits memory.
        cores_percent: the compute that the container always has; 100 when nothing limits it.
    """

    uuid: str
    memory_bytes: int
    cores_percent: int


class ControlledUse(msgspec.Struct, frozen=True):
    """The use that one container with vgpu-control makes of its cards, as far as its library and
    the list of its processes tell, and its limits as they are written. Cards have NVML's indices.

    Attributes:
        pids: the ids of its processes on the host; None when the processes are not listed.
        spilled_bytes: card → bytes that were allocated for it and lie in the host's memory.
        cores_percent: card → compute in use, by the library's own samples.
        limits: those in its ``vgpu.config``; empty where there is none that can be read.
        trouble: why that file does not limit this container as intended; empty when it does.
        registers_processes: its library lets every process register with the agent, before it uses
            a card, so one that has not registered runs without the library.
        on_cards: its processes on cards as the driver and the kernel name them: (card's UUID,
            process id on the host, MiB).
    """

    namespace: str
    pod: str
    container: str
    pids: tuple[int, ...] | None = None
    spilled_bytes: tuple[tuple[int, int], ...] = ()
    cores_percent: tuple[tuple[int, int], ...] = ()
    limits: tuple[WrittenLimit, ...] = ()
    trouble: str = ""
    registers_processes: bool = False
    on_cards: tuple[tuple[str, int, int], ...] = ()
