"""Attacks on the registry of processes, the one socket of the agent that containers can reach: a
tenant wants another one's list, a list of its own making, or that others are not served.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from grpclib.exceptions import GRPCError

from tests.grpc.conftest import directory
from tests.patience import PATIENCE_SECONDS, eventually
from tests.runtime.contained import Contained, Kubepods, kubepods
from tests.runtime.registered import Stage, encoded
from vgpu_agent.runtime import process_registry, registry_acceptor
from vgpu_agent.runtime.registry_acceptor import BURST, PER_SECOND, RateLimiter

__all__ = ["directory"]

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.fixture
def pods() -> Iterator[Kubepods]:
    """Cgroups of pods."""
    with kubepods() as made:
        yield made


@pytest.fixture
async def stage(directory: Path) -> AsyncIterator[Stage]:
    """A registry at work."""
    made = Stage(directory)
    async with made.running():
        yield made


async def _refused(call: object) -> tuple[str, str]:
    with pytest.raises(GRPCError) as refusal:
        await call  # type: ignore[misc]  # one of several kinds of calls
    return refusal.value.status.name, refusal.value.message or ""


async def test_no_process_registers_as_another_pod(stage: Stage, pods: Kubepods) -> None:
    """It knows the other's UID and names: they are no secret."""
    victim, attacker = pods.container(), pods.container()
    list_of_victim, list_of_attacker = stage.add(victim), stage.add(attacker)
    victim.start()
    process = attacker.start()
    status, text = await _refused(stage.register(process, victim))
    assert status == "PERMISSION_DENIED"
    assert attacker.member.pod_uid in text
    assert not list_of_victim.exists()
    assert not list_of_attacker.exists()


async def test_no_container_registers_as_another_of_its_pod(stage: Stage, pods: Kubepods) -> None:
    """Two containers of a pod have different limits."""
    uid = pods.container().member.pod_uid
    main, side = pods.container(uid, "main"), pods.container(uid, "side")
    lists = stage.add(main), stage.add(side)
    main.start()
    status, text = await _refused(stage.register(side.start(), main))
    assert status == "PERMISSION_DENIED"
    assert "the caller is container 'side' and asks for 'main'" in text
    assert not any(one.exists() for one in lists)


async def test_the_token_of_another_pod_opens_nothing(stage: Stage, pods: Kubepods) -> None:
    """A register_uuid that belongs to somebody else, with and without his names."""
    victim, attacker = pods.container(), pods.container()
    list_of_victim = stage.add(victim)
    stage.add(attacker)
    process = attacker.start()
    token = "7a1d9b52-1111-4222-8333-444455556666"
    for message in (
        encoded(victim.member.pod_uid, victim.name, token),
        encoded(token=token),
        encoded(victim.member.pod_uid, "", token),
    ):
        status, _ = await _refused(stage.call(process, message))
        assert status in {"PERMISSION_DENIED", "INVALID_ARGUMENT"}
    assert not list_of_victim.exists()
    own = encoded(attacker.member.pod_uid, attacker.name, token)
    assert await stage.call(process, own) == b""
    assert not list_of_victim.exists()


async def test_a_cgroup_named_like_another_container_changes_nothing(
    stage: Stage, pods: Kubepods
) -> None:
    """Root in a container with a writable cgroup file system makes one, and moves into it."""
    victim, attacker = pods.container(), pods.container()
    list_of_victim, list_of_attacker = stage.add(victim), stage.add(attacker)
    forged = f"kubepods/pod{victim.member.pod_uid}/{victim.member.container_id}"
    process = attacker.start(forged)
    status, _ = await _refused(stage.register(process, victim))
    assert status == "PERMISSION_DENIED"
    assert not list_of_victim.exists()
    own = victim.start()
    assert await stage.register(own, victim) == b""
    assert list_of_victim.read_text() == f"{own.pid}\n"
    assert await stage.register(process, attacker) == b""
    assert list_of_attacker.read_text() == f"{process.pid}\n"


async def test_a_process_that_moves_on_between_connection_and_call_is_refused(
    stage: Stage, pods: Kubepods
) -> None:
    """It counts where it is when the list is written."""
    before, after = pods.container(), pods.container()
    lists = stage.add(before, known=False), stage.add(after)
    process, keeps = before.start(), before.start()
    call = asyncio.ensure_future(stage.register(process, before))
    await eventually(lambda: [one.calls for one in stage.registry._connections] == [1])
    process.move(after.directory)
    stage.add(before)
    status, _ = await _refused(call)
    assert status == "PERMISSION_DENIED"
    assert not any(one.exists() for one in lists)
    assert await stage.register(keeps, before) == b""
    assert lists[0].read_text() == f"{keeps.pid}\n"


