"""A plugin server as the comparison with the kubelet's list sees it: what it sent, and which new
registrations were asked of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from vgpu_agent.device_ids import DeviceId, ListedDevice
from vgpu_agent.kubelet.plugin import SentList
from vgpu_agent.status import PluginStatus

GPU = "nvidia.com/gpu"


class FakeServer:
    """A server that sent ``healthy`` and ``unhealthy`` a minute ago; a test may set `told`."""

    def __init__(
        self,
        healthy: Iterable[str] = ("a", "b"),
        unhealthy: Iterable[str] = (),
        *,
        resource: str = GPU,
    ) -> None:
        self.status = PluginStatus(resource, "nvidia")
        health = {**dict.fromkeys(healthy, True), **dict.fromkeys(unhealthy, False)}
        devices = [ListedDevice(DeviceId(name, name), well) for name, well in health.items()]
        self.last_sent: SentList | None = SentList(devices, seconds_ago=60.0)
        self.again: list[str] = []

    def register_again(self, reason: str) -> None:
        """Remember it; nothing else happens."""
        self.again.append(reason)
