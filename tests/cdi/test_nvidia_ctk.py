"""The adapter of the host tool, against a process that plays it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from tests.cdi.cdi_schema import SCHEMA
from tests.cdi.conftest import Tool
from tests.golden import U0, U1
from tests.patience import FOR_EVER_SECONDS, PATIENCE_SECONDS
from vgpu_agent.cdi.document import Spec, encode
from vgpu_agent.cdi.nvidia_ctk import CtkOptions, Stuck, generate
from vgpu_agent.cdi.roots import Roots
from vgpu_agent.errors import CdiError

pytestmark = pytest.mark.component  # it starts programs

Prepare = Callable[[Tool], Awaitable[CtkOptions]]
VENDOR = "k8s.device-plugin.nvidia.com"


async def _gpus(options: CtkOptions, id_strategy: str = "uuid") -> Spec:
    spec = await generate(options, vendor=VENDOR, name="gpu", mode="auto", id_strategy=id_strategy)
    assert spec is not None
    return spec


def _device(spec: Spec, name: str) -> list[str]:
    (device,) = [device for device in spec.devices if device.name == name]
    return [node.path for node in device.container_edits.device_nodes]


async def test_gpus_are_described_by_uuid(tool: Tool) -> None:
    """Each GPU and ``all``; common edits void the variable of the old runtime,
    and the text is what a runtime takes.
    """
    spec = await _gpus(tool.options)
    assert spec.kind == f"{VENDOR}/gpu"
    assert [device.name for device in spec.devices] == [U0, U1, "all"]
    assert _device(spec, U1) == ["/dev/nvidia1"]
    assert _device(spec, "all") == ["/dev/nvidia0", "/dev/nvidia1"]
    assert "NVIDIA_VISIBLE_DEVICES=void" in spec.container_edits.env
    assert "/dev/nvidiactl" in [node.path for node in spec.container_edits.device_nodes]
    jsonschema.validate(json.loads(encode(spec)), SCHEMA)


async def test_slices_are_described_by_index_with_their_capabilities(tool: Tool) -> None:
    """A GPU in MIG mode gives way to its slices, each with its GPU's node and two capabilities."""
    await tool.set_mig(1, ["1g.5gb", "2g.10gb"])
    spec = await _gpus(tool.options, "index")
    assert [device.name for device in spec.devices] == ["0", "1:0", "1:1", "all"]
    nodes = _device(spec, "1:1")
    assert nodes[0] == "/dev/nvidia1"
    assert len(nodes) == 3
    assert all(node.startswith("/dev/nvidia-caps/nvidia-cap") for node in nodes[1:])


async def test_paths_are_those_of_the_node(tool: Tool) -> None:
    """Paths that the tool finds in the agent's container are written as the runtime finds them on
    the node (nvidia §8).
    """
    seen = str(tool.node.directory)
    await tool.misbehave(
        edits={
            "mounts": [
                {
                    "hostPath": f"{seen}/usr/lib/libcuda.so.1",
                    "containerPath": "/usr/lib/libcuda.so.1",
                }
            ]
        }
    )
    spec = await _gpus(
        msgspec.structs.replace(tool.options, roots=Roots(seen, "/run/nvidia/driver", seen, "/"))
    )
    assert [mount.host_path for mount in spec.container_edits.mounts] == [
        "/run/nvidia/driver/usr/lib/libcuda.so.1"
    ]
    (gpu,) = spec.devices[0].container_edits.device_nodes
    assert gpu.path == "/dev/nvidia0"
    assert not gpu.host_path, "the same path on the node needs no second one"


async def test_options_are_handed_on(tool: Tool) -> None:
    """Hook program and feature flags."""
    await _gpus(
        msgspec.structs.replace(
            tool.options, hook_path="/opt/hook", feature_flags=("disable-nvsandboxutils",)
        )
    )
    (call,) = await tool.calls()
    assert "--nvidia-cdi-hook-path=/opt/hook" in call
    assert "--feature-flag=disable-nvsandboxutils" in call


# In the order of nvidia-ctk 1.20; of 1.17.4 before hooks could be chosen.
ALL_HOOKS = [
    "create-symlinks",
    "enable-cuda-compat",
    "update-ldcache",
    "disable-device-node-modification",
    "update-application-profile",
]
OLD_HOOKS = ["create-symlinks", "update-ldcache", "chmod"]


def _hooks(spec: Spec) -> list[str]:
    """The names of the hooks of every device, which follow the program and, of nvidia-ctk,
    its subcommand.
    """
    return [
        next(word for word in hook.args[1:] if word != "hook")
        for hook in spec.container_edits.hooks
    ]


