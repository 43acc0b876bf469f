"""Commands of the package as processes beside simulated nodes."""

from __future__ import annotations

import gc
import socket

import pytest

from vgpu_agent.sim.agent_process import _Port


def test_a_port_is_for_one_process_also_while_that_is_restarted() -> None:
    """Tests run side by side, and an agent keeps its addresses over a restart."""
    port = _Port()
    for _ in range(2):
        with socket.create_server(("127.0.0.1", port.number)):
            pass
        with socket.socket() as other, pytest.raises(OSError, match="already in use"):
            other.bind(("127.0.0.1", port.number))


def test_a_port_is_free_again_without_its_owner() -> None:
    """A run of all tests starts a thousand agents."""
    port = _Port()
    number = port.number
    del port
    gc.collect()
    with socket.socket() as other:
        other.bind(("127.0.0.1", number))
