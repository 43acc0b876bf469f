"""``vgpu-agent status`` as a process beside the agent's real one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

from tests.component.commands import command
from tests.component.conftest import Stage
from tests.patience import quickest

# A person must not wait, and a shell loop over pods must not cost a node its processors.
BUDGET_SECONDS = 0.15


def processor_seconds(*words: str) -> float:
    """The time that the command keeps a processor busy: what it takes on a node with one to spare,
    however busy this machine is. Bytecode is kept, as in the image.
    """
    environment = {name: text for name, text in os.environ.items() if "BYTECODE" not in name}
    with subprocess.Popen(
        [sys.executable, "-m", "vgpu_agent", *words], stdout=subprocess.DEVNULL, env=environment
    ) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode in (0, 1)
    return usage.ru_utime + usage.ru_stime


async def test_status_answers_in_a_moment(stage: Stage) -> None:
    """The page is made by the agent, so the command loads next to nothing."""
    agent = await stage.ready_agent()
    words = ("status", "--debug-listen", agent.debug_address)

    async def attempt() -> float:
        return await asyncio.to_thread(processor_seconds, *words)

    seconds = await quickest(attempt, within_seconds=BUDGET_SECONDS)
    assert seconds < BUDGET_SECONDS


async def test_the_page_is_the_agents_own_text(stage: Stage) -> None:
    """So the command is never older or newer than the page. Text about all pods is refused."""
    agent = await stage.ready_agent()

    async def page() -> list[str]:
        _, text = await agent.get_text("/debug/status?text", debug=True)
        return text.splitlines()[2:]

    # until its use is measured
    while any("-/40960" in line for line in await page()):  # noqa: ASYNC110 - no event says so
        await asyncio.sleep(0.01)
    shown = (await command("status", "-o", "wide", "--debug-listen", agent.debug_address)).text
    assert await page() == shown.splitlines()[2:]
    status, refusal = await agent.get_text("/debug/explain?text", debug=True)
    assert status == 400
    assert "write ?text&pod=NAMESPACE/NAME" in refusal
