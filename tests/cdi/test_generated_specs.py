"""The agent's own specs: made when something has changed and only then, there again when they were
removed, gone when they shall go.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from tests.cdi.cdi_schema import SCHEMA
from tests.cdi.conftest import Tool
from tests.golden import U0, U1
from tests.patience import FOR_EVER_SECONDS, PATIENCE_SECONDS
from vgpu_agent.cdi.generated_specs import GeneratedSpecs, Wanted
from vgpu_agent.journal import Journal

VENDOR = "k8s.device-plugin.nvidia.com"
GPU_FILE = "k8s.device-plugin.nvidia.com-gpu.json"
DRIVER = "580.95.05"


@contextlib.asynccontextmanager
async def running(directory: Path, *, look_seconds: float = 0.05) -> AsyncIterator[GeneratedSpecs]:
    """The loop, with pauses of milliseconds."""
    specs = GeneratedSpecs(
        str(directory),
        Journal(),
        look_seconds=look_seconds,
        retry_min_seconds=0.02,
        retry_max_seconds=0.1,
    )
    task = asyncio.ensure_future(specs.run(lambda: None))
    try:
        yield specs
    finally:
        task.cancel()
        await asyncio.wait({task})


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


async def made(specs: GeneratedSpecs, wanted: Wanted) -> None:
    """Have it made and wait for the end of the first try."""
    specs.want(wanted)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await specs.tried.wait()


def read(path: Path) -> Any:
    """The JSON of a file."""
    return json.loads(path.read_text())


async def test_the_specs_lie_where_runtimes_look_for_them(tool: Tool, tmp_path: Path) -> None:
    """File names of upstream, the whole of each file valid, readable for all users, and no
    half-written file beside them.
    """
    tool.device("gdrdrv")
    cdi = tmp_path / "cdi"
    wanted = Wanted(
        1,
        modes=("gdrcopy", "gds"),
        channels=(0,),
        channel_root="/run/nvidia/driver",
        ctk=tool.options,
    )
    async with running(cdi) as specs:
        await made(specs, wanted)
        assert specs.names == {f"{VENDOR}/gpu={name}" for name in (U0, U1, "all")} | {
            f"{VENDOR}/imex-channel=0",
            f"{VENDOR}/gdrcopy=all",
        }
        assert specs.knows("gdrcopy")
        assert not specs.knows("gds")
        assert not specs.error
    files = await asyncio.to_thread(
        lambda: {path.name: (read(path), path.stat().st_mode & 0o777) for path in cdi.iterdir()}
    )
    assert sorted(files) == [f"{VENDOR}-gdrcopy.json", GPU_FILE, f"{VENDOR}-imex-channel.json"]
    for spec, mode in files.values():
        jsonschema.validate(spec, SCHEMA)
        assert mode == 0o644
    (channel,) = files[f"{VENDOR}-imex-channel.json"][0]["devices"]
    path = "/dev/nvidia-caps-imex-channels/channel0"
    assert channel == {
        "name": "0",
        "containerEdits": {
            "deviceNodes": [{"path": path, "hostPath": f"/run/nvidia/driver{path}"}]
        },
    }


async def test_the_tool_runs_again_only_when_the_gpus_have_changed(
    tool: Tool, tmp_path: Path
) -> None:
    """The same desired state again, or time that passes, runs nothing. Another geometry does, and
    the old names are gone with it.
    """
    async with running(tmp_path / "cdi", look_seconds=0.01) as specs:
        await made(specs, Wanted("two GPUs", ctk=tool.options))
        specs.want(Wanted("two GPUs", ctk=tool.options))
        await asyncio.sleep(0.1)
        assert len(await tool.calls()) == 1
        await tool.set_mig(1, ["1g.5gb"])
        await made(specs, Wanted("a GPU and a slice", ctk=tool.options))
        assert len(await tool.calls()) == 2
        assert f"{VENDOR}/gpu={U1}" not in specs.names
        assert f"{VENDOR}/gpu={tool.node.mig_uuids(1)[0]}" in specs.names


async def test_a_file_that_was_removed_is_there_again_without_the_tool(
    tool: Tool, tmp_path: Path
) -> None:
    """A deleted or overwritten spec is written again: the content is known."""
    path = tmp_path / "cdi" / GPU_FILE
    async with running(tmp_path / "cdi", look_seconds=0.01) as specs:
        await made(specs, Wanted(1, ctk=tool.options))
        before = await asyncio.to_thread(path.read_bytes)
        await asyncio.to_thread(path.write_text, "{")
        await until(lambda: specs.names != frozenset())
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                if await asyncio.to_thread(path.read_bytes) == before:
                    break
                await asyncio.sleep(0.01)
        assert len(await tool.calls()) == 1


async def test_trouble_is_told_once_and_tried_again(tool: Tool, tmp_path: Path) -> None:
    """A driver that is not ready yet: the reason is shown, no name is promised,
    and when the tool works the names are there.
    """
    await tool.misbehave(fail="driver not loaded")
    async with running(tmp_path / "cdi") as specs:
        await made(specs, Wanted(1, ctk=tool.options))
        assert "driver not loaded" in specs.error
        assert not specs.names
        await until(lambda: specs.revision.value >= 1)
        await tool.behave()
        await until(lambda: bool(specs.names))
        assert not specs.error
        assert [status.error for status in specs.statuses] == [""]
        assert [entry.event for entry in specs._journal.entries] == ["cdi.trouble", "cdi.spec_made"]


async def test_what_an_earlier_agent_has_made_is_gone_by_while_the_tool_fails(
    tool: Tool, tmp_path: Path
) -> None:
    """A GPU has fallen off the bus and the agent starts anew: containers on the others find their
    names until the tool answers again.
    """
    wanted = Wanted(2, DRIVER, ctk=tool.options)
    async with running(tmp_path / "cdi") as specs:
        await made(specs, wanted)
        names = specs.names
    await asyncio.to_thread(tool.node.lose, 1)
    async with running(tmp_path / "cdi") as specs:
        await made(specs, wanted)
        assert specs.names == names
        assert "GPU is lost" in specs.error
        assert specs.gpu_spec_facts is None
        assert [entry.event for entry in specs._journal.entries] == [
            "cdi.spec_found",
            "cdi.trouble",
        ]
        await asyncio.to_thread(tool.node.restore, 1)
        await until(lambda: not specs.error)
        assert specs.gpu_spec_facts == 2


async def test_what_needs_no_tool_is_there_while_the_tool_hangs(tool: Tool, tmp_path: Path) -> None:
    """The GPUs have their names from before. Without that of its channel a resource would be
    withheld until the tool is given up.
    """
    wanted = Wanted(2, DRIVER, channels=(0,), ctk=tool.options)
    async with running(tmp_path / "cdi") as specs:
        await made(specs, wanted)
        names = specs.names
    await tool.misbehave(hang_seconds=FOR_EVER_SECONDS)
    async with running(tmp_path / "cdi") as specs:
        specs.want(wanted)
        await until(lambda: specs.names == names)
        assert not specs.tried.is_set()


@pytest.mark.parametrize(
    "spoilt",
    [
        "other driver",
        "unknown driver",
        "other kind",
        "cut short",
        "refused by runtimes",
        "a directory",
    ],
)
async def test_what_does_not_fit_this_node_is_not_gone_by(
    tool: Tool, tmp_path: Path, spoilt: str
) -> None:
    """Libraries of a driver that is gone cannot be mounted,
    and what no runtime takes is no name.
    """
    path, driver = tmp_path / "cdi" / GPU_FILE, DRIVER
    async with running(tmp_path / "cdi") as specs:
        await made(specs, Wanted(2, DRIVER, ctk=tool.options))
    content = await asyncio.to_thread(path.read_text)
    if spoilt in {"other driver", "unknown driver"}:
        driver = "590.1.2" if spoilt == "other driver" else ""
    elif spoilt == "a directory":
        await asyncio.to_thread(path.unlink)
        await asyncio.to_thread(path.mkdir)
    else:
        texts = {
            "other kind": content.replace(VENDOR, "example.com"),
            "cut short": content[:-9],
            "refused by runtimes": _unnamed(content),
        }
        await asyncio.to_thread(path.write_text, texts[spoilt])
    await tool.misbehave(fail="driver not loaded")
    async with running(tmp_path / "cdi") as specs:
        await made(specs, Wanted(2, driver, ctk=tool.options))
        assert specs.names == frozenset()
        assert specs.error


def _unnamed(content: str) -> str:
    spec = json.loads(content)
    spec["devices"][0]["name"] = ""
    return json.dumps(spec)


async def test_what_was_made_before_stays_in_use_while_the_tool_fails(
    tool: Tool, tmp_path: Path
) -> None:
    """A GPU falls off the bus, and the tool answers for none:
    containers on the others still find their names.
    """
    async with running(tmp_path / "cdi") as specs:
        await made(specs, Wanted(2, ctk=tool.options))
        await asyncio.to_thread(tool.node.lose, 1)
        await made(specs, Wanted(1, ctk=tool.options))
        assert "GPU is lost" in specs.error
        assert f"{VENDOR}/gpu={U0}" in specs.names
        assert (await asyncio.to_thread(read, tmp_path / "cdi" / GPU_FILE))["devices"]


async def test_one_spec_that_cannot_be_made_keeps_no_other_from_it(
    tool: Tool, tmp_path: Path
) -> None:
    """The tool fails, the channel's spec needs no tool."""
    await tool.misbehave(fail="no")
    async with running(tmp_path / "cdi") as specs:
        await made(specs, Wanted(1, channels=(0,), ctk=tool.options))
        assert specs.names == {f"{VENDOR}/imex-channel=0"}


