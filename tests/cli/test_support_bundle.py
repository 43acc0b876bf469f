"""The parts of a support bundle after secrets and names have been replaced."""

from __future__ import annotations

import pytest

from vgpu_agent.cli import support_bundle
from vgpu_agent.cli.support_bundle import Names, Part

HIDDEN = "(hidden)"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("token: abc def\n", f"token: {HIDDEN}\n"),
        ("a: {token: abcdefgh, b: 1}\n", f"a: {{token: {HIDDEN}, b: 1}}\n"),
        ('{"apiKey": "abc"}', f'{{"apiKey": {HIDDEN}}}'),
        ("tokenFile: /var/run/token\n", "tokenFile: /var/run/token\n"),
    ],
)
def test_values_of_keys_that_sound_secret_are_replaced(text: str, left: str) -> None:
    """On a line of their own and within braces. A path is no secret."""
    assert support_bundle._without_secrets(text.encode()).decode() == left


def test_a_pod_that_only_the_log_names_is_hidden() -> None:
    """Such as one that ended before the agent's last restart."""
    log = b'{"msg":"start.bound","pod":"acme-prod/acme-train-0","grant":3}\n'
    part = Part("log", log, "", 0.0)
    Names.of([part]).hide([part])
    left = (part.content or b"").decode()
    assert "acme" not in left
    assert '"grant":3' in left
