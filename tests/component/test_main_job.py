"""The main job with the agent's real process: shares reach containers, and nothing is lost when a
component goes away for a moment.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests import constants
from tests.component.conftest import GPU, QUICK, SHARED, Stage, until_not_ready
from tests.golden import U0, U1
from tests.patience import FOR_EVER_SECONDS
from tests.replacing import replace_text
from vgpu_agent.sim.kubelet.faults import AdmissionError
from vgpu_agent.sim.kubelet.kubelet import Container

LASTING = QUICK.replace("quietSeconds: 0.5", "quietSeconds: 60")


async def test_a_pod_gets_its_gpu(stage: Stage) -> None:
    """nvidia G1 and A1 on the wire: two whole GPUs with their NUMA nodes,
    one in the container's environment.
    """
    await stage.ready_agent(QUICK)
    await stage.allocatable(2)
    assert stage.kubelet.resource(GPU).healthy == {U0: 0, U1: 1}
    pod = await stage.admit("train")
    assert dict(pod.answers["main"].envs) == {"NVIDIA_VISIBLE_DEVICES": U0}
    assert not pod.answers["main"].devices


async def test_device_nodes_are_passed_where_asked_for(stage: Stage) -> None:
    """nvidia A16 and A17 on the wire: control nodes that exist and the GPU's node,
    from below the driver root.
    """
    await stage.ready_agent(QUICK + "plugin: {passDeviceSpecs: true}\n")
    pod = await stage.admit("train")
    passed = [
        (node.container_path, node.host_path, node.permissions)
        for node in pod.answers["main"].devices
    ]
    names = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia0"]
    assert passed == [
        (f"/dev/{name}", f"{stage.node.directory}/dev/{name}", "rw") for name in names
    ]


async def test_index_strategy(stage: Stage) -> None:
    """nvidia A5 on the wire: GPUs by index."""
    await stage.ready_agent(QUICK + "plugin: {deviceIdStrategy: index}\n")
    pod = await stage.admit("train", 2)
    assert pod.answers["main"].envs["NVIDIA_VISIBLE_DEVICES"] == "0,1"


async def test_renamed_replicas(stage: Stage) -> None:
    """nvidia G9 on the wire: only ``nvidia.com/gpu.shared`` is registered."""
    await stage.ready_agent(
        QUICK
        + "sharing: {timeSlicing: {renameByDefault: true, resources: [{name: gpu, replicas: 4}]}}\n"
    )
    await stage.allocatable(8, resource="nvidia.com/gpu.shared")
    assert {call.resource for call in stage.kubelet.called("Register")} == {"nvidia.com/gpu.shared"}


async def test_packed_and_distributed_reach_kubelet(stage: Stage) -> None:
    """nvidia §6.2 on the wire: packed fills one GPU, distributed then takes the emptier one."""
    agent = await stage.ready_agent(
        QUICK + SHARED + "plugin: {sharedDevicesAllocationPolicy: packed}\n"
    )
    packed = await stage.admit("packed", 2)
    assert packed.answers["main"].envs["NVIDIA_VISIBLE_DEVICES"] == U0
    replace_text(stage.config, QUICK + SHARED)
    await agent.until_logged("config.applied")
    spread = await stage.admit("spread", 2)
    assert spread.answers["main"].envs["NVIDIA_VISIBLE_DEVICES"] == U1
    even = await stage.admit("even", 2)
    assert set(even.answers["main"].envs["NVIDIA_VISIBLE_DEVICES"].split(",")) == {U0, U1}


async def test_a_refused_request_shows_its_reason_in_the_pods_status(stage: Stage) -> None:
    """nvidia A23 on the wire: the text kubelet puts into the pod's status is ours.
    The next pod is served.
    """
    await stage.ready_agent(
        QUICK
        + (
            "sharing: {timeSlicing: {failRequestsGreaterThanOne: true, resources: [{name: gpu, "
            "replicas: 4}]}}\n"
        )
    )
    with pytest.raises(
        AdmissionError, match="maximum request size for shared resources is 1; found 2"
    ):
        await stage.admit("greedy", 2)
    await stage.admit("modest")


async def test_the_ledger_learns_who_it_was(stage: Stage) -> None:
    """Within seconds of an Allocate, pod, container and UID are in the ledger,
    proven by both of kubelet's records.
    """
    agent = await stage.ready_agent()
    pod = await stage.admit("train")
    ledger = await agent.until(
        "/debug/ledger",
        lambda answer: any(grant["state"] == "identified" for grant in answer["grants"]),
    )
    (grant,) = ledger["grants"]
    assert (grant["namespace"], grant["pod"], grant["container"], grant["pod_uid"]) == (
        "default",
        "train",
        "main",
        pod.uid,
    )
    assert await agent.metric("vgpu_agent_ledger_drift_total") == 0


async def test_a_pod_that_ended_is_released(stage: Stage) -> None:
    """No event reports it. The kubelet's records do."""
    agent = await stage.ready_agent()
    pod = await stage.admit("short")
    await agent.until(
        "/debug/ledger",
        lambda answer: any(grant["state"] == "identified" for grant in answer["grants"]),
    )
    await stage.kubelet.delete(pod)
    await agent.until("/debug/ledger", lambda answer: answer["grants"] == [])
    assert await agent.metric("vgpu_agent_ledger_drift_total") == 0


