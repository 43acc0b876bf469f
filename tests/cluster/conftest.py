"""Fixtures for the tests of `vgpu_agent.cluster`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests import constants
from tests.cluster.scripted import IMPATIENT, QUICK
from vgpu_agent.cluster.client import ApiClient
from vgpu_agent.cluster.credentials import Access, Credentials
from vgpu_agent.journal import Journal
from vgpu_agent.sim.api.server import ApiServer


@pytest.fixture
def journal() -> Journal:
    """A journal of its own."""
    return Journal()


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    """A simulated API server."""
    async with ApiServer() as running:
        yield running


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses, and time limits for a busy machine."""
    constants.use(monkeypatch, QUICK)


@pytest.fixture
async def client(server: ApiServer, quick: None) -> AsyncIterator[ApiClient]:
    """A client of it."""
    api = ApiClient(Credentials(lambda: Access(server.url), "test"))
    yield api
    await api.close()


@pytest.fixture
async def impatient(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiClient]:
    """A client of it that gives up at once."""
    constants.use(monkeypatch, IMPATIENT)
    api = ApiClient(Credentials(lambda: Access(server.url), "test"))
    yield api
    await api.close()
