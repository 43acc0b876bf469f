"""``vgpu-agent doctor`` on a simulated node, with and without the agent's real process."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from tests.component.commands import Ran, command
from tests.component.conftest import QUICK, SHARED, Stage
from tests.patience import FOR_EVER_SECONDS
from vgpu_agent.sim.api.server import ApiServer

MPS = "sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n"


async def doctor(*words: str) -> tuple[dict[str, list[dict[str, Any]]], Ran]:
    """The findings by check, and the command."""
    ran = await command("doctor", "--json", *words)
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(ran.out)["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return found, ran


def before(stage: Stage, more: str = "") -> tuple[str, ...]:
    """The flags of a node whose agent is not installed yet."""
    text = f"{QUICK}binding: {{cdiDirectory: {stage.folder}/cdi}}\n{more}"
    stage.config.write_text(text)
    (stage.folder / "cdi").mkdir(exist_ok=True)
    return (
        *("--config", str(stage.config), "--kubelet-dir", str(stage.folder / "kubelet")),
        *("--simulate", str(stage.node.directory), "--debug-listen", free_address()),
    )


def free_address() -> str:
    """An address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


async def test_a_running_agent_is_asked_for_its_settings_and_gpus(stage: Stage) -> None:
    """No flag is needed in the agent's pod: the kubelet's directory is that of the settings in
    force.
    """
    agent = await stage.ready_agent(
        f"{QUICK}{SHARED}binding: {{cdiDirectory: {stage.folder}/cdi}}\n"
    )
    await asyncio.to_thread((stage.folder / "cdi").mkdir, exist_ok=True)
    await stage.admit("train")
    found, ran = await doctor("--debug-listen", agent.debug_address)

    assert found["configuration"] == [
        {
            "check": "configuration",
            "level": "ok",
            "text": "that of the running agent",
            "remedy": "",
        }
    ]
    assert "is ready" in found["agent"][0]["text"]
    assert "2 GPUs (simulated), all healthy" in found["driver"][0]["text"]
    assert {finding["level"] for finding in found["device plugins"]} == {"ok"}
    assert str(stage.folder / "kubelet") in found["device plugins"][0]["text"]
    assert found["pod resources"][0]["level"] == "ok"
    assert "1 entries of 1 containers" in found["checkpoint"][0]["text"]
    assert found["other plugins"][0]["level"] == "ok"
    assert found["CDI directory"][0]["level"] == "ok"
    worst = json.loads(ran.out)["worst"]
    assert ran.status == {"ok": 0, "warning": 1, "error": 2}[worst]


async def test_a_gpu_that_is_ill_is_a_warning_with_its_reason(stage: Stage) -> None:
    """The reader learns which card it is, and from where to learn more."""
    agent = await stage.ready_agent(
        f"version: v1\ngpu: {{recovery: {{quietSeconds: {FOR_EVER_SECONDS}}}}}\n{SHARED}"
    )
    stage.node.xid(0, 79)
    await stage.allocatable(4)
    found, ran = await doctor("--debug-listen", agent.debug_address)
    assert found["driver"][0]["level"] == "warning"
    assert "XID 79" in found["driver"][0]["text"]
    assert any(check.startswith("agent: gpu 0") for check in found)
    assert ran.status >= 1


async def test_a_node_without_an_agent_is_checked_by_its_configuration(stage: Stage) -> None:
    """Before the installation: nothing listens at the debug address, and that is no fault."""
    found, ran = await doctor(*before(stage))
    assert found["configuration"][0]["text"] == str(stage.config)
    assert found["agent"][0]["level"] == "ok"
    assert {finding["level"] for finding in found["device plugins"]} == {"ok"}
    assert found["pod resources"][0]["level"] == "ok"
    assert found["driver"][0]["level"] == "warning"  # simulated
    assert ran.status in (1, 2)


async def test_a_kubelet_that_is_away_is_an_error_with_a_remedy(stage: Stage) -> None:
    """Exit status 2, and the text form names the remedy below the fault."""
    flags = before(stage)
    await stage.kubelet.stop()
    found, ran = await doctor(*flags)
    assert found["pod resources"][0]["level"] == "error"
    assert ran.status == 2
    shown = await command("doctor", *flags)
    assert shown.status == 2
    assert "\nerror    pod resources" in shown.text
    assert "remedy: " in shown.text
    assert max(map(len, shown.text.splitlines())) <= 80 or str(stage.folder) in shown.text
    assert "\033[" not in shown.text