async def test_init_container_and_its_successor_share_ids(stage: Stage) -> None:
    """The kubelet gives the init container's ids to the app container:
    one holder in the book, the running one.
    """
    agent = await stage.ready_agent()
    await stage.kubelet.admit(
        "job", [Container("prepare", {GPU: 1}, init=True), Container("main", {GPU: 1})]
    )
    ledger = await agent.until(
        "/debug/ledger",
        lambda answer: any(grant["state"] == "identified" for grant in answer["grants"]),
    )
    assert [grant["container"] for grant in ledger["grants"]] == ["main"]


async def test_v10_after_kill_9_the_ledger_is_full_before_anything_registers(stage: Stage) -> None:
    """kubelet V10: a new process knows U0::n of ns/p/c before its first Register,
    and gives a free id to the next pod.
    """
    agent = await stage.ready_agent()
    pods = [await stage.admit(f"pod-{number}") for number in range(3)]
    await agent.kill()
    await agent.start()
    await agent.until_ready()
    events = [line["msg"] for line in agent.log_lines()]
    assert (
        events.index("ledger.adopted")
        < events.index("ledger.rebuilt")
        < events.index("plugin.registered")
    )
    ledger = await agent.get("/debug/ledger")
    assert {grant["pod"]: grant["ids"] for grant in ledger["grants"]} == {
        pod.name: stage.ids(pod) for pod in pods
    }
    held = {id_ for pod in pods for id_ in stage.ids(pod)}
    await stage.allocatable(8)
    assert not held & set(stage.ids(await stage.admit("late")))
    assert await agent.metric("vgpu_agent_ledger_drift_total") == 0


async def test_a_graceful_restart_loses_nothing(stage: Stage) -> None:
    """SIGTERM ends with status 0 and no socket left. The next process has the same grants."""
    agent = await stage.ready_agent()
    pod = await stage.admit("train")
    assert await agent.terminate() == 0
    assert [
        path.name for path in stage.kubelet.plugins.iterdir() if path.name.endswith(".sock")
    ] == ["kubelet.sock"]
    await agent.start()
    await agent.until_ready()
    ledger = await agent.get("/debug/ledger")
    assert [(grant["pod"], grant["ids"]) for grant in ledger["grants"]] == [
        ("train", stage.ids(pod))
    ]


async def test_v2_kubelet_restarts_under_running_pods(stage: Stage) -> None:
    """kubelet V2: a new socket of our own, one Register, the full list, and the same grants;
    long before the next poll.
    """
    stage.constants[constants.SOCKET_POLL] = 60
    agent = await stage.ready_agent(QUICK + SHARED)
    await stage.admit("train")
    await agent.until(
        "/debug/ledger",
        lambda answer: any(grant["state"] == "identified" for grant in answer["grants"]),
    )
    before = stage.kubelet.called("Register")
    await stage.kubelet.restart()
    await stage.kubelet.until(lambda: len(stage.kubelet.called("Register")) > len(before))
    await stage.allocatable(8)
    again = stage.kubelet.called("Register")[len(before) :]
    assert len(again) == 1
    assert again[0].facts["endpoint"] != before[-1].facts["endpoint"]
    assert len((await agent.get("/debug/ledger"))["grants"]) == 1


