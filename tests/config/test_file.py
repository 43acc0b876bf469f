"""Files that cannot be read, and junk of every kind:
one clear line each, and never another exception.
"""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import quickest_call
from vgpu_agent.config import options, schema
from vgpu_agent.config.load import LARGEST_FILE_BYTES, Contents, Sources, load, load_contents, read
from vgpu_agent.errors import ConfigError


def _problems(file: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        load({"--config": file}, {})
    return refused.value.problems


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_missing_file_is_said_to_be_missing() -> None:
    """It was asked for by name, so the defaults would be a silent surprise."""
    assert _problems("config.yaml") == [
        (
            "config.yaml: cannot be read: No such file or directory; give --config an existing, "
            "readable file"
        )
    ]


def test_a_directory_is_no_file() -> None:
    """A volume that is mounted over the file's name makes it a directory."""
    Path("config.yaml").mkdir()

    assert _problems("config.yaml") == ["config.yaml: is a directory; expected a YAML file"]


def test_a_pipe_without_a_writer_does_not_hang_the_start() -> None:
    """Opening it as a file would wait for ever."""
    os.mkfifo("config.yaml")

    assert _problems("config.yaml") == ["config.yaml: is not a regular file; expected a YAML file"]


def test_a_file_that_must_not_be_read_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the refusal is put in its mouth."""

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)

    with pytest.raises(ConfigError) as refused:
        read("config.yaml")
    assert refused.value.problems == [
        "config.yaml: cannot be read: Permission denied; give --config an existing, readable file"
    ]


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
def test_what_cannot_be_a_file_name_is_one_line(name: str) -> None:
    """The operating system refuses it, or Python does."""
    assert len(_problems(name)) == 1


def test_a_file_above_one_mebibyte_is_not_read() -> None:
    """The largest ConfigMap is one. The wrong file may have no end."""
    Path("config.yaml").write_bytes(b"#" * (LARGEST_FILE_BYTES + 1))

    assert _problems("config.yaml") == [
        ("config.yaml: is larger than 1048576 bytes; a configuration is smaller, so check the path")
    ]


def test_a_file_of_one_mebibyte_is_read() -> None:
    """The bound itself is allowed."""
    Path("config.yaml").write_bytes(b"version: v1\n".ljust(LARGEST_FILE_BYTES, b"#"))

    assert load({"--config": "config.yaml"}, {}).warnings == ()


_JUNK = {
    "random bytes": random.Random(1).randbytes(LARGEST_FILE_BYTES),
    "NULs": bytes(LARGEST_FILE_BYTES),
    "one word": b"x" * LARGEST_FILE_BYTES,
    "open lists": b"[" * LARGEST_FILE_BYTES,
    "open mappings": b"{a: " * (LARGEST_FILE_BYTES // 4),
    "dashes": b"- " * (LARGEST_FILE_BYTES // 2),
    "question marks": b"? " * (LARGEST_FILE_BYTES // 2),
    "anchors": b"&a " * (LARGEST_FILE_BYTES // 3),
    "digits": b"version: " + b"9" * (LARGEST_FILE_BYTES - 9),
    "long key": b"a" * (LARGEST_FILE_BYTES - 3) + b": 1",
}


@pytest.mark.parametrize("junk", _JUNK.values(), ids=_JUNK)
def test_a_megabyte_of_junk_is_refused_in_one_short_line(junk: bytes) -> None:
    """At once, and without repeating the junk."""
    Path("config.yaml").write_bytes(junk)

    problems = _problems("config.yaml")

    assert len(problems) == 1
    assert problems[0].startswith("config.yaml:1: ")
    assert len(problems[0]) < 200


def test_a_megabyte_of_unknown_keys_of_nvidias_plugin_is_told_in_few_lines() -> None:
    """Each would be a warning; finding what it might have meant takes its time."""
    content = b"".join(b"junk%d: 1\n" % number for number in range(4_900))

    def warned() -> None:
        assert (
            len(load_contents(Sources({}, {}, None), Contents(None, "v1.yaml", content)).warnings)
            == 21
        )

    assert quickest_call(warned, within_seconds=3) < 3


@pytest.mark.parametrize(
    "junk", [b"a: 1\n" * 200_000, b"{" + b"a," * 500_000 + b"}"], ids=["the same key", "flow keys"]
)
def test_a_megabyte_of_repeated_keys_is_cut_short(junk: bytes) -> None:
    """Valid YAML can be junk, too."""
    Path("config.yaml").write_bytes(junk)

    assert len(_problems("config.yaml")) == 21


def test_a_billion_laughs_are_not_laughed() -> None:
    """Aliases are refused before anything is expanded."""
    laughs = [
        "a0: &a0 [lol]",
        *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)),
    ]
    Path("config.yaml").write_text("\n".join(laughs))

    assert _problems("config.yaml") == [
        "config.yaml:1: a0: anchor &a0 is not supported, write the value out"
    ]


def _loads_or_is_refused(
    content: bytes, flags: dict[str, str], environment: dict[str, str]
) -> None:
    with contextlib.suppress(ConfigError):
        load_contents(Sources(flags, environment, "config.yaml"), Contents(content))


@given(st.one_of(st.binary(), st.text().map(lambda text: text.encode("utf-8", "surrogatepass"))))
def test_no_content_raises_anything_but_a_config_error(content: bytes) -> None:
    """The file may hold anything."""
    _loads_or_is_refused(content, {}, {})


_KEYS = st.sampled_from(
    sorted(
        {part for path in schema.value_paths() for part in path.split(".")}
        | {
            "version",
            "name",
            "replicas",
            "devices",
            "a b",
            "nvidiaConfig",
            "flags",
            "imex",
            "channelIDs",
            "deviceDiscoveryStrategy",
        }
    )
)
_SCALARS = st.one_of(
    st.sampled_from(
        [
            "v1",
            "yes",
            "1:30",
            "~",
            "*a",
            "&a 1",
            "!!int 3",
            "1e999",
            ".nan",
            "-0",
            '"\\ud800"',
            "'",
            "[",
            "null",
            ":1",
            "/x",
            "gpu",
        ]
    ),
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=5),
)
_FLOW = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.lists(st.tuples(_KEYS, inner), max_size=4).map(
            lambda items: "{" + ", ".join(f"{key}: {value}" for key, value in items) + "}"
        ),
    ),
    max_leaves=12,
)


@given(st.lists(st.tuples(_KEYS, _FLOW), max_size=6))
def test_no_mixture_of_known_keys_raises_anything_but_a_config_error(
    members: list[tuple[str, str]],
) -> None:
    """Keys of the schema in every place, with values of every kind."""
    text = "version: v1\n" + "".join(f"{key}: {value}\n" for key, value in members)

    content = text.encode("utf-8", "surrogatepass")
    _loads_or_is_refused(content, {}, {})
    with contextlib.suppress(ConfigError):
        load_contents(Sources({}, {}, None), Contents(None, "v1.yaml", content))


@given(
    st.text(alphabet=st.characters(codec=None)),
    st.sampled_from(
        [*sorted(name for option in options.options() for name in option.variables), "VGPU_AGENT_X"]
    ),
    st.sampled_from([option.flag for option in options.options() if option.flag]),
)
def test_no_variable_or_flag_raises_anything_but_a_config_error(
    text: str, variable: str, flag: str
) -> None:
    """Variables can hold any bytes, which Python shows as lone surrogates."""
    _loads_or_is_refused(b"", {"--kubelet-dir": text, flag: text}, {variable: text})
