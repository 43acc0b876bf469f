"""Fixtures for all tests: the event loop must not be blocked,
and the golden node of the contracts.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import io
import logging
import os
from collections.abc import Generator, Iterator

import hypothesis
import pytest
from blockbuster import BlockBuster

from tests.golden import golden_inventory
from vgpu_agent import log
from vgpu_agent.config import options
from vgpu_agent.families import registry  # noqa: F401 - the families bring their sections and flags
from vgpu_agent.model import Inventory

# Some tests import grpcio before the simulator, which says the same and why.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# How long an example, or making some, takes tells of what else the machine does; what is to be
# quick has a test that says so. `--hypothesis-profile=release` tries as many examples as a release
# needs, in tests that name no number of their own.
hypothesis.settings.register_profile(
    "vgpu-agent",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    max_examples=50,
)
hypothesis.settings.register_profile(
    "release", hypothesis.settings.get_profile("vgpu-agent"), max_examples=1000
)
hypothesis.settings.load_profile("vgpu-agent")

# The turns of an idle loop before looptime moves virtual time on. Its default, 42, takes 2 ms for
# each step of the time.
_IDLE_TURNS = 2

_detector = pytest.StashKey[BlockBuster]()
_log_handlers = pytest.StashKey[list[logging.Handler]]()

# Where scripts/test collects tests of a kind; it looks for the others everywhere.
_FOLDERS = {
    "adversary": ("tests/adversary/",),
    "cluster": ("tests/real_node/", "tests/monitoring/"),
    "torture": ("tests/torture/",),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """See ``scripts/test hardware``."""
    parser.addoption(
        "--real-driver",
        action="store_true",
        help="test against the driver and the cards of this machine, not the simulated library",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector the tests themselves: of the unit tests, 570,000 objects that
    stay. It would look at them again and again, a tenth of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let virtual time move on soon after the loop has nothing left to do, and give tests of
    processes more time: what takes ten seconds on an idle machine may take a minute on a busy one.
    Tests that need a card are left out on a machine without one.

    Raises:
        pytest.UsageError: a test is of a kind that ``scripts/test`` collects in other folders only.
    """
    if not config.getoption("--real-driver"):
        needing_card = [item for item in items if item.get_closest_marker("hardware")]
        items[:] = [item for item in items if not item.get_closest_marker("hardware")]
        config.hook.pytest_deselected(items=needing_card)
    for item in items:
        for kind, folders in _FOLDERS.items():
            if item.get_closest_marker(kind) and not item.nodeid.startswith(folders):
                raise pytest.UsageError(
                    f"{item.nodeid} is marked as {kind}; scripts/test looks for these in "
                    f"{', '.join(folders)} only"
                )
        if item.get_closest_marker("looptime"):
            item.add_marker(pytest.mark.looptime(noop_cycles=_IDLE_TURNS))
        if item.get_closest_marker("component") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(240))


def pytest_configure(config: pytest.Config) -> None:
    """Prepare to find blocking calls on the event loop that our own code makes. Remove the shell's
    settings for an agent, which are not meant for the ones under test.
    """
    for option in options.options():
        os.environ.pop(option.variable, None)
    for name in [name for name in os.environ if name.startswith("VGPU_AGENT_")]:
        del os.environ[name]
    config.stash[_log_handlers] = []
    detector = config.stash[_detector] = BlockBuster("vgpu_agent")
    # A module's file has an absolute name, so no disk is touched; without this, every traceback
    # that the agent logs would be lost.
    detector.functions["os.path.abspath"].can_block_in("structlog/tracebacks.py", "extract")
    # Of two threads that enter a file for the first time at once, coverage makes one wait for its
    # own few microseconds.
    detector.functions["threading.Lock.acquire"].can_block_in("coverage/collector.py", "lock_data")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Prepare what each test takes for granted. Autouse fixtures would cost a third of a
    millisecond a test.
    """
    _find_blocking_calls(item)
    _log_into_nothing(item.config.stash[_log_handlers])
    if not inspect.iscoroutinefunction(getattr(item, "function", None)):
        # A plugin that asks for "the" loop around a synchronous test must not be given a new one,
        # which would never be closed.
        asyncio.set_event_loop(None)


def _find_blocking_calls(item: pytest.Item) -> None:
    """A blocking call on the event loop fails the test. Component and cluster tests run the agent
    in a process of its own, and may themselves block.

    The search stays on from test to test: to begin and to end it takes 2 ms.
    """
    detector = item.config.stash[_detector]
    if item.get_closest_marker("component") or item.get_closest_marker("cluster"):
        detector.deactivate()
    else:
        detector.activate()  # it may be off since the test before


def _log_into_nothing(handlers: list[logging.Handler]) -> None:
    """Lines are rendered as in production and kept out of the test report. A command that a test
    before ran in this process may have chosen another level and a stream that is closed now.

    Args:
        handlers: those of the last call, empty at first.
    """
    root = logging.getLogger()
    if not handlers or handlers[0] not in root.handlers or root.level != logging.DEBUG:
        log.configure(level="debug", stream=io.StringIO())
        handlers[:] = root.handlers


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """Yield the output of the log; the root logger is restored afterwards."""
    stream = io.StringIO()
    log.configure(stream=stream)
    yield stream
    log.configure(level="debug", stream=io.StringIO())


@pytest.fixture
def loop_may_block(pytestconfig: pytest.Config) -> None:
    """Let the test block its event loop, unlike others (`pytest_runtest_setup`). It comes before
    what replaces a function that blocks: to stop the search puts the original there again.
    """
    pytestconfig.stash[_detector].deactivate()


@pytest.fixture
def inventory() -> Inventory:
    """The two A100 of the contracts' golden vectors."""
    return golden_inventory()