@pytest.mark.parametrize("program", ["nvidia-cdi-hook", "nvidia-ctk"])
@pytest.mark.parametrize(
    ("version", "disabled", "hooks"),
    [
        ("", (), ALL_HOOKS),
        ("", ("chmod",), ALL_HOOKS),
        ("", ("enable-cuda-compat",), [name for name in ALL_HOOKS if name != "enable-cuda-compat"]),
        ("", ("update-ldcache", "create-symlinks"), [ALL_HOOKS[1], *ALL_HOOKS[3:]]),
        ("", ("all",), []),
        ("1.17.5", (), ["create-symlinks", "enable-cuda-compat", "update-ldcache", "chmod"]),
        ("1.17.4", (), OLD_HOOKS),
        ("1.17.4", ("enable-cuda-compat",), OLD_HOOKS),
        ("1.17.4", ("chmod",), OLD_HOOKS[:2]),
        ("1.17.4", ("all",), []),
    ],
)
async def test_only_the_named_hooks_are_left_out(
    version: str, disabled: tuple[str, ...], hooks: list[str], program: str, tool: Tool
) -> None:
    """NVIDIA does the same from 0.18 on (nvidia §8):
    images whose CUDA is newer than the driver need `enable-cuda-compat`.

    A tool before 1.17.5 knows no option for it, and refuses one that it does not know.
    """
    path = tool.node.directory / program
    await asyncio.to_thread(path.touch, mode=0o755)
    await tool.misbehave(version=version)
    spec = await _gpus(
        msgspec.structs.replace(tool.options, hook_path=str(path), disable_hooks=disabled)
    )
    assert _hooks(spec) == hooks
    jsonschema.validate(json.loads(encode(spec)), SCHEMA)


async def test_hooks_of_single_devices_are_left_out_as_well(tool: Tool) -> None:
    """Specs of the tool before 1.17.5 have them there too: the hook `chmod` is about the
    capabilities of one MIG instance.
    """
    hooks = [
        {
            "hookName": "createContainer",
            "path": "/x/nvidia-ctk",
            "args": ["nvidia-ctk", "hook", name],
        }
        for name in ("chmod", "other")
    ]
    edits = {"env": ["A=b"], "hooks": [*hooks, {"hookName": "createContainer", "path": "/chmod"}]}
    await tool.misbehave(print_text=_spec(devices=[{"name": "0", "containerEdits": edits}]))
    spec = await _gpus(msgspec.structs.replace(tool.options, disable_hooks=("chmod",)))
    assert [hook.path for hook in spec.devices[0].container_edits.hooks] == [
        "/x/nvidia-ctk",
        "/chmod",
    ]


