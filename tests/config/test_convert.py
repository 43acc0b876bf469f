"""A v1 file of NVIDIA's plugin written as one of ours,
and what the translator does with any text at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.config.conftest import Load
from vgpu_agent.config.convert import convert
from vgpu_agent.config.load import Contents, Sources, load_contents
from vgpu_agent.config.settings import Settings
from vgpu_agent.errors import ConfigError


def outcome(do: Callable[[], Settings | str]) -> Any:
    """Return the result of ``do``, or the sentences of its refusal;
    any other exception is a failure.
    """
    try:
        return do()
    except ConfigError as refused:
        return refused.problems


def read(content: bytes) -> Any:
    """The settings with ``content`` as the file of NVIDIA's plugin, or why there are none."""
    return outcome(
        lambda: load_contents(Sources({}, {}, None), Contents(None, "v1.yaml", content)).settings
    )


# What a key may hold, what it must not, and nothing.
_JUNK = (
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.text(max_size=6)
    | st.floats()
    | st.lists(st.integers(0, 3), max_size=2)
)
_TEXT = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=12)


class Documents:
    """Documents of NVIDIA's schema: sound ones, or such with junk in any place."""

    def __init__(self, *, junk: bool) -> None:
        self._junk = junk

    def _of(self, good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return (
            st.one_of(good, good, good, good, good, good, good, st.none(), _JUNK)
            if self._junk
            else good
        )

    def _one_of(self, *words: Any) -> st.SearchStrategy[Any]:
        return self._of(st.sampled_from(words))

    def _some(
        self, members: dict[str, st.SearchStrategy[Any]], **needed: st.SearchStrategy[Any]
    ) -> st.SearchStrategy[dict[str, Any]]:
        """A mapping with ``needed`` and some of ``members``,
        at times with a key that is unknown or misplaced.
        """
        known = st.fixed_dictionaries(needed, optional=members)
        stray = st.dictionaries(
            st.sampled_from(["renameByDefault", "migStrategy", "flags", "replicas", "x"]) | _TEXT,
            _JUNK,
            max_size=1,
        )
        return (
            st.one_of(
                known, known, known, st.builds(lambda one, other: {**other, **one}, known, stray)
            )
            if self._junk
            else known
        )

    def _sharing(self) -> st.SearchStrategy[Any]:
        words = st.sampled_from([0, 1, "2", "1:0", "GPU-aaaaaaaa-0000-4000-8000-000000000000"])
        devices = (
            st.just("all")
            | st.integers(1, 8)
            | st.lists(words, min_size=1, max_size=3, unique_by=str)
        )
        shared = self._some(
            {"rename": self._one_of("small", "nvidia.com/large"), "devices": self._of(devices)},
            name=self._one_of(
                "gpu", "nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "mig-2g.10gb", "mig-3g.20gb"
            ),
            replicas=self._of(st.integers(1, 48)),
        )
        resources = st.lists(
            shared,
            min_size=1,
            max_size=3,
            unique_by=(
                None if self._junk else lambda one: str(one["name"]).removeprefix("nvidia.com/")
            ),
        )
        return self._of(
            self._some(
                {
                    "renameByDefault": self._of(st.booleans()),
                    "failRequestsGreaterThanOne": self._of(st.none() | st.booleans()),
                },
                resources=self._of(resources),
            )
        )

    def _flags(self) -> st.SearchStrategy[Any]:
        plugin = {
            "deviceListStrategy": self._one_of("envvar", ["envvar", "cdi-cri"], ["volume-mounts"]),
            "deviceIDStrategy": self._one_of("uuid", "index"),
            "passDeviceSpecs": self._of(st.booleans()),
        }
        flags = {
            "migStrategy": self._one_of("none", "single"),
            "failOnInitError": self._one_of(True, False, "yes", "off"),
            "nvidiaDriverRoot": self._one_of("", "/", "/run/nvidia/driver"),
            "mpsRoot": self._one_of("/mps", "/run/nvidia/mps"),
            "gdsEnabled": self._of(st.booleans()),
            "deviceDiscoveryStrategy": self._one_of("auto", "tegra"),
            "gfd": self._one_of({"oneshot": True}),
            "plugin": self._of(self._some(plugin)),
        }
        return self._of(self._some(flags))

    def documents(self) -> st.SearchStrategy[Any]:
        """The whole of it."""
        pattern = self._some(
            {},
            pattern=self._one_of("*", "A100*", "1g.5gb"),
            name=self._one_of("gpu", "nvidia.com/small"),
        )
        patterns = {name: self._of(st.lists(pattern, max_size=2)) for name in ("gpus", "mig")}
        imex = {"channelIDs": self._one_of([], [0]), "required": self._of(st.booleans())}
        return self._some(
            {
                "version": self._one_of("v1", ""),
                "flags": self._flags(),
                "resources": self._of(self._some(patterns)),
                "sharing": self._of(
                    self._some({"timeSlicing": self._sharing(), "mps": self._sharing()})
                ),
                "imex": self._of(self._some(imex)),
            }
        )


@given(Documents(junk=False).documents())
def test_what_is_printed_loads_to_the_same_settings(document: dict[str, Any]) -> None:
    """A sound file is never refused, and an operator may go on from either file."""
    content = json.dumps(document).encode()

    printed = convert("v1.yaml", content)

    assert load_contents(
        Sources({}, {}, "config.yaml"), Contents(printed.encode())
    ).settings == read(content)


@given(Documents(junk=True).documents())
def test_what_is_wrong_is_refused_with_the_sentences_of_the_agent(document: dict[str, Any]) -> None:
    """Any other content is printed, and loads to the same settings."""
    content = json.dumps(document).encode()
    expected, printed = read(content), outcome(lambda: convert("v1.yaml", content))

    if isinstance(printed, str):
        printed = load_contents(Sources({}, {}, "config.yaml"), Contents(printed.encode())).settings
    assert printed == expected


@given(st.binary(max_size=60) | st.text(max_size=80).map(str.encode))
def test_any_bytes_are_a_configuration_or_refused(content: bytes) -> None:
    """Never another exception."""
    found = read(content)

    assert isinstance(found, Settings) or all(problem.startswith("v1.yaml:") for problem in found)


_ANYTHING = st.recursive(
    _JUNK,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(_TEXT, below, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from(
        [
            "",
            "flags",
            "flags.plugin",
            "sharing",
            "sharing.mps",
            "sharing.timeSlicing.resources",
            "resources.gpus",
            "imex",
        ]
    ),
    _ANYTHING,
)
def test_anything_in_any_place_is_taken_or_refused(place: str, value: Any) -> None:
    """Never another exception."""
    document = value
    for name in reversed(place.split(".") if place else []):
        document = {name: document}

    assert read(json.dumps(document).encode()) != []


def test_it_says_only_what_the_file_says(load_text: Load) -> None:
    """With the warnings above. A person reads on from there."""
    text = (
        "flags: {migStrategy: mixed, migstrat: 1}\nsharing:\n"
        "  timeSlicing:\n    resources: [{name: gpu, replicas: 2, devices: [0]}]\n"
    )

    assert convert("v1.yaml", text.encode()) == (
        "# Made from v1.yaml, a configuration of NVIDIA's device plugin.\n"
        "# warning: v1.yaml:1: flags.migstrat: unknown key, it has no effect; did you mean "
        "migStrategy?\n# warning: v1.yaml:4: sharing.timeSlicing.resources[0].devices: NVIDIA's "
        "plugin ignores this and the agent applies it; remove it to keep the resources as they "
        "were\n"
        "version: v1\nplugin:\n  migStrategy: mixed\nsharing:\n"
        "  timeSlicing:\n    resources:\n      - name: nvidia.com/gpu\n"
        "        replicas: 2\n"
        '        devices: ["0"]\n'
    )
    assert load_text(convert("a\nb", text.encode())).settings.plugin.mig_strategy == "mixed"
