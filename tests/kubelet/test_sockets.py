"""Socket files in the kubelet's directory: names that are never used twice, the kubelet's age,
and the rubbish of an earlier life.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from vgpu_agent.grpc.sockets import bind
from vgpu_agent.kubelet import sockets


def test_names_are_never_used_twice() -> None:
    """Two instances of one resource get sockets of their own (kubelet V5),
    with the resource in the name.
    """
    first, second = (
        sockets.new_socket_name("nvidia.com/gpu.shared"),
        sockets.new_socket_name("nvidia.com/gpu.shared"),
    )

    assert first != second
    assert first.startswith("vgpu-agent-gpu.shared-")


def test_a_long_resource_name_still_makes_a_short_path() -> None:
    """The default directory leaves room for the longest resource name that Kubernetes allows."""
    name = sockets.new_socket_name("a" * 253 + "/" + "b" * 63)

    assert len(f"/var/lib/kubelet/device-plugins/{name}") < 107


@pytest.mark.parametrize(("created_seconds_ago", "age_seconds"), [(0, 0), (60, 60), (-3600, 0)])
def test_the_age_of_a_socket_is_that_of_its_file(
    directory: Path, created_seconds_ago: float, age_seconds: float
) -> None:
    """It tells when the kubelet started; a clock that was set back must not make that a time
    to come.
    """
    path = directory / sockets.KUBELET_SOCKET
    assert sockets.age_seconds(path) == 0
    with contextlib.closing(bind(path, "--kubelet-dir")):
        os.utime(path, (time.time() - created_seconds_ago,) * 2)
        assert sockets.age_seconds(path) == pytest.approx(age_seconds, abs=5)


def test_leftovers_of_a_killed_agent_are_removed(directory: Path) -> None:
    """Sockets of our naming scheme without a listener go.
    Those of a living agent, of the kubelet and of other plugins stay.
    """
    dead, living, foreign = (
        "vgpu-agent-gpu-00aa11-1.sock",
        "vgpu-agent-gpu-00aa22-1.sock",
        "nvidia-gpu.sock",
    )
    for name in (dead, foreign, "kubelet.sock"):
        bind(directory / name, "--kubelet-dir").close()

    with bind(directory / living, "--kubelet-dir") as listener:
        listener.listen()
        removed = sockets.remove_stale_sockets(directory)

    assert removed == [dead]
    assert sorted(path.name for path in directory.iterdir()) == [
        "kubelet.sock",
        "nvidia-gpu.sock",
        living,
    ]


def test_a_missing_directory_has_no_leftovers(directory: Path) -> None:
    """The agent may start before the directory is there."""
    assert sockets.remove_stale_sockets(directory / "none") == []
