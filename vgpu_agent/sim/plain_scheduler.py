"""A stand-in for the plain kube-scheduler: it binds a pod to the first node that has enough free
resources.

Used by the simulated cluster for pods whose ``schedulerName`` is ``default-scheduler``. It writes
nothing about devices, so the agent has to choose the devices of such a pod. It changes the object
store directly, without requests to the simulated API server.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from vgpu_agent.sim.api.objects import ApiRefusalError
from vgpu_agent.sim.volcano import resources

if TYPE_CHECKING:
    from vgpu_agent.sim.api.objects import ObjectStore

NAME = "default-scheduler"


async def run_plain_scheduler(objects: ObjectStore) -> None:
    """Bind all pods that wait for ``default-scheduler``, until cancelled."""
    async for _ in objects.revision.changes():
        _schedule(objects)


def _schedule(objects: ObjectStore) -> None:
    for pod in objects.list("pods"):
        spec, metadata = pod["spec"], pod["metadata"]
        waiting = spec.get("schedulerName") == NAME and not spec.get("nodeName")
        if not waiting or resources.is_terminated(pod) or resources.is_terminating(pod):
            continue
        for node in objects.list("nodes"):
            name = node["metadata"]["name"]
            beside = [
                other for other in objects.list("pods") if other["spec"].get("nodeName") == name
            ]
            # `may_hold`: ready, not cordoned, and with the labels of the pod's nodeSelector
            if resources.may_hold(node, pod) and not resources.lacking(
                resources.free(node, beside), resources.requests(pod)
            ):
                binding = {"metadata": {"uid": metadata["uid"]}, "target": {"name": name}}
                with contextlib.suppress(ApiRefusalError):  # another writer was quicker
                    objects.bind(metadata["name"], metadata["namespace"], binding)
                break
