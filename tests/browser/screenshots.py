"""The pictures of the page in docs/images/: light, dark, and on a phone.

Run by ``scripts/screenshots``. Pods are placed by name, and ages are set, so that a picture changes
only when the page does.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

from tests.browser import scene
from tests.browser.chromium import Chromium
from tests.component.volcano import VGPU, VolcanoStage, volcano_stage
from vgpu_agent import log

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "images"
_UUIDS = [f"GPU-{place}f0e31c8-5a7b-4d92-8c46-1b9e7d2a640{place}" for place in range(1, 5)]
_SHARES = (
    scene.Share("chat-0", 0, 12288, 50, used_mib=9216, used_percent=38),
    scene.Share("chat-1", 0, 8192, 30, used_mib=5120, used_percent=17),
    scene.Share("embed-0", 1, 6144, 25, used_mib=4096, used_percent=21),
    scene.Share("train-0", 2, 16384, 80, used_mib=14336, used_percent=74),
    scene.Share("notebook-0", 3, 4096, 20, used_mib=512, used_percent=2),
)
_ILL = 2
# name → width in pixels, the id of the last element, and whether it is dark
_SCREENS = {
    "page-light": (1200, "waiting", False),
    "page-dark": (1200, "gpus", True),
    "page-phone": (360, "g0", False),
}
# Each moment becomes one some minutes ago.
_AGES = """(() => {
  const now = Date.now();
  const set = (time, minutes) => {
    time.dateTime = new Date(now - minutes * 60000 - 30000).toISOString();
    time.dataset.clock = "12:00:00 UTC";
  };
  [...document.querySelectorAll("#hour time")].forEach((time, place) => set(time, 3 + 2 * place));
  for (const time of document.querySelectorAll("#gpus time, #waiting time")) set(time, 3);
  set(document.querySelector("#head time"), 61);
})()"""
_AGED = (
    "[...document.querySelectorAll('#main time, #head time')].every((time) => "
    "/ min/.test(time.textContent))"
)


async def _take(folder: Path) -> None:
    """Start the node and a browser, break a GPU, and take the pictures."""
    stage: VolcanoStage
    async with (
        # the refused pod is not tried again, which would be another event
        volcano_stage(folder, uuids=_UUIDS, retry_seconds=300) as stage,
        Chromium(folder) as browser,
    ):
        await stage.start_agent(VGPU)
        await scene.serve(stage, _SHARES)
        await scene.refuse(stage, "train-1", 20 * 1024)
        for number, celsius in enumerate((61, 52, 74, 39)):
            stage.gpus.temperature(number, celsius)
        stage.gpus.xid(_ILL, 79)
        stage.gpus.recovery_action(_ILL, "reboot")
        address = f"http://{stage.agent.public_address}/"
        for name, (width, last, dark) in _SCREENS.items():
            async with browser.tab(width=width, height=900, dark=dark) as tab:
                await tab.open(address)
                await tab.until("document.getElementById('live').textContent === 'live'")
                await tab.until(
                    f"document.getElementById('g{_ILL}h').textContent.includes('asks for')"
                )
                await tab.until("document.getElementById('g3').textContent.includes('uses 512')")
                await tab.evaluate(_AGES)
                await tab.until(_AGED)
                await tab.picture(PICTURES / f"{name}.png", last=last)


def main() -> None:
    """Take all pictures."""
    log.configure(level="error")  # not the simulator's steps
    folder = Path(tempfile.mkdtemp(prefix="vgs", dir="/tmp"))
    PICTURES.mkdir(exist_ok=True)
    try:
        asyncio.run(_take(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for picture in sorted(PICTURES.glob("*.png")):
        sys.stdout.write(f"{picture}: {picture.stat().st_size // 1024} KiB\n")


if __name__ == "__main__":
    main()
