"""Answers of the control binary, in the forms that its versions have."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS
from vgpu_agent.errors import MpsDaemonGoneError, MpsError
from vgpu_agent.isolation.mps import DaemonPlan, DeviceLimit
from vgpu_agent.mps.control import Control
from vgpu_agent.mps.host_tools import HostTool

PLAN = DaemonPlan(
    "nvidia.com/gpu",
    "/mps/nvidia.com/gpu",
    "/mps/nvidia.com/gpu/pipe",
    (DeviceLimit("GPU-1", 0, 10134),),
    25,
)


async def _control(
    tmp_path: Path, threads: str, memory: str = "10134M", *, status: int = 0
) -> Control:
    path = tmp_path / "control"
    script = f"""#!/bin/sh
read command
case $command in
  *thread*) echo '{threads}' ;;
  *) echo '{memory}' ;;
esac
exit {status}
"""
    await asyncio.to_thread(path.write_text, script)
    await asyncio.to_thread(path.chmod, 0o755)
    return Control(
        PLAN,
        HostTool(str(path), timeout_seconds=PATIENCE_SECONDS),
        timeout_seconds=PATIENCE_SECONDS,
    )


@pytest.mark.parametrize("threads", ["25", "25.0"])
@pytest.mark.parametrize(
    "memory", ["10134M", "9G", "10134 MiB", "Device 0 default pinned memory limit: 9 GiB"]
)
async def test_every_form_of_the_right_limits_is_no_difference(
    tmp_path: Path, threads: str, memory: str
) -> None:
    """With and without a fraction, in MiB or in whole GiB rounded down, bare or in a sentence."""
    assert await (await _control(tmp_path, threads, memory)).difference() == ""


@pytest.mark.parametrize("memory", ["10133M", "10G", "0M"])
async def test_another_memory_limit_is_told(tmp_path: Path, memory: str) -> None:
    """The sentence has the daemon's limit and the desired one."""
    assert (
        await (await _control(tmp_path, "25.0", memory)).difference()
        == f"{memory} on GPU 0 instead of 10134M"
    )


@pytest.mark.parametrize("threads", ["", "nan", "101", "-1", "lots"])
async def test_what_is_no_percentage_is_an_error(tmp_path: Path, threads: str) -> None:
    """An empty answer fails as well: the daemon has reported no limit."""
    with pytest.raises(MpsError, match="expected a percentage"):
        await (await _control(tmp_path, threads)).difference()


@pytest.mark.parametrize("status", [0, 1])
async def test_no_daemon_is_understood_whatever_the_exit_status(
    tmp_path: Path, status: int
) -> None:
    """Some versions say so with success."""
    with pytest.raises(
        MpsDaemonGoneError, match=r"there is no MPS control daemon at /mps/nvidia\.com/gpu/pipe"
    ):
        await (
            await _control(tmp_path, "Cannot find MPS control daemon process", status=status)
        ).difference()