async def test_v14_without_kubelet_the_agent_waits(folder: Path) -> None:
    """kubelet V14: a missing kubelet.sock is no crash, and /readyz reports it. When it appears,
    Register comes before any poll.
    """
    stage = await asyncio.to_thread(Stage, folder)
    stage.constants[constants.SOCKET_POLL] = 60
    agent = stage.agent(QUICK + SHARED)
    await agent.start()
    await until_not_ready(agent, "waiting for the kubelet: there is no")
    await stage.kubelet.start()
    await stage.kubelet.until(lambda: bool(stage.kubelet.called("Register")))
    await agent.until_ready()
    await agent.terminate()
    await stage.kubelet.stop()


async def test_v7_one_fault_is_one_message_with_all_ids(stage: Stage) -> None:
    """kubelet V7: a GPU with 4 replicas fails: exactly one more list, 4 ids Unhealthy."""
    await stage.ready_agent(LASTING + SHARED)
    await stage.allocatable(8)
    before = len(stage.kubelet.called("list"))
    stage.node.xid(U1, 79)
    await stage.allocatable(4)
    # noted a moment after it is followed
    await stage.kubelet.until(lambda: len(stage.kubelet.called("list")) > before)
    await asyncio.sleep(0.5)
    assert len(stage.kubelet.called("list")) == before + 1
    assert set(stage.kubelet.resource(GPU).unhealthy) == {f"{U1}::{number}" for number in range(4)}


async def test_v16_a_lost_gpu_stays_in_the_list_under_its_holder(stage: Stage) -> None:
    """kubelet V16: NVML loses GPU 1 while U1::n is held:
    all its ids stay, all Unhealthy, also after a restart beside it.
    """
    agent = await stage.ready_agent()
    await stage.admit("on-both", 2)
    await agent.until(
        "/debug/ledger",
        lambda answer: any(grant["state"] == "identified" for grant in answer["grants"]),
    )
    stage.node.lose(U1)
    await stage.allocatable(4)
    assert set(stage.kubelet.resource(GPU).unhealthy) == {f"{U1}::{number}" for number in range(4)}
    await agent.kill()
    await agent.start()
    await agent.until_ready()
    await stage.allocatable(4)
    assert f"{U1}::0" in stage.kubelet.resource(GPU).unhealthy


async def test_a_gpu_recovers_and_is_offered_again(stage: Stage) -> None:
    """XID 79, then quiet: Unhealthy at once, Healthy again after the quiet time.
    The running pod never noticed.
    """
    agent = await stage.ready_agent(QUICK.replace("quietSeconds: 0.5", "quietSeconds: 2") + SHARED)
    pod = await stage.admit("train", 2)
    stage.node.xid(U0, 79)
    await stage.allocatable(4)
    await stage.allocatable(8)
    assert len(stage.ids(pod)) == 2
    events = [event["event"] for event in (await agent.get("/debug/events"))["events"]]
    assert events.index("gpu.unhealthy") < events.index("gpu.recovered")


async def test_the_driver_can_forbid_recovery(stage: Stage) -> None:
    """A GPU for which the driver asks for a reset stays out, with the reason in /debug/devices."""
    agent = await stage.ready_agent()
    stage.node.recovery_action(U0, "reset")
    stage.node.xid(U0, 95)
    await stage.allocatable(4)
    await asyncio.sleep(1.5)
    assert stage.kubelet.resource(GPU).allocatable == 4
    (gpu, _) = (await agent.get("/debug/devices"))["gpus"]
    assert "reset" in gpu["health_reason"]
    stage.node.recovery_action(U0, "none")
    await stage.allocatable(8)


@pytest.mark.parametrize(
    ("environment", "xid", "allocatable"),
    [
        ({}, 31, 8),
        ({"DP_DISABLE_HEALTHCHECKS": "48"}, 48, 8),
        ({"DP_DISABLE_HEALTHCHECKS": "all", "DP_ENABLE_HEALTHCHECKS": "79"}, 79, 4),
    ],
    ids=["31 is ignored by default", "48 is disabled", "all but 79"],
)
async def test_xid_lists_from_the_environment(
    stage: Stage, environment: dict[str, str], xid: int, allocatable: int
) -> None:
    """nvidia §17.4 through the real process, with NVIDIA's variable names;
    ENABLE beats DISABLE=all (its bug is not copied).
    """
    agent = await stage.ready_agent(LASTING + SHARED, **environment)
    stage.node.xid(U0, xid)
    await agent.until(
        "/debug/events",
        lambda answer: any(event["event"] == "gpu.xid" for event in answer["events"]),
    )
    await stage.allocatable(allocatable)
    await asyncio.sleep(0.3)
    assert stage.kubelet.resource(GPU).allocatable == allocatable


