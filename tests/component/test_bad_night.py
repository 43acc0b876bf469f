"""The failures of a bad night, one row each: provoked in the agent's real process, read as an
operator reads them, and mended.

Each view has the cause *and* the remedy, in the words of docs/troubleshooting.md: ``vgpu-agent
status``, the page for a browser without its script, the log, and where there is an API server an
event. A row says which view it cannot have, and why.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import html
import json
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests import constants
from tests.component.commands import command
from tests.component.conftest import QUICK as PLAIN
from tests.component.conftest import SHARED, Stage, full
from tests.component.volcano import (
    NODE,
    U0,
    VolcanoStage,
    asks,
    volcano_stage,
)
from tests.patience import FOR_EVER_SECONDS, PATIENCE_SECONDS, eventually
from tests.replacing import replace_text
from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.agent_process import AgentProcess
from vgpu_agent.sim.mps_tools import MpsTools, end_daemon
from vgpu_agent.sim.stand_in_library import REGION_BYTES, load_instruction

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "troubleshooting.md").read_text()

# the exit status of `vgpu-agent status`
HEALTHY, DEGRADED, UNREACHABLE = 0, 1, 2

AGAIN = "see dmesg; if the driver does not answer within minutes, drain the node and reboot it"
RESET = "drain the GPU's pods and reset it (nvidia-smi --gpu-reset -i …)"
REBOOT = "drain the node and reboot it; if the GPU is lost again, check its slot and its power"
KUBELET = "start the kubelet, or correct the directory in which its socket is looked for"
ROOM = "a directory with room in which the agent can write; until then …"
CORRECT = "correct it, nothing has to be restarted"
PROGRAM = (
    "look at the program that used the GPU at that time: its own error is the most likely cause"
)


def pattern(words: str) -> re.Pattern[str]:
    """The expression for a sentence of the guide, in which ``…`` stands for the part that differs;
    at the end for anything at all.
    """
    return re.compile(".*?".join(re.escape(piece) for piece in words.split("…")))


def one_line(text: str) -> str:
    """The text as it reads: without markup, entities and line breaks."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def has(words: str, text: str) -> bool:
    """Tell whether the sentence is in the text."""
    return bool(pattern(words).search(text))


class Night:
    """A node in a cluster with Volcano, whose agent serves NVIDIA's family as well."""

    def __init__(self, stage: VolcanoStage) -> None:
        self.stage = stage
        self.cluster, self.gpus = stage.cluster, stage.gpus
        self.tools = MpsTools(stage.folder / "tools")  # installed by a row
        self._exit = contextlib.ExitStack()

    @property
    def agent(self) -> AgentProcess:
        return self.stage.agent

    def configure(self, more: str = "", *, quiet_seconds: float = 600.0) -> None:
        """Write the configuration; by default no GPU comes back before its row is over."""
        self.stage.configure(
            f"families: {{nvidia: true, volcanoVgpu: true}}\nmps: {{shmSizeMib: 1}}\n{more}"
        )
        text = self.stage.config.read_text()
        assert "quietSeconds: 0.5" in text
        replace_text(
            self.stage.config,
            text.replace("quietSeconds: 0.5", f"quietSeconds: {quiet_seconds}"),
        )

    def fill(self, directory: Path) -> None:
        """Mount a file system without room at a directory, until `empty`."""
        self._exit.enter_context(full(directory))

    def empty(self) -> None:
        """Take it away."""
        self._exit.close()

    def deliver(self, *, layout: int = REGION_BYTES) -> None:
        """Deliver libvgpu.so, with a region of that size."""
        self.stage.deliver_library()
        library = self.stage.folder / "vgpu" / "libvgpu.so"
        content = library.read_bytes()
        ours = load_instruction(REGION_BYTES)
        assert ours in content
        library.write_bytes(content.replace(ours, load_instruction(layout)))

    async def well(self) -> None:
        """Let a GPU that answers recover."""
        self.configure(quiet_seconds=0.1)
        await self.agent.until("/debug/status", lambda found: found["problems"] == [])
        self.configure()
        await self.agent.until(
            "/debug/config",
            lambda found: found["values"]["gpu.recovery.quietSeconds"]["value"] == 600,
        )


