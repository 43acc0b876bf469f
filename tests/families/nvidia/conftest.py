"""Fixtures for tests of the family's part of the configuration."""

from tests.config.conftest import load_text, problems_of

__all__ = ["load_text", "problems_of"]
