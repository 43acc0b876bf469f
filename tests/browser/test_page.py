"""The page in a real browser, from the agent's real process: structure, keyboard, colours, a phone,
and what changes while somebody looks.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator

import pytest

from tests.browser import looks
from tests.browser.chromium import Chromium, Tab
from tests.browser.conftest import LONG_POD, REFUSED, SHARES
from tests.component.volcano import VolcanoStage

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIVE = "document.getElementById('live').textContent === 'live'"
# all moods of pills: a page without one of them tells nothing about its colours
MOODS = {"pill good", "pill warn", "pill bad", "pill plain"}


@contextlib.asynccontextmanager
async def looked_at(
    browser: Chromium,
    stage: VolcanoStage,
    query: str = "",
    *,
    outage: bool = False,
    scripts: bool = True,
    width: int = 1200,
    height: int = 900,
) -> AsyncIterator[Tab]:
    """The page in a tab. At the end its console must be empty, apart from a connection that was
    refused during an ``outage``, and nothing may have come from elsewhere.
    """
    address = f"http://{stage.agent.public_address}/"
    async with browser.tab(scripts=scripts, width=width, height=height) as tab:
        await tab.open(f"{address}{query}")
        if scripts:
            await tab.until(LIVE)
        yield tab
        errors = [error for error in tab.errors if not (outage and "ERR_CONNECTION" in error)]
        assert errors == []
        assert [url for url in tab.requests if not url.startswith((address, "data:,"))] == []


def words(part: str) -> str:
    """The text of a part of the page, in JavaScript."""
    return f"document.getElementById('{part}').textContent"


@contextlib.asynccontextmanager
async def ill_gpu(stage: VolcanoStage, number: int) -> AsyncIterator[None]:
    """GPU ``number`` reports XID 79, and the driver asks for a reset. At the end it is healthy."""
    # in this order: a driver that asks for nothing after the XID has the GPU healthy again
    stage.gpus.recovery_action(number, "reset")
    stage.gpus.xid(number, 79)
    try:
        yield
    finally:
        stage.gpus.recovery_action(number, "none")
        await stage.agent.until(
            "/debug/devices", lambda found: found["gpus"][number]["health"] == "Healthy"
        )


async def test_the_structure_is_that_of_a_document(browser: Chromium, stage: VolcanoStage) -> None:
    """Landmarks, headings, a card for each GPU and named bars, as a screen reader gets them."""
    async with looked_at(browser, stage) as tab:
        things = await tab.accessible()
    found = [role for role, _ in things]
    landmarks = [role for role in found if role in {"banner", "search", "main", "contentinfo"}]
    assert landmarks == ["banner", "search", "main", "contentinfo"]
    assert [name for role, name in things if role == "heading"] == [
        "node-a Ready no problems",
        *("Problems", "GPUs", "GPU 0 Healthy", "GPU 1 Healthy"),
        *("Pods that wait", "Resources", "The last hour"),
    ]
    bars = [name for role, name in things if role == "image"]
    assert bars == [
        "Memory used 6.0 GiB of 22.5 GiB given 12.0 GiB",
        "Compute used 25 % given 50 %",
        "Memory used 1.0 GiB of 22.5 GiB given 12.0 GiB",
        "Compute used 5 % given 50 %",
    ]
    assert ("searchbox", "Why is a pod where it is?") in things
    assert ("button", "Search") in things
    assert things[things.index(("status", "")) + 1] == ("StaticText", "live")
    assert {name for role, name in things if role == "link"} >= {
        *(f"default/{share.pod}" for share in SHARES),
        f"default/{REFUSED}",
    }


async def test_bars_are_as_long_as_their_figures(browser: Chromium, stage: VolcanoStage) -> None:
    """Given and used of memory and compute, as drawn."""
    async with looked_at(browser, stage) as tab:
        drawn = await tab.evaluate("""[...document.querySelectorAll("#g0 .bar")].map((bar) => {
          const width = (part) => part.getBoundingClientRect().width;
          return [...bar.children].map((part) =>
            [part.getAttribute("class"), Math.round(100 * width(part) / width(bar))]);
        })""")
    assert drawn == [[["given", 53], ["used", 27]], [["given", 50], ["used", 25]]]


async def test_a_pod_is_found_and_explained(browser: Chromium, stage: VolcanoStage) -> None:
    """By a part of its name and Enter; from a list of several; and one that cannot start."""
    async with looked_at(browser, stage) as tab:
        await tab.press("Tab")
        await tab.type("trai")
        async with tab.loading():
            await tab.press("Enter")
        await tab.until(LIVE)
        answer = await tab.evaluate(words("answer"))
        assert answer.startswith(
            "default/trainContainer main has 8192 MiB and 30 % of the cores of"
        )
        assert await tab.evaluate("document.activeElement === document.body")
        assert await tab.evaluate("document.querySelector('input').value") == "trai"

        await tab.press("Tab")
        await tab.evaluate("document.activeElement.select()")
        await tab.type("a")
        async with tab.loading():
            await tab.press("Tab", "Enter")  # the button
        assert "4 pods match." in await tab.evaluate(words("answer"))
        await tab.press("Tab", "Tab", "Tab")  # field, button, the first link
        async with tab.loading():
            await tab.press("Enter")
        assert re.match(f"default/{LONG_POD}Container", await tab.evaluate(words("answer")))
        await tab.open(f"http://{stage.agent.public_address}/?pod=default/{REFUSED}")
        assert "Container main may not start" in await tab.evaluate(words("answer"))


async def test_each_control_is_reached_by_tab_and_seen(
    browser: Chromium, stage: VolcanoStage
) -> None:
    """In the order of the document, with a line around it that stands out; on a narrow screen,
    where all is one column, from top to bottom. Escape empties the search.
    """
    async with looked_at(browser, stage, "?pod=a", width=400, height=700) as tab:
        controls = await tab.evaluate(looks.CONTROLS)
        assert len(controls) > 10
        tops = [control["top"] for control in controls if control["name"] != "Search"]
        assert tops == sorted(tops)
        for dark in (False, True):
            await tab.colours(dark=dark)
            await tab.evaluate("document.activeElement.blur()")
            await tab.open(f"http://{stage.agent.public_address}/?pod=a")
            for control in controls:
                await tab.press("Tab")
                focus = await tab.evaluate(looks.FOCUS)
                assert focus["name"] == control["name"]
                assert focus["line"] >= 2, focus
                assert focus["contrast"] >= 3, focus
                assert focus["inView"], focus
        await tab.evaluate("document.querySelector('input').focus()")
        await tab.press("Escape")
        assert await tab.evaluate("document.querySelector('input').value") == ""


async def test_texts_stand_out_from_their_ground(browser: Chromium, stage: VolcanoStage) -> None:
    """Light and dark: WCAG's 4.5:1, and 3:1 for large ones, with pills of every mood, an ill GPU
    and an answer.
    """
    async with looked_at(browser, stage, "?pod=train") as tab, ill_gpu(stage, 0):
        await tab.until(f"{words('g0h')}.includes('asks for a GPU reset')")
        await tab.evaluate("document.getElementById('live').className = 'pill plain'")
        for dark in (False, True):
            await tab.colours(dark=dark)
            found = await tab.evaluate(looks.CONTRAST)
            assert found["pale"] == []
            assert set(found["moods"]) == MOODS
            assert found["checked"] > 60


async def test_a_phone_cuts_nothing(browser: Chromium, stage: VolcanoStage) -> None:
    """360 px: no scrolling sideways, whatever the length of names and reasons."""
    async with looked_at(browser, stage, width=360, height=740) as tab, ill_gpu(stage, 1):
        await tab.until(f"{words('g1h')}.includes('asks for a GPU reset')")
        for query in ("", "?pod=a", f"?pod=default/{LONG_POD}"):
            await tab.open(f"http://{stage.agent.public_address}/{query}")
            assert await tab.evaluate("innerWidth") == 360
            assert await tab.evaluate(looks.CUT) == []


async def test_a_gpu_that_breaks_is_seen_at_once_and_its_return(
    browser: Chromium, stage: VolcanoStage
) -> None:
    """Pill, card, problem and the last hour, without a reload. Without scripts the page reloads
    itself.
    """
    async with (
        looked_at(browser, stage, scripts=False) as plain,
        looked_at(browser, stage) as tab,
    ):
        assert await plain.evaluate("document.querySelector('noscript meta').content") == "10"
        assert "State of" in await plain.evaluate(words("live"))
        await tab.evaluate("window.isTheSame = true")
        async with ill_gpu(stage, 0):
            await tab.until(f"{words('g0h')}.includes('XID 79: the GPU has fallen off the bus')")
            await tab.until(f"{words('g0h')}.includes('asks for a GPU reset')")
            assert await tab.evaluate("document.querySelector('#g0h .pill.bad').textContent") == (
                "Unhealthy"
            )
            pills = await tab.evaluate(
                "[...document.querySelectorAll('h1 .pill.warn')].map((pill) => pill.textContent)"
            )
            assert pills == ["Ready", "1 problem"]
            assert "Remedy" in await tab.evaluate(
                "getComputedStyle(document.querySelector('#problems .remedy'), '::before').content"
            )
            assert "drain" in await tab.evaluate("document.querySelector('#problems').textContent")
            assert "GPU 0 is" in await tab.evaluate(words("hour"))
            assert "Healthy" in await tab.evaluate(words("g1h"))
            async with plain.loading():  # by itself
                pass
            assert "Unhealthy" in await plain.evaluate(words("g0h"))
        await tab.until(f"{words('g0h')}.includes(' Healthy')")
        assert await tab.evaluate(f"{words('problems')}.length") == 0
        await tab.until("document.querySelector('h1').textContent.includes('no problems')")
        assert "GPU 0 is healthy again" in await tab.evaluate(words("hour"))
        assert await tab.evaluate("window.isTheSame")


async def test_a_restart_of_the_agent_is_said_and_survived(
    browser: Chromium, stage: VolcanoStage
) -> None:
    """The page says that it is not live, connects again by itself, and is up to date. The focus
    stays on its pod.
    """
    async with looked_at(browser, stage, outage=True) as tab:
        await tab.evaluate("window.isTheSame = true")
        link = "document.querySelector('#g0p a')"
        await tab.evaluate(f"{link}.focus()")
        await stage.agent.terminate()
        await tab.until("document.querySelector('#live.warn').textContent.startsWith('not live')")
        async with ill_gpu(stage, 1):
            await stage.restart_agent()
            await tab.until(LIVE)
            await tab.until(f"{words('g1h')}.includes('Unhealthy')")
        assert await tab.evaluate("window.isTheSame")
        assert await tab.evaluate(f"document.activeElement === {link}")
        await tab.until(f"{words('g1h')}.includes(' Healthy')")
