"""Each command of README.md and docs/ is run by a test or says that it is not, and names only what
exists.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import yaml

from tests.docs_commands import (
    COMMANDS,
    ELSEWHERE,
    INLINE,
    MARK,
    NEEDS,
    OTHER_BLOCKS,
    ROOT,
    Command,
    Way,
    calls,
)
from vgpu_agent.cli import main
from vgpu_agent.scheduler import web as scheduler_web
from vgpu_agent.web import debug

EVERY = (*COMMANDS, *INLINE)


def test_there_are_commands_of_each_way() -> None:
    """A changed prompt would leave nothing to check."""
    counted = {way: sum(command.way is way for command in COMMANDS) for way in Way}
    assert counted[Way.SIMULATED] > 60
    assert counted[Way.CLUSTER] > 60
    assert len(INLINE) > 150


def test_a_command_is_run_or_says_what_it_needs() -> None:
    """A reader may rely on the others."""
    assert [command.place for command in COMMANDS if command.way is Way.NONE] == [], (
        f"no test runs these; add the programs to tests/docs_commands.py and to the tests, or the "
        f"comment '# {MARK}…' to the page, with one of {', '.join(NEEDS)}"
    )
    marked = [command for command in COMMANDS if "untested" in command.comment]
    assert [
        command.place
        for command in marked
        if not command.comment.startswith(tuple(f"{MARK}{need}" for need in NEEDS))
    ] == []
    assert {command.way for command in marked} == {Way.UNTESTED}


def test_commands_are_in_blocks_with_a_prompt() -> None:
    """Others would not be found here."""
    program = re.compile(r"\s*(\$ |# )?(sudo )?(kubectl|helm|curl|vgpu-agent|scripts/\w+) ")
    assert [place for place in OTHER_BLOCKS if program.match(place[2])] == []
    # Root's prompt is `$ sudo`, because # begins a comment.
    as_root = re.compile(r"^# \S", re.MULTILINE)
    assert [command.place for command in COMMANDS if as_root.search(command.output)] == []


@pytest.mark.parametrize(("pattern", "test", "part"), ELSEWHERE)
def test_the_test_of_another_file_exists(pattern: str, test: str, part: str) -> None:
    """And has the command, and the docs still have it, too."""
    path, _, name = test.partition("::")
    text = (ROOT / path).read_text()
    assert f"def {name}(" in text
    assert part in text
    assert any(re.search(pattern, f"{each.text}\n{each.output}") for each in COMMANDS)


def _arguments_of_the_agent(command: Command) -> Iterator[list[str]]:
    for words in calls(command.text):
        # the command behind `kubectl exec … --`
        inner = words[words.index("--") + 1 :] if "--" in words else words
        if inner[0].removeprefix(".venv/bin/") == "vgpu-agent":
            yield [re.sub(r"^NAMESPACE/(NAME|POD)$", "default/train", word) for word in inner[1:]]


def test_the_agent_knows_the_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """The real parser accepts each one, without a run. In a sentence arguments may be missing."""
    wrong, seen = [], 0
    for command in EVERY:
        for words in _arguments_of_the_agent(command):
            seen += bool(words)
            try:
                _, unknown = main._parser(words).parse_known_args(words)
            except SystemExit:
                said = capsys.readouterr().err
                if command in INLINE and re.search(
                    "arguments? (are|is) required|expected one", said
                ):
                    continue
                wrong.append(f"{command.place}: {said or 'no command'}")
            else:
                wrong += [f"{command.place}: {unknown}"] if unknown else []
    assert wrong == []
    assert seen > 100


def test_a_script_knows_its_arguments() -> None:
    """Each word is in the script, or in the module that it runs."""
    wrong, seen = [], 0
    for command in EVERY:
        program, *words = calls(command.text)[0]
        if not program.startswith("scripts/"):
            continue
        seen += 1
        text = (ROOT / program).read_text()
        for module in re.findall(r"-m (tests\.[a-z_.]+)", text):
            place = ROOT / module.replace(".", "/")
            file = place / "__main__.py" if place.is_dir() else place.with_suffix(".py")
            text += file.read_text()
        wrong += [
            command.place
            for word in words
            if word not in text and not (ROOT / word).exists() and not word.endswith(".tar")
        ]
    assert wrong == []
    assert seen > 30


def test_an_address_is_a_route() -> None:
    """It is one of the agent, or of the extender on its port."""
    agents = {"", "/", "/metrics", "/livez", "/healthz", "/readyz"}
    agents |= {entry.path for entry in debug.PATHS}
    extenders = set(re.findall(r'add_get\("(/[a-z]+)"', inspect.getsource(scheduler_web)))
    assert extenders == {"/explain", "/capacity"}
    wrong, seen = [], 0
    for command in EVERY:
        if not any(words[0] == "curl" for words in calls(command.text)):
            continue
        for port, path in re.findall(r"[^ ':]+:(\d{4})(/[a-z/]*)?", command.text):
            seen += 1
            wrong += (
                [command.place] if path not in (extenders if port == "3456" else agents) else []
            )
    assert wrong == []
    assert seen > 20


@cache
def _objects() -> list[dict[str, Any]]:
    """All objects of the manifests, as they are in their files."""
    return [
        each
        for path in sorted((ROOT / "manifests").rglob("*.yaml"))
        if "chart" not in path.parts and path.name != "kustomization.yaml"
        for each in yaml.safe_load_all(path.read_text())
        if isinstance(each, dict) and "kind" in each
    ]


def test_an_object_in_the_agents_namespace_is_in_the_manifests() -> None:
    """Kind and name, and the labels of pods."""
    kinds = {"ds": "DaemonSet", "daemonset": "DaemonSet", "deploy": "Deployment"}
    kinds["deployment"] = "Deployment"
    named = {(each["kind"], each["metadata"]["name"]) for each in _objects()}
    labels = [
        each["spec"]["template"]["metadata"]["labels"].items()
        for each in _objects()
        if each["kind"] in {"DaemonSet", "Deployment"} and "selector" in each["spec"]
    ]
    wrong, seen = [], 0
    for command in EVERY:
        asked = re.findall(r" (?:-n|--namespace) (vgpu-[\w-]+)", command.text)
        wrong += [command.place for name in asked if ("Namespace", name) not in named]
        if not asked or not command.text.startswith("kubectl"):
            continue
        for kind, name in re.findall(rf"\b({'|'.join(kinds)})[ /]([a-z-]+)", command.text):
            seen += 1
            wrong += [command.place] if (kinds[kind], name) not in named else []
        for label in re.findall(r" -l ([a-z./-]+)=([a-z-]+)", command.text):
            wrong += [command.place] if not any(label in each for each in labels) else []
    assert wrong == []
    assert seen > 20


def test_a_file_of_the_repository_exists() -> None:
    """A folder that was renamed is looked for in vain."""
    paths = [
        (command.place, path)
        for command in EVERY
        for path in re.findall(r"(?<![\w./-])(?:manifests|bin|docs)(?:/[\w./-]+)?", command.text)
    ]
    assert [place for place, path in paths if not (ROOT / path).exists()] == []
    assert len(paths) > 40
