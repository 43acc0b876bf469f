"""One browser and one node for all tests of the page, because both take seconds to start."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests import constants
from tests.browser import scene
from tests.browser.chromium import Chromium, program
from tests.component.volcano import VGPU, VolcanoStage, volcano_stage
from tests.real_node.rig.errors import RequirementError

_HERE = Path(__file__).parent
# no place in it where a line may break
LONG_POD = ("apodwithanameaslongaskubernetesallows" * 7)[:253]
SHARES = (
    scene.Share("train", 0, 8192, 30, used_mib=6144, used_percent=25),
    scene.Share("serve", 0, 4096, 20),
    scene.Share(LONG_POD, 1, 12288, 50, used_mib=1024, used_percent=5),
)
# a pod that cannot start
REFUSED = "too-large"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is a component test."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.component)
            # the first one may have to fetch the browser
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="module")
def room() -> Iterator[Path]:
    """A folder with a short path for all tests of a module: names of sockets have 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="vgb", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(room: Path) -> AsyncIterator[Chromium]:
    """Chromium. Skips where it cannot be had, unless REQUIRE_CLUSTER=1 insists."""
    try:
        program()
    except RequirementError as err:
        if os.environ.get("REQUIRE_CLUSTER") == "1":
            pytest.fail(f"REQUIRE_CLUSTER=1, but {err}", pytrace=False)
        pytest.skip(str(err))
    (room / "browser").mkdir()
    async with Chromium(room / "browser") as browser:
        yield browser


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(room: Path) -> AsyncIterator[VolcanoStage]:
    """A node with two A10, its agent, pods with shares, and one that cannot start."""
    async with volcano_stage(room) as stage:
        stage.constants[constants.FLAP_WINDOW] = 0.1  # a GPU may break in several tests
        await stage.start_agent(VGPU)
        await scene.serve(stage, SHARES)
        await scene.refuse(stage, REFUSED, 20 * 1024)
        yield stage
