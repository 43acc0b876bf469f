"""Attacks in the kubelet's name: what lies where its checkpoint should be,
and servers in place of its pod-resources API.

Only root on the node, or a kubelet gone mad, can write there. Its lies cannot be prevented, but the
agent must go on.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.component.conftest import Stage
from vgpu_agent.errors import CheckpointError, KubeletError
from vgpu_agent.kubelet.checkpoint import read_checkpoint
from vgpu_agent.kubelet.pod_resources import PodResources

_MIB = 1024 * 1024
_PATIENCE_SECONDS = 10

# Reads a checkpoint in a process of its own, which may take 2 GiB of addresses; prints what came of
# it and the most memory it ever had.
_READER = """
import asyncio, resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from vgpu_agent.errors import CheckpointError
from vgpu_agent.kubelet.checkpoint import read_checkpoint
try:
    print(len(asyncio.run(read_checkpoint(Path(sys.argv[1])))))
except CheckpointError as err:
    print(err)
# a parent's does not count
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


async def _read_elsewhere(path: Path) -> tuple[str, float]:
    """The outcome and the peak of memory in MiB."""
    command = [sys.executable, "-c", _READER, str(path)]
    done = await asyncio.to_thread(
        subprocess.run, command, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    outcome, peak = done.stdout.rsplit("\n", 2)[:2]
    return outcome, int(peak) / 1024


async def test_a_fifo_in_place_of_the_checkpoint_cannot_hang_a_reader(tmp_path: Path) -> None:
    """Opening one waits for a writer, and the thread that waits is one of few."""
    path = tmp_path / "kubelet_internal_checkpoint"
    os.mkfifo(path)
    async with asyncio.timeout(_PATIENCE_SECONDS):
        with pytest.raises(CheckpointError, match="is not a regular file"):
            await read_checkpoint(path)


@pytest.mark.component
async def test_a_checkpoint_of_500_mb_cannot_use_up_the_memory(tmp_path: Path) -> None:
    """The agent has 256 MiB for everything.
    The file is reported as too large, after a part of it.
    """
    path = tmp_path / "kubelet_internal_checkpoint"
    with path.open("wb") as file:
        file.write(b'{"Data":{"PodDeviceEntries":[')
        file.truncate(500 * _MIB)
    outcome, peak_mib = await _read_elsewhere(path)
    assert "that would have to be read" in outcome
    assert peak_mib < 110


@pytest.mark.component
async def test_an_endless_device_in_place_of_the_checkpoint_is_not_read(tmp_path: Path) -> None:
    """A link to /dev/zero is read for ever."""
    path = tmp_path / "kubelet_internal_checkpoint"
    path.symlink_to("/dev/zero")
    outcome, peak_mib = await _read_elsewhere(path)
    assert "is not a regular file" in outcome
    assert peak_mib < 80


@pytest.mark.component
@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ('{"PodUID":"","ContainerName":"","ResourceName":"","DeviceIDs":null}', "entries"),
        (
            '{"PodUID":"","ContainerName":"","ResourceName":"","DeviceIDs":['
            + '"a",' * 2_000_000
            + '"a"]}',
            "ids",
        ),
    ],
    ids=["tiny entries", "tiny ids"],
)
async def test_a_checkpoint_of_tiny_things_cannot_swell_in_memory(
    tmp_path: Path, entry: str, told: str
) -> None:
    """An object takes ten times the room of the few characters that call for it."""
    path = tmp_path / "kubelet_internal_checkpoint"
    count = max(1, 20 * _MIB // len(entry))
    path.write_text(
        '{"Data":{"PodDeviceEntries":['
        + ",".join([entry] * count)
        + '],"RegisteredDevices":{}},"Checksum":1}'
    )
    outcome, peak_mib = await _read_elsewhere(path)
    assert told in outcome
    assert peak_mib < 150


@pytest.mark.parametrize(
    "checksum",
    ["1" * 1_000_000, "[" * 1_000_000, "-1e" + "9" * 100_000],
    ids=["digits", "nesting", "exponent"],
)
async def test_odd_json_in_the_checkpoint_ends_in_one_clear_error_or_is_passed_over(
    tmp_path: Path, checksum: str
) -> None:
    """In a place that is not ours, and in the place of our ids.
    Neither computes for seconds nor ends the thread's stack.
    """
    path = tmp_path / "kubelet_internal_checkpoint"
    entry = '{"PodUID":"u","ContainerName":"c","ResourceName":"r","DeviceIDs":%s}'
    for ids, last in (('["a"]', checksum), (checksum, "1")):
        path.write_text(
            '{"Data":{"PodDeviceEntries":['
            + entry % ids
            + '],"RegisteredDevices":{}},"Checksum":'
            + last
            + "}"
        )
        async with asyncio.timeout(_PATIENCE_SECONDS):
            try:
                assert [one.ids for one in await read_checkpoint(path)] == [("a",)]
            except CheckpointError as err:
                assert len(str(err)) < 1000  # noqa: PT017 - either way is right


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
async def test_another_users_checkpoint_is_not_believed(tmp_path: Path) -> None:
    """The kubelet is root. Another user's writes there decide nothing about GPUs."""
    path = tmp_path / "kubelet_internal_checkpoint"
    path.write_text(
        json.dumps({"Data": {"PodDeviceEntries": [], "RegisteredDevices": {}}, "Checksum": 1})
    )
    os.chown(path, 1000, 1000)
    with pytest.raises(CheckpointError, match="belongs to user 1000"):
        await read_checkpoint(path)


@pytest.mark.component
async def test_a_mad_checkpoint_cannot_keep_pods_from_starting(stage: Stage) -> None:
    """Ids that name the GPU need no checkpoint for an answer,
    and the trouble is one line in the log.
    """
    agent = await stage.ready_agent()
    path = stage.folder / "kubelet" / "device-plugins" / "kubelet_internal_checkpoint"
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    answer = await agent.until(
        "/debug/events?event=kubelet.records_incomplete", lambda answer: answer["events"]
    )
    assert "checkpoint" in str(answer["events"][0])
    assert stage.ids(await stage.admit("meanwhile"))
    assert await agent.get_text("/livez") == (200, "alive\n")
    again = await agent.get("/debug/events?event=kubelet.records_incomplete")
    assert len(again["events"]) == len(answer["events"]) == 1


class _PodResources(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in its stubs only
    """A pod-resources API whose answer is as large as it likes."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def service(self, _: grpc.HandlerCallDetails) -> Any:
        async def answer(request: bytes, _: object) -> bytes:
            del request
            return self._answer

        return grpc.unary_unary_rpc_method_handler(answer)


async def test_an_answer_of_100_mib_from_pod_resources_is_broken_off(folder: Path) -> None:
    """The error names the limit of 32 MiB, and no part of the answer is decoded."""
    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    server.add_generic_rpc_handlers((_PodResources(bytes(100 * _MIB)),))
    path = folder / "kubelet.sock"
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    client = PodResources(path, timeout_seconds=30)
    try:
        with pytest.raises(KubeletError, match="more than 32 MiB"):
            await client.list()
    finally:
        client.close()
        await server.stop(None)