async def test_a_hung_driver_stops_neither_allocate_nor_http(stage: Stage) -> None:
    """NVML does not return: pods are admitted, /readyz and /debug/tasks name the call,
    and it is over when the driver answers.
    """
    stage.constants |= {constants.NVML_CALL_TIMEOUT: 0.5, constants.GPU_HUNG_UNHEALTHY: 60}
    agent = await stage.ready_agent(QUICK + SHARED)
    stage.node.fault("nvmlDeviceGetTemperature", times=1, delay_ms=int(FOR_EVER_SECONDS * 1000))
    await agent.until("/debug/tasks", lambda answer: answer["nvml"]["state"] == "hung")
    await stage.admit("during")
    status, text = await agent.get_text("/readyz")
    assert status == 503
    assert "nvmlDeviceGetTemperature" in text
    assert (await agent.get_text("/livez"))[0] == 200
    stage.node.clear_faults()
    await agent.until("/debug/tasks", lambda answer: answer["nvml"]["state"] == "answering")
    await agent.until_ready()


async def test_new_replicas_take_effect_under_running_pods(stage: Stage) -> None:
    """A changed file changes the list within moments. A running container keeps its id."""
    agent = await stage.ready_agent()
    pod = await stage.admit("train")
    replace_text(stage.config, QUICK + SHARED.replace("replicas: 4", "replicas: 6"))
    await stage.allocatable(12)
    await agent.until_ready()
    assert len(stage.ids(pod)) == 1


async def test_a_bad_new_file_keeps_the_old_one_in_force(stage: Stage) -> None:
    """The error is in the log and in /debug/config, nothing else changes,
    and the corrected file is taken.
    """
    agent = await stage.ready_agent()
    replace_text(stage.config, QUICK + SHARED.replace("replicas: 4", "replicas: four"))
    line = await agent.until_logged("config.refused")
    assert any(
        'sharing.timeSlicing.resources[0].replicas: expected an integer ≥ 1, got "four"' in text
        for text in line["problems"]
    )
    assert "four" in str(await agent.get("/debug/config"))
    assert await agent.metric("vgpu_agent_config_reload_failed") == 1
    assert stage.kubelet.resource(GPU).allocatable == 8
    replace_text(stage.config, QUICK + SHARED.replace("replicas: 4", "replicas: 2"))
    await stage.allocatable(4)
    await agent.until_logged("config.applied")
    assert await agent.metric("vgpu_agent_config_reload_failed") == 0


async def test_a_new_list_that_is_too_long_is_refused(stage: Stage) -> None:
    """The kubelet would drop it, and the old list goes on being served."""
    stage.constants[constants.MESSAGE_BUDGET] = 4096
    agent = await stage.ready_agent(QUICK + SHARED)
    replace_text(stage.config, QUICK + SHARED.replace("replicas: 4", "replicas: 100"))
    line = await agent.until_logged("config.refused")
    assert any("replicas: at most" in text for text in line["problems"])
    status, text = await agent.get_text("/readyz")
    assert (status, text.splitlines()[-1]) == (200, "ready")
    assert text.startswith("[~] config: the newest configuration is not in force: ")
    assert stage.kubelet.resource(GPU).allocatable == 8


async def test_renaming_under_running_pods_gives_no_gpu_away_twice(stage: Stage) -> None:
    """renameByDefault with one replica keeps the ids:
    a holder of a GPU under its old name keeps it alone, and the book settles.
    """
    agent = await stage.ready_agent(QUICK)
    pod = await stage.admit("train")
    (held,) = stage.ids(pod)
    await agent.until(
        "/debug/ledger",
        lambda answer: [grant["state"] for grant in answer["grants"]] == ["identified"],
    )
    replace_text(
        stage.config,
        QUICK
        + SHARED.replace("replicas: 4", "replicas: 1").replace(
            "{timeSlicing: {", "{timeSlicing: {renameByDefault: true, "
        ),
    )
    await stage.allocatable(1, resource="nvidia.com/gpu.shared")
    await stage.allocatable(0)
    ledger = await agent.get("/debug/ledger")
    assert [grant["ids"] for grant in ledger["grants"]] == [[held]]
    assert await agent.metric("vgpu_agent_ledger_drift_total") == 0


