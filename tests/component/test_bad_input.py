"""Wrong input to the agent's real process:
one clear line each, nothing else stops, nothing is lost (issue "The ground", part 5).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.component.conftest import GPU, QUICK, SHARED, Stage, full, until_not_ready
from tests.golden import U0, U1
from tests.patience import FOR_EVER_SECONDS, PATIENCE_SECONDS
from tests.replacing import replace_text
from vgpu_agent.config.load import load
from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.agent_process import AgentProcess


async def _ended(agent: AgentProcess) -> tuple[int, list[str]]:
    """Status and last errors of an agent that is expected to end by itself. Its log is JSON, and so
    are they.
    """
    await agent.spawn()
    status = await agent.wait()
    lines = agent.log_lines()
    assert [line for line in lines if len(line) == 1] == []
    return status, [line["error"] for line in lines if line["msg"] == "command.failed"]


async def test_a_wrong_configuration_is_refused_before_anything_is_registered(stage: Stage) -> None:
    """Every problem with file, line, key, value and remedy, exit 2."""
    status, lines = await _ended(
        stage.agent(QUICK + SHARED.replace("replicas: 4", "replicas: four") + "lissten: :1\n")
    )
    assert status == 2
    assert sorted(lines) == [
        (
            f"{stage.config}:3: sharing.timeSlicing.resources[0].replicas: expected an integer ≥ "
            '1, got "four"'
        ),
        f"{stage.config}:4: lissten: unknown key, did you mean listen?",
    ]
    assert stage.kubelet.called("Register") == []


async def test_families_that_collide_are_named_as_by_config_check_and_stop_nothing_else(
    stage: Stage,
) -> None:
    """An upgrade must not take a node's GPUs away because of a name in a family
    that has never been served there.
    """
    text = QUICK + SHARED + "families: {aws: true}\naws:\n  resourceName: nvidia.com/gpu\n"
    agent = stage.agent(text)
    await agent.spawn()
    line = await agent.until_logged("config.collision")
    await stage.allocatable(8)
    assert [line["problem"]] == list(load({"--config": str(stage.config)}, {}).collisions)


@pytest.mark.parametrize(("replicas", "fitting"), [(35000, True), (1_000_000_000, False)])
async def test_v13_a_list_that_kubelet_would_drop_is_refused_with_the_factor_that_fits(
    stage: Stage, replicas: int, fitting: bool
) -> None:
    """kubelet V13: 2 × 35,000 replicas of 65 bytes exceed the budget:
    exit 2, and the named number does start.
    """
    status, lines = await _ended(
        stage.agent(QUICK + SHARED.replace("replicas: 4", f"replicas: {replicas}"))
    )
    assert status == 2
    assert len(lines) == 1
    assert "replicas: at most " in lines[0]
    assert stage.kubelet.called("Register") == []
    if fitting:
        number = int(lines[0].partition("replicas: at most ")[2].split()[0])
        assert number < 35000
        await stage.ready_agent(QUICK + SHARED.replace("replicas: 4", f"replicas: {number}"))
        await stage.allocatable(2 * number)


async def test_no_driver_is_an_error_that_says_what_was_looked_for(stage: Stage) -> None:
    """Without --simulate there is no silent simulation: exit 1 with the library and the remedy."""
    root = stage.folder / "no-driver"
    root.mkdir()
    status, lines = await _ended(
        stage.agent(QUICK.replace("gpu: {", f"gpu: {{driverRoot: {root}, "), simulate=False)
    )
    assert status == 1
    (text,) = lines
    what, *_, install = text.splitlines()  # one more where these tests run in a container
    assert "there is no libnvidia-ml.so.1" in what
    assert str(root) in install


async def test_no_driver_in_a_pod_is_first_a_question_of_its_runtime(stage: Stage) -> None:
    """Three lines; the driver is on the node, and only NVIDIA's runtime adds it to a container."""
    root = stage.folder / "no-driver"
    root.mkdir()
    config = QUICK.replace("gpu: {", f"gpu: {{driverRoot: {root}, ")
    agent = stage.agent(config, simulate=False, environment={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    status, (text,) = await _ended(agent)
    what, runtime, install = text.splitlines()
    assert status == 1
    assert "there is no libnvidia-ml.so.1" in what
    assert "NVIDIA's container runtime" in runtime
    assert "runtimeClassName" in runtime
    assert install.startswith("Install the NVIDIA driver")
    assert "simulate" not in text


async def test_no_driver_with_fail_on_init_error_false_waits(stage: Stage) -> None:
    """FAIL_ON_INIT_ERROR=false: the process lives, /readyz says why it is not ready, and a driver
    that comes up is used (aws:D5).
    """
    stage.node.fault("nvmlInit*", code=9)
    agent = stage.agent(environment={"FAIL_ON_INIT_ERROR": "false"})
    await agent.start()
    await until_not_ready(agent, "Driver Not Loaded")
    stage.node.clear_faults()
    await agent.until_ready()
    await stage.allocatable(8)


async def test_gpus_that_come_later_and_would_be_too_many_ids_are_withheld(stage: Stage) -> None:
    """A problem found after the start is no crash loop:
    /readyz names the factor that would fit, once in the log.
    """
    stage.node.fault("nvmlInit*", code=9)
    agent = stage.agent(
        QUICK + SHARED.replace("replicas: 4", "replicas: 300000"),
        environment={"FAIL_ON_INIT_ERROR": "false"},
    )
    await agent.start()
    await agent.until_logged("agent.started")
    stage.node.clear_faults()
    await agent.until_logged("plugin.withheld")
    status, text = await agent.get_text("/readyz")
    assert (status, "replicas: at most" in text) == (503, True)
    tasks = await agent.get("/debug/tasks")
    assert [task["restarts"] for task in tasks["tasks"] if task["name"] == "offering"] == [0]


async def test_a_simulated_node_that_is_not_there_is_an_error(stage: Stage) -> None:
    """--simulate with a wrong directory ends with status 1 and names it."""
    (stage.node.directory / "state").unlink()
    status, lines = await _ended(stage.agent())
    assert status == 1
    assert str(stage.node.directory) in lines[0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\x00\xff junk",
        b'{"Data": 5}',
        b'{"Data":{"PodDeviceEntries":[{"PodUID":7}]},"Checksum":1}',
        b'{"V9":{"Entries":[]}}',
    ],
    ids=["empty", "half-written", "binary", "foreign", "wrong types", "future"],
)
async def test_a_checkpoint_that_makes_no_sense_is_one_warning(
    stage: Stage, content: bytes
) -> None:
    """The agent serves with what pod-resources says, names the file once, and goes on."""
    pod_agent = await stage.ready_agent()
    pod = await stage.admit("train")
    await pod_agent.kill()
    checkpoint = stage.kubelet.plugins / "kubelet_internal_checkpoint"
    checkpoint.write_bytes(content)
    await pod_agent.start()
    ledger = await pod_agent.until("/debug/ledger", lambda answer: len(answer["grants"]) == 1)
    assert ledger["grants"][0]["pod"] == "train"
    assert ledger["grants"][0]["ids"] == stage.ids(pod)
    warnings = [
        line for line in pod_agent.log_lines() if line["msg"] == "kubelet.records_incomplete"
    ]
    assert len(warnings) == 1
    assert "kubelet_internal_checkpoint" in warnings[0]["reason"]
    await pod_agent.until_ready()


async def test_pod_resources_missing_is_one_warning(stage: Stage) -> None:
    """Without that socket the checkpoint alone keeps the book. The warning names the socket."""
    (stage.folder / "kubelet" / "pod-resources" / "kubelet.sock").unlink()
    agent = await stage.ready_agent()
    await stage.admit("train")
    ledger = await agent.until(
        "/debug/ledger",
        lambda answer: any(grant["state"] == "granted" for grant in answer["grants"]),
    )
    assert ledger["grants"][0]["container"] == "main"
    warnings = [
        line["reason"] for line in agent.log_lines() if line["msg"] == "kubelet.records_incomplete"
    ]
    assert len(warnings) == 1
    assert "pod-resources/kubelet.sock" in warnings[0]


async def test_v12_exhausted_pod_resources_are_left_alone_for_a_while(stage: Stage) -> None:
    """kubelet V12: RESOURCE_EXHAUSTED: back-off, service unaffected,
    the book complete afterwards.
    """
    stage.kubelet.faults.exhausted_lists = 3
    agent = await stage.ready_agent()
    await stage.admit("train")
    await agent.until(
        "/debug/ledger",
        lambda answer: any(grant["state"] == "identified" for grant in answer["grants"]),
        timeout_seconds=30,
    )


async def test_a_port_in_use_ends_the_start_with_its_name(stage: Stage) -> None:
    """Exit 1, the address and the flag to change, nothing registered."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        agent = AgentProcess(
            stage.folder / "agent.log",
            kubelet=stage.folder / "kubelet",
            simulate=stage.node.directory,
            listen=f"127.0.0.1:{port}",
        )
        status, lines = await _ended(agent)
    assert status == 1
    assert len(lines) == 1
    assert f"127.0.0.1:{port}" in lines[0]
    assert "--listen" in lines[0]
    assert stage.kubelet.called("Register") == []


@contextlib.contextmanager
def _unwritable(directory: Path, how: str) -> Iterator[None]:
    """A directory in which no socket can be made:
    by mode for an ordinary user, by a mount for root, whom no mode stops.
    """
    if os.geteuid() != 0:
        directory.chmod(0o500)
        yield
        directory.chmod(0o700)
        return
    if how != "read-only":
        with full(directory):
            yield
        return
    subprocess.run(["mount", "--bind", str(directory), str(directory)], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


async def test_a_read_only_plugin_directory_is_named_and_left_when_it_is_mended(
    stage: Stage,
) -> None:
    """No socket can be made beside kubelet's: /readyz names directory and cause.
    Afterwards it registers by itself.
    """
    agent = stage.agent()
    with _unwritable(stage.kubelet.plugins, "read-only"):
        await agent.start()
        await agent.until_logged("plugin.registering_again")
        status, text = await agent.get_text("/readyz")
        assert status == 503
        assert str(stage.kubelet.plugins) in text
        assert (await agent.get_text("/livez"))[0] == 200
    await agent.until_ready()


async def test_a_full_disk_under_the_configuration_changes_nothing(stage: Stage) -> None:
    """An editor on a full disk leaves an empty file:
    refused with a line, the old settings stay in force.
    """
    agent = await stage.ready_agent()
    replace_text(stage.config, "")
    line = await agent.until_logged("config.refused")
    assert "version" in line["problems"][0]
    assert stage.kubelet.resource(GPU).allocatable == 8


@pytest.mark.skipif(
    os.geteuid() != 0,
    reason=(
        "only root can mount a file system without room; the read-only test covers the same path"
    ),
)
async def test_a_full_plugin_directory_is_named(stage: Stage) -> None:
    """A file system without a free inode: kubelet's socket is not there either,
    and the agent waits instead of crashing.
    """
    agent = stage.agent()
    with _unwritable(stage.kubelet.plugins, "full"):
        await agent.start()
        await until_not_ready(agent, "waiting for the kubelet")
    await agent.until_ready()


async def test_unreadable_sysfs_means_no_topology_and_one_warning_a_card(stage: Stage) -> None:
    """NUMA files with junk or none: the GPUs are offered without a NUMA node,
    the log names the file.
    """
    numa_nodes = sorted((stage.node.directory / "sys").rglob("numa_node"))
    numa_nodes[0].write_text("north\n")
    numa_nodes[1].unlink()
    agent = await stage.ready_agent(QUICK)
    await stage.allocatable(2)
    assert stage.kubelet.resource(GPU).healthy == {U0: None, U1: None}
    warnings = [line["problem"] for line in agent.log_lines() if line["msg"] == "gpu.fact_missing"]
    assert len([text for text in warnings if "numa_node" in text]) == 2


async def test_garbage_on_the_grpc_socket_disturbs_nobody(stage: Stage) -> None:
    """Random bytes, half a preface, a silent client: the next Allocate is answered as ever."""
    agent = await stage.ready_agent()
    (path,) = [
        path
        for path in stage.kubelet.plugins.iterdir()
        if path.name.endswith(".sock") and path.name != "kubelet.sock"
    ]
    silent = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for number, junk in enumerate(
        [os.urandom(100_000), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(5000), b""]
    ):
        silent[number].setblocking(False)
        silent[number].connect(str(path))
        with contextlib.suppress(OSError):
            silent[number].send(junk)
    try:
        await stage.admit("train")
    finally:
        for client in silent:
            client.close()
    assert (await agent.get_text("/livez"))[0] == 200
    assert await agent.metric("vgpu_agent_task_restarts_total") == 0


def _send(address: str, request: bytes) -> int:
    """The status of the answer to raw bytes; 0 when the connection was closed without one."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as client:
        with contextlib.suppress(OSError):
            client.sendall(request)
        try:
            head = client.recv(1000)
        except OSError:
            return 0
    return int(head.split()[1]) if head.startswith(b"HTTP/") else 0


async def test_a_megabyte_of_junk_to_each_path(stage: Stage) -> None:
    """Every path answers 1 MB with 4xx or closes the connection, and the server goes on."""
    agent = await stage.ready_agent()
    index = await agent.get("/debug/")
    paths = [
        (agent.public_address, path) for path in ("/", "/metrics", "/healthz", "/livez", "/readyz")
    ]
    paths += [(agent.debug_address, entry["path"].partition("?")[0]) for entry in index["paths"]]
    assert len(paths) >= 14
    junk = os.urandom(1024 * 1024)
    for address, path in paths:
        for method in ("GET", "POST", "PUT"):
            head = (
                f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(junk)}\r\n\r\n"
            ).encode()
            status = await asyncio.to_thread(_send, address, head + junk)
            assert status == 0 or 400 <= status < 500, f"{method} {path} answered {status}"
    assert (await agent.get_text("/livez"))[0] == 200
    assert len((await agent.get("/debug/devices"))["gpus"]) == 2


