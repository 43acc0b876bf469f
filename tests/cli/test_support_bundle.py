"""The parts of a support bundle after secrets and names have been replaced."""

from __future__ import annotations

from collections.abc import Iterator

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
        ("a:\n  password: |\n    one\n\n    two\n  b: 1\n", f"a:\n  password: {HIDDEN}\n  b: 1\n"),
        ("- token: >-\n    one\n  b: 1\n", f"- token: {HIDDEN}\n  b: 1\n"),
        ("secret: one\n  two\nb: 1\n", f"secret: {HIDDEN}\nb: 1\n"),
        ("tokens:\n- one\n- two\nb: 1\n", f"tokens: {HIDDEN}\nb: 1\n"),
        ("credentials: # of the proxy\n  user: u\n", f"credentials: {HIDDEN}\n"),
        ("# a secret: below\nb: 1\n", f"# a secret: {HIDDEN}\nb: 1\n"),
        ("secret:\nb: 1\n", "secret:\nb: 1\n"),
    ],
)
def test_values_of_keys_that_sound_secret_are_replaced(text: str, left: str) -> None:
    """On a line of their own and within braces. A path is no secret."""
    assert support_bundle._without_secrets(text.encode()).decode() == left


def test_parts_beyond_the_sum_are_dropped_while_they_are_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process shares the memory limit of the agent's pod, so they cannot wait for the end."""
    monkeypatch.setattr(support_bundle, "_MAX_TOTAL_BYTES", 10)
    held: list[Part] = []

    def collected() -> Iterator[Part]:
        for number in range(5):
            assert sum(len(part.content or b"") for part in held) <= 10
            yield Part(f"{number}", b"12345", "", 0.0)

    for part in support_bundle._within_the_sum(collected()):
        held.append(part)  # noqa: PERF402 - `collected` looks at it meanwhile
    assert [part.content for part in held] == [b"12345", b"12345", None, None, None]
    assert held[-1].note == "left out: the bundle would exceed 0 MiB"


def test_a_pod_that_only_the_log_names_is_hidden() -> None:
    """Such as one that ended before the agent's last restart."""
    log = b'{"msg":"start.bound","pod":"acme-prod/acme-train-0","grant":3}\n'
    part = Part("log", log, "", 0.0)
    Names.of([part]).hide([part])
    left = (part.content or b"").decode()
    assert "acme" not in left
    assert '"grant":3' in left
