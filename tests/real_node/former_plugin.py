"""The plugin that a node had before: NVIDIA's names, ids, socket and answers,
for tests in which the agent takes its place.

Run as a process by test_nvidia_swap: ``python -m tests.real_node.former_plugin KUBELET_DIR
OFFERS``; OFFERS as for `idle_plugin`, with what an id begins with (``GPU-…::``). It is killed,
never stopped, so its socket stays behind as that of a crashed plugin does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.real_node.idle_plugin import serve
from vgpu_agent.sim.protocol import deviceplugin_pb2 as messages

_INFIXES = ("::", "-replica-")  # NVIDIA's, iktos'


def _answer(ids: Sequence[str]) -> messages.ContainerAllocateResponse:
    """The devices of the ids, each once and in the order of the request (nvidia §7, `envvar`)."""
    devices = list(ids)
    for infix in _INFIXES:
        devices = [device.partition(infix)[0] for device in devices]
    return messages.ContainerAllocateResponse(
        envs={"NVIDIA_VISIBLE_DEVICES": ",".join(dict.fromkeys(devices))}
    )


if __name__ == "__main__":
    serve(*sys.argv[1:], answer=_answer, sockets="nvidia")