async def test_a_process_that_ends_before_it_is_looked_at_registers_nobody(
    stage: Stage, pods: Kubepods
) -> None:
    """Its number may be another's by the time of the call; the connection lives on elsewhere."""
    container = pods.container()
    path = stage.add(container, known=False)
    process = container.start()
    call = asyncio.ensure_future(stage.register(process, container))
    await eventually(lambda: [one.calls for one in stage.registry._connections] == [1])
    process.end()
    stage.add(container)
    assert (await _refused(call))[0] == "PERMISSION_DENIED"
    assert not path.exists()


async def test_a_process_of_the_node_is_no_container(stage: Stage, pods: Kubepods) -> None:
    """A daemon of the node, or a pod with hostPID that left its cgroup."""
    container = pods.container()
    stage.add(container)
    outside = Contained(container.directory.parents[2])
    try:
        status, text = await _refused(stage.register(outside, container))
    finally:
        outside.end()
    assert status == "PERMISSION_DENIED"
    assert "does not run in a pod's container" in text


@pytest.mark.parametrize(
    ("message", "status", "text"),
    [
        (b"", "INVALID_ARGUMENT", "not what Kubernetes allows"),
        (b"\x0a", "INVALID_ARGUMENT", "cannot be read"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "INVALID_ARGUMENT", "cannot be read"),
        (b"\x08\x07", "INVALID_ARGUMENT", "cannot be read"),
        (encoded("../../etc", "main"), "INVALID_ARGUMENT", "not what Kubernetes allows"),
        (encoded("a_b", "main"), "INVALID_ARGUMENT", "not what Kubernetes allows"),
        (encoded("uid", "../main"), "INVALID_ARGUMENT", "not what Kubernetes allows"),
        (encoded("uid", "main", "x" * 200), "INVALID_ARGUMENT", "register_uuid has 200 characters"),
        (encoded("u" * 16_000, "m" * 500), "RESOURCE_EXHAUSTED", "16384 are the most"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isupper() else "",
)
async def test_nonsense_is_refused_with_one_sentence(
    stage: Stage, pods: Kubepods, message: bytes, status: str, text: str
) -> None:
    """The next honest call is answered."""
    container = pods.container()
    stage.add(container)
    process = container.start()
    found, said = await _refused(stage.call(process, message))
    assert found == status
    assert text in said
    assert len(said) < 1024
    assert await stage.register(process, container) == b""


async def test_a_huge_message_is_not_collected(stage: Stage, pods: Kubepods) -> None:
    """The length comes first; the connection ends long before all of it has come."""
    container = pods.container()
    stage.add(container)
    process = container.start()
    with pytest.raises(Exception):  # noqa: B017 - whichever way the client notices it
        await stage.call(process, bytes(16 * 1024 * 1024))
    assert await stage.register(process, container) == b""


async def test_a_container_that_locks_its_list_delays_nobody_else(
    stage: Stage, pods: Kubepods, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may lock what it can only read, and keep the lock for ever."""
    monkeypatch.setattr(process_registry, "_LOCK_SECONDS", 0.2)
    attacker, victim = pods.container(), pods.container()
    locked, path = stage.add(attacker), stage.add(victim)
    process, honest = attacker.start(), victim.start()
    await stage.register(process, attacker)
    attacker.start()
    with locked.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        stuck = asyncio.ensure_future(stage.register(process, attacker))
        began = time.monotonic()
        await stage.register(honest, victim)
        assert time.monotonic() - began < PATIENCE_SECONDS / 4
        assert path.read_text() == f"{honest.pid}\n"
        status, text = await _refused(stuck)
    assert status == "UNAVAILABLE"
    assert "has locked it" in text


async def test_silent_connections_of_one_container_keep_nobody_else_out(
    stage: Stage, pods: Kubepods
) -> None:
    """It opens as many as it can and asks nothing; another container registers meanwhile."""
    attacker, victim = pods.container(), pods.container()
    stage.add(attacker)
    path = stage.add(victim)
    process, honest = attacker.start(), victim.start()
    opened: list[socket.socket] = []
    try:
        for _ in range(300):
            opened.append(await asyncio.to_thread(process.connect, stage.path))
            with contextlib.suppress(OSError):
                opened[-1].send(_PREFACE)
        began = time.monotonic()
        await stage.register(honest, victim)
        assert time.monotonic() - began < PATIENCE_SECONDS / 4
        assert path.exists()
        assert len(stage.registry._connections) <= process_registry._MAX_OF_A_CONTAINER + 1
    finally:
        for one in opened:
            one.close()
    await eventually(lambda: not stage.registry._connections)


async def test_connections_of_many_containers_make_room_for_one_more(
    stage: Stage, pods: Kubepods, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest of the container that has the most is closed."""
    monkeypatch.setattr(process_registry, "_MAX_CONNECTIONS", 6)
    greedy, modest = pods.container(), pods.container()
    stage.add(greedy)
    stage.add(modest)
    first, second = greedy.start(), modest.start()
    opened = [await asyncio.to_thread(first.connect, stage.path) for _ in range(6)]
    await eventually(lambda: len(stage.registry._connections) == 6)
    await stage.register(second, modest)
    assert len(stage.registry._connections) <= 6
    for one in opened:
        one.close()


async def test_silent_connections_are_closed(
    directory: Path, pods: Kubepods, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor is not held for nothing."""
    monkeypatch.setattr(process_registry, "_SILENT_SECONDS", 0.2)
    stage = Stage(directory)
    container = pods.container()
    async with stage.running():
        connection = await asyncio.to_thread(container.start().connect, stage.path)
        with connection:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while await asyncio.get_running_loop().sock_recv(connection, 1024):
                    pass
        await eventually(lambda: not stage.registry._connections)


async def test_a_flood_of_calls_of_one_container_is_bounded_and_delays_no_other(
    stage: Stage, pods: Kubepods, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call costs the agent a look at cgroups, and the event loop is the kubelet's, too."""
    monkeypatch.setattr(registry_acceptor, "BURST", 8.0)
    monkeypatch.setattr(registry_acceptor, "PER_SECOND", 4.0)
    attacker, victim = pods.container(), pods.container()
    stage.add(attacker)
    path = stage.add(victim)
    process, honest = attacker.start(), victim.start()
    flooding = True
    answered = 0

    async def flood() -> None:
        nonlocal answered
        while flooding:
            with contextlib.suppress(Exception):
                await stage.register(process, attacker)
                answered += 1

    began = time.monotonic()
    floods = [asyncio.ensure_future(flood()) for _ in range(8)]
    await asyncio.sleep(0.5)
    asked = time.monotonic()
    await stage.register(honest, victim)
    assert time.monotonic() - asked < PATIENCE_SECONDS / 4
    assert path.exists()
    flooding = False
    await asyncio.gather(*floods)
    assert answered <= 8 + 4 * (time.monotonic() - began) + 1


def test_a_rate_limit_is_each_containers_own_and_comes_back() -> None:
    """Numbers of the contract's kind: a burst of processes at a start is let in."""
    now = [100.0]
    limiter = RateLimiter(lambda: now[0])
    assert [limiter.take(None) for _ in range(int(BURST) + 1)].count(True) == BURST
    now[0] += 1.0
    assert [limiter.take(None) for _ in range(200)].count(True) == PER_SECOND


async def test_more_waiting_calls_of_a_container_than_it_may_have_are_refused(
    stage: Stage, pods: Kubepods, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds memory until the pod's status comes, which it may know never will."""
    monkeypatch.setattr(process_registry, "_MAX_OF_A_CONTAINER", 3)
    container = pods.container()
    stage.add(container, known=False)
    process = container.start()
    calls = [asyncio.ensure_future(stage.register(process, container)) for _ in range(3)]
    await eventually(lambda: sum(one.calls for one in stage.registry._connections) == 3)
    with pytest.raises(Exception):  # noqa: B017 - closed before it is answered
        await stage.register(process, container)
    stage.add(container)
    assert await asyncio.gather(*calls) == [b""] * 3


_FLOOD = """
import socket, sys
print(flush=True)
while True:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(sys.argv[1])
        except OSError:
            pass
"""


def _started(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.PIPE)


async def test_a_flood_of_connections_leaves_the_loop_and_others_their_time(
    stage: Stage, pods: Kubepods
) -> None:
    """The loop also answers the kubelet. Most of the flood is closed in the thread that accepts,
    which takes no more than so many a second.
    """
    attacker, victim = pods.container(), pods.container()
    stage.add(attacker)
    path = stage.add(victim)
    honest = victim.start()
    enters = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
    program = [sys.executable, "-S", "-E", "-c", _FLOOD, str(stage.path)]
    command = ["/bin/sh", "-c", enters, str(attacker.directory), *program]
    floods = [_started(command) for _ in range(4)]
    try:
        for flood in floods:
            assert flood.stdout is not None
            assert await asyncio.to_thread(flood.stdout.readline) == b"\n"
        lags: list[float] = []
        for _ in range(100):
            began = time.monotonic()
            await asyncio.sleep(0.005)
            lags.append(time.monotonic() - began - 0.005)
        assert statistics.median(lags) < 0.05
        began = time.monotonic()
        await stage.register(honest, victim)
        assert time.monotonic() - began < PATIENCE_SECONDS / 4
        assert path.read_text() == f"{honest.pid}\n"
    finally:
        for flood in floods:
            flood.kill()
            flood.wait()
            if flood.stdout is not None:
                flood.stdout.close()
