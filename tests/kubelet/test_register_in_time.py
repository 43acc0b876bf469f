"""Registration in time after a kubelet came back:
a kubelet makes its socket first and listens on it a little later.

Pods that are bound to the node meanwhile fail for good, so what a dead kubelet has taught about
pauses must not count for the next one.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kubelet.backend import FakeBackend, shared_resource
from tests.kubelet.conftest import Node
from tests.patience import PATIENCE_SECONDS, eventually
from vgpu_agent.concurrency import Latest, Supervisor
from vgpu_agent.errors import KubeletError
from vgpu_agent.grpc.sockets import SocketIdentity
from vgpu_agent.journal import Journal
from vgpu_agent.kubelet import server, sockets
from vgpu_agent.kubelet.directory import DirectoryState
from vgpu_agent.kubelet.registration import NotListeningError
from vgpu_agent.kubelet.server import DevicePlugin
from vgpu_agent.sim.kubelet.kubelet import SimulatedKubelet

LATEST_SECONDS = 0.3
AWAY_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)
GAP_SECONDS = tuple(tenths / 10 for tenths in range(11))
OLD, NEW = SocketIdentity(1, 1, 1), SocketIdentity(1, 2, 2)


def _refused() -> KubeletError:
    return NotListeningError("Register: cannot connect to kubelet.sock: Connection refused")


def _broken_off() -> KubeletError:
    return KubeletError("Register on kubelet.sock broke off")


class Directory:
    """The kubelet's directory, whose state the test sets."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state: Latest[DirectoryState] = Latest(DirectoryState())

    def show(self, kubelet: SocketIdentity | None) -> None:
        """Let there be this kubelet.sock."""
        self.state.publish(
            DirectoryState({} if kubelet is None else {sockets.KUBELET_SOCKET: kubelet})
        )


class Answers:
    """Answers each Register as the kubelet of the moment would, on virtual time."""

    def __init__(self, failure: Callable[[], KubeletError]) -> None:
        self.failure = failure
        self.listens = False
        self.asked_at: list[float] = []
        self.registered = asyncio.Event()

    async def register(self, *_: object, **__: object) -> None:
        """Stand in for `registration.register`."""
        self.asked_at.append(asyncio.get_running_loop().time())
        if not self.listens:
            raise self.failure()
        self.registered.set()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch, loop_may_block: None) -> None:
    """Do in the loop what is done in threads: virtual time does not wait for threads."""

    async def run(function: Callable[..., Any], *args: object, **named: object) -> Any:
        return function(*args, **named)

    monkeypatch.setattr(asyncio, "to_thread", run)


def _plugin(directory: Directory, journal: Journal | None = None) -> DevicePlugin:
    resource = shared_resource()
    # its state is all that is used
    return DevicePlugin(resource, FakeBackend(resource), directory, journal or Journal())  # type: ignore[arg-type]  # a stand-in with the members that are used


@pytest.mark.looptime
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("away_seconds", AWAY_SECONDS)
@pytest.mark.parametrize("failure", [_refused, _broken_off])
async def test_registered_soon_after_kubelet_listens(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    away_seconds: float,
    failure: Callable[[], KubeletError],
) -> None:
    """However long the old kubelet was dead,
    and however long the new one takes from its socket to listening.
    """
    for gap_seconds in GAP_SECONDS:
        lying, kubelet = Directory(directory), Answers(failure)
        monkeypatch.setattr(server, "register", kubelet.register)
        plugin = _plugin(lying)
        lying.show(OLD)
        run = asyncio.create_task(plugin.run())
        await asyncio.sleep(away_seconds)
        lying.show(None)
        await asyncio.sleep(0.01)
        lying.show(NEW)
        kubelet.failure = _refused
        await asyncio.sleep(gap_seconds)
        kubelet.listens = True
        listens_at = asyncio.get_running_loop().time()
        await kubelet.registered.wait()
        late = asyncio.get_running_loop().time() - listens_at
        assert late <= LATEST_SECONDS, (
            f"{late:.2f} s late after {gap_seconds} s between socket and listening"
        )
        await plugin.stop()
        await run


