"""A device plugin of our own `kubelet` room that binds late: Allocate answers with a CDI name,
PreStartContainer gives it its meaning.

Run as a process by test_late_binding: ``python -m tests.real_node.late_plugin KUBELET_DIR CDI_DIR
RESOURCE IDS``. It holds no decision of the agent; it shows that the room under it does on a real
kubelet what later families rest on. SIGTERM is a graceful stop.
A file ``refuse`` in CDI_DIR makes every start be refused with its text.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from vgpu_agent import log
from vgpu_agent.concurrency import Revision
from vgpu_agent.config.settings import Kubelet
from vgpu_agent.device_ids import DeviceId, ListedDevice
from vgpu_agent.errors import RequestRefusedError
from vgpu_agent.isolation.edits import Edits
from vgpu_agent.journal import Journal
from vgpu_agent.kubelet import directory
from vgpu_agent.kubelet.directory import DirectoryWatch
from vgpu_agent.kubelet.pod_resources import PodResources
from vgpu_agent.kubelet.records import read_records
from vgpu_agent.kubelet.server import DevicePlugin
from vgpu_agent.model import Resource
from vgpu_agent.status import KubeletStatus

KIND = "vgpu-agent.test/grant"


class LateBackend:
    """Answers Allocate without knowing the pod,
    and PreStartContainer from the kubelet's records.
    """

    def __init__(self, resource: Resource, settings: Kubelet, cdi_directory: Path) -> None:
        self.revision = Revision()
        self.ready = asyncio.Event()
        self.ready.set()
        self._resource = resource
        self._settings = settings
        self._cdi_directory = cdi_directory
        self._pod_resources = PodResources(settings.pod_resources_socket, timeout_seconds=5)

    def listing(self, resource: str) -> Sequence[ListedDevice]:
        """Everything is healthy."""
        return [ListedDevice(entry, healthy=True) for entry in self._resource.ids]

    def preferred(
        self, resource: str, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> list[str]:
        """The last ones, so that a test can see that kubelet follows."""
        return [*must_include, *sorted(set(available) - set(must_include), reverse=True)][:size]

    async def allocate(self, resource: str, ids: Sequence[str]) -> Edits:
        """One CDI name for the set of ids; no spec of that name exists yet."""
        return Edits(cdi_names=(f"{KIND}={_name(ids)}",))

    def may_start_unasked(self, resource: str) -> bool:
        """A CDI name is its own container's or undefined."""
        return True

    async def pre_start(self, resource: str, ids: Sequence[str]) -> None:
        """Find the owner of these ids, and write the spec.

        Raises:
            RequestRefusedError: the kubelet's records name no owner, or several, or the test asks
                for a refusal.
        """
        refusal = self._cdi_directory / "refuse"
        if await asyncio.to_thread(refusal.exists):
            raise RequestRefusedError(await asyncio.to_thread(refusal.read_text))
        records = await read_records(self._pod_resources, self._settings.checkpoint_path)
        owners = [
            each.owner
            for each in records.holdings
            if each.resource == resource and set(each.ids) == set(ids)
        ]
        if len(owners) != 1:
            raise RequestRefusedError(
                f"the kubelet's records name {len(owners)} holders of {', '.join(ids)}"
            )
        (owner,) = owners
        spec = {
            "cdiVersion": "0.6.0",
            "kind": KIND,
            "devices": [
                {
                    "name": _name(ids),
                    "containerEdits": {
                        "env": [
                            f"GRANT_POD={owner.namespace}/{owner.pod}/{owner.container}",
                            f"GRANT_UID={owner.pod_uid}",
                        ],
                        "deviceNodes": [{"path": "/dev/granted", "hostPath": "/dev/null"}],
                    },
                }
            ],
        }
        await asyncio.to_thread(self._write, f"{_name(ids)}.json", json.dumps(spec))

    def _write(self, name: str, text: str) -> None:
        new = self._cdi_directory / f".{name}"
        new.write_text(text)
        os.replace(new, self._cdi_directory / name)


def _name(ids: Sequence[str]) -> str:
    return hashlib.sha256(",".join(sorted(ids)).encode()).hexdigest()[:16]


async def serve(kubelet_directory: str, cdi_directory: str, name: str, count: str) -> None:
    """Serve until SIGTERM, then end gracefully."""
    settings = Kubelet(directory=kubelet_directory)
    resource = Resource(
        name,
        "test",
        tuple(DeviceId(f"late-{number}", "device") for number in range(int(count))),
        pre_start_required=True,
    )
    journal = Journal()
    watch = DirectoryWatch(
        settings.device_plugin_directory,
        poll_seconds=directory.POLL_SECONDS,
        journal=journal,
        status=KubeletStatus(),
    )
    plugin = DevicePlugin(
        resource, LateBackend(resource, settings, Path(cdi_directory)), watch, journal
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch.run())
        group.create_task(plugin.run())
        await stop.wait()
        await plugin.stop()
        watching.cancel()


if __name__ == "__main__":
    log.configure(level="debug")
    asyncio.run(serve(*sys.argv[1:]))
