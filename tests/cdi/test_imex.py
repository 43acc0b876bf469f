"""IMEX channels of a node."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from vgpu_agent.cdi import imex, rules
from vgpu_agent.cdi.imex import Channels, channel_spec, find_channels
from vgpu_agent.cdi.roots import Roots, find_roots

CHANNEL = "dev/nvidia-caps-imex-channels/channel0"


def _channel(root: Path) -> None:
    path = root / CHANNEL
    path.parent.mkdir(parents=True)
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))


def test_no_channel_is_looked_for_where_none_is_wanted() -> None:
    """The default."""
    assert find_channels((), Roots()) == Channels()


def test_a_channel_is_found_below_the_device_root(tmp_path: Path) -> None:
    """nvidia §9: the agent looks in its own view, and containers get the node's path."""
    _channel(tmp_path)
    found = find_channels((0,), Roots(dev=str(tmp_path), dev_on_node="/run/nvidia/driver"))
    assert found == Channels((0,), "/run/nvidia/driver")


def test_a_channel_may_lie_below_the_usual_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver in a container whose channels the node itself has:
    then the path on the node is the usual one, too.
    """
    _channel(tmp_path)
    monkeypatch.setattr(imex, "_is_character_device", lambda path: path == f"/{CHANNEL}")
    assert find_channels(
        (0,), Roots(dev="/driver-root", dev_on_node="/run/nvidia/driver")
    ) == Channels((0,), "/")


def test_a_missing_channel_is_named_with_the_places(tmp_path: Path) -> None:
    """A file that is no device is no channel either."""
    path = tmp_path / CHANNEL
    path.parent.mkdir(parents=True)
    path.touch()
    found = find_channels((0,), Roots(dev=str(tmp_path)))
    assert found.ids == ()
    assert f"/{CHANNEL} is no character device below {tmp_path} and /" in found.trouble
    assert "plugin.imexChannelIds" in found.trouble


def test_the_spec_of_a_channel_is_what_a_runtime_takes() -> None:
    """The device ``0``; without a second path where it is the same on the node (nvidia §8)."""
    spec = channel_spec("vendor.com/imex-channel", (0,), "/")
    assert rules.problems(spec) == []
    assert spec.names == ("vendor.com/imex-channel=0",)
    assert not spec.devices[0].container_edits.device_nodes[0].host_path


def test_roots_are_found_by_what_is_mounted(tmp_path: Path) -> None:
    """nvidia §9: below the container's driver root if that is there,
    and its ``dev`` if it has one.
    """
    assert (
        find_roots(driver_root="/", dev_root="", container_driver_root=str(tmp_path / "none"))
        == Roots()
    )
    seen = str(tmp_path)
    driver = {"driver_root": "/run/nvidia/driver", "container_driver_root": seen}
    assert find_roots(dev_root="", **driver) == Roots(
        seen, "/run/nvidia/driver", "/", "/run/nvidia/driver"
    )
    (tmp_path / "dev").mkdir()
    assert find_roots(dev_root="/", **driver) == Roots(seen, "/run/nvidia/driver", seen, "/")
