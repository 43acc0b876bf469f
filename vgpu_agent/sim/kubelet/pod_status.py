"""The pod status that the simulated kubelet writes: the pod's phase, and the state of each
container.

Called by `sim.cluster`. Statuses have the fields of a real kubelet's that the simulation needs:
phase, reasons, the containers' states, restart counts and times. They lack container ids,
conditions and the start time of an ended container.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from typing import TYPE_CHECKING, Any

from vgpu_agent.sim.api.objects import ApiRefusalError

if TYPE_CHECKING:
    from vgpu_agent.sim.api.objects import Object, ObjectStore


class PodStatus:
    """The status of one pod, in the object store of the simulated API server; nothing more is
    written once the pod is gone.
    """

    def __init__(self, objects: ObjectStore, pod: Object) -> None:
        self._objects = objects
        self._name, self._namespace, self._uid = (
            pod["metadata"][key] for key in ("name", "namespace", "uid")
        )
        self._init = [one["name"] for one in pod["spec"].get("initContainers") or ()]
        self._names = [*self._init, *(one["name"] for one in pod["spec"]["containers"])]

    def set_phase(self, phase: str, **more: str) -> None:
        """Set the phase, and e.g. reason and message."""
        self._write({"phase": phase, **more})

    def set_waiting(self, container: str, reason: str, message: str) -> None:
        """Write that the container could not be started."""
        self._set(container, state={"waiting": {"reason": reason, "message": message}})

    def set_running(self, container: str) -> None:
        """Write that the container runs."""
        self._set(container, state={"running": {"startedAt": _now()}}, started=True, ready=True)

    def set_terminated(self, container: str) -> None:
        """Write that the container has ended with exit code 0."""
        self._set(
            container,
            state={"terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": _now()}},
            started=False,
        )

    def set_crashed(self, container: str) -> None:
        """Write that the container has failed, and will be started again."""
        before = next((one for one in self._statuses() if one["name"] == container), {})
        last = {"terminated": {"exitCode": 1, "reason": "Error", "finishedAt": _now()}}
        waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
        self._set(
            container,
            state=waiting,
            lastState=last,
            started=False,
            restartCount=before.get("restartCount", 0) + 1,
        )

    def _statuses(self) -> list[dict[str, Any]]:
        try:
            status = self._objects.get("pods", self._name, self._namespace).get("status") or {}
        except ApiRefusalError:
            return []
        written = {
            one["name"]: one
            for key in ("initContainerStatuses", "containerStatuses")
            for one in status.get(key) or ()
        }
        return [
            written.get(
                name, {"name": name, "restartCount": 0, "ready": False, "state": {"waiting": {}}}
            )
            for name in self._names
        ]

    def _set(self, container: str, **changes: Any) -> None:
        statuses = [one | changes if one["name"] == container else one for one in self._statuses()]
        self._write(
            {
                "initContainerStatuses": [one for one in statuses if one["name"] in self._init],
                "containerStatuses": [one for one in statuses if one["name"] not in self._init],
            }
        )

    def _write(self, status: Object) -> None:
        with contextlib.suppress(ApiRefusalError):  # it was deleted meanwhile
            pod = self._objects.get("pods", self._name, self._namespace)
            if pod["metadata"]["uid"] == self._uid:  # otherwise another pod has the name
                start_time = (pod.get("status") or {}).get("startTime") or _now()
                self._objects.set_status(
                    "pods", self._name, {"startTime": start_time, **status}, self._namespace
                )


def _now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
