"""The entries of iktos's resourceConfig (iktos §I.2)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.config.conftest import Load, Problems
from vgpu_agent.families.nvidia.iktos import AUTOMATIC, IktosEntry, entries, problems


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        (" , ,", []),
        ("gpu:sharedgpu:4", [("gpu", "sharedgpu", 4)]),
        ("gpu:gpu-mem-gb:-1,", [("gpu", "gpu-mem-gb", AUTOMATIC)]),
        ("gpu:gpu:1", [("gpu", "gpu", 1)]),
        (
            " mig-3g.20gb:mig-small:2 , mig-7g.40gb:mig-large:+10",
            [("mig-3g.20gb", "mig-small", 2), ("mig-7g.40gb", "mig-large", 10)],
        ),
        ("mig-1g.5gb.me.all:a:2147483647", [("mig-1g.5gb.me.all", "a", 2147483647)]),
    ],
)
def test_an_entry_is_a_resource_a_name_and_a_number(
    text: str, found: list[tuple[str, str, int]]
) -> None:
    """Blanks around an entry and empty entries are legal."""
    assert list(problems(text)) == []
    assert entries(text) == tuple(
        IktosEntry(f"nvidia.com/{original}", f"nvidia.com/{new}", count)
        for original, new, count in found
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("gpu", 'entry "gpu": expected <resource>:<new name>:<replicas>, got 1 part'),
        ("gpu:a:1:2", 'entry "gpu:a:1:2": expected <resource>:<new name>:<replicas>, got 4 parts'),
        (
            "nvidia.com/gpu:a:1",
            (
                'entry "nvidia.com/gpu:a:1": expected gpu or mig-<profile> as the resource, got '
                '"nvidia.com/gpu"'
            ),
        ),
        ("tpu:a:1", 'entry "tpu:a:1": expected gpu or mig-<profile> as the resource, got "tpu"'),
        (
            "gpu : a:1",
            'entry "gpu : a:1": expected gpu or mig-<profile> as the resource, got "gpu "',
        ),
        *(
            (
                f"gpu:{name}:1",
                (
                    f"entry \"gpu:{name}:1\": expected up to 63 lower case letters, digits, '-' "
                    f"and '.' as the new name, got \"{name}\""
                ),
            )
            for name in ("", " a", "a/b", "-a")
        ),
        *(
            (
                f"gpu:a:{count}",
                (
                    f'entry "gpu:a:{count}": expected replicas of 1 or more, or -1 for one per '
                    f'unit of memory, got "{count}"'
                ),
            )
            for count in ("0", "-2", "", "4.0", "four", "2147483648", "٤")
        ),
        (
            "gpu:a:1,gpu:b:2",
            'entries "gpu:a:1" and "gpu:b:2": both divide nvidia.com/gpu; keep one of them',
        ),
        (
            "gpu:a:1,mig-1g.5gb:a:2",
            (
                'entries "gpu:a:1" and "mig-1g.5gb:a:2": both are offered as nvidia.com/a; give '
                "one of them another name"
            ),
        ),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_entry(
    problems_of: Problems, text: str, problem: str
) -> None:
    """iktos:D9: the replaced plugin takes 0, negative numbers and any name,
    and the last of two entries for one resource.
    """
    assert problems_of(environment={"NVIDIA_DRIVER_RESOURCE_CONFIG": text}) == [
        f"environment variable NVIDIA_DRIVER_RESOURCE_CONFIG: {problem}"
    ]


def test_every_wrong_entry_has_its_sentence() -> None:
    """Everything can then be mended at once."""
    assert len(list(problems("gpu:a:0,x:y:1,mig-1g.5gb:slice:2,gpu"))) == 3


def test_sharing_beside_it_is_warned_of(load_text: Load) -> None:
    """Two plans for the same GPUs."""
    text = (
        "version: v1\niktos: {resourceConfig: 'gpu:a:2'}\n"
        "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}\n"
    )

    assert load_text(text).warnings == (
        "sharing: has no effect beside iktos.resourceConfig; leave one of them out",
    )


@given(st.text(alphabet="gpumi-1.:, a0/", max_size=40) | st.text(max_size=20))
def test_any_text_has_entries_or_problems(text: str) -> None:
    """Never an exception, and never an entry that could not be served."""
    words = [word for word in text.split(",") if word.strip()]

    assert len(words) == len(entries(text)) + len(
        [problem for problem in problems(text) if problem.startswith("entry ")]
    )
