"""A vGPU on a node without an NVIDIA runtime:
the spec of the grant itself brings the device nodes.
"""

from __future__ import annotations

import contextlib

from tests.real_node.nvidia import CONTROL_NODES, gpu_container, printed
from tests.real_node.rig import Rig
from tests.real_node.volcano import VolcanoScheduler, vgpu, volcano_pod
from tests.real_node.volcano_node import U0, U1, VGPU_CONFIG, start_vgpu, volcano_agent


def test_a_late_bound_grant_brings_its_own_device(volcano_rig: Rig) -> None:
    """cdi.inline: what `nvidia.com/gpu` would get by a CDI name is in the grant's spec,
    for that container's GPU alone.
    """
    with contextlib.closing(
        volcano_agent(volcano_rig, VGPU_CONFIG + "cdi: {inline: true}\n")
    ) as agent:
        start_vgpu(agent)
        with VolcanoScheduler(volcano_rig):
            volcano_rig.create_pod(
                volcano_pod("inlined", containers=[gpu_container("main", vgpu(1, 3000))])
            )
            found = printed(volcano_rig, "inlined", timeout=30)
        (held,) = agent.get("/debug/ledger")["grants"]
        gpu = [U0, U1].index(held["shares"][0]["device"])
        assert found.nodes == sorted([*CONTROL_NODES, f"/dev/nvidia{gpu}"])
        assert found.environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
