"""The registry of processes as the library's client uses it (vgpu-manager §9): real processes in
real cgroups call over a real socket.
"""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from grpclib.exceptions import GRPCError

from tests.grpc.conftest import directory
from tests.patience import PATIENCE_SECONDS, eventually, quickest_call
from tests.runtime.contained import Kubepods, kubepods
from tests.runtime.registered import Stage, encoded
from vgpu_agent.pods import container_directory
from vgpu_agent.runtime import process_registry
from vgpu_agent.runtime.cgroups import ContainerKey

pytestmark = pytest.mark.component  # it starts programs

__all__ = ["directory"]

_CLIENT = """
import os, sys
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
import grpc
channel = grpc.insecure_channel(f"unix:{sys.argv[1]}")
method = channel.unary_unary("/registry.VDeviceRegistry/RegisterContainerDevice")
print(method(bytes.fromhex(sys.argv[2]), timeout=12))
"""


@pytest.fixture
def pods() -> Iterator[Kubepods]:
    """Cgroups of pods."""
    with kubepods() as made:
        yield made


@pytest.fixture
async def stage(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    """A registry at work that looks often."""
    monkeypatch.setattr(process_registry, "REFRESH_SECONDS", 0.05)
    monkeypatch.setattr(process_registry, "_GUARD_SECONDS", 0.1)
    made = Stage(directory)
    async with made.running():
        yield made


async def test_a_container_that_registers_gets_the_list_of_all_its_processes(
    stage: Stage, pods: Kubepods
) -> None:
    """Also of those that never load the library, and in its own cgroups; and the answer is the
    empty message.
    """
    container, other = pods.container(), pods.container()
    path, others = stage.add(container), stage.add(other)
    processes = [container.start(), container.start("child")]
    other.start()
    assert await stage.register(processes[0], container) == b""
    expected = "".join(f"{pid}\n" for pid in sorted(each.pid for each in processes))
    assert path.read_text() == expected
    assert not others.exists()


async def test_the_client_that_the_library_executes_is_answered(
    stage: Stage, pods: Kubepods
) -> None:
    """Another implementation of gRPC, in a process of the container, with an address as its own
    dialler takes it.
    """
    container = pods.container()
    path = stage.add(container)
    message = encoded(container.member.pod_uid, container.name, "").hex()
    enters = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
    command = [sys.executable, "-c", _CLIENT, str(stage.path), message]
    done = await asyncio.to_thread(
        subprocess.run,
        ["/bin/sh", "-c", enters, str(container.directory), *command],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "b''\n"), done.stderr
    assert path.exists()


async def test_a_list_follows_the_processes_of_its_container(stage: Stage, pods: Kubepods) -> None:
    """vgpu-manager:D26: there it is written only when somebody registers. It never becomes empty
    (vgpu-manager:D21), because the library ends its process then.
    """
    container = pods.container()
    path = stage.add(container)
    first = container.start()
    await stage.register(first, container)
    second = container.start()
    await eventually(lambda: path.read_text().split() == sorted([str(first.pid), str(second.pid)],
                                                                key=int))  # fmt: skip
    second.end()
    await eventually(lambda: path.read_text() == f"{first.pid}\n")
    container.end()
    await eventually(lambda: not stage.registry.registered)
    assert path.read_text() == f"{first.pid}\n"


async def test_a_call_waits_until_the_kubelet_has_named_the_container(
    stage: Stage, pods: Kubepods
) -> None:
    """A process is quicker than the status of its pod, and quicker than the watch."""
    container = pods.container()
    process = container.start()
    call = asyncio.ensure_future(stage.register(process, container))
    await asyncio.wait([call], timeout=0.1)
    assert not call.done()
    path = stage.add(container, known=False)
    await asyncio.wait([call], timeout=0.1)
    assert not call.done()
    stage.add(container)
    assert await call == b""
    assert path.exists()


async def test_a_call_that_nobody_confirms_ends_in_time(
    stage: Stage, pods: Kubepods, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text says what is missing; the library's client may try again."""
    monkeypatch.setattr(process_registry, "WAIT_SECONDS", 0.1)
    container = pods.container()
    process = container.start()
    with pytest.raises(GRPCError, match="the API server has not shown this pod"):
        await stage.register(process, container)
    stage.add(container, known=False)
    with pytest.raises(GRPCError, match="does not name the caller's container id"):
        await stage.register(process, container)


async def test_a_restarted_agent_goes_on_with_the_lists(directory: Path, pods: Kubepods) -> None:
    """Nobody registers again because of it."""
    container, idle = pods.container(), pods.container()
    before = Stage(directory)
    path = before.add(container)
    process = container.start()
    async with before.running():
        await before.register(process, container)
    late = container.start()
    after = Stage(directory)
    after.add(container)
    after.add(idle)
    async with after.running():
        await eventually(lambda: str(late.pid) in path.read_text().split())
        assert set(after.registry.registered) == {(container.member.pod_uid, container.name)}


async def test_the_socket_is_made_whole_and_made_again(stage: Stage) -> None:
    """vgpu-manager §9: directory 0711, socket 0666, and another one when it is gone or replaced."""
    folder = stage.path.parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o711
    assert stat.S_IMODE(stage.path.stat().st_mode) == 0o666
    first = stage.path.stat().st_ino, stage.path.stat().st_mtime_ns
    stage.path.unlink()
    await eventually(lambda: stage.listening)
    assert (stage.path.stat().st_ino, stage.path.stat().st_mtime_ns) != first
    stage.path.unlink()
    stage.path.write_text("no socket")
    await eventually(lambda: stage.listening)
    assert os.listdir(folder) == ["socket.sock"]
    assert [entry.event for entry in stage.journal.entries] == ["registry.socket_replaced"] * 2


async def test_the_new_socket_serves(stage: Stage, pods: Kubepods) -> None:
    """A call over it is answered like one over the old."""
    container = pods.container()
    stage.add(container)
    process = container.start()
    await stage.register(process, container)
    stage.path.unlink()
    await eventually(lambda: stage.listening)
    assert await stage.register(process, container) == b""


async def test_nothing_is_looked_at_while_nobody_has_registered(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle node costs nothing (the loop waits)."""
    looked: list[object] = []
    monkeypatch.setattr(stage.registry, "_look", looked.append)
    await asyncio.sleep(0.3)
    assert looked == []


def test_a_look_at_a_hundred_lists_takes_milliseconds(tmp_path: Path) -> None:
    """It happens every second, in a thread of its own, and mostly finds nothing new."""
    members = [ContainerKey(str(uuid.uuid4()), uuid.uuid4().hex * 2) for _ in range(100)]
    for place, member in enumerate(members):
        directory = (
            tmp_path / "kubepods" / "burstable" / f"pod{member.pod_uid}" / member.container_id
        )
        directory.mkdir(parents=True)
        processes = "".join(f"{1000 * place + each}\n" for each in range(1, 21))
        (directory / "cgroup.procs").write_text(processes)
        (tmp_path / container_directory(member.pod_uid, "main") / "config").mkdir(parents=True)
    (tmp_path / "cgroup.procs").write_text("")
    registry = Stage(tmp_path, tmp_path).registry
    owners = {(one.pod_uid, "main"): process_registry._Registered(one) for one in members}
    assert set(registry._look(owners).values()) == {""}
    assert quickest_call(lambda: registry._look(owners), within_seconds=0.05) < 0.05
