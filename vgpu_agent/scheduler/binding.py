"""The requests that bind a pod and record its cards in its annotations.

The Binding carries the annotations. A separate request for them could arrive late, and would then
replace the cards in the annotations of a pod that is bound to another Node. Since Kubernetes 1.35
(feature gate ``PodTopologyLabelsAdmission``) a Binding can carry labels, too. Then one request is
enough, and no plugin sees a bound pod without its labels. Older API servers ignore the labels
without an error. So a patch before the first Binding writes all labels but one, the *probe*. The
watch then shows whether the Binding has written the probe. If so, further pods are bound by the
Binding alone. A pod may lack its labels nevertheless, because another API server has answered. It
gets them late, and from then on the patch is sent again before each Binding.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from vgpu_agent.cluster.api import pod_path
from vgpu_agent.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from vgpu_agent.cluster.api import Api
    from vgpu_agent.journal import Journal
    from vgpu_agent.pods import DesiredPod, Pod

_CONFLICT = 409
_LATE_TRIES = 5  # at most, to write the labels that a bound pod lacks


class Bindings:
    """The binding of pods: by a Binding alone, or after a patch that writes their labels.

    State: whether the API server takes labels from Bindings, None while that is unknown. The tasks
    that write late labels.
    """

    def __init__(
        self,
        api: Api,
        *,
        look_up: Callable[[Pod], Awaitable[Pod | None]],
        journal: Journal,
    ) -> None:
        """Build it.

        Args:
            api: the API server.
            look_up: reads a pod from the API server; returns None once it is gone.
            journal: records how the API server treats labels.
        """
        self._api, self._look_up, self._journal = api, look_up, journal
        self._takes_labels: bool | None = None
        self._late: set[asyncio.Task[None]] = set()

    async def bind(
        self, pod: Pod, node: str, state: DesiredPod, *, check: Callable[[], None]
    ) -> None:
        """Bind a pod, and write its desired annotations and labels.

        Args:
            pod: the pod.
            node: its Node.
            state: its annotations and labels.
            check: raises `RequestRefusedError` if the pod must not be bound any more. It is called
                after a request that comes before the Binding, which may have taken long.

        Raises:
            ClusterError: an API server refuses, or does not answer.
            RequestRefusedError: by ``check``.
        """
        labels = _texts(state.labels)
        # A Binding cannot remove a label, and some API servers do not replace one with it.
        if state.labels and (
            not self._takes_labels or any(key in pod.labels for key in state.labels)
        ):
            written = dict(state.labels)
            if self._takes_labels is None and len(labels) > 1:
                probe = _probe(labels)
                # a label that the pod's author has set needs the patch: see above
                if probe not in pod.labels:
                    del written[probe]
            await self._patch(pod, {"labels": written})
            check()
        await self.post(
            pod.namespace,
            pod.name,
            pod.uid,
            node,
            annotations=_texts(state.annotations),
            labels=labels,
        )

    async def post(
        self,
        namespace: str,
        name: str,
        uid: str,
        node: str,
        *,
        annotations: Mapping[str, str],
        labels: Mapping[str, str],
    ) -> None:
        """Bind a pod by the Binding alone. Raises: ClusterError."""
        metadata = {
            "name": name,
            "namespace": namespace,
            "uid": uid,
            "annotations": dict(annotations),
            "labels": dict(labels),
        }
        await self._api.post(
            pod_path(namespace, name) + "/binding",
            {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": metadata,
                "target": {"apiVersion": "v1", "kind": "Node", "name": node},
            },
        )

    def note_bound(self, pod: Pod, state: DesiredPod) -> None:
        """Learn from a bound pod, as the watch shows it, whether the API server takes labels from
        Bindings, and write those that the pod lacks. ``state`` is what it was bound with.
        """
        labels = _texts(state.labels)
        missing = labels.keys() - pod.labels.keys()
        if any(pod.labels[key] != labels[key] for key in labels.keys() - missing):
            return  # the agent of its Node has changed a label since
        if missing:
            if self._takes_labels is not False:  # not known to leave them out
                self._journal.record("scheduler.labels_not_bound", pod=pod.full_name)
            self._takes_labels = False
            task = asyncio.get_running_loop().create_task(self._write_late(pod, labels))
            self._late.add(task)
            task.add_done_callback(self._late.discard)
        elif self._takes_labels is None and len(labels) > 1:
            self._takes_labels = True

    async def _write_late(self, pod: Pod, labels: Mapping[str, str]) -> None:
        """Write labels that a bound pod lacks, unless the agent has written them meanwhile."""
        found: Pod | None = pod
        for _ in range(_LATE_TRIES):
            if found is None or labels.keys() <= found.labels.keys():
                return
            try:
                # the agent of its Node may have written the others meanwhile
                lacking = {key: text for key, text in labels.items() if key not in found.labels}
                changed = {"labels": lacking, "resourceVersion": found.resource_version}
                await self._patch(pod, changed)
            except ClusterError as err:
                if err.status != _CONFLICT:
                    self._journal.record(
                        "scheduler.labels_not_written",
                        level="warning",
                        pod=pod.full_name,
                        error=str(err),
                    )
                    return
            else:
                return
            try:
                found = await self._look_up(pod)
            except ClusterError:
                return

    async def _patch(self, pod: Pod, metadata: Mapping[str, object]) -> None:
        await self._api.patch(
            pod_path(pod.namespace, pod.name), {"metadata": {"uid": pod.uid, **metadata}}
        )


def _texts(values: Mapping[str, str | None]) -> dict[str, str]:
    # without the keys that must not be there: their value is None
    return {key: value for key, value in values.items() if value is not None}


def _probe(labels: Mapping[str, str]) -> str:
    """Return the label that only the Binding writes while it is unknown whether the API server
    takes it: the last one, because it is needed least.
    """
    return list(labels)[-1]
