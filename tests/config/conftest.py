"""Shared parts of the tests of the configuration:
one way to load a text, and one to get its problems.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from vgpu_agent.config.load import Contents, Loaded, Sources, load_contents
from vgpu_agent.errors import ConfigError

Load = Callable[..., Loaded]
Problems = Callable[..., list[str]]


def _load(
    text: str | bytes = "",
    *,
    flags: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Loaded:
    content = text if isinstance(text, bytes) else (text or "version: v1\n").encode()
    return load_contents(Sources(flags or {}, environment or {}, "config.yaml"), Contents(content))


@pytest.fixture(scope="session")
def load_text() -> Load:
    """Loads a text as the content of ``config.yaml``; "" is the shortest file there can be."""
    return _load


@pytest.fixture(scope="session")
def problems_of() -> Problems:
    """The sentences with which a text is refused."""

    def problems(text: str | bytes = "", **sources: Mapping[str, str]) -> list[str]:
        with pytest.raises(ConfigError) as refused:
            _load(text, **sources)
        assert str(refused.value) == "\n".join(refused.value.problems)
        return refused.value.problems

    return problems
