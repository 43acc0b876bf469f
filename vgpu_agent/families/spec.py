"""The declaration of a family: what the rest of the agent has to know about it without knowing its
name.

Each family has one `FamilySpec`, in the module `spec` of its package; `registry` lists them.
`agent` iterates over that list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from vgpu_agent.families.device_lists import ListOptions
from vgpu_agent.isolation.backend import NO_SERVICES, InstalledLibrary, LibraryServices
from vgpu_agent.isolation.mps import IN_CONTAINER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vgpu_agent.config.families import FamilySettings
    from vgpu_agent.config.settings import Settings
    from vgpu_agent.families.admission import AdmissionFamily, AdmissionOptions
    from vgpu_agent.families.family import IdFamily, PodFamily
    from vgpu_agent.families.plugin_files import PluginFile
    from vgpu_agent.families.scheduling import SchedulingFamily, SchedulingOptions
    from vgpu_agent.isolation.backend import LibraryLimits
    from vgpu_agent.isolation.mps import MpsOptions, MpsView
    from vgpu_agent.model import ContainerUsage, ControlledUse, GpuUsage, Grant, Inventory


_NO_LIBRARY = InstalledLibrary()


class NodeFacts(msgspec.Struct, frozen=True):
    """The facts, in addition to the settings, from which families are built.

    Attributes:
        lists: how containers get their devices (NVIDIA's ``deviceListStrategy``), where ids name
            them.
        pod_lists: the same where pods decide. With late binding and the setting ``cdi.inline``, the
            spec of a grant contains the edits themselves instead of CDI names.
        late: grants of families whose pods decide are bound late.
        wsl: the node is a Windows Subsystem for Linux.
        libraries: isolation backend → its library, where a family uses it.
        cgroup_version: of the node, 1 or 2; a hybrid of both counts as 2.
        divides: the program that divides GPUs into MIG instances is there.
        given: dotted paths of settings that a flag or a variable has set; they beat the files of a
            replaced plugin.
        texts: name of a file of a replaced plugin → those of its texts that count: the newest, and
            while that has an error, those before it, back to the last one without, oldest first.
        unreadable: such a file that exists and cannot be read → why.
        mps_view: where the agent and its MPS control daemons see the files that they share with
            containers; by default, where the agent's container has ``mps.root`` mounted.
    """

    lists: ListOptions = msgspec.field(default_factory=ListOptions)
    pod_lists: ListOptions = msgspec.field(default_factory=ListOptions)
    late: bool = False
    wsl: bool = False
    libraries: Mapping[str, InstalledLibrary] = msgspec.field(default_factory=dict)
    cgroup_version: int = 2
    divides: bool = True
    given: frozenset[str] = frozenset()
    texts: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    unreadable: Mapping[str, str] = msgspec.field(default_factory=dict)
    mps_view: MpsView = IN_CONTAINER

    def library(self, backend: str) -> InstalledLibrary:
        """The library of that backend; an empty one where no family uses it."""
        return self.libraries.get(backend, _NO_LIBRARY)


class BuiltFamily(msgspec.Struct, frozen=True):
    """A family built from its settings.

    Attributes:
        id_families: the parts of it whose ids name devices.
        pod_families: the parts of it whose pods decide.
        idle: the parts that are not offered. Ids from before it was switched off are still read,
            because containers hold them.
        problems: faults of the files of the replaced plugin, one sentence each.
        in_force: attribute of its settings → value, after the files were applied; may be empty for
            a family whose plugin has no files.
        origins: of those that a file has set, attribute → the file.
        blocked: why its pods must not be started now; empty when they can be.
        uses_library: the backend whose library its containers get; empty for none.
        limits: how that library limits them; None where it never does.
        services: the directories of the running agent that the library relies on, such as that of
            the socket by which processes register.
        node_labels: the GPUs → the labels that describe them on the Node, where the settings ask
            for such labels; it returns None while no GPU answers.
    """

    id_families: tuple[IdFamily, ...] = ()
    pod_families: tuple[PodFamily, ...] = ()
    idle: tuple[IdFamily, ...] = ()
    problems: tuple[str, ...] = ()
    in_force: Mapping[str, object] = msgspec.field(default_factory=dict)
    origins: Mapping[str, str] = msgspec.field(default_factory=dict)
    blocked: str = ""
    uses_library: str = ""
    limits: LibraryLimits | None = None
    services: LibraryServices = NO_SERVICES
    node_labels: Callable[[Inventory], Mapping[str, str] | None] | None = None


class MigTool(msgspec.Struct, frozen=True):
    """The tool that divides GPUs into MIG instances for the pods of a family.

    Attributes:
        program: nvidia-mig-parted, or a script that calls it.
        setting: the key of the program, for messages; that of the timeout is this key followed
            by ``TimeoutSeconds``.
        timeout_seconds: how long one call of the program may take.
    """

    program: str
    setting: str
    timeout_seconds: float


class LibraryUse(msgspec.Struct, frozen=True):
    """The use that a family makes of the library of an isolation backend.

    Attributes:
        backend: the backend, one of `isolation.registry`.
        is_wanted: the settings → whether its containers get the library.
        instead: what else can be done where there is none, as the end of a sentence.
    """

    backend: str
    is_wanted: Callable[[Settings], bool]
    instead: str


class Readings(msgspec.Struct, frozen=True):
    """The values that a family's metrics are made of.

    Attributes:
        grants: the family's live grants.
        inventory: the GPUs.
        usage: the use of each GPU that could be read.
        containers: the use that containers make of their devices.
        controlled: the same for containers that the backend `vgpu-control` limits, whose library
            reports it in another form.
        now: unix seconds.
        node: the Node's name.
        version: of the agent.
        commit: of the agent; empty where it is not known.
        in_force: attribute of the family's settings → value in force.
    """

    grants: Sequence[Grant]
    inventory: Inventory
    usage: Sequence[GpuUsage]
    containers: Sequence[ContainerUsage]
    now: float
    node: str = ""
    version: str = ""
    commit: str = ""
    in_force: Mapping[str, Any] = msgspec.field(default_factory=dict)
    controlled: Sequence[ControlledUse] = ()


class FamilyMetric(msgspec.Struct, frozen=True):
    """A gauge of one family, which exists while the family is on.

    Attributes:
        name: as scraped.
        labels: label names, in the order of a row's label values.
        help: one sentence, with the unit where the name does not have it.
        rows: the readings → one row for each combination of labels: their values, and the number.
    """

    name: str
    labels: tuple[str, ...]
    help: str
    rows: Callable[[Readings], Iterable[tuple[tuple[str, ...], float]]]


class Vocabulary(msgspec.Struct, frozen=True):
    """The keys and names that a family has in the cluster.

    Attributes:
        resource_prefixes: the beginnings of all names that its resources may have in this domain.
        annotations: those of pods that it reads or writes, the most important first, because the
            last are cut where a pod's are very long. All others are skipped unread.
        labels: the same of pods' labels.
        node_annotations: what the agent writes to the Node and removes when it leaves the node for
            good: keys, or patterns with ``*``. If that fails, a message lists them.
        progress_annotations: annotations of pods that only show how far a start has come; others,
            by which schedulers count, are written first.
    """

    resource_prefixes: tuple[str, ...] = ()
    annotations: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    node_annotations: tuple[str, ...] = ()
    progress_annotations: frozenset[str] = frozenset()


class ExporterOptions(msgspec.Struct, frozen=True):
    """The metrics of a replaced program, and how they are served.

    Attributes:
        listen: where, e.g. ``:3456``.
        flag: the setting that an operator changes when the address is taken.
        min_interval_seconds: a scraper that asks more often gets the last answer again.
        authorised: scrapers must show a token that the API server allows to get the path.
        certificate_file: PEM; empty for plain HTTP.
        key_file: the private key of that certificate.
        tls_flags: the settings of these two, for messages.
    """

    listen: str
    flag: str
    min_interval_seconds: float = 1.0
    authorised: bool = False
    certificate_file: str = ""
    key_file: str = ""
    tls_flags: str = ""


class FamilyExporter(msgspec.Struct, frozen=True):
    """Metrics that a family serves at an address of their own, as the program that it replaces did.

    Attributes:
        metrics: all of them.
        options: the settings → where and how; None while they are off.
    """

    metrics: tuple[FamilyMetric, ...]
    options: Callable[[Settings], ExporterOptions | None]


def _nothing(_: Settings) -> Iterable[str]:
    return ()


class SchedulingPart(msgspec.Struct, frozen=True):
    """The part of a family that the scheduler extender needs.

    Attributes:
        build: what the operator decides → the reader of the family's Nodes and pods.
        by_default: the extender places the pods of this family where the operator names none.
    """

    build: Callable[[SchedulingOptions], SchedulingFamily]
    by_default: bool


class FamilySpec(msgspec.Struct, frozen=True):
    """The facts about a family that the agent has to know.

    Attributes:
        settings: its part in the configuration, which has its name.
        build: builds it; called whether it is on or off. Never raises: problems in the files of the
            replaced plugin are reported.
        needs_api_server: it cannot be offered before the API server was read, so pods are watched
            and Node and pods are written.
        files: the configuration files of the plugin that it replaces.
        resource_prefixes: the beginnings of the names of its resources; like all of its names here,
            as they are without renaming.
        annotations: those of pods that it reads or writes, the most important first.
        labels: the same of pods' labels.
        variables: a pattern of the variables of containers that it has to know of; empty for none.
            Names and not prefixes: a tenant could invent any number below a prefix.
        values: a pattern, in the same way, of those of them whose text the family reads; of the
            others it only has to know whether they are there.
        parts: the names of those parts of `BuiltFamily` that are not named like the family, as
            grants and resources have them, e.g. ``vgpu-manager-mig``.
        metrics: its own metrics.
        exporter: metrics at an address of their own; None where there are none.
        mps: the settings → the directories that its containers share with its MPS control daemons;
            None where it shares nothing by MPS.
        mig_tool: the settings → how GPUs are divided for its pods; None where none is.
        device_modes: the settings → the kinds of other devices that its containers get, of
            `config.types.DEVICE_MODES`.
        library: its use of an isolation backend's library; None where its containers never get
            one. Where they may get one, their use of GPUs is read.
        stale_keys: the settings → annotations and labels of pods that schedulers and the agent have
            written about one pod; they are taken off when it is recreated.
        reschedules: the settings → whether its failed pods are evicted or created again, although
            ``binding.rescheduleFailed`` is off; None where only that decides.
        node_annotations: what the agent writes to the Node, and removes when it leaves for good.
        progress_annotations: annotations of pods that only show how far a start has come.
        renamed: the settings → its keys and names; None where no setting changes them. It is asked
            once, at the start.
        scheduling: its part in placing pods over Nodes; None where the extender does not place its
            pods.
        admission: options → the rules for its new pods; None where the webhook has nothing to do.
            It raises `ConfigError`.
        foreign_label: the label of the Node by which a program is known that writes the same labels
            as `BuiltFamily.node_labels`; empty where the family has none.
    """

    settings: FamilySettings
    build: Callable[[Settings, NodeFacts], BuiltFamily]
    needs_api_server: bool = False
    files: tuple[PluginFile, ...] = ()
    resource_prefixes: tuple[str, ...] = ()
    annotations: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    variables: str = ""
    values: str = ""
    parts: tuple[str, ...] = ()
    metrics: tuple[FamilyMetric, ...] = ()
    exporter: FamilyExporter | None = None
    mps: Callable[[Settings, MpsView], MpsOptions] | None = None
    mig_tool: Callable[[Settings], MigTool] | None = None
    device_modes: Callable[[Settings], tuple[str, ...]] | None = None
    library: LibraryUse | None = None
    node_annotations: tuple[str, ...] = ()
    progress_annotations: frozenset[str] = frozenset()
    stale_keys: Callable[[Settings], Iterable[str]] = _nothing
    reschedules: Callable[[Settings], bool] | None = None
    renamed: Callable[[Settings], Vocabulary] | None = None
    scheduling: SchedulingPart | None = None
    admission: Callable[[AdmissionOptions], AdmissionFamily] | None = None
    foreign_label: str = ""

    @property
    def name(self) -> str:
        """The glossary's name, e.g. ``volcano-vgpu``."""
        return self.settings.name

    @property
    def names(self) -> frozenset[str]:
        """Its name, and those of its parts."""
        return frozenset((self.name, *self.parts))

    def vocabulary(self, settings: Settings | None = None) -> Vocabulary:
        """Return its keys and names under ``settings``; without, those that it has by default."""
        if settings is not None and self.renamed is not None:
            return self.renamed(settings)
        return Vocabulary(
            self.resource_prefixes,
            self.annotations,
            self.labels,
            self.node_annotations,
            self.progress_annotations,
        )

    def is_on(self, settings: Settings) -> bool:
        """Tell whether the settings offer it on this node."""
        return settings.is_on(self.name)