# pauses that last seconds on a node
_QUICK: dict[str, float | str] = {
    constants.VERIFY: 0.3,
    constants.NVML_CALL_TIMEOUT: 1.0,
    constants.FLAP_WINDOW: 0.1,
    constants.EVENTS_LOOK: 0.3,
    constants.SOCKET_POLL: 0.5,
    constants.PAGE_REFRESH: 0.1,
    constants.MPS_PROBE: 0.1,
    constants.MPS_BACKOFF_MIN: 0.1,
    constants.MPS_BACKOFF_MAX: 0.5,
}

Step = Callable[[Night], Awaitable[None]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One failure.

    Attributes:
        name: of the row.
        cause: the sentence of the guide, ``…`` for the part that differs.
        remedy: the same.
        provoke: makes it happen.
        mend: ends it.
        part: the kind and subject of the problem.
        log: the event in the log.
        event: the reason of the event in Kubernetes; empty where there is none.
        no_event: why there is none.
        logged: the cause in the log, where the name of the event tells a part of it.
        told: the cause in the event of Kubernetes, where it has other words.
        ready: it stops no resource, so ``/readyz`` succeeds.
        pod: of whom ``status --pod``, the search of the page and the event tell; empty for the
            node.
        advice: the remedy in ``status --pod`` and on the page, where it has the pod's names.
        levels: of which the line in the log may be.
    """

    name: str
    cause: str
    remedy: str
    provoke: Step
    mend: Step
    part: str
    log: str
    event: str = "VgpuProblem"
    no_event: str = ""
    logged: str = ""
    told: str = ""
    ready: bool = False
    pod: str = ""
    advice: str = ""
    levels: tuple[str, ...] = ("warning", "error")


async def _no_driver(night: Night) -> None:
    night.gpus.fault("nvmlInit*", code=9)
    night.deliver()
    night.configure()
    await night.stage.new_agent().start()


async def _driver(night: Night) -> None:
    night.gpus.clear_faults()
    await night.stage.offered()


async def _lose(night: Night) -> None:
    night.gpus.lose(0)


async def _fall_off(night: Night) -> None:
    night.gpus.xid(1, 79)
    night.gpus.lose(1)


async def _find(night: Night) -> None:
    night.gpus.restore(0)
    night.gpus.restore(1)
    await night.well()


async def _program(night: Night) -> None:
    await night.stage.serve("faulty", asks(1, 10), annotations={"volcano.sh/vgpu-use-gpuuuid": U0})
    await night.stage.settled("faulty")
    night.gpus.xid(0, 31)
    await night.agent.until_logged("gpu.xid")


async def _end_program(night: Night) -> None:
    night.cluster.delete_pod("faulty")


def xid(gpu: int, code: int) -> Step:
    """The step that has the driver report an XID."""

    async def provoke(night: Night) -> None:
        night.gpus.xid(gpu, code)

    return provoke


async def _hang(night: Night) -> None:
    night.gpus.fault("nvmlDeviceGetTemperature", times=1, delay_ms=int(FOR_EVER_SECONDS * 1000))


async def _return(night: Night) -> None:
    night.gpus.clear_faults()
    await night.well()


async def _kill_kubelet(night: Night) -> None:
    await night.cluster.kubelet.stop()


async def _remove_socket(night: Night) -> None:
    await night.cluster.kubelet.stop()
    (night.cluster.kubelet.plugins / "kubelet.sock").unlink()


async def _start_kubelet(night: Night) -> None:
    await night.cluster.kubelet.start()
    await night.stage.offered()


async def _fill_state(night: Night) -> None:
    night.fill(night.stage.folder / "state")
    config_map = {
        "metadata": {"name": "volcano-vgpu-device-config"},
        "data": {"device-config.yaml": "nvidia:\n  deviceSplitCount: 9\n"},
    }
    night.cluster.objects.create("configmaps", config_map, "kube-system")


async def _fill_cdi(night: Night) -> None:
    night.fill(night.cluster.cdi_directory)
    night.cluster.create_pod("waits", asks(1, 10))


async def _fill_containers(night: Night) -> None:
    night.fill(night.stage.folder / "vgpu" / "vgpu" / "regions")
    night.cluster.create_pod("waits", asks(1, 10))


async def _empty(night: Night) -> None:
    night.empty()


async def _empty_and_start(night: Night) -> None:
    night.empty()
    await night.cluster.running("waits")
    night.cluster.delete_pod("waits")


async def _misspell(night: Night) -> None:
    night.configure("lissten: :1\n")


async def _correct(night: Night) -> None:
    night.configure()


async def _too_many(night: Night) -> None:
    night.configure(SHARED.replace("replicas: 4", "replicas: 300000"))


async def _share_by_mps(night: Night) -> None:
    night.configure(SHARED.replace("timeSlicing", "mps"))


async def _install_mps(night: Night) -> None:
    await asyncio.to_thread(MpsTools.install, night.tools.directory, night.gpus.directory)
    await night.agent.until_ready()
    night.configure()
    await night.agent.until("/debug/mps", lambda found: found["daemons"][0]["state"] == "stopped")


async def _bad_library(night: Night) -> None:
    night.deliver(layout=REGION_BYTES + 8)


async def _good_library(night: Night) -> None:
    night.deliver()


async def _restart_with_bad_library(night: Night) -> None:
    await night.agent.terminate()
    await asyncio.to_thread(_remove_installed, night.stage.folder / "vgpu")
    night.deliver(layout=REGION_BYTES + 8)
    await night.agent.start()


def _remove_installed(directory: Path) -> None:
    for path in directory.rglob("libvgpu*.so*"):
        path.unlink()


async def _outage(night: Night) -> None:
    await night.cluster.api.down()


async def _end_outage(night: Night) -> None:
    await night.cluster.api.up()


ROWS = (
    Row(
        "no driver, and the agent waits",
        "no usable NVIDIA driver: …",
        "Check that the nvidia kernel module is loaded (lsmod), and /dev/nvidiactl there",
        _no_driver,
        _driver,
        "nvml",
        "nvml.missing",
        "GpuDriverMissing",
    ),
    Row(
        "lost GPU",
        "…GPU is lost (NVML code 15)",
        REBOOT,
        _lose,
        _find,
        "gpu 0",
        "gpu.lost",
        "GpuLost",
        ready=True,
    ),
    Row(
        "XID 31",
        "XID 31: a program touched GPU memory that is not mapped",
        PROGRAM,
        _program,
        _end_program,
        "",
        "gpu.xid",
        "GpuProgramError",
        ready=True,
        pod="faulty",
        # The GPU is well, and a tenant can repeat it at will.
        levels=("info",),
        advice=(
            "so the program of container … has most likely caused it, and the GPU is not the "
            "cause; look at its log of that time."
        ),
    ),
    Row(
        "XID 48",
        "XID 48: GPU memory lost bits beyond what ECC corrects",
        f"{RESET}; replace the card if the error comes back",
        xid(0, 48),
        Night.well,
        "gpu 0",
        "gpu.unhealthy",
        "GpuUnhealthy",
        ready=True,
    ),
    Row(
        "XID 79",
        "XID 79: the GPU has fallen off the bus",
        REBOOT,
        _fall_off,
        _find,
        "gpu 1",
        "gpu.lost",
        "GpuLost",
        ready=True,
    ),
    Row(
        "XID 94",
        "XID 94: a memory error hit one program only",
        "restart the pod that was hit; the GPU needs a reset only if the driver asks for it",
        xid(0, 94),
        Night.well,
        "gpu 0",
        "gpu.unhealthy",
        "GpuUnhealthy",
        ready=True,
    ),
    Row(
        "hung driver",
        "… has not returned for … s",
        AGAIN,
        _hang,
        _return,
        "nvml",
        "nvml.hung",
        "GpuDriverHung",
        logged="nvmlDeviceGetTemperature",
        told="the NVIDIA driver does not return from …",
    ),
    Row(
        "killed kubelet",
        "…: cannot connect to …: …",
        KUBELET,
        _kill_kubelet,
        _start_kubelet,
        "resource nvidia.com/gpu, volcano.sh/vgpu-cores, volcano.sh/vgpu-memory, "
        "volcano.sh/vgpu-number",
        "plugin.registering_again",
        logged="cannot connect to …/kubelet.sock",
    ),
    Row(
        "kubelet gone",
        "waiting for the kubelet: there is no …/kubelet.sock",
        KUBELET,
        _remove_socket,
        _start_kubelet,
        "resource nvidia.com/gpu, volcano.sh/vgpu-cores, volcano.sh/vgpu-memory, "
        "volcano.sh/vgpu-number",
        "kubelet.waiting",
        logged="/kubelet.sock",
    ),
    Row(
        "full state directory",
        "cannot write … in …: …",
        ROOM,
        _fill_state,
        _empty,
        "files",
        "state.not_written",
        logged="No space left on device",
        ready=True,
    ),
    Row(
        "full CDI directory",
        "cannot write … in …: …",
        ROOM,
        _fill_cdi,
        _empty_and_start,
        "files",
        "grants.not_written",
        logged="No space left on device",
        ready=True,
    ),
    Row(
        "full library directory",
        "cannot write … in …: …",
        ROOM,
        _fill_containers,
        _empty_and_start,
        "files",
        "grants.not_written",
        logged="No space left on device",
        ready=True,
    ),
    Row(
        "bad configuration on reload",
        "the newest configuration is not in force: …",
        CORRECT,
        _misspell,
        _correct,
        "config",
        "config.refused",
        logged="lissten: unknown key, did you mean listen?",
        ready=True,
    ),
    Row(
        "list too long on reload",
        "… make a device list of … MiB, and the agent sends at most … MiB",
        "replicas: at most … for each of the … devices would fit, … are configured",
        _too_many,
        _correct,
        "config",
        "config.refused",
        ready=True,
    ),
    Row(
        "MPS tools missing",
        "cannot run …: …",
        (
            "it comes with NVIDIA's driver: give the agent's container the capabilities "
            "compute,utility, or add the program's directory to its PATH"
        ),
        _share_by_mps,
        _install_mps,
        "resource nvidia.com/gpu",
        "mps.daemon_failed",
    ),
    Row(
        "wrong library, beside a good one",
        "has a shared region of unknown layout: the size of layout …, …, is not in its code",
        "deliver a library of HAMi 2.4.1 to 2.10 other than 2.8.1",
        _bad_library,
        _good_library,
        "config",
        "config.caution",
        ready=True,
    ),
    Row(
        "wrong library",
        "has a shared region of unknown layout: the size of layout …, …, is not in its code",
        "deliver a library of HAMi 2.4.1 to 2.10 other than 2.8.1",
        _restart_with_bad_library,
        _good_library,
        "resource volcano.sh/vgpu-cores, volcano.sh/vgpu-memory, volcano.sh/vgpu-number",
        "plugin.withheld",
        "GpuLibraryMissing",
    ),
    Row(
        "API server away",
        "the watch of … has been failing for … s: …; known pods are served, and writes wait",
        "bring the API server back; nothing has to be restarted",
        _outage,
        _end_outage,
        "API server",
        "cluster.watch_failed",
        "",
        no_event="all nodes would write one at the moment when the API server is back",
        logged="GET /api/v1/…: …",
        ready=True,
    ),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.name))
def test_the_guide_has_the_sentences(row: Row) -> None:
    """An operator searches for what the screen shows."""
    for words in filter(None, (row.cause, row.remedy, row.advice, row.told)):
        assert words.strip("…") in GUIDE


class Seen:
    """The views of the agent at one moment, and what the log and the cluster got since another."""

    def __init__(self, night: Night) -> None:
        self.night = night
        self._lines = len(night.agent.log_lines()) if night.stage.log.exists() else 0
        self._events = {event["metadata"]["name"]: event["count"] for event in self._all()}

    def _all(self) -> list[dict[str, Any]]:
        return list(self.night.cluster.objects.list("events", "default"))

    def events(self, reason: str) -> list[str]:
        """The messages of the events with this reason since then, with the kinds of their
        objects.
        """
        return [
            f"{event['involvedObject']['kind']} {event['message']}"
            for event in self._all()
            if event["reason"] == reason
            and event["count"] > self._events.get(event["metadata"]["name"], 0)
        ]

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The lines of the log with that event since then."""
        lines = self.night.agent.log_lines()
        # another run of the agent has a log of its own
        since = self._lines if len(lines) >= self._lines else 0
        return [line for line in lines[since:] if line["msg"] == event]


async def status(agent: AgentProcess, *words: str) -> tuple[int, str]:
    """Exit status and output of ``vgpu-agent status``."""
    ran = await command("status", "--debug-listen", agent.debug_address, *words)
    return ran.status, one_line(ran.text + ran.err)


async def page(agent: AgentProcess, path: str = "/") -> str:
    """The page as a browser gets it."""
    address = f"http://{agent.public_address}{path}"
    async with (
        aiohttp.ClientSession() as session,
        session.get(address, headers={"Accept": "text/html"}) as answer,
    ):
        return await answer.text()


async def problems_on_page(agent: AgentProcess, number: int) -> list[str]:
    """The problems on the page, once there are so many: it is made anew every second."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            (listed,) = re.findall('<ul id="problems".*?</ul>', await page(agent), re.DOTALL)
            items = [one_line(item) for item in re.findall("<li .*?</li>", listed, re.DOTALL)]
            if len(items) == number:
                return items
            await asyncio.sleep(0.1)


async def check_node(row: Row, night: Night) -> None:
    """Check status, JSON, probe, metrics and page."""
    agent = night.agent
    found = await agent.until(
        "/debug/status",
        lambda answer: (
            [each["part"] for each in answer["problems"]] == [row.part]
            and has(row.cause, answer["problems"][0]["reason"])
            and has(row.remedy, answer["problems"][0]["reason"])
        ),
        timeout_seconds=PATIENCE_SECONDS,
    )
    (problem,) = found["problems"]

    code, text = await status(agent)
    assert code == DEGRADED
    # another table has the reasons of ids that are held back
    text = text.partition(" Problems ")[2]
    assert has(row.cause, text), text
    assert len(pattern(row.remedy).findall(text)) == 1, text
    code, ready = await agent.get_text("/readyz")
    assert (code, f"{'[~]' if row.ready else '[-]'} {row.part}: " in ready) == (
        200 if row.ready else 503,
        True,
    ), ready
    assert has(row.cause, ready), ready
    assert has(row.remedy, ready), ready
    kind = problem["kind"]
    assert await agent.metric(f'vgpu_agent_problems{{kind="{kind}"}}') == 1
    (item,) = await problems_on_page(agent, 1)
    assert has(row.cause, item), item
    assert has(row.remedy, item), item


async def check_pod(row: Row, night: Night) -> None:
    """Check what the pod's owner gets to read. The node has no problem."""
    code, text = await status(night.agent, "--pod", f"default/{row.pod}")
    assert code == HEALTHY
    assert has(row.cause, text), text
    assert has(row.advice, text), text
    shown = one_line(await page(night.agent, f"/?pod={row.pod}"))
    assert has(row.cause, shown), shown
    assert has(row.advice, shown), shown
    assert (await night.agent.get("/debug/status"))["problems"] == []
    assert await night.agent.get_text("/readyz") == (200, "ready\n")


async def check_log(row: Row, seen: Seen) -> None:
    """Check that one line tells the cause and the remedy."""
    told: list[dict[str, Any]] = []

    def is_told() -> bool:
        told[:] = [
            line
            for line in seen.logged(row.log)
            if line["level"] in row.levels
            and has(row.logged or row.cause, json.dumps(line, ensure_ascii=False))
        ]
        return bool(told)

    try:
        await eventually(is_told)
    except TimeoutError:
        raise AssertionError(seen.logged(row.log) or "no such line") from None
    assert all(has(row.remedy, " ".join(map(str, line.values()))) for line in told), told


async def check_event(row: Row, seen: Seen) -> None:
    """Check that Kubernetes has the event with both, or none of this reason."""
    if not row.event:
        assert row.no_event
        return
    kind = "Pod" if row.pod else "Node"

    def is_told() -> bool:
        return any(
            text.startswith(kind) and has(row.told or row.cause, text) and has(row.remedy, text)
            for text in seen.events(row.event)
        )

    try:
        await eventually(is_told)
    except TimeoutError:
        raise AssertionError(seen.events(row.event) or "no such event") from None


async def play(row: Row, night: Night) -> None:
    """Provoke the failure, look everywhere, and mend it."""
    seen = Seen(night)
    await row.provoke(night)
    try:
        await (check_pod if row.pod else check_node)(row, night)
        await check_log(row, seen)
        await check_event(row, seen)
    finally:
        await row.mend(night)
    await is_over(row, night, seen)


async def is_over(row: Row, night: Night, seen: Seen) -> None:
    """Check that no view has the problem any more."""
    await night.agent.until("/debug/status", lambda found: found["problems"] == [])
    code, text = await status(night.agent)
    assert (code, "none known" in text) == (HEALTHY, True), text
    assert await night.agent.get_text("/readyz") == (200, "ready\n")
    assert await problems_on_page(night.agent, 0) == []
    if row.event == "VgpuProblem":
        await eventually(
            lambda: any(has(row.cause, text) for text in seen.events("VgpuProblemOver"))
        )


@pytest.fixture
async def night(folder: Path) -> AsyncIterator[Night]:
    """A node with two A10 in a cluster with Volcano; its agent is started by the first row."""
    async with volcano_stage(folder) as stage:
        stage.constants |= _QUICK
        made = Night(stage)
        stage.constants[constants.MPS_CONTROL_BINARY] = str(made.tools.control)
        stage.constants[constants.MPS_SMI_BINARY] = str(made.tools.smi)
        yield made
        end_daemon(stage.gpus.directory / "mps" / "nvidia.com" / "gpu" / "pipe")
        made.gpus.clear_faults()
        made.empty()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system without room")
async def test_the_failures_of_one_night(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    """One agent goes through all of them. Each is seen in each view, and is over when it is mended;
    a row that fails does not hide the next one.
    """
    monkeypatch.setenv("FAIL_ON_INIT_ERROR", "false")  # so that the first row has an agent
    failures = []
    for row in ROWS:
        try:
            await play(row, night)
        except (AssertionError, SimulationError, TimeoutError) as err:
            failures.append(f"{row.name}: {err}")
    assert failures == []


# -- an agent that does not start: no page and no event of its own, because nothing of it runs ---

PORT_TAKEN = (
    "the address is already in use; stop the process that holds it "
    "(ss -ltnp 'sport = :…' names it) or …"
)


@dataclasses.dataclass(frozen=True)
class Fatal:
    """A reason not to start. ``cause`` and ``remedy`` are in the guide; ``status`` is that of the
    process.
    """

    name: str
    cause: str
    remedy: str
    config: str = PLAIN
    status: int = 1
    simulate: bool = True
    listen: str = ""


FATAL = (
    Fatal("port taken", "cannot listen on …: …", PORT_TAKEN, listen="taken"),
    Fatal(
        "no driver",
        "no usable NVIDIA driver: …",
        "Install the NVIDIA driver on the node, or set driverRoot (now …) to where it is installed",
        config=PLAIN.replace("gpu: {", "gpu: {driverRoot: /nowhere, "),
        simulate=False,
    ),
    Fatal(
        "list too long",
        "… make a device list of … MiB, and the agent sends at most … MiB",
        "replicas: at most … for each of the … devices would fit, … are configured",
        config=PLAIN + SHARED.replace("replicas: 4", "replicas: 300000"),
        status=2,
    ),
)


@pytest.mark.parametrize("row", FATAL, ids=lambda row: str(row.name))
async def test_an_agent_that_does_not_start(stage: Stage, row: Fatal) -> None:
    """The last line of its log tells all, and Kubernetes shows that line as the container's last
    state (``terminationMessagePolicy``). ``vgpu-agent status`` says that there is no agent.
    """
    assert row.cause.strip("…") in GUIDE
    assert row.remedy in GUIDE
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("", 0)) as free:
        port, unused = taken.getsockname()[1], free.getsockname()[1]
        free.close()
        agent = AgentProcess(
            stage.folder / "agent.log",
            kubelet=stage.folder / "kubelet",
            simulate=stage.node.directory if row.simulate else None,
            config=stage.config,
            listen=f"127.0.0.1:{port if row.listen else 0}",
            debug_listen=f"127.0.0.1:{unused}",
        )
        replace_text(stage.config, row.config)
        await agent.spawn()
        assert await agent.wait() == row.status
    last = agent.log_lines()[-1]
    assert (last["msg"], last["level"]) == ("command.failed", "error")
    assert has(row.cause, last["error"].replace("\n", " ")), last
    assert has(row.remedy, last["error"].replace("\n", " ")), last
    agent.debug_address = f"127.0.0.1:{unused}"
    code, text = await status(agent)
    assert code == UNREACHABLE
    assert "cannot reach the agent at" in text
    assert "is it running?" in text


@pytest.mark.parametrize("file", ["daemonset.yaml", "chart/templates/daemonset.yaml"])
def test_the_reason_is_in_the_state_of_the_container(file: str) -> None:
    """``kubectl describe pod`` is what an operator looks at in a CrashLoop."""
    text = (ROOT / "manifests" / file).read_text()
    assert "terminationMessagePolicy: FallbackToLogsOnError\n" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
async def test_no_permission(folder: Path) -> None:
    """The kubelet's directory belongs to another user, and the agent, as in its container, has no
    capability that ignores this.
    """
    row = Row(
        "no permission",
        "waiting for the kubelet: …",
        "let the agent read it: run it as root, and look for a security policy (SELinux, AppArmor)",
        _outage,  # neither is called
        _outage,
        "resource nvidia.com/gpu",
        "kubelet.waiting",
        logged="cannot read …: Permission denied",
    )
    for words in (row.cause, row.remedy):
        assert words.strip("…") in GUIDE
    async with volcano_stage(folder) as stage:
        plugins = stage.cluster.kubelet.plugins
        text = f"{PLAIN}nodeName: {NODE}\nkubeconfig: {folder}/cluster/kubeconfig\n"
        text += f"stateDirectory: {folder}/state\nnodeStatus: {{events: always}}\n"
        replace_text(stage.config, text)
        stage.agent = AgentProcess(
            stage.log,
            kubelet=stage.cluster.kubelet_directory,
            simulate=stage.gpus.directory,
            config=stage.config,
            constants=stage.constants | _QUICK,
            through=(
                *("setpriv", "--bounding-set=-dac_override,-dac_read_search"),
                *("--pdeathsig", "TERM", "--"),
            ),
        )
        night = Night(stage)
        seen = Seen(night)
        os.chown(plugins, 65534, 65534)
        plugins.chmod(0o700)
        try:
            await stage.agent.start()
            await check_node(row, night)
            await check_log(row, seen)
            await check_event(row, seen)
        finally:
            os.chown(plugins, 0, 0)
        await is_over(row, night, seen)