async def test_a_nonsense_log_level_is_refused_with_the_known_ones(stage: Stage) -> None:
    """PUT /debug/loglevel: 400 with one line. A good one works at once."""
    agent = await stage.ready_agent()

    def put(body: bytes) -> bytes:
        host, _, port = agent.debug_address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as client:
            client.sendall(
                (
                    b"PUT /debug/loglevel HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                    b"Content-Length: %d\r\n\r\n"
                )
                % len(body)
                + body
            )
            answer = b""
            while part := client.recv(65536):
                answer += part
            return answer

    refused = await asyncio.to_thread(put, b"loud")
    assert refused.startswith(b"HTTP/1.1 400")
    assert "debug, info, warning, error" in json.loads(refused.partition(b"\r\n\r\n")[2])["error"]
    assert (await asyncio.to_thread(put, b"debug")).startswith(b"HTTP/1.1 200")
    assert (await agent.get("/debug/loglevel"))["level"] == "debug"


async def test_a_socket_path_that_is_too_long_is_named(folder: Path) -> None:
    """107 bytes are the limit of a unix socket. The directory is named before anything is tried."""
    deep = folder / ("d" * 80)
    stage = await asyncio.to_thread(Stage, folder)
    agent = AgentProcess(folder / "agent.log", kubelet=deep, simulate=stage.node.directory)
    (deep / "device-plugins").mkdir(parents=True)
    here = Path.cwd()
    listener = socket.socket(socket.AF_UNIX)
    try:
        os.chdir(deep / "device-plugins")  # a relative path is short enough for the stand-in's end
        listener.bind("kubelet.sock")
        listener.listen()
    finally:
        os.chdir(here)
    try:
        await agent.start()
        line = await agent.until_logged("plugin.registering_again")
        assert "107" in line["reason"]
    finally:
        listener.close()
        with contextlib.suppress(SimulationError):
            await agent.terminate()


async def test_sigterm_during_the_start_ends_it(stage: Stage) -> None:
    """A driver that hangs at the first call: SIGTERM still ends the process."""
    stage.node.fault("nvmlInit*", delay_ms=int(FOR_EVER_SECONDS * 1000), times=1)
    agent = stage.agent()
    await agent.start()
    await agent.terminate(timeout_seconds=PATIENCE_SECONDS)
