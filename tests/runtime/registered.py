"""A registry of processes with a cache of pods, directories of containers, and clients that are
real processes in real cgroups.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from grpclib.client import Channel
from grpclib.const import Cardinality

from tests.patience import PATIENCE_SECONDS, eventually
from tests.runtime.contained import CGROUPS, Contained, Container
from vgpu_agent.grpc import wire
from vgpu_agent.grpc.connection import Bytes
from vgpu_agent.journal import Journal
from vgpu_agent.pods import Pod, PodCache, PodContainer, container_directory
from vgpu_agent.runtime.process_registry import METHOD, ProcessRegistry


def encoded(pod_uid: str = "", container: str = "", token: str = "") -> bytes:
    """A ``ContainerDeviceRequest`` (vgpu-manager §9); proto3 leaves out what is empty."""
    texts = enumerate((pod_uid, container, token), 1)
    return b"".join(wire.encode_field(number, text.encode()) for number, text in texts if text)


class _Over(Channel):
    """A client over a connection that another process has made."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(codec=Bytes())
        self._made_by_another = connection

    async def _create_connection(self) -> Any:
        _, protocol = await asyncio.get_running_loop().create_unix_connection(
            self._protocol_factory, sock=self._made_by_another
        )
        return protocol


async def call(
    path: Path, process: Contained, message: bytes, *, seconds: float = PATIENCE_SECONDS
) -> bytes:
    """Call the registry at ``path`` as ``process``."""
    channel = _Over(await asyncio.to_thread(process.connect, path))
    try:
        async with channel.request(
            METHOD, Cardinality.UNARY_UNARY, bytes, bytes, timeout=seconds
        ) as stream:
            await stream.send_message(message, end=True)
            answer = await stream.recv_message()
            assert answer is not None
            return bytes(answer)
    finally:
        channel.close()


class Stage:
    """The registry of one node."""

    def __init__(self, folder: Path, cgroup_root: Path = CGROUPS) -> None:
        self.folder = folder
        self.book = PodCache()
        self.book.replace(())
        self.journal = Journal()
        self.registry = ProcessRegistry(
            folder / "registry",
            folder,
            self.book,
            self.journal,
            proc_root="/proc",
            cgroup_root=str(cgroup_root),
        )
        self._pods: dict[str, Pod] = {}

    @property
    def path(self) -> Path:
        return self.folder / "registry" / "socket.sock"

    def add(self, container: Container, *, known: bool = True, directory: bool = True) -> Path:
        """Put the container into its pod, ``known`` by its id, and make its directory; return the
        path of its list.
        """
        uid = container.member.pod_uid
        before = self._pods.get(uid, Pod(uid=uid, namespace="default", name=f"pod-{uid[:8]}"))
        added = PodContainer(
            container.name, container_id=container.member.container_id if known else ""
        )
        others = tuple(one for one in before.containers if one.name != container.name)
        pod = Pod(uid=uid, namespace="default", name=before.name, containers=(*others, added))
        self._pods[uid] = pod
        self.book.put(pod)
        config = self.folder / container_directory(uid, container.name) / "config"
        if directory:
            config.mkdir(parents=True, exist_ok=True)
        return config / "pids.config"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The registry at work."""
        loops = [
            asyncio.ensure_future(self.registry.run()),
            asyncio.ensure_future(self.registry.keep_lists()),
        ]
        await eventually(lambda: any(one.done() for one in loops) or self.listening)
        try:
            yield
        finally:
            for one in loops:
                one.cancel()
            ended = await asyncio.gather(*loops, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended

    @property
    def listening(self) -> bool:
        return self.path.exists() and stat.S_ISSOCK(self.path.stat().st_mode)

    async def call(
        self, process: Contained, message: bytes, *, seconds: float = PATIENCE_SECONDS
    ) -> bytes:
        """Call as ``process``."""
        return await call(self.path, process, message, seconds=seconds)

    async def register(self, process: Contained, container: Container, **more: Any) -> bytes:
        """Register as the library does."""
        message = encoded(container.member.pod_uid, container.name)
        return await self.call(process, message, **more)
