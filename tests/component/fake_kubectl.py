"""A stand-in for kubectl that ``kubectl vgpu`` finds on PATH.

It knows the pods of a file, and runs the real command ``vgpu-agent`` where kubectl would do so in a
pod, with the address of that pod's process in the environment. ``kubectl vgpu`` is the plugin, as
kubectl would find it.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

PLUGIN = Path(__file__).resolve().parents[2] / "bin/kubectl-vgpu"

_PROGRAM = """\
#!{python}
import json, os, subprocess, sys, time

words = sys.argv[1:]
world = json.load(open({world!r}))
with open({calls!r}, "a") as calls:
    calls.write(json.dumps(words) + "\\n")
if words[0] == "vgpu":
    os.execv(sys.executable, [sys.executable, {plugin!r}, *words[1:]])
while words[0] in ("--context", "-n"):
    words = words[2:]

def after(flag):
    return words[words.index(flag) + 1]

def fail(text):
    print(text, file=sys.stderr)
    raise SystemExit(1)

if words[:2] == ["get", "pods"]:
    name = after("-l").partition("=")[2]
    print(json.dumps({{"items": [pod["object"] for pod in world["pods"] if pod["app"] == name]}}))
elif words[:2] == ["get", "pod"]:
    pod = world["bound"].get(after("-n") + "/" + words[2])
    if pod is None:
        fail('Error from server (NotFound): pods "' + words[2] + '" not found')
    print(json.dumps({{"spec": {{"nodeName": pod}} if pod else {{}}}}))
else:
    (pod,) = [pod for pod in world["pods"] if pod["name"] in words]
    if pod["hangs"]:
        time.sleep(300)
    if pod["fails"]:
        fail(pod["fails"])
    if words[0] == "logs":
        if "--previous" in words:
            fail("previous terminated container not found")
        print(open(pod["log"]).read() if pod["log"] else "a line of the log of " + pod["name"])
    else:
        command = words[words.index("--") + 1:]
        assert command[0] == "vgpu-agent", command
        ran = subprocess.run(
            [sys.executable, "-m", "vgpu_agent", *command[1:]],
            env={{**os.environ, **pod["environment"]}},
            stdin=None if "-i" in words else subprocess.DEVNULL,
        )
        if ran.returncode:
            fail("command terminated with exit code " + str(ran.returncode))
"""


class FakeKubectl:
    """The program, in a folder for PATH, and its pods; `write` before it is used.

    Attributes:
        bound: pods of tenants → their nodes; empty for none yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bound: dict[str, str] = {}
        self._pods: list[dict[str, Any]] = []
        folder.mkdir()
        (folder / "calls").touch()

    def add(
        self,
        app: str,
        name: str,
        node: str,
        *,
        environment: dict[str, str] | None = None,
        phase: str = "Running",
        waiting: str = "",
        fails: str = "",
        hangs: bool = False,
        log: Path | None = None,
    ) -> None:
        """Add a pod of an application of the agent's."""
        states = [{"state": {"waiting": {"reason": waiting}}}] if waiting else []
        self._pods.append(
            {
                "app": app,
                "name": name,
                "log": str(log or ""),
                "object": {
                    "metadata": {"name": name},
                    "spec": {"nodeName": node},
                    "status": {"phase": phase, "containerStatuses": states},
                },
                "environment": environment or {},
                "fails": fails,
                "hangs": hangs,
            }
        )

    def write(self) -> None:
        """Write the program and its world."""
        world = self.folder / "world.json"
        world.write_text(json.dumps({"pods": self._pods, "bound": self.bound}))
        program = self.folder / "kubectl"
        program.write_text(
            _PROGRAM.format(
                python=sys.executable,
                plugin=str(PLUGIN),
                world=str(world),
                calls=str(self.folder / "calls"),
            )
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    @property
    def calls(self) -> list[list[str]]:
        """The words of every call."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which the program is found."""
        return {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}"}