@pytest.mark.looptime
@pytest.mark.usefixtures("at_once")
async def test_a_new_socket_counts_although_nobody_saw_the_old_one_go(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wipe and a new socket within a millisecond are one change of the directory."""
    lying, kubelet = Directory(directory), Answers(_refused)
    monkeypatch.setattr(server, "register", kubelet.register)
    plugin = _plugin(lying)
    lying.show(OLD)
    run = asyncio.create_task(plugin.run())
    await asyncio.sleep(300)
    lying.show(NEW)
    await asyncio.sleep(0.5)
    kubelet.listens = True
    async with asyncio.timeout(LATEST_SECONDS):
        await kubelet.registered.wait()
    await plugin.stop()
    await run


@pytest.mark.looptime
@pytest.mark.usefixtures("at_once")
async def test_a_socket_that_a_dead_kubelet_left_is_not_hammered(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks come milliseconds apart at first, then as far apart as is configured. The reason is
    recorded, and again after a while.
    """
    lying, kubelet, journal = Directory(directory), Answers(_refused), Journal()
    monkeypatch.setattr(server, "register", kubelet.register)
    plugin = _plugin(lying, journal)
    lying.show(OLD)
    run = asyncio.create_task(plugin.run())
    await asyncio.sleep(3600)
    pauses = [
        later - earlier
        for earlier, later in zip(kubelet.asked_at, kubelet.asked_at[1:], strict=False)
    ]
    assert pauses[0] <= 0.02
    assert pauses[-1] == pytest.approx(30)
    assert all(later >= earlier - 0.001 for earlier, later in itertools.pairwise(pauses))
    assert len(kubelet.asked_at) < 180
    lines = [
        entry.facts["reason"]
        for entry in journal.entries
        if entry.event == "plugin.registering_again"
    ]
    assert 5 <= len(lines) <= 8
    assert set(lines) == {str(_refused())}
    assert plugin.status.last_error == str(_refused())
    assert plugin.status.registration_failures == len(kubelet.asked_at)
    assert [name for name in os.listdir(directory) if name.endswith(".sock")] == [
        plugin.status.endpoint
    ]
    await plugin.stop()
    await run


@pytest.mark.looptime
@pytest.mark.usefixtures("at_once")
async def test_the_same_reason_of_another_kubelet_is_recorded_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of the log of a second kubelet restart must not have to look for the first one's."""
    lying, kubelet, journal = Directory(directory), Answers(_refused), Journal()
    monkeypatch.setattr(server, "register", kubelet.register)
    plugin = _plugin(lying, journal)
    run = asyncio.create_task(plugin.run())
    for socket_ in (OLD, NEW):
        lying.show(socket_)
        await asyncio.sleep(5)
    assert (
        len([entry for entry in journal.entries if entry.event == "plugin.registering_again"]) == 2
    )
    await plugin.stop()
    await run


async def test_a_kubelet_that_makes_its_socket_and_listens_later(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real sockets: bound, not listening, then a kubelet; every plugin is there within moments
    of that, and on one socket each.
    """
    kubelet = SimulatedKubelet(directory)
    (directory / "device-plugins").mkdir()
    path = directory / "device-plugins" / sockets.KUBELET_SOCKET
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound.bind(str(path))
    async with Supervisor(backoff_min_seconds=0.05, backoff_max_seconds=1.0) as supervisor:
        node = Node(directory, supervisor, monkeypatch)
        node.watch_directory()
        plugin = node.offer(shared_resource(), FakeBackend(shared_resource()))
        await eventually(lambda: plugin.status.registration_failures > 5)
        bound.listen()
        accepted = asyncio.Event()
        asyncio.get_running_loop().add_reader(bound, accepted.set)
        listened_at = asyncio.get_running_loop().time()
        await asyncio.wait_for(accepted.wait(), PATIENCE_SECONDS)
        # a busy machine may take a second for nothing
        assert asyncio.get_running_loop().time() - listened_at < LATEST_SECONDS + 1
        asyncio.get_running_loop().remove_reader(bound)
        bound.close()
        await kubelet.start()  # as a restart does: everything is wiped, and there is another socket
        await kubelet.until(lambda: plugin.status.ready)
        await plugin.stop()
        await kubelet.stop()
