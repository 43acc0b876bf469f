"""The host tool that knows the driver's parts for a container:
``nvidia-ctk cdi generate``, behind one adapter.

Only NVIDIA knows which libraries, device nodes and hooks a driver version takes. So we run their
tool and write none of it down ourselves. It is another vendor's program: it may be missing, hang,
fail, or print an invalid spec. All of that becomes one `CdiError`, and nothing of ours waits for
it. Called by `generated_specs`. The options are those of version 1.20; older versions know all
those that are always passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from typing import TYPE_CHECKING

import msgspec

from vgpu_agent.cdi import rules
from vgpu_agent.cdi.document import LARGEST_BYTES, Spec, decode
from vgpu_agent.cdi.roots import Roots, on_the_node
from vgpu_agent.errors import CdiError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vgpu_agent.cdi.document import ContainerEdits, Hook

# The tool leaves out the hooks that this variable names. Only our settings may choose hooks.
_DISABLED_HOOKS_VARIABLE = "NVIDIA_CTK_CDI_GENERATE_DISABLED_HOOKS"
_EVERY_HOOK = "all"
# Keeps an NVIDIA runtime in legacy mode from adding devices of its own.
_VOID = "NVIDIA_VISIBLE_DEVICES=void"
# the tool's text on a node without GDS, GDRCopy or Mellanox devices
_NOTHING_TO_INJECT = "empty device edits"
# How long the program may take on a node.
TIMEOUT_SECONDS = 30.0
_KEPT_STDERR = 64 * 1024  # bytes, for the error; the rest is dropped
# how long a killed tool may take to disappear; one that waits for the driver in the kernel does not
_KILL_SECONDS = 1.0
# the text in one line of the tool's log
_MESSAGE = re.compile(r'\bmsg="((?:[^"\\]|\\.)*)"')


class CtkOptions(msgspec.Struct, frozen=True):
    """The way to run the tool.

    Attributes:
        command: the program, with the arguments before those that this module adds. The last word
            is the tool's name in errors.
        timeout_seconds: how long it may take.
        roots: where the driver and its device nodes are, for the agent and on the node.
        hook_path: path on the node of the program that runtimes run as a hook.
        feature_flags: values of the tool's option ``--feature-flag``.
        disable_hooks: names of hooks that are left out, or ``all``. Every other hook that the tool
            describes stays (nvidia §8).
    """

    command: tuple[str, ...] = ("/usr/bin/nvidia-ctk",)
    timeout_seconds: float = 30.0
    roots: Roots = msgspec.field(default_factory=Roots)
    hook_path: str = "/usr/bin/nvidia-cdi-hook"
    feature_flags: tuple[str, ...] = ()
    disable_hooks: tuple[str, ...] = ()


class Stuck:
    """A run of the tool that was killed and did not end. While there is one, no other is started:
    they would pile up behind a hung driver.
    """

    def __init__(self) -> None:
        self.process: asyncio.subprocess.Process | None = None

    def require_none(self, program: str) -> None:
        """Raise `CdiError` while there is such a run; its text names ``program``."""
        if self.process is not None and self.process.returncode is None:
            raise CdiError(
                f"an earlier {program} (process {self.process.pid}) does not end even when killed; "
                "the driver hangs, see nvidia-smi and dmesg"
            )
        self.process = None


async def generate(
    options: CtkOptions,
    *,
    vendor: str,
    name: str,
    mode: str,
    id_strategy: str,
    stuck: Stuck | None = None,
) -> Spec | None:
    """Have the tool describe this node's devices.

    Args:
        options: the way to run the tool.
        vendor: of the spec's kind.
        name: class of the spec's kind.
        mode: the kind of devices: ``auto`` for GPUs, or one of ``gds``, ``mofed``, ``gdrcopy``.
        id_strategy: ``uuid`` or ``index``: how devices are named.
        stuck: remembers a run that did not end even when killed; the caller passes the same object
            in each call.

    Returns:
        the spec, with the paths of the node instead of those in the agent's container; None when
            the node has nothing of that mode.

    Raises:
        CdiError: the tool is missing, failed, did not end in time, or did not print a spec that a
            runtime takes.
    """
    arguments = _arguments(options, vendor=vendor, name=name, mode=mode, id_strategy=id_strategy)
    program = options.command[-1]
    status, out, err = await _run(
        [*options.command, *arguments], options, program, stuck or Stuck()
    )
    if status != 0:
        if _NOTHING_TO_INJECT in err and mode != "auto":
            return None
        raise CdiError(
            f"{program} cdi generate (mode {mode}) failed with status {status}: {_reason(err)}; "
            f"run it by hand on this node to see more: {program} {' '.join(arguments)}"
        )
    try:
        spec = decode(out)
    except CdiError as problem:
        raise CdiError(
            f"the output of {program} cdi generate {problem}; check cdi.nvidiaCtk and the tool's "
            "version"
        ) from problem
    return _finished(spec, options, f"{vendor}/{name}", program)


def _arguments(
    options: CtkOptions, *, vendor: str, name: str, mode: str, id_strategy: str
) -> list[str]:
    arguments = [
        "cdi",
        "generate",
        "--format=json",
        f"--mode={mode}",
        f"--vendor={vendor}",
        f"--class={name}",
        f"--device-name-strategy={id_strategy}",
        f"--driver-root={options.roots.driver}",
        f"--dev-root={options.roots.dev}",
        f"--nvidia-cdi-hook-path={options.hook_path}",
    ]
    arguments += [f"--feature-flag={flag}" for flag in options.feature_flags]
    return arguments


def _finished(spec: Spec, options: CtkOptions, kind: str, program: str) -> Spec:
    """Return the spec with paths of the node, checked."""
    if spec.kind != kind:
        raise CdiError(
            f"the output of {program} cdi generate is of kind {spec.kind!r}, not {kind}; check "
            "cdi.nvidiaCtk"
        )
    spec = _without_hooks(on_the_node(spec, options.roots), options.disable_hooks)
    edits = spec.container_edits
    if _VOID not in edits.env:
        others = tuple(line for line in edits.env if not line.startswith("NVIDIA_VISIBLE_DEVICES="))
        spec = msgspec.structs.replace(
            spec, container_edits=msgspec.structs.replace(edits, env=(*others, _VOID))
        )
    spec = rules.with_sufficient_version(spec)
    if found := rules.problems(spec):
        raise CdiError(
            f"the output of {program} cdi generate would be refused by container runtimes: "
            f"{'; '.join(found[:3])}"
        )
    return spec


def _without_hooks(spec: Spec, names: Sequence[str]) -> Spec:
    """Return the spec without the hooks of these names.

    The tool is not asked to leave them out: before 1.17.5 it refuses the option `--disable-hook`.
    """

    def without(edits: ContainerEdits) -> ContainerEdits:
        kept = (
            ()
            if _EVERY_HOOK in names
            else tuple(hook for hook in edits.hooks if _hook_name(hook) not in names)
        )
        return msgspec.structs.replace(edits, hooks=kept)

    devices = tuple(
        msgspec.structs.replace(device, container_edits=without(device.container_edits))
        for device in spec.devices
    )
    return msgspec.structs.replace(
        spec, container_edits=without(spec.container_edits), devices=devices
    )


def _hook_name(hook: Hook) -> str:
    """Return the name of a hook: the first argument of ``nvidia-cdi-hook`` or of ``nvidia-ctk
    hook``; empty for a hook without arguments.
    """
    _program, *arguments = hook.args or ("",)
    if arguments[:1] == ["hook"]:
        del arguments[0]
    return arguments[0] if arguments else ""


async def _run(
    command: Sequence[str], options: CtkOptions, program: str, stuck: Stuck
) -> tuple[int, bytes, str]:
    stuck.require_none(program)
    environment = {
        name: value for name, value in os.environ.items() if name != _DISABLED_HOOKS_VARIABLE
    }
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,  # its own children are ended with it
        )
    except OSError as err:
        raise CdiError(
            f"cannot run {program}: {err.strerror or err}; mount the NVIDIA container toolkit's "
            "program into the agent and set cdi.nvidiaCtk to its path, or choose cdi.source: "
            "toolkit or the device list strategy envvar"
        ) from err

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    ended = False
    try:
        async with asyncio.timeout(options.timeout_seconds):
            out, err_bytes = await asyncio.gather(
                _read(process.stdout, LARGEST_BYTES, on_too_much=end),
                _read(process.stderr, _KEPT_STDERR, on_too_much=None),
            )
            status = await process.wait()
        ended = True
    except TimeoutError:
        raise CdiError(
            f"{program} cdi generate did not end within {options.timeout_seconds:g} s; it was "
            "ended; a driver that hangs shows in nvidia-smi as well"
        ) from None
    finally:
        if not ended:  # perhaps it has, and one of its children holds its output open
            end()
            stuck.process = process
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KILL_SECONDS):
                    await process.wait()
    if len(out) > LARGEST_BYTES:
        raise CdiError(f"{program} cdi generate does not stop printing; check cdi.nvidiaCtk")
    return status, out, err_bytes.decode(errors="replace")


async def _read(
    stream: asyncio.StreamReader | None, max_bytes: int, *, on_too_much: Callable[[], None] | None
) -> bytes:
    """Return the first bytes of a stream, up to ``max_bytes`` and one more;
    the rest is read and dropped, and ``on_too_much`` is called.
    """
    kept = bytearray()
    while stream is not None and (chunk := await stream.read(65536)):
        kept += chunk[: max_bytes + 1 - len(kept)]
        if len(kept) > max_bytes and on_too_much is not None:
            on_too_much()
    return bytes(kept)


def _reason(err: str) -> str:
    """Extract the tool's complaint, without its time stamps and help text."""
    lines = [
        line for line in err.splitlines() if "level=error" in line
    ] or err.strip().splitlines()[-1:]
    found = [
        match[1].replace('\\"', '"') if (match := _MESSAGE.search(line)) else line.strip()
        for line in lines
    ]
    return "; ".join(found)[:500] or "no output"