async def test_a_directory_that_cannot_be_written_is_one_clear_error(
    tool: Tool, tmp_path: Path
) -> None:
    """No name is promised while no runtime could find it. The tool is not run again for that, and
    when it can be written all is well.
    """
    cdi = tmp_path / "cdi"
    await asyncio.to_thread(cdi.write_text, "a file")
    async with running(cdi) as specs:
        await made(specs, Wanted(1, ctk=tool.options))
        assert f"cannot write {cdi / GPU_FILE}" in specs.error
        assert "move away the file that is in the place of a directory" in specs.error
        assert not specs.names
        await asyncio.to_thread(os.unlink, cdi)
        await until(lambda: bool(specs.names))
        assert len(await tool.calls()) == 1


async def test_the_file_of_an_earlier_agent_is_not_gone_by(tool: Tool, tmp_path: Path) -> None:
    """The driver may have been changed since. What is in it is replaced, not trusted."""
    cdi = tmp_path / "cdi"
    async with running(cdi) as specs:
        await made(specs, Wanted(1, ctk=tool.options))
    await tool.misbehave(fail="no")
    async with running(cdi) as specs:
        await made(specs, Wanted(1, ctk=tool.options))
        assert not specs.names
        assert await asyncio.to_thread((cdi / GPU_FILE).exists), (
            "running containers may start again by it"
        )


async def test_a_node_that_is_left_for_good_keeps_no_spec(tool: Tool, tmp_path: Path) -> None:
    """All of ours are removed, also those of modes that were switched off and what a killed agent
    had half written, and no others.
    """
    cdi = tmp_path / "cdi"
    async with running(cdi) as specs:
        await made(specs, Wanted(1, ctk=tool.options))
    await asyncio.to_thread((cdi / f"{VENDOR}-mofed.json").write_text, "{}")
    await asyncio.to_thread((cdi / f".{GPU_FILE}.new").write_text, "{")
    await asyncio.to_thread((cdi / "nvidia.yaml").write_text, "kind: nvidia.com/gpu")
    await specs.remove()
    assert [path.name for path in await asyncio.to_thread(lambda: list(cdi.iterdir()))] == [
        "nvidia.yaml"
    ]
    assert not specs.names


async def test_other_options_make_the_spec_anew(tool: Tool, tmp_path: Path) -> None:
    """Another way to name devices is another spec."""
    async with running(tmp_path / "cdi") as specs:
        wanted = Wanted(1, ctk=tool.options)
        await made(specs, wanted)
        await made(specs, msgspec.structs.replace(wanted, id_strategy="index"))
        assert f"{VENDOR}/gpu=0" in specs.names
