"""Debian's Chromium: where its program is, a process of one's own, and tabs that a test looks into
and types into.

It is driven by the DevTools protocol over a WebSocket, so that neither a driver nor npm is needed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import aiohttp

from tests.patience import PATIENCE_SECONDS
from tests.real_node.rig import cache
from tests.real_node.rig.errors import RequirementError

_PACKAGE = "chromium"
_NAMES = (_PACKAGE, "google-chrome")
# the configuration of fonts that were unpacked, because this machine has none
_FONTS = "fonts.conf"
_FONTS_TEXT = """\
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir prefix="relative">usr/share/fonts</dir></fontconfig>
"""
# The first start on a busy machine reads 300 MB.
_START_SECONDS = 60.0
_POLL_SECONDS = 0.05
_FLAGS = (
    "--headless",
    "--remote-debugging-port=0",
    "--no-sandbox",  # it does not work for root; this browser only shows pages of ours
    "--disable-gpu",
    "--disable-dev-shm-usage",  # /dev/shm has 64 MB in many containers
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    # pages that no window shows are as quick as one in front
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    # the same picture on every machine
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--font-render-hinting=none",
)
# name → virtual key code of Windows, and the text that it types
_KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), "Escape": (27, "")}


class BrowserError(Exception):
    """Chromium or a page in it did not do what it was asked."""


def program() -> tuple[Path, dict[str, str]]:
    """Return the program and the variables that it needs.

    Where it is not installed, Debian's packages are unpacked: that needs no root and leaves the
    machine as it is. They are fetched once per machine.

    Raises:
        RequirementError: it is not here and cannot be had.
    """
    for name in _NAMES:
        if (found := shutil.which(name)) is not None:
            return Path(found), {}
    if shutil.which("apt-get") is None:
        raise RequirementError("chromium is not in PATH, and there is no apt-get to fetch it")
    folder = cache.get("chromium-debian", _unpack)
    libraries = {str(each.parent) for each in folder.rglob("lib*.so*")}
    variables = {"LD_LIBRARY_PATH": ":".join(sorted(libraries, key=len))}
    if (folder / _FONTS).exists():
        variables["FONTCONFIG_FILE"] = str(folder / _FONTS)
    return folder / "usr" / "lib" / _PACKAGE / _PACKAGE, variables


def _unpack(folder: Path) -> None:
    """Unpack the package, and all it depends on that is not installed here."""
    plan = ["apt-get", "install", "-qq", "--print-uris", "--no-install-recommends", _PACKAGE]
    # Package lists are often absent or stale, and fetching them is slow.
    for prepare in ([], ["apt-get", "update", "-qq"]):
        if prepare:
            _apt(prepare, folder)
        planned = _apt(plan, folder)
        # 'http://…/chromium_1_amd64.deb' chromium_1_amd64.deb 80000000 SHA256:…
        names = [
            line.split()[1].partition("_")[0]
            for line in planned.stdout.splitlines()
            if line.startswith("'")
        ]
        fetched = _apt(["apt-get", "download", "-qq", *names], folder) if names else planned
        if names and fetched.returncode == 0:
            break
    else:
        raise RequirementError(f"apt-get download {_PACKAGE}: {fetched.stderr.strip()[-500:]}")
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(folder)], check=True)
        package.unlink()
    if (folder / "usr" / "share" / "fonts").is_dir():
        (folder / _FONTS).write_text(_FONTS_TEXT)


def _apt(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, text=True, capture_output=True, check=False)


class Chromium:
    """A browser without a window; an async context.

    State: the process, its profile and log in ``folder``, and the connection to it. After a crash
    of the process every call fails.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._exit = contextlib.AsyncExitStack()
        self._process: asyncio.subprocess.Process
        self._socket: aiohttp.ClientWebSocketResponse
        self._reader: asyncio.Task[None]
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._tabs: dict[str, Tab] = {}
        self._calls = 0

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            address = await self._start(stack)
            session = await stack.enter_async_context(aiohttp.ClientSession())
            self._socket = await session.ws_connect(address, max_msg_size=0)
            stack.push_async_callback(self._socket.close)
            self._reader = asyncio.create_task(self._read())
            self._exit = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit.aclose()
        await self._reader

    async def _start(self, stack: contextlib.AsyncExitStack) -> str:
        """Start the process, and return the address of its WebSocket."""
        path, variables = await asyncio.to_thread(program)
        profile = self._folder / "profile"
        with (self._folder / "chromium.log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                str(path),
                *_FLAGS,
                f"--user-data-dir={profile}",
                "about:blank",
                env=os.environ | variables,
                stdout=log,
                stderr=log,
                start_new_session=True,  # one group with the processes that it starts
            )
        stack.push_async_callback(self._stop)
        listening = profile / "DevToolsActivePort"  # its port, and the path of the WebSocket
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(FileNotFoundError):
                lines = listening.read_text().splitlines()
                if len(lines) == 2:
                    return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            if self._process.returncode is not None or time.monotonic() > deadline:
                said = (self._folder / "chromium.log").read_text(errors="replace")[-1000:]
                raise BrowserError(f"Chromium did not start: {said}")
            await asyncio.sleep(_POLL_SECONDS)

    async def _stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def _read(self) -> None:
        """Hand answers and events to those who wait for them, until the connection ends."""
        async for message in self._socket:
            received = json.loads(message.data)
            if answer := self._answers.pop(received.get("id"), None):
                if not answer.done():
                    answer.set_result(received)
            elif tab := self._tabs.get(received.get("sessionId", "")):
                tab.note(received["method"], received["params"])
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(BrowserError("Chromium has ended"))

    async def call(self, method: str, *, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol, of a tab's session or of the browser.

        Raises:
            BrowserError: Chromium refuses the call, or has ended.
        """
        self._calls += 1
        number = self._calls
        message = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        if self._reader.done():
            raise BrowserError("Chromium has ended")
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(message)
        async with asyncio.timeout(PATIENCE_SECONDS):
            answer = await self._answers[number]
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    @contextlib.asynccontextmanager
    async def tab(
        self, *, width: int = 1200, height: int = 900, dark: bool = False, scripts: bool = True
    ) -> AsyncIterator[Tab]:
        """A tab of its own in a screen of this size (CSS pixels)."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = await self.call(
            "Target.createTarget", url="about:blank", browserContextId=context, newWindow=True
        )
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        tab = self._tabs[attached["sessionId"]] = Tab(self, attached["sessionId"])
        try:
            for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
                await tab.call(f"{domain}.enable")
            await tab.call("Emulation.setFocusEmulationEnabled", enabled=True)
            await tab.call("Emulation.setScriptExecutionDisabled", value=not scripts)
            await tab.resize(width, height)
            await tab.colours(dark=dark)
            yield tab
        finally:
            del self._tabs[attached["sessionId"]]
            with contextlib.suppress(BrowserError):
                await self.call("Target.disposeBrowserContext", browserContextId=context)


