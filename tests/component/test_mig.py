"""MIG with the agent's real process: slices as resources of their own,
and a geometry that is changed while the node works.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tests import constants
from tests.component.conftest import GPU, QUICK, SHARED, Stage
from tests.golden import U0, U1
from tests.patience import quickest
from tests.replacing import replace_text
from vgpu_agent.sim.kubelet.faults import AdmissionError
from vgpu_agent.sim.state import SimulatedNode

MIXED = "plugin: {migStrategy: mixed}\n"
# With the default intervals.
DEFAULTS = "version: v1\n" + MIXED
FIVE, TEN, TWENTY = "nvidia.com/mig-1g.5gb", "nvidia.com/mig-2g.10gb", "nvidia.com/mig-3g.20gb"
LIMIT_SECONDS = 2.0


async def _cut(stage: Stage, gpu: int, *profiles: str) -> float:
    """Cut the GPU anew, as `vgpu-agent sim mig` does; the time at which it was done."""
    await asyncio.to_thread(stage.node.set_mig, gpu, profiles)
    return time.monotonic()


async def test_slices_are_resources_beside_whole_gpus(stage: Stage) -> None:
    """nvidia G6 on the wire: GPU 0 whole, seven slices of GPU 1 by their profile.
    A pod gets the slice that kubelet chose.
    """
    await _cut(stage, 1, *["1g.5gb"] * 7)
    await stage.ready_agent(QUICK + MIXED)
    await stage.allocatable(1)
    await stage.allocatable(7, resource=FIVE)
    pod = await stage.admit("train", 1, FIVE)

    assert list(stage.kubelet.resource(GPU).healthy) == [U0]
    assert pod.answers["main"].envs["NVIDIA_VISIBLE_DEVICES"] in stage.node.mig_uuids(1)


async def test_a_change_of_geometry_reaches_kubelet_in_two_seconds(stage: Stage) -> None:
    """nvidia:D9: with the default intervals.
    The old name goes to 0, the new one comes, the whole GPU stays as it is.
    """
    await _cut(stage, 1, *["1g.5gb"] * 7)
    stage.constants = {constants.VERIFY: 1, constants.RESERVATION: 3}
    agent = await stage.ready_agent(DEFAULTS)

    async def changed() -> float:
        await _cut(stage, 1, *["1g.5gb"] * 7)
        await stage.allocatable(7, resource=FIVE)
        await stage.allocatable(0, resource=TEN)
        changed_at = await _cut(stage, 1, *["2g.10gb"] * 3)
        await stage.allocatable(3, resource=TEN)
        await stage.allocatable(0, resource=FIVE)
        return time.monotonic() - changed_at

    assert await quickest(changed, within_seconds=LIMIT_SECONDS) < LIMIT_SECONDS
    assert list(stage.kubelet.resource(GPU).healthy) == [U0]
    events = [
        event
        for event in (await agent.get("/debug/events"))["events"]
        if event["event"] == "gpu.mig_changed"
    ]
    assert {profile for event in events for profile in event["facts"]["removed"].values()} >= {
        "1g.5gb"
    }


async def test_mig_mode_switched_on_and_off_moves_the_gpu_between_resources(stage: Stage) -> None:
    """nvidia:D9: a whole GPU becomes slices and is whole again, without any restart."""
    await stage.ready_agent(QUICK + MIXED)
    await stage.allocatable(2)

    await _cut(stage, 1, "3g.20gb", "3g.20gb")
    await stage.allocatable(1)
    await stage.allocatable(2, resource=TWENTY)
    await _cut(stage, 1)
    await stage.allocatable(2)
    await stage.allocatable(0, resource=TWENTY)


async def test_a_pod_on_an_instance_that_is_cut_away_is_named(stage: Stage) -> None:
    """nvidia:D9: event with pod and instance, and a metric.
    The pod keeps its ids, and the new slices are not held up by it.
    """
    await _cut(stage, 1, *["1g.5gb"] * 7)
    agent = await stage.ready_agent(QUICK + MIXED)
    await stage.allocatable(7, resource=FIVE)
    pod = await stage.admit("train", 1, FIVE)
    (instance,) = stage.ids(pod, FIVE)
    await agent.until(
        "/debug/ledger",
        lambda answer: any(grant["state"] == "identified" for grant in answer["grants"]),
    )

    await _cut(stage, 1, "3g.20gb")
    event = await agent.until_logged("grant.device_missing")
    await stage.allocatable(1, resource=TWENTY)

    assert (event["pod"], event["device"], event["resource"]) == ("default/train", instance, FIVE)
    assert event["gpu"] == stage.node.uuids[1]
    assert await agent.metric(f'vgpu_agent_grants_on_missing_devices{{resource="{FIVE}"}}') == 1
    assert stage.ids(pod, FIVE) == [instance]
    await agent.terminate()
    # a new process learns of it from kubelet's records, although the resource is not offered any
    # more
    await agent.start()
    event = await agent.until_logged("grant.device_missing")
    assert (event["device"], event["gpu"]) == (instance, stage.node.uuids[1])
    await _cut(stage, 1)  # a process of the pod may still be at work on the GPU
    await stage.kubelet.until(
        lambda: list(stage.kubelet.resource(GPU).unhealthy) == [stage.node.uuids[1]]
    )
    await stage.kubelet.delete(pod)
    await agent.until("/debug/ledger", lambda answer: not answer["grants"])
    await stage.allocatable(2)


async def test_geometry_that_changes_under_load(stage: Stage) -> None:
    """nvidia:D9: pods of whole GPUs and of slices come and go while GPU 1 is cut anew.
    None of them gets what is not there.
    """
    layouts = [["1g.5gb"] * 7, ["2g.10gb"] * 3, ["3g.20gb", "2g.10gb", "1g.5gb"]]
    await _cut(stage, 1, *layouts[0])
    agent = await stage.ready_agent(QUICK + MIXED)
    await stage.allocatable(7, resource=FIVE)
    number, served, all_kinds = 0, set[str](), {GPU, FIVE, TEN, TWENTY}
    while number < 24 or (served != all_kinds and number < 48):
        await _cut(stage, 1, *layouts[number % 3])
        for resource in stage.kubelet.resources:
            try:
                pod = await stage.admit(f"pod-{number}-{resource.rpartition('/')[2]}", 1, resource)
            except AdmissionError:
                # kubelet has none, or the slice that it chose was cut away a moment ago
                continue
            served.add(resource)
            assert pod.answers["main"].envs["NVIDIA_VISIBLE_DEVICES"] in stage.ids(pod, resource)
            await stage.kubelet.delete(pod)
        # on a slow machine the next change may come before the last one is offered
        await asyncio.sleep(0.1 if number < 24 else 3)
        number += 1

    assert served == all_kinds
    await _cut(stage, 1, *layouts[2])
    await stage.allocatable(1, resource=TWENTY)
    await stage.allocatable(1, resource=FIVE)
    assert await agent.metric(f'vgpu_agent_gpu_healthy{{gpu="{U1}"}}') == 1
    assert [
        line["msg"]
        for line in agent.log_lines()
        if line["msg"] in {"gpu.lost", "gpu.unhealthy", "ledger.unsound"}
    ] == []


async def test_an_error_in_a_slice_is_that_slices(stage: Stage) -> None:
    """nvidia:D1 on the wire: both replicas of one slice become Unhealthy in one list, and come back
    after the quiet time (nvidia:D2).
    """
    await _cut(stage, 1, *["1g.5gb"] * 7)
    config = (
        QUICK
        + MIXED
        + "sharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.5gb, replicas: 2}]}}\n"
    )
    # long enough to see that it is ill
    await stage.ready_agent(config.replace("quietSeconds: 0.5", "quietSeconds: 600"))
    await stage.allocatable(14, resource=FIVE)
    ill = stage.node.mig_uuids(1)[3]

    await asyncio.to_thread(stage.node.xid, 1, 48, gpu_instance=10, compute_instance=0)
    await stage.allocatable(12, resource=FIVE)
    assert {f"{ill}::0", f"{ill}::1"}.isdisjoint(stage.kubelet.resource(FIVE).healthy)
    assert len(stage.kubelet.resource(FIVE).healthy) == 12
    replace_text(stage.config, config)
    await stage.allocatable(14, resource=FIVE)


async def test_health_survives_everything_but_the_agents_own_restart(stage: Stage) -> None:
    """nvidia:D11: kubelet comes back and the settings change, and what was Unhealthy still is.
    A new process reads anew.
    """
    never = QUICK.replace("quietSeconds: 0.5", "mode: never, quietSeconds: 0.5")
    agent = await stage.ready_agent(never)
    await asyncio.to_thread(stage.node.xid, 1, 79)
    await stage.allocatable(1)

    await stage.kubelet.restart()
    await stage.allocatable(1)
    replace_text(stage.config, never + SHARED)
    await agent.until_logged("config.applied")
    await stage.allocatable(4)
    assert {id_.partition("::")[0] for id_ in stage.kubelet.resource(GPU).healthy} == {U0}

    await agent.terminate()
    await agent.start()
    await stage.allocatable(8)


async def test_garbage_in_the_capability_file_costs_what_it_describes(stage: Stage) -> None:
    """One bad line is one Unhealthy slice. No file at all withholds the slices with a reason,
    and whole GPUs are offered.
    """
    minors = stage.node.directory / "proc" / "driver" / "nvidia-caps" / "mig-minors"
    await _cut(stage, 1, *["1g.5gb"] * 7)
    whole = minors.read_text()
    replace_text(minors, whole.replace("gpu1/gi8/access 210\n", "gpu1/gi8/access 21O\n"))
    agent = await stage.ready_agent(QUICK + MIXED)
    await stage.allocatable(6, resource=FIVE)
    devices = await agent.get("/debug/devices")
    said = [
        one["health_reason"]
        for one in devices["gpus"][1]["mig_instances"]
        if one["health"] == "Unhealthy"
    ]
    assert len(said) == 1
    assert "mig-minors line" in said[0]
    assert "'gpu1/gi8/access 21O'" in said[0]

    minors.unlink()
    await agent.until("/debug/resources", lambda answer: FIVE in answer["withheld"])
    _, readiness = await agent.get_text("/readyz")
    assert "the device nodes of no MIG instance are known: cannot read" in readiness
    await stage.allocatable(1)
    replace_text(minors, whole)
    await stage.allocatable(7, resource=FIVE)
    await agent.until_ready()


async def test_eight_gpus_of_seven_slices_start_quickly(folder: Path) -> None:
    """From exec to a registered list of 56 slices;
    scripts/bench holds it to a second, a machine that runs tests gets ten.
    """
    node = SimulatedNode.create(folder / "big", model="A100-SXM4-40GB", gpus=8)
    for gpu in range(8):
        await asyncio.to_thread(node.set_mig, gpu, ["1g.5gb"] * 7)
    stage = await asyncio.to_thread(Stage, folder)
    stage.node = node
    await stage.kubelet.start()
    began = time.monotonic()
    try:
        await stage.ready_agent("version: v1\n" + MIXED)
        await stage.allocatable(56, resource=FIVE)
        assert time.monotonic() - began < 10
    finally:
        for agent in stage.agents:
            await agent.terminate()
        await stage.kubelet.stop()
