"""A kubelet that can be killed anywhere:
serial admission, concurrent pod workers, starts that are refused and tried again.

`device_manager` knows the holders of ids. Here is the order: init containers first, image pulls of
minutes, PreStartContainer with its 30 s, a refusal tried again at once and then every 14 s
(measured on a real node), crashes, ends, and what a restart of kubelet or of the node keeps.
Started by `episode`; at each container start the `Judge` is asked.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable
from typing import Protocol

from tests.torture.api_model import ApiModel, LivePod
from tests.torture.device_manager import AdmissionError, DeviceManager, StartError
from tests.torture.node_files import NodeFiles
from tests.torture.plan import Ending, Kind, PlannedContainer
from tests.torture.story import Story
from vgpu_agent.isolation.edits import Edits

_PRE_START_SECONDS = 30.0
_RETRY_SECONDS = 14.0


class Judge(Protocol):
    """Looks at each container that the runtime starts and ends."""

    def starts(
        self,
        pod: LivePod,
        container: PlannedContainer,
        edits: Edits,
        ids: tuple[str, ...],
        *,
        unasked: bool,
    ) -> None:
        """The container has been created with these edits;
        ``unasked`` when kubelet left PreStartContainer out.
        """

    def ends(self, pod: LivePod, container: str) -> None:
        """The container runs no more."""


class KubeletModel:
    """One node's kubelet, with the runtime below it.

    State: ``pods`` are those it has received; what of a pod survives kubelet (running containers)
    is in `LivePod`.
    """

    def __init__(
        self, rng: random.Random, *, api: ApiModel, files: NodeFiles, judge: Judge, story: Story
    ) -> None:
        self._rng, self._api, self._files, self._judge, self._story = rng, api, files, judge, story
        self.on_end: Callable[[LivePod], None] = _nothing
        self.devices = DeviceManager(rng)
        self.pods: dict[str, LivePod] = {}
        self.up = False
        self._knows_at = self._started_at = 0.0
        self._queue: asyncio.Queue[LivePod] = asyncio.Queue()
        self._admitting: asyncio.Task[None] | None = None
        # ordered, so that a seed stays a seed
        self._workers: dict[str, dict[asyncio.Task[None], None]] = {}
        # Starts that kubelet let pass without asking, because it had lost the plugin's options
        # (kubelet §6).
        self.unasked: set[tuple[str, str]] = set()

    # -- kubelet's own life ------------------------------------------------------------------------

    def start(self) -> None:
        """Read the checkpoint, find the pods again, wait for plugins."""
        self.up = True
        self._started_at = asyncio.get_running_loop().time()
        self._knows_at = self._started_at + self._rng.random()
        self.devices.restart()
        self._queue = asyncio.Queue()
        self._admitting = asyncio.get_running_loop().create_task(self._admit_all())
        known = [pod for pod in self.pods.values() if not pod.gone]
        self._rng.shuffle(known)
        for pod in known:
            if pod.deleting:
                self._work(pod, self._terminate(pod))
            elif pod.admitted and pod.running and self._nothing_to_start(pod):
                self._work(pod, self._live(pod))
            else:  # judged again, like a new one
                asyncio.get_running_loop().call_later(
                    1.0 + self._rng.random() * 3, self._queue.put_nowait, pod
                )

    def kill(self) -> None:
        """The kubelet ends between any two steps; containers run on."""
        self.up = False
        for task in [
            self._admitting,
            *(task for tasks in self._workers.values() for task in tasks),
        ]:
            if task is not None:
                task.cancel()
        self._workers = {}
        self._story.tell("kubelet killed")

    def reboot(self) -> None:
        """All containers of the node have ended; must be called while kubelet is down."""
        for pod in self.pods.values():
            for container in sorted(pod.running):
                self._stopped(pod, container)
            # A new sandbox, in which all init containers run again.
            pod.finished.clear()
            pod.in_new_sandbox = True

    def _nothing_to_start(self, pod: LivePod) -> bool:
        return all(
            each.name in pod.running or each.name in pod.finished for each in pod.plan.containers
        )

    # -- pods come and go --------------------------------------------------------------------------

    def add(self, pod: LivePod) -> None:
        """A pod was bound to this node, or its file has appeared."""
        self.pods[pod.uid] = pod
        if self.up:
            self._queue.put_nowait(pod)

    def delete(self, pod: LivePod, *, force: bool) -> None:
        """Delete the pod: at once out of sight when forced, else when its containers have ended."""
        if pod.gone or pod.deleting:
            return
        pod.deleting = True
        self._story.tell("deleted by force" if force else "deleted", pod.uid)
        if force:
            # kubelet counts the ids as free while the containers still end, which no plugin can
            # know
            pod.active = False
            for container in pod.running:
                self._judge.ends(pod, container)
            self._api.remove(pod)
        else:
            self._api.show(pod)
        self._cancel(pod)
        if self.up:
            self._work(pod, self._terminate(pod))

    async def _terminate(self, pod: LivePod) -> None:
        if pod.running:
            await asyncio.sleep(self._rng.random() * self._rng.choice((1.0, 30.0)))
        self._end(pod, "Failed")
        self._api.remove(pod)

    def _end(self, pod: LivePod, phase: str) -> None:
        for container in sorted(pod.running):
            self._stopped(pod, container)
        pod.phase, pod.gone, pod.active = phase, True, False
        self._story.tell("ended", pod.uid, phase)
        if pod.listed:
            self._api.show(pod)
        self.pods.pop(pod.uid, None)
        self.on_end(pod)

    def _stopped(self, pod: LivePod, container: str) -> None:
        pod.running.discard(container)
        pod.ended[container] = asyncio.get_running_loop().time()
        self._judge.ends(pod, container)

    @property
    def knows_its_pods(self) -> bool:
        """Not at once after a start."""
        return asyncio.get_running_loop().time() >= self._knows_at

    @property
    def age_seconds(self) -> float:
        """The seconds since it started last."""
        return asyncio.get_running_loop().time() - self._started_at

    def _cancel(self, pod: LivePod) -> None:
        for task in self._workers.pop(pod.uid, {}):
            task.cancel()

    def _work(self, pod: LivePod, coroutine: Coroutine[None, None, None]) -> None:
        tasks = self._workers.setdefault(pod.uid, {})
        task = asyncio.get_running_loop().create_task(coroutine)
        tasks[task] = None
        task.add_done_callback(lambda ended: tasks.pop(ended, None))

    # -- admission ---------------------------------------------------------------------------------

    async def _admit_all(self) -> None:
        while True:
            pod = await self._queue.get()
            if pod.gone or pod.deleting:
                if not pod.gone and pod.uid not in self._workers:
                    self._work(pod, self._terminate(pod))
                continue
            pod.active = True
            try:
                await self._admit(pod)
            except AdmissionError as err:
                self._story.tell("not admitted", pod.uid, err)
                if not pod.gone:
                    self._end(pod, "Failed")
            else:
                if not pod.gone and not pod.deleting:
                    pod.admitted = True
                    self._work(pod, self._live(pod))

    async def _admit(self, pod: LivePod) -> None:
        reusable: dict[str, set[str]] = {}
        for container in sorted(pod.plan.containers, key=lambda each: each.kind is Kind.MAIN):
            await self.devices.allocate(pod, container, reusable)
            self.devices.reuse(pod, container, reusable)
        await asyncio.sleep(self._rng.random() * 0.01)

    # -- a pod's worker ----------------------------------------------------------------------------

    def _tell_of_new_sandbox(self, pod: LivePod) -> None:
        """Write the status, as the real one does before it makes a sandbox."""
        if pod.in_new_sandbox:
            self._api.show(pod)

    async def _live(self, pod: LivePod) -> None:
        self._tell_of_new_sandbox(pod)
        for container in pod.plan.containers:
            if container.kind is Kind.INIT and container.name not in pod.finished:
                await self._start_all(pod, [container])
                await asyncio.sleep(container.run_seconds)
                self._stopped(pod, container.name)
                pod.finished.add(container.name)
                # The real one writes the status before it starts the next container.
                self._api.show(pod)
            elif container.kind is Kind.SIDECAR and container.name not in pod.running:
                await self._start_all(pod, [container])
        await self._start_all(
            pod,
            [
                each
                for each in pod.plan.containers
                if each.kind is Kind.MAIN and each.name not in pod.running
            ],
        )
        if pod.phase != "Running":
            pod.phase = "Running"
            self._api.show(pod)
        now = asyncio.get_running_loop().time()
        if pod.ends_at is None:
            pod.ends_at = now + pod.plan.run_seconds
        for container in pod.plan.containers:
            if container.crashes and container.kind is not Kind.INIT:
                self._work(pod, self._crash(pod, container))
        await asyncio.sleep(max(0.0, pod.ends_at - now))
        match pod.plan.ending:
            case Ending.COMPLETES | Ending.EARLY:
                self._cancel_others(pod)
                self._end(pod, "Succeeded")
            case Ending.DELETED | Ending.FORCED:
                asyncio.get_running_loop().call_soon(
                    lambda: self.delete(pod, force=pod.plan.ending is Ending.FORCED)
                )

    def _cancel_others(self, pod: LivePod) -> None:
        for task in self._workers.pop(pod.uid, {}):
            if task is not asyncio.current_task():
                task.cancel()

    async def _crash(self, pod: LivePod, container: PlannedContainer) -> None:
        while pod.starts.get(container.name, 0) <= container.crashes:
            await asyncio.sleep(container.run_seconds)
            self._stopped(pod, container.name)
            self._story.tell("crashed", pod.uid, container.name)
            await asyncio.sleep(self._rng.choice((0.5, 10.0)))
            await self._start_all(pod, [container])

    async def _start_all(self, pod: LivePod, waiting: list[PlannedContainer]) -> None:
        """Start each of them, in order, again and again until all run."""
        refusals = 0
        while waiting:
            for container in list(waiting):
                if container.name not in pod.pulled:
                    await asyncio.sleep(container.pull_seconds)
                    pod.pulled.add(container.name)
                try:
                    await self._start(pod, container)
                except StartError as err:
                    self._refused(pod, container, str(err))
                else:
                    waiting.remove(container)
            if waiting:
                await asyncio.sleep(
                    0.01 if not refusals else _RETRY_SECONDS * (0.9 + self._rng.random() * 0.2)
                )
                refusals += 1

    def _refused(self, pod: LivePod, container: PlannedContainer, text: str) -> None:
        pod.refusal = text
        pod.stuck_since = pod.stuck_since or asyncio.get_running_loop().time()
        self._story.tell("start refused", pod.uid, container.name, text)

    async def _start(self, pod: LivePod, container: PlannedContainer) -> None:
        """PreStartContainer for each resource, then CreateContainer.

        Raises:
            StartError: the container does not start now.
        """
        ids: tuple[str, ...] = ()
        edits = Edits()
        if container.request is not None:
            for resource in container.request.limits:
                await self._pre_start(pod, container, resource)
            await asyncio.sleep(self._rng.random() * self._rng.choice((0.02, 0.2, 2.0)))
            answers = [
                entry
                for resource in container.request.limits
                if (entry := self.devices.entry(pod, container.name, resource))
            ]
            ids = next(
                (entry.ids for entry in answers if entry.resource == container.request.resource), ()
            )
            edits = self._create(entry.answer for entry in answers)
        pod.running.add(container.name)
        pod.starts[container.name] = pod.starts.get(container.name, 0) + 1
        pod.started_at[container.name] = asyncio.get_running_loop().time()
        pod.refusal, pod.stuck_since = "", 0.0
        if pod.in_new_sandbox:
            pod.in_new_sandbox = False
            self._api.show(pod)
        if container.request is not None:
            self._story.tell("started", pod.uid, container.name, ids)
            self._judge.starts(
                pod, container, edits, ids, unasked=(pod.uid, container.name) in self.unasked
            )

    async def _pre_start(self, pod: LivePod, container: PlannedContainer, resource: str) -> None:
        entry = self.devices.entry(pod, container.name, resource)
        if entry is None:
            return
        endpoint = self.devices.endpoints.get(resource)
        if endpoint is None:
            raise StartError(f"endpoint not found in cache for a registered resource: {resource}")
        if not endpoint.pre_start:
            if resource.endswith("vgpu-number") and endpoint.plugin is None:
                self._story.tell("start unasked", pod.uid, container.name, entry.ids)
                self.unasked.add((pod.uid, container.name))
            return
        self.unasked.discard((pod.uid, container.name))
        if endpoint.stopped or endpoint.plugin is None:
            raise StartError(f"endpoint {resource} has been stopped")
        try:
            async with asyncio.timeout(_PRE_START_SECONDS):
                await endpoint.plugin.pre_start(entry.ids)
        except Exception as err:  # whatever it was, kubelet tries again
            raise StartError(
                f"device plugin PreStartContainer rpc failed with err: {err!r}"
            ) from err

    def _create(self, answers: Iterable[Edits]) -> Edits:
        """Return the runtime's result of the answers at this moment;
        the first answer wins where two disagree.
        """
        united = Edits()
        for answer in answers:
            united = answer.joined(united)
        for name in united.cdi_names:
            spec = self._files.spec(name)
            if spec is None:
                raise StartError(f"unresolvable CDI devices {name}")
            united = united.joined(spec)
        return united


def _nothing(_: LivePod) -> None:
    """Do nothing: the answer is not needed."""