class Tab:
    """One page.

    Attributes:
        errors: what its console has shown as an error or a warning, exceptions included.
        requests: every URL that it has asked for.
    """

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser, self._session = browser, session
        self._loaded = asyncio.Event()
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol; see `Chromium.call`."""
        return await self._browser.call(method, session=self._session, **parameters)

    def note(self, event: str, facts: dict[str, Any]) -> None:
        """Take an event of the DevTools protocol."""
        match event:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Network.requestWillBeSent":
                self.requests.append(facts["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(facts["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if facts["type"] in {"error", "warning", "assert"}:
                self.errors.append(json.dumps(facts["args"]))
            case "Log.entryAdded" if facts["entry"]["level"] in {"error", "warning"}:
                self.errors.append(f"{facts['entry']['text']} {facts['entry'].get('url', '')}")

    async def resize(self, width: int, height: int) -> None:
        """Change the screen's size; a narrow one is a phone's."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )

    async def colours(self, *, dark: bool) -> None:
        """Prefer dark or light colours. Nothing moves slowly, as for those who ask for that."""
        features = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce",
        }
        await self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": name, "value": value} for name, value in features.items()],
        )

    async def open(self, url: str) -> None:
        """Go to a page, and wait until it and its style and script are there.

        Raises:
            BrowserError: it cannot be reached.
        """
        async with self.loading():
            if error := (await self.call("Page.navigate", url=url)).get("errorText"):
                raise BrowserError(f"{url}: {error}")

    @contextlib.asynccontextmanager
    async def loading(self) -> AsyncIterator[None]:
        """Do something that leads to another page, and wait until that is there."""
        self._loaded.clear()
        yield
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self._loaded.wait()

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page.

        Raises:
            BrowserError: it throws, or the page is being left.
        """
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if details := answer.get("exceptionDetails"):
            thrown = details.get("exception", {}).get("description", details["text"])
            raise BrowserError(f"{expression[:200]}: {thrown}")
        return answer["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until a JavaScript expression holds in the page.

        Raises:
            BrowserError: not in time; the message has the page's text.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with contextlib.suppress(BrowserError):  # the page may be on its way to another
                if await self.evaluate(f"Boolean({condition})"):
                    return
            if time.monotonic() > deadline:
                shown = await self.evaluate("document.body.innerText")
                raise BrowserError(f"waited in vain for {condition} on the page:\n{shown}")
            await asyncio.sleep(_POLL_SECONDS)

    async def press(self, *names: str) -> None:
        """Press keys, one after the other: Tab, Enter or Escape."""
        for name in names:
            code, text = _KEYS[name]
            key = {"key": name, "code": name, "windowsVirtualKeyCode": code}
            down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
            await self.call("Input.dispatchKeyEvent", **key, **down)
            await self.call("Input.dispatchKeyEvent", **key, type="keyUp")

    async def type(self, text: str) -> None:
        """Type a text where the focus is."""
        await self.call("Input.insertText", text=text)

    async def accessible(self) -> list[tuple[str, str]]:
        """List role and name of each thing on the page in order, as a screen reader gets them."""
        nodes = (await self.call("Accessibility.getFullAXTree"))["nodes"]
        by_id = {node["nodeId"]: node for node in nodes}
        found: list[tuple[str, str]] = []

        def walk(node: dict[str, Any]) -> None:
            if not node["ignored"]:
                role, name = node["role"]["value"], node.get("name", {}).get("value", "")
                found.append((role, " ".join(str(name).split())))
            for child in node.get("childIds", ()):
                if child in by_id:
                    walk(by_id[child])

        walk(nodes[0])
        return found

    async def picture(self, path: Path, *, last: str) -> None:
        """Write the page as PNG, from its top to the end of the element with the id ``last``."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        bottom = await self.evaluate(
            f"document.getElementById('{last}').getBoundingClientRect().bottom + scrollY"
        )
        height = min(size["height"], round(bottom) + 16)
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height, "scale": 1}
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))