async def test_health_and_holders_are_there_for_probes_and_for_prometheus(stage: Stage) -> None:
    """nvidia:D14: a GPU that fails is a number that an alert can watch,
    and no reason to kill the agent that serves the others.
    """
    agent = await stage.ready_agent()
    pod = await stage.admit("train")
    held = stage.ids(pod)[0].partition("::")[0]
    await agent.until(
        "/debug/ledger",
        lambda answer: [grant["state"] for grant in answer["grants"]] == ["identified"],
    )
    stage.node.xid(U0, 79)
    await stage.allocatable(4)
    _, text = await agent.get_text("/metrics")
    healthy = {
        line.split('"')[1]: line.rpartition(" ")[2]
        for line in text.splitlines()
        if line.startswith("vgpu_agent_gpu_healthy{")
    }
    assert healthy == {U0: "0.0", U1: "1.0"}
    assert any("train" in line and held in line for line in text.splitlines())
    assert [(await agent.get_text(path))[0] for path in ("/healthz", "/livez")] == [200, 200]


async def test_a_simulated_node_says_so(stage: Stage) -> None:
    """No silent simulation: the log, /debug and a metric say that the GPUs are not real."""
    agent = await stage.ready_agent()
    assert (await agent.until_logged("agent.simulated"))["level"] == "warning"
    assert (await agent.get("/debug/devices"))["simulated"] is True
    assert await agent.metric("vgpu_agent_simulated") == 1


async def test_two_pods_in_a_burst_and_a_lost_admission(stage: Stage) -> None:
    """Eight pods in a row get eight different ids.
    One more is refused by kubelet and nothing leaks.
    """
    agent = await stage.ready_agent()
    pods = [await stage.admit(f"pod-{number}") for number in range(8)]
    assert len({id_ for pod in pods for id_ in stage.ids(pod)}) == 8
    with pytest.raises(AdmissionError, match="Requested: 1, Available: 0"):
        await stage.admit("ninth")
    ledger = await agent.until(
        "/debug/ledger",
        lambda answer: all(grant["state"] == "identified" for grant in answer["grants"]),
    )
    assert len(ledger["grants"]) == 8


CONTROL_NODES = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"]


@pytest.mark.parametrize(
    "roots",
    [{"NVIDIA_DRIVER_ROOT": "/run/nvidia/driver"}, {"NVIDIA_DEV_ROOT": "/run/nvidia/driver"}],
)
async def test_device_nodes_are_passed_from_a_mounted_driver_root(
    stage: Stage, roots: dict[str, str]
) -> None:
    """nvidia §9 and A17: NVIDIA's chart mounts the driver's root,
    which has that path on the node only, at /driver-root.
    """
    mounted = stage.folder / "driver-root"
    await asyncio.to_thread((mounted / "dev").mkdir, parents=True)
    for name in CONTROL_NODES:
        await asyncio.to_thread((mounted / "dev" / name).touch)
    await stage.ready_agent(
        QUICK + "plugin: {passDeviceSpecs: true}\n", **roots, DRIVER_ROOT_CTR_PATH=str(mounted)
    )
    pod = await stage.admit("train")
    passed = [(node.container_path, node.host_path) for node in pod.answers["main"].devices]
    assert passed == [
        (f"/dev/{name}", f"/run/nvidia/driver/dev/{name}") for name in [*CONTROL_NODES, "nvidia0"]
    ]


async def test_gpus_without_the_nodes_that_they_need_are_withheld(stage: Stage) -> None:
    """The module nvidia-uvm is loaded late:
    until then each CUDA program of a pod would fail for no visible reason.
    """
    uvm = stage.node.directory / "dev" / "nvidia-uvm"
    await asyncio.to_thread(uvm.rename, stage.folder / "uvm")
    agent = stage.agent(QUICK + "plugin: {passDeviceSpecs: true}\n")
    await agent.start()
    await until_not_ready(
        agent,
        f"{GPU}: plugin.passDeviceSpecs",
        f"there is no /dev/nvidia-uvm below {stage.node.directory}",
    )
    assert not stage.kubelet.called("Register")

    await asyncio.to_thread((stage.folder / "uvm").rename, uvm)
    await agent.until_ready()
    await stage.allocatable(2)
    pod = await stage.admit("train")
    assert "/dev/nvidia-uvm" in [node.container_path for node in pod.answers["main"].devices]
