"""``vgpu-agent support-bundle`` beside the agent's real process on a simulated node."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import tarfile
from pathlib import Path

from tests.component.commands import Ran, command
from tests.component.conftest import QUICK, SHARED, Stage
from vgpu_agent.sim.agent_process import AgentProcess
from vgpu_agent.sim.kubelet.kubelet import Container

TOP = "vgpu-agent-support/"
SECRET = "s3cr3t-of-the-operator"


def unpacked(archive: bytes) -> dict[str, str]:
    """The files of an archive, without its top directory."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = {}
        for member in tar.getmembers():
            content = tar.extractfile(member)
            assert content is not None
            files[member.name.removeprefix(TOP)] = content.read().decode()
        return files


async def bundle(agent: AgentProcess, *words: str) -> tuple[dict[str, str], Ran]:
    """The files of the archive on standard output, and the command."""
    ran = await command(
        *("support-bundle", "--output", "-", "--debug-listen", agent.debug_address),
        *("--listen", agent.public_address, *words),
    )
    assert ran.status == 0, ran.err
    return unpacked(ran.out), ran


def config(stage: Stage, more: str = "") -> str:
    """A configuration whose CDI specs lie in a folder of the test."""
    return f"{QUICK}{SHARED}binding: {{cdiDirectory: {stage.folder}/cdi}}\n{more}"


async def test_everything_that_a_bug_report_needs_is_there(stage: Stage) -> None:
    """Every path of /debug that the agent lists, and all else; the manifest names each."""
    agent = await stage.ready_agent(config(stage))
    await stage.admit("train")
    await agent.until("/debug/status", lambda found: found["pods"][0]["name"] == "train")
    (stage.folder / "cdi").mkdir(exist_ok=True)
    (stage.folder / "cdi/other.json").write_text('{"cdiVersion": "0.6.0"}')
    files, ran = await bundle(agent, "--log", str(agent.log_path))

    paths = [entry["path"] for entry in (await agent.get("/debug/"))["paths"]]
    assert {f"{path.removeprefix('/')}.json" for path in paths} <= set(files)
    assert json.loads(files["debug/status.json"])["pods"][0]["pod"] == "default/train"
    assert "vgpu_agent_" in files["metrics.txt"]
    assert "ready" in files["readyz.txt"]
    held = json.loads(files["kubelet-checkpoint.json"])["held_ids"]
    assert sum(held["nvidia.com/gpu"].values()) == 1
    assert f"cdi{stage.folder}/cdi/other.json" in files
    assert "agent.started" in files["agent.log"]
    checks = {finding["check"] for finding in json.loads(files["doctor.json"])}
    assert {"driver", "limits", "pod resources"} <= checks
    assert json.loads(files["versions.json"])["vgpu_agent"]
    assert files["MANIFEST.txt"] == ran.err
    assert [name for name in files if name not in ran.err and name != "MANIFEST.txt"] == []


async def test_a_bundle_without_an_agent_names_what_is_missing(stage: Stage) -> None:
    """An agent that does not start is the commonest reason for a report."""
    await asyncio.to_thread(stage.config.write_text, config(stage))
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    ran = await command(
        *("support-bundle", "--output", "-", "--debug-listen", f"127.0.0.1:{port}"),
        *("--config", str(stage.config), "--listen", f"127.0.0.1:{port}"),
        *("--kubelet-dir", str(stage.folder / "kubelet")),
    )
    assert ran.status == 0
    files = unpacked(ran.out)
    assert {"doctor.json", "versions.json", "config.yaml"} <= set(files)
    assert "metrics.txt" not in files
    (line,) = [line for line in ran.err.splitlines() if line.startswith("metrics.txt")]
    assert "missing" in line
    assert "connection refused" in line


async def test_secrets_are_in_no_part(stage: Stage) -> None:
    """People write tokens into files and flags that they were not meant for."""
    agent = await stage.ready_agent(config(stage))
    log = stage.folder / "extra.log"
    log.write_text(f"Authorization: Bearer {SECRET}\nhttps://user:{SECRET}@host/\n")
    listed = stage.folder / "listed.yaml"
    listed.write_text(f"{config(stage)}# api_key: {SECRET}\n  password: {SECRET}\n")
    files, ran = await bundle(agent, "--log", str(log), "--config", str(listed))
    assert "config.yaml" in files
    assert [name for name, text in files.items() if SECRET in text] == []
    assert SECRET not in ran.err


async def test_names_are_hidden_on_demand(stage: Stage) -> None:
    """The same pod has the same number everywhere, so that the report can still be read."""
    agent = await stage.ready_agent(config(stage))
    await stage.kubelet.admit(
        "acme-train-0", [Container("main", {"nvidia.com/gpu": 1})], namespace="acme-prod"
    )
    await stage.kubelet.admit("acme", [Container("main", {"nvidia.com/gpu": 1})])
    await agent.until(
        "/debug/status",
        lambda found: {pod["name"] for pod in found["pods"]} == {"acme", "acme-train-0"},
    )
    shown, _ = await bundle(agent, "--log", str(agent.log_path))
    assert "acme-prod/acme-train-0" in shown["debug/status.json"]
    hidden, ran = await bundle(agent, "--hide-names", "--log", str(agent.log_path))
    assert [name for name, text in hidden.items() if "acme" in text] == []
    pod = json.loads(hidden["debug/status.json"])["pods"][0]
    assert pod["pod"] == f"{pod['namespace']}/{pod['name']}"
    assert f'pod="{pod["name"]}"' in hidden["metrics.txt"]
    assert "names of pods and namespaces: hidden" in ran.err


async def test_a_file_is_for_its_owner_alone_and_is_bounded(stage: Stage) -> None:
    """It has the names of tenants. A huge log is cut to its end."""
    agent = await stage.ready_agent(config(stage))
    log = stage.folder / "huge.log"
    with log.open("wb") as file:
        file.truncate(64 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"the end\n")
    output = stage.folder / "report.tar.gz"
    ran = await command(
        *("support-bundle", "--output", str(output), "--debug-listen", agent.debug_address),
        *("--log", str(log)),
    )
    assert ran.status == 0, ran.err
    assert output.stat().st_mode & 0o777 == 0o600
    files = unpacked(output.read_bytes())
    assert files["agent.log"].endswith("the end\n")
    assert sum(map(len, files.values())) < 32 << 20
    assert f"{output}: {output.stat().st_size} bytes" in ran.text
    assert ran.text.startswith(files["MANIFEST.txt"])


async def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """The agent's own root file system is read-only."""
    output = tmp_path / "nowhere/report.tar.gz"
    ran = await command("support-bundle", "--output", str(output), "--debug-listen", "127.0.0.1:1")
    assert ran.status == 1
    (line,) = ran.err.splitlines()
    assert "standard output with --output -" in line