async def test_another_plugin_of_the_same_resource_is_an_error(stage: Stage) -> None:
    """The commonest mistake when switching over: the replaced plugin still runs. Resources of a
    family that is off are another plugin's own.
    """
    plugins = stage.folder / "kubelet/device-plugins"
    checkpoint = {
        "Data": {
            "PodDeviceEntries": [],
            "RegisteredDevices": {
                "nvidia.com/gpu": ["GPU-1"],
                "nvidia.com/vgpu-number": ["GPU-1::0"],
                "example.com/nic": ["a"],
            },
        },
        "Checksum": 1,
    }
    text = json.dumps(checkpoint)
    await asyncio.to_thread((plugins / "kubelet_internal_checkpoint").write_text, text)
    found, _ = await doctor(*before(stage))
    assert found["other plugins"][0]["level"] == "ok"  # a leftover: nobody listens

    with socket.socket(socket.AF_UNIX) as plugin:
        plugin.bind(str(plugins / "nvidia-gpu.sock"))
        plugin.listen()
        found, ran = await doctor(*before(stage))
    (rival,) = found["other plugins"]
    assert rival["level"] == "error"
    assert "nvidia.com/gpu" in rival["text"]
    assert "example.com/nic" not in rival["text"]
    assert "nvidia.com/vgpu-number" not in rival["text"]
    assert "nvidia-gpu.sock" in rival["text"]
    assert ran.status == 2


async def test_tools_specs_and_settings_that_are_wrong_are_named(stage: Stage) -> None:
    """A spec that is no JSON, MPS without its programs, and a key that does not exist."""
    flags = before(stage, MPS)
    await asyncio.to_thread((stage.folder / "cdi/broken.json").write_text, "{")
    found, _ = await doctor(*flags)
    assert found["CDI directory"][0]["level"] == "warning"
    assert "broken.json" in found["CDI directory"][0]["text"]
    assert found["MPS"][0]["level"] == "error"
    assert "nvidia-cuda-mps-control" in found["MPS"][0]["text"]

    found, ran = await doctor(*before(stage, "nonsense: 1\n"))
    assert found["configuration"][0]["level"] == "error"
    assert ":4: nonsense" in found["configuration"][0]["text"]
    assert ran.status == 2


async def test_a_library_that_is_not_delivered_is_an_error(stage: Stage) -> None:
    """A family that needs one is on; nothing is installed by looking."""
    more = f"families: {{volcanoVgpu: true}}\nhamiCore: {{hostDirectory: {stage.folder}/vgpu}}\n"
    found, _ = await doctor(*before(stage, more))
    (library,) = found["isolation library"]
    assert library["level"] == "error"
    assert f"{stage.folder}/vgpu/libvgpu.so" in library["text"]
    assert library["remedy"].startswith("deliver")
    assert not (stage.folder / "vgpu").exists()
    assert found["API server"][0]["level"] == "error"  # no credentials, and that family needs them


async def test_clock_and_rights_are_asked_from_the_api_server(stage: Stage) -> None:
    """Two minutes apart, and one right of the manifests missing."""
    async with ApiServer() as api:
        path = stage.folder / "kubeconfig"
        await asyncio.to_thread(api.kubeconfig, path)
        flags = (*before(stage), "--kubeconfig", str(path))
        found, _ = await doctor(*flags)
        assert [found[name][0]["level"] for name in ("API server", "clock", "API rights")] == [
            "ok",
            "ok",
            "ok",
        ]
        api.clock_offset_seconds = 120
        api.denied.add(("patch", "nodes/status"))
        found, ran = await doctor(*flags)
        assert found["clock"][0]["level"] == "error"
        assert "behind the API server's" in found["clock"][0]["text"]
        assert found["API rights"][0]["text"] == "missing: patch nodes/status"
        assert ran.status == 2
    found, _ = await doctor(*flags)
    assert found["API server"][0]["level"] == "error"
