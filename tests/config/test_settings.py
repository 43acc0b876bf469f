"""Derived values that other packages ask of the settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.settings import settings as settings_of
from vgpu_agent.config import schema
from vgpu_agent.config.settings import Gpu, Kubelet, split_address


def test_the_kubelets_sockets_and_records_lie_below_its_directory() -> None:
    """The kubelet's own layout. Only the root of it can be set."""
    kubelet = Kubelet(directory="/k")

    assert kubelet.device_plugin_directory == Path("/k/device-plugins")
    assert kubelet.kubelet_socket == Path("/k/device-plugins/kubelet.sock")
    assert kubelet.checkpoint_path == Path("/k/device-plugins/kubelet_internal_checkpoint")
    assert kubelet.pod_resources_socket == Path("/k/pod-resources/kubelet.sock")


@pytest.mark.parametrize(("dev_root", "root"), [("", "/run/nvidia/driver"), ("/host", "/host")])
def test_device_nodes_lie_in_the_driver_root_unless_said_otherwise(
    dev_root: str, root: str
) -> None:
    """nvidia §1: an empty dev root follows the driver root."""
    assert Gpu(driver_root="/run/nvidia/driver", dev_root=dev_root).device_node_root == Path(root)


def test_a_node_without_a_name_is_called_like_its_host() -> None:
    """In lower case, as kubelet does it."""
    assert settings_of().node_name_or_hostname == os.uname().nodename.lower()


def test_a_node_with_a_name_keeps_it() -> None:
    """The host's name does not matter then."""
    assert settings_of(node_name="gpu-7").node_name_or_hostname == "gpu-7"


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        (":9394", "", 9394),
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("[::1]:80", "::1", 80),
        ("localhost:65535", "localhost", 65535),
    ],
)
def test_an_address_splits_into_host_and_port(address: str, host: str, port: int) -> None:
    """An IPv6 address loses its brackets, as sockets want it."""
    assert split_address(address) == (host, port)


@pytest.mark.parametrize(
    ("path", "key"), schema.value_paths().items(), ids=list(schema.value_paths())
)
def test_every_key_is_described_and_accepts_its_own_default(path: str, key: schema.Key) -> None:
    """The documentation is written from here, so nothing may be without a sentence."""
    assert key.text.endswith((".", '"'))
    assert key.accept(key.default) == key.default


def test_seconds_and_bytes_are_said_in_the_name() -> None:
    """A number whose unit must be guessed is a mistake waiting."""
    # a count and a ratio have none
    units = ("Seconds", "Milliseconds", "Bytes", "Mib", "Count", "Factor", "Scaling", "vgpus")

    assert [
        path
        for path, key in schema.value_paths().items()
        if isinstance(key.default, float | int)
        and not isinstance(key.default, bool)
        and not path.endswith(units)
    ] == []
