"""The CDI names of this node's devices:
the source of their specs, and what must wait until a runtime can resolve them.

A container whose device name no spec has does not start. So a resource is not offered before there
are names for it, and a device that has none yet (a MIG instance that was just created) is not
granted. IMEX channels (device nodes by which machines share GPU memory) are here as well, because
they are looked for below the same roots (the directories that contain the driver and its device
nodes) and a node that lacks one that is required offers nothing.

Built by `composition`. `offers.families` passes it every inventory before offering its devices, and
asks what was found. `offers.servers` asks `withheld` before it offers a resource.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from typing import TYPE_CHECKING, NamedTuple

from vgpu_agent import log
from vgpu_agent.allocation import identification
from vgpu_agent.cdi import nvidia_ctk
from vgpu_agent.cdi.generated_specs import GeneratedSpecs, Wanted
from vgpu_agent.cdi.imex import Channels, find_channels
from vgpu_agent.cdi.inlining import resolve_edits
from vgpu_agent.cdi.named_devices import opens_another, places, present_cards
from vgpu_agent.cdi.nvidia_ctk import CtkOptions
from vgpu_agent.cdi.roots import find_roots
from vgpu_agent.cdi.toolkit_specs import STATIC_DIRECTORY, ToolkitSpecs
from vgpu_agent.config.device_answers import Cdi
from vgpu_agent.config.types import DEVICE_MODES
from vgpu_agent.errors import CdiError, HostFileError
from vgpu_agent.families.device_lists import CDI_STRATEGIES, GENERATED_KIND, TOOLKIT_KIND
from vgpu_agent.families.registry import FAMILIES
from vgpu_agent.ledger.offers import Offers
from vgpu_agent.model import Decider
from vgpu_agent.status import CdiStatus, Withheld

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from vgpu_agent.allocation.carrier import InlinedEdits
    from vgpu_agent.cdi.named_devices import Place
    from vgpu_agent.cdi.roots import Roots
    from vgpu_agent.concurrency import Latest, Supervisor
    from vgpu_agent.config.settings import Settings
    from vgpu_agent.journal import Journal
    from vgpu_agent.ledger import Ledger
    from vgpu_agent.model import Inventory, Resource

# How long the agent's start waits for the first specs.
START_WAIT_SECONDS = 5.0
# How often specs are looked at, which others can change or remove.
LOOK_SECONDS = 5.0
# Pauses after a spec could not be made.
RETRY_MIN_SECONDS = 0.5
RETRY_MAX_SECONDS = 30.0

_logger = log.get(__name__)

_TASK = "cdi specs"  # the supervisor's name of the loop that makes or reads the specs
_CORDON_OWNER = "cdi"  # of cordons in the ledger
# NVIDIA's plugin does not even start with CDI names on such a node (nvidia §1).
_NO_NAME_OF_INTEGRATED = (
    "plugin.deviceListStrategy: the GPU of this node is part of its processor, and CDI names of "
    "GPUs are made through NVML; remove cdi-cri and cdi-annotations, envvar and volume-mounts "
    "work with the NVIDIA runtime in CSV mode"
)


class CdiFound(NamedTuple):
    """Everything apart from GPUs that containers of this node can get.

    Attributes:
        channels: IMEX channels.
        modes: of `config.types.DEVICE_MODES`, those that are enabled and have a spec.
    """

    channels: Channels = Channels()
    modes: tuple[str, ...] = ()


NO_CDI = CdiFound()  # where there is no controller to look for them


class CdiController:
    """The controller that keeps specs, names and offers together.

    State: what the last call of `look` found, the last inventory, which devices have no name
    and are kept back (cordoned) for that reason, and whether the specs have been withdrawn.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        ledger: Ledger,
        journal: Journal,
        supervisor: Supervisor,
        is_late: Callable[[], bool],
        simulated_tool: Callable[[], tuple[str, ...]] | None = None,
    ) -> None:
        """Build it.

        Args:
            settings: those of the start; `look` gets those in force.
            ledger: where devices without a name are cordoned.
            journal: records specs and what is missing.
            supervisor: runs the loop.
            is_late: tells whether grants are bound late.
            simulated_tool: returns the command of the simulator's tool, which runs unless
                cdi.nvidiaCtk names another; None on a node with real GPUs.
        """
        self._settings = settings
        self._ledger = ledger
        self._journal = journal
        self._supervisor = supervisor
        self._is_late = is_late
        self._simulated_tool = simulated_tool
        self._withdrawn = False
        directory = settings.binding.cdi_directory
        self._source: GeneratedSpecs | ToolkitSpecs
        if settings.cdi.source == "toolkit":
            self._source = ToolkitSpecs(
                (STATIC_DIRECTORY, directory), journal, look_seconds=LOOK_SECONDS
            )
        else:
            self._source = GeneratedSpecs(
                directory,
                journal,
                look_seconds=LOOK_SECONDS,
                retry_min_seconds=RETRY_MIN_SECONDS,
                retry_max_seconds=RETRY_MAX_SECONDS,
            )
        # nvidia.com/gpu of the container toolkit, or the kind of the specs that the agent generates
        self._kind = TOOLKIT_KIND if settings.cdi.source == "toolkit" else GENERATED_KIND
        self._roots: Roots | None = None  # where the driver and its device nodes are
        self._tool = settings.cdi.nvidia_ctk  # path of the program that makes specs
        self._channels = Channels()
        self._inventory: Inventory | None = None
        self._nameless: dict[str, str] = {}  # devices that have no name, and why
        self._kept_back: dict[str, str] = {}  # those of them that are cordoned, and why
        # names that are missing, or stand for another device by now
        self._wrong_names: frozenset[str] = frozenset()
        self._followed = 0  # version of the names that the offers are in line with

    # -- what is there -----------------------------------------------------------------------------

    async def look(self, settings: Settings) -> CdiFound:
        """Look at the node for what ``settings``, which are in force from now on, ask for."""
        self._settings = settings
        gpu = settings.gpu
        self._tool = await asyncio.to_thread(_tool, settings)
        roots = await asyncio.to_thread(
            find_roots,
            driver_root=gpu.driver_root,
            dev_root=gpu.dev_root,
            container_driver_root="" if settings.simulate else settings.cdi.container_driver_root,
        )
        channels = await asyncio.to_thread(find_channels, settings.plugin.imex_channel_ids, roots)
        # `trouble`: which of the channels in the settings do not exist
        if channels.trouble and channels.trouble != self._channels.trouble:
            required = settings.plugin.imex_required
            self._journal.record(
                "imex.missing",
                level="error" if required else "warning",
                required=required,
                problem=channels.trouble,
            )
        self._roots, self._channels = roots, channels
        self._want()
        self._keep_back()
        return CdiFound(channels, tuple(mode for mode in self._modes() if self._source.knows(mode)))

    def observe(self, inventory: Inventory) -> None:
        """Take note of possibly changed devices:
        those without a name are not granted until they have one.
        """
        self._inventory = inventory
        self._want()
        self._keep_back()

    async def begin(self, settings: Settings, inventory: Inventory) -> None:
        """Look for the first time; return when the specs were made or could not be made,
        after `START_WAIT_SECONDS` at the latest.
        """
        await self.look(settings)
        self.observe(inventory)
        if self._needed() and _namable(inventory):
            # a tool that hangs must not keep the agent from starting; `tried` is set after an
            # attempt, successful or not
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(START_WAIT_SECONDS):
                    await self._source.tried.wait()
            self._keep_back()
        # offers that are built from now on take all names so far into account
        self._followed = self._source.revision.version

    async def watch(self, inventory: Latest[Inventory]) -> None:
        """Observe each inventory at once, until cancelled:
        the loop that offers resources may be busy with the one before for seconds.
        """
        async for newest in inventory.changes():
            self.observe(newest)

    async def follow(self, changed: Callable[[], Awaitable[None]]) -> None:
        """Call ``changed`` to bring the offers in line with the names, until cancelled."""
        while True:
            await self._source.revision.newer_than(self._followed)
            version = self._source.revision.version
            self._keep_back()
            await changed()
            self._followed = version

    def withheld(self, resource: Resource) -> Withheld | None:
        """Explain why ``resource`` must not be offered now; None when it may."""
        if self._channels.trouble and self._settings.plugin.imex_required:
            return Withheld(f"{self._channels.trouble}, or set plugin.imexRequired: false")
        return self._unnamed(resource) if self._uses_cdi_names(resource) else None

    def _unnamed(self, resource: Resource) -> Withheld | None:
        """Explain why containers with ``resource`` cannot be given CDI names, yet or at all; None
        when they can.
        """
        if self._inventory is not None and any(gpu.integrated for gpu in self._inventory.gpus):
            return Withheld(_NO_NAME_OF_INTEGRATED)
        names = self._source.names
        if not any(name.startswith(f"{self._kind}=") for name in names):
            if self._source.error:
                return Withheld(self._source.error)
            # temporary: an error only if it lasts
            return Withheld("the CDI spec of this node's GPUs is being made", temporary=True)
        vendor = self._kind.partition("/")[0]
        for channel in self._channels.ids:
            if (name := f"{vendor}/imex-channel={channel}") not in names:
                return Withheld(
                    f"no CDI spec has the device {name}; create it with the container toolkit, or "
                    "remove the channel from plugin.imexChannelIds"
                )
        if resource.decided_by is Decider.IDS:  # its ids name devices
            devices = set(Offers.devices(resource))
            if devices <= self._nameless.keys():
                reason = next((self._nameless[device] for device in sorted(devices)), "")
                made_here = not isinstance(self._source, ToolkitSpecs)  # the agent makes the spec
                return Withheld(reason, temporary=made_here and not self._source.error)
        return None

    async def inline(self, names: Sequence[str]) -> InlinedEdits:
        """Return the edits behind CDI names; wait a moment for a spec that is being made because a
        MIG instance was created for this container.

        Raises:
            HostFileError: the names do not resolve now.
        """
        with contextlib.suppress(TimeoutError):
            # as long as a start waits for its pod to appear in the watch
            async with asyncio.timeout(identification.POD_WAIT_SECONDS):
                while not self._can_resolve(names):
                    await self._source.revision.newer_than(self._source.revision.version)
                    self._keep_back()
        if wrong := self._wrong_names.intersection(names):
            raise HostFileError(
                f"the CDI spec of this node does not have {', '.join(sorted(wrong))} as it is "
                "now; the kubelet will retry"
            )
        return resolve_edits(names, self._source.specs)

    def _can_resolve(self, names: Sequence[str]) -> bool:
        return not self._wrong_names.intersection(names) and self._source.names.issuperset(names)

    def status(self) -> CdiStatus:
        """Return the status for ``/debug/config``."""
        strategies = self._settings.plugin.device_list_strategy
        if not self._needed():
            return CdiStatus(strategies=strategies)
        return CdiStatus(
            source=self._settings.cdi.source,
            strategies=strategies,
            specs=self._source.statuses,
            names=self._source.names,
        )

    async def withdraw(self) -> None:
        """Remove our specs, where the agent leaves the node for good (cluster.withdrawAtStop);
        those that other software keeps stay.
        """
        if self._settings.cluster.withdraw_at_stop and isinstance(self._source, GeneratedSpecs):
            self._withdrawn = True  # other loops go on, and may look
            await self._supervisor.stop(_TASK)
            try:
                await self._source.remove()
            except CdiError as err:
                _logger.error("cdi.not_removed", error=str(err))

    # -- how it is done ----------------------------------------------------------------------------

    @property
    def _strategies_use_names(self) -> bool:
        """Tell whether a device list strategy gives containers their devices by CDI names."""
        return any(
            strategy in CDI_STRATEGIES for strategy in self._settings.plugin.device_list_strategy
        )

    def _needed(self) -> bool:
        """Tell whether specs are needed: for their names, or because the edits behind these are
        copied into the spec of each late grant (``cdi.inline``).
        """
        return self._settings.cdi.inline or self._strategies_use_names

    def _uses_cdi_names(self, resource: Resource) -> bool:
        if self._strategies_use_names:
            return True
        # late grants of families whose pods decide have specs of their own for the edits
        return (
            self._settings.cdi.inline and resource.decided_by is not Decider.IDS and self._is_late()
        )

    def _modes(self) -> tuple[str, ...]:
        """List the device modes (GDRCopy, GDS, MOFED) that the settings or a family enable."""
        settings = self._settings
        wanted = set(settings.plugin.device_modes)
        for family in FAMILIES:
            if family.device_modes and family.is_on(settings):
                wanted.update(family.device_modes(settings))
        return tuple(mode for mode in DEVICE_MODES if mode in wanted)

    def _want(self) -> None:
        """Have the specs made or read, once they are needed and the node's devices are known."""
        if (
            not self._needed()
            or self._roots is None
            or self._inventory is None
            or not _namable(self._inventory)
        ):
            return
        if isinstance(self._source, GeneratedSpecs):
            cdi = self._settings.cdi
            ctk = CtkOptions(
                command=self._command(),
                timeout_seconds=nvidia_ctk.TIMEOUT_SECONDS,
                roots=self._roots,
                hook_path=cdi.hook_path,  # on the node: the program that runtimes run as a hook
                feature_flags=cdi.feature_flags,
                disable_hooks=cdi.disable_hooks,
            )
            driver = self._inventory.driver_version
            id_strategy = "index" if self._by_index else "uuid"
            self._source.want(
                Wanted(
                    # the GPUs' spec is made again when these differ
                    device_facts=(present_cards(self._inventory), driver),
                    driver_version=driver,
                    id_strategy=id_strategy,
                    modes=self._modes(),
                    channels=self._channels.ids,
                    channel_root=self._channels.root,
                    ctk=ctk,
                )
            )
        # the supervisor has a report for each loop that was started
        is_running = any(report.name == _TASK for report in self._supervisor.reports)
        if not is_running and not self._withdrawn:
            self._supervisor.start(
                _TASK,
                functools.partial(
                    self._source.run, functools.partial(self._supervisor.beat, _TASK)
                ),
            )

    def _command(self) -> tuple[str, ...]:
        # `Cdi()` has the defaults
        if self._simulated_tool and self._settings.cdi.nvidia_ctk == Cdi().nvidia_ctk:
            return self._simulated_tool()
        return (self._tool,)

    def _keep_back(self) -> None:
        """Cordon the devices that have no name, so that nothing of them is granted;
        uncordon those that have one by now.
        """
        names, error = self._source.names, self._source.error
        if self._settings.cdi.source == "toolkit":
            error = error or (
                "let the container toolkit write its spec again (service nvidia-cdi-refresh, or "
                "nvidia-ctk cdi generate)"
            )
        why = f"no CDI spec has its name yet{': ' if error else ''}{error}"
        # A spec with `all` as its only device is that of a Windows Subsystem for Linux, where
        # containers get all GPUs or none.
        one_for_all = {name for name in names if name.startswith(f"{self._kind}=")} == {
            f"{self._kind}=all"
        }
        # A name is missing if no spec has it, if it stood for another place when the spec was made,
        # or if its device nodes open another GPU.
        places_then, opened = self._places_in_spec(), self._nodes_by_name()
        missing = {
            uuid: name
            for uuid, place, name in self._named()
            if name not in names
            or (places_then is not None and places_then.get(uuid) != place)
            or opens_another(opened.get(name, ()), place)
        }
        self._nameless = dict.fromkeys(missing, why) if self._needed() and not one_for_all else {}
        self._wrong_names = frozenset(missing.values())
        wanted = self._nameless if self._strategies_use_names else {}
        for device, reason in wanted.items():
            if self._kept_back.get(device) != reason:
                self._ledger.cordon(device, reason, by=_CORDON_OWNER)
        for device in self._kept_back.keys() - wanted.keys():
            self._ledger.uncordon(device, by=_CORDON_OWNER)
        self._kept_back = dict(wanted)

    def _named(self) -> Iterator[tuple[str, Place, str]]:
        """UUID, place (index and device nodes) and CDI name of each device that containers can be
        given.
        """
        for uuid, place in (
            places(present_cards(self._inventory)) if self._inventory is not None else ()
        ):
            yield uuid, place, f"{self._kind}={place.position if self._by_index else uuid}"

    @property
    def _by_index(self) -> bool:
        """Tell whether CDI names are made of indices.
        The toolkit's never are, because it does not report a new numbering.
        """
        return self._settings.plugin.device_id_strategy == "index" and isinstance(
            self._source, GeneratedSpecs
        )

    def _nodes_by_name(self) -> dict[str, list[str]]:
        """The device nodes by which each name of a spec gives a container its device."""
        return {
            f"{spec.kind}={device.name}": [
                node.path for node in device.container_edits.device_nodes
            ]
            for spec in self._source.specs
            if spec.kind == self._kind
            for device in spec.devices
        }

    def _places_in_spec(self) -> dict[str, Place] | None:
        """Return UUID → place of each device at the time when the spec was made;
        None where a name can stand for one device only.
        """
        if not self._by_index or not isinstance(self._source, GeneratedSpecs):
            return None
        facts = self._source.gpu_spec_facts  # as `_want` has passed them
        return dict(places(facts[0])) if isinstance(facts, tuple) else {}


def _namable(inventory: Inventory) -> bool:
    """Tell whether a device exists that a CDI name could stand for."""
    return any(not gpu.integrated for gpu in inventory.gpus)


def _tool(settings: Settings) -> str:
    """Return the path by which the agent runs nvidia-ctk: the one in the settings, or the same
    below the mounted driver root if only that exists; looks at the file system.
    """
    own, mounted = (
        settings.cdi.nvidia_ctk,
        settings.cdi.container_driver_root.rstrip("/") + settings.cdi.nvidia_ctk,
    )
    return mounted if not os.path.exists(own) and os.path.exists(mounted) else own
