"""The YAML reader: what a plain value is, and what no file may contain."""

from __future__ import annotations

import math

import pytest
import yaml as pyyaml

from vgpu_agent.config import yaml
from vgpu_agent.config.yaml import Fault, Node


@pytest.fixture(params=["CSafeLoader", "SafeLoader"])
def _either_parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyYAML has a parser in C and one in Python;
    where it was built without the first, the second must do the same.
    """
    monkeypatch.setattr(yaml, "_Loader", getattr(pyyaml, request.param))


def _value_of(text: str) -> object:
    root, faults = yaml.parse(f"key: {text}")
    assert faults == []
    assert root is not None
    assert isinstance(root.value, dict)
    return root.value["key"].value


@pytest.mark.usefixtures("_either_parser")
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("false", False),
        ("null", None),
        ("", None),
        ("0", 0),
        ("-7", -7),
        ("12", 12),
        ("0.5", 0.5),
        ("-1.5e3", -1500.0),
        ("1E2", 100.0),
        ('"12"', "12"),
        ("'true'", "true"),
        ('""', ""),
        ("|\n  12", "12"),
    ],
)
def test_a_plain_value_is_what_json_would_call_it(text: str, value: object) -> None:
    """Words and numbers of JSON get its types. Anything in quotes is text."""
    found = _value_of(text)

    assert (type(found), found) == (type(value), value)


@pytest.mark.usefixtures("_either_parser")
@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "no",
        "on",
        "off",
        "y",
        "True",
        "TRUE",
        "Null",
        "~",
        "012",
        "0o14",
        "0x1F",
        "1:30",
        "1_000",
        "+1",
        ".5",
        "1.",
        ".inf",
        ".nan",
        "2026-01-01",
        "=",
        "<<",
        "NaN",
        "Infinity",
        "9" * 301,
    ],
)
def test_what_yaml_1_1_would_turn_into_something_else_stays_text(text: str) -> None:
    """No surprises: ``yes`` is no boolean, ``012`` no ten, ``1:30`` no ninety."""
    assert _value_of(text) == text


@pytest.mark.usefixtures("_either_parser")
def test_every_value_knows_the_line_of_its_key() -> None:
    """A member has the line of its key, an item of a list its own."""
    root, faults = yaml.parse("# comment\na: 1\nb:\n  c: [x,\n    y]\n  d:\n    long text\n")

    assert faults == []
    assert root == Node(
        {
            "a": Node(1, 2),
            "b": Node({"c": Node([Node("x", 4), Node("y", 5)], 4), "d": Node("long text", 6)}, 3),
        },
        2,
    )


@pytest.mark.usefixtures("_either_parser")
@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "null\n", "   "])
def test_a_text_without_content_is_nothing(text: str) -> None:
    """Blank lines, comments and an empty document are no error and no value."""
    assert yaml.parse(text) == (None, [])


@pytest.mark.usefixtures("_either_parser")
def test_a_key_that_stands_twice_is_a_fault_and_the_first_value_stays() -> None:
    """Each second key is named with its path and with the line of the first one;
    reading goes on.
    """
    root, faults = yaml.parse("a: 1\nb:\n  - c: 1\n    c: {d: 1, d: 2}\na: 2\n")

    assert faults == [
        Fault(4, "b[0].c", "given twice, first on line 3; keep one of them"),
        Fault(4, "b[0].c.d", "given twice, first on line 4; keep one of them"),
        Fault(5, "a", "given twice, first on line 1; keep one of them"),
    ]
    assert root == Node({"a": Node(1, 1), "b": Node([Node({"c": Node(1, 3)}, 3)], 2)}, 1)


@pytest.mark.usefixtures("_either_parser")
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: &x 1\nb: *x\n", Fault(1, "a", "anchor &x is not supported, write the value out")),
        ("a:\n  - *x\n", Fault(2, "a[0]", "alias *x is not supported, write the value out")),
        (
            "a: !!int 3\n",
            Fault(1, "a", 'tag "tag:yaml.org,2002:int" is not supported, leave it out'),
        ),
        (
            "a: !!python/object:os.system x\n",
            Fault(
                1,
                "a",
                'tag "tag:yaml.org,2002:python/object:os.system" is not supported, leave it out',
            ),
        ),
        ("a: 1\n---\nb: 2\n", Fault(2, "", "a second document begins here; expected one")),
        ("a:\n  ? [1]\n  : 2\n", Fault(2, "a", "a mapping or list stands where a key is expected")),
        ("[" * 40, Fault(1, "", "nested deeper than 32 levels")),
        ("a\x00b", Fault(1, "", "contains the control character U+0000; expected plain text")),
        (
            "a: 1\nb: \x1b[31m\n",
            Fault(2, "", "contains the control character U+001B; expected plain text"),
        ),
        (
            "- 1\n" * 10_001,
            Fault(9999, "", "more than 10000 keys and values; no configuration has so many"),
        ),
    ],
)
def test_what_no_configuration_needs_is_refused(text: str, fault: Fault) -> None:
    """Aliases can make a billion values of nine lines, tags can name code,
    and depth can exhaust a stack.
    """
    assert yaml.parse(text) == (None, [fault])


@pytest.mark.usefixtures("_either_parser")
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: [", 1),
        ("a: 1\n\tb: 2\n", 2),
        ("a: 'x", 1),
        ("a: b: c", 1),
        ("a:\n  - b\n c: 1\n", 3),
        ("a: 1\nb: @x\n", 2),
    ],
)
def test_what_is_not_yaml_is_one_fault_near_its_line(text: str, line: int) -> None:
    """The parser's words are passed on, in one line."""
    root, faults = yaml.parse(text)

    assert root is None
    assert len(faults) == 1
    assert abs(faults[0].line - line) <= 1
    assert faults[0].text.startswith("not YAML: ")
    assert "\n" not in faults[0].text


def test_a_number_that_is_too_large_for_a_float_is_infinite() -> None:
    """It is a number by its form. A field that needs a finite one refuses it."""
    assert _value_of("1e999") == math.inf