async def test_hooks_are_chosen_by_the_settings_alone(
    tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool's own variable, left in the agent's environment,
    would take a hook out that no setting names.
    """
    monkeypatch.setenv("NVIDIA_CTK_CDI_GENERATE_DISABLED_HOOKS", "enable-cuda-compat")
    path = tool.node.directory / "nvidia-cdi-hook"
    await asyncio.to_thread(path.touch, mode=0o755)
    assert (
        _hooks(await _gpus(msgspec.structs.replace(tool.options, hook_path=str(path)))) == ALL_HOOKS
    )


async def test_a_mode_that_the_node_does_not_have_gives_no_spec(tool: Tool) -> None:
    """No GDS devices: nothing to inject, which is no error (nvidia §8).
    With them there is a device ``all``.
    """
    assert (
        await generate(tool.options, vendor=VENDOR, name="gds", mode="gds", id_strategy="uuid")
        is None
    )
    tool.device("nvidia-fs0")
    spec = await generate(tool.options, vendor=VENDOR, name="gds", mode="gds", id_strategy="uuid")
    assert spec is not None
    assert _device(spec, "all") == ["/dev/nvidia-fs0"]


async def _missing(tool: Tool) -> CtkOptions:
    return msgspec.structs.replace(tool.options, command=("/nonexistent/nvidia-ctk",))


async def _failing(tool: Tool) -> CtkOptions:
    await tool.misbehave(fail="failed to initialize NVML: ERROR_DRIVER_NOT_LOADED")
    return tool.options


async def _hanging(tool: Tool) -> CtkOptions:
    await tool.misbehave(hang_seconds=FOR_EVER_SECONDS)
    return msgspec.structs.replace(tool.options, timeout_seconds=0.5)


def _printing(text: str) -> Prepare:
    async def prepared(tool: Tool) -> CtkOptions:
        await tool.misbehave(print_text=text)
        return tool.options

    return prepared


async def _endless(tool: Tool) -> CtkOptions:
    script = tool.node.directory / "endless"
    script.write_text("#!/bin/sh\nexec yes\n")
    script.chmod(0o755)
    return msgspec.structs.replace(tool.options, command=(str(script),))


def _spec(**changes: Any) -> str:
    edits = {"env": ["A=b"]}
    return json.dumps(
        {
            "cdiVersion": "0.5.0",
            "kind": f"{VENDOR}/gpu",
            "devices": [{"name": "0", "containerEdits": edits}],
        }
        | changes
    )


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (
            _missing,
            (
                r"cannot run /nonexistent/nvidia-ctk: No such file or directory; mount .* set "
                r"cdi\.nvidiaCtk"
            ),
        ),
        (
            _failing,
            (
                r"failed with status 1: failed to generate CDI spec: failed to initialize NVML: "
                r"ERROR_DRIVER_NOT_LOADED; run it by hand"
            ),
        ),
        (_hanging, r"did not end within 0\.5 s;"),
        (_endless, r"does not stop printing"),
        (_printing("GPU 0: A100"), r"is not a CDI spec: .*check cdi\.nvidiaCtk"),
        (_printing(""), r"is not a CDI spec"),
        (_printing(_spec(kind="vendor.com/gpu")), r"is of kind 'vendor\.com/gpu'"),
        (
            _printing(_spec(devices=[])),
            r"would be refused by container runtimes: there are no devices",
        ),
        (
            _printing(_spec(devices=[{"name": "a/b", "containerEdits": {"env": ["A=b"]}}])),
            r"device name 'a/b'",
        ),
        (_printing(_spec(surprise=1)), r"is not a CDI spec: .*surprise"),
    ],
)
async def test_a_tool_that_does_not_do_its_work_is_one_clear_error(
    prepare: Prepare, said: str, tool: Tool
) -> None:
    """Absent, failing, hanging, endless or printing nonsense."""
    options = await prepare(tool)
    with pytest.raises(CdiError, match=said):
        await _gpus(options)


async def test_a_tool_that_hangs_is_ended_with_all_that_it_started(tool: Tool) -> None:
    """Nothing of it is left on the node, also where the program is a script around another."""
    script, child = tool.node.directory / "wrapper", tool.node.directory / "child"
    script.write_text(f"#!/bin/sh\n sleep 300 & echo $! > {child}; wait\n")
    script.chmod(0o755)
    with pytest.raises(CdiError, match="did not end"):
        await _gpus(
            msgspec.structs.replace(tool.options, command=(str(script),), timeout_seconds=2.0)
        )
    assert await asyncio.to_thread(_ends, child)


async def test_a_tool_ends_with_whoever_waits_for_it(tool: Tool) -> None:
    """The agent is stopped while a spec is being made."""
    script, written = tool.node.directory / "wrapper", tool.node.directory / "child"
    script.write_text(
        f"#!/bin/sh\necho $$ > {written}.new; mv {written}.new {written}; exec sleep 300\n"
    )
    script.chmod(0o755)
    task = asyncio.ensure_future(
        _gpus(msgspec.structs.replace(tool.options, command=(str(script),)))
    )
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if await asyncio.to_thread(written.exists):
                break
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(_ends, written)


def _ends(written: Path) -> bool:
    """Tell whether the process whose number is in a file is gone, or dead and not collected,
    before patience ends.
    """
    status = Path(f"/proc/{written.read_text().strip()}/stat")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            if ") Z " in status.read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


async def test_what_a_tool_leaves_behind_is_ended_with_it(tool: Tool, tmp_path: Path) -> None:
    """It has ended, and something that it started holds its output open: no process stays on the
    node for each time it is tried.
    """
    path = tmp_path / "forks"
    await asyncio.to_thread(path.write_text, f"#!/bin/sh\nsleep 300 &\necho $! > {tmp_path}/pid\n")
    await asyncio.to_thread(path.chmod, 0o755)
    with pytest.raises(CdiError, match="did not end within 2 s"):
        await _gpus(
            msgspec.structs.replace(tool.options, command=(str(path),), timeout_seconds=2.0)
        )
    assert await asyncio.to_thread(_ends, tmp_path / "pid")


async def test_a_tool_that_not_even_a_signal_ends_holds_nobody_up(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that hangs keeps it in the kernel:
    there is an error all the same, and no second tool is started beside it.
    """
    path = tmp_path / "waits"
    await asyncio.to_thread(
        path.write_text, f"#!/bin/sh\necho $$ >> {tmp_path}/pids\nexec sleep 300\n"
    )
    await asyncio.to_thread(path.chmod, 0o755)
    options = msgspec.structs.replace(tool.options, command=(str(path),), timeout_seconds=2.0)
    monkeypatch.setattr("vgpu_agent.cdi.nvidia_ctk.os.killpg", lambda *_: None)
    stuck = Stuck()
    for said in ("did not end within 2 s", "an earlier .*waits .* does not end even when killed"):
        began = time.monotonic()
        with pytest.raises(CdiError, match=said):
            await generate(
                options, vendor=VENDOR, name="gpu", mode="auto", id_strategy="uuid", stuck=stuck
            )
        assert time.monotonic() - began < PATIENCE_SECONDS
    assert len((await asyncio.to_thread((tmp_path / "pids").read_text)).split()) == 1
    assert stuck.process is not None
    stuck.process.kill()
    # the loop of this test ends before it, and must not be asked to collect it
    await stuck.process.communicate()
