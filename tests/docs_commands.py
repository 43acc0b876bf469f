"""The commands of README.md and docs/, and how each of them is tested.

A command is a line of a block `console` behind the prompt `$ `, with its continuation lines and its
here-document. Of the commands inside sentences (`INLINE`) only form and names are checked.

A new command is run by one of the tests below, or its comment begins with `MARK` and one of
`NEEDS`.
"""

from __future__ import annotations

import enum
import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

MARK = "untested: needs "
# What no test has. A registry is one that answers to a push; the replaced plugin is another
# project's image or chart.
NEEDS = ("a GPU", "a registry", "kustomize", "the replaced plugin")

# A file of NVIDIA's plugin, which several pages have the reader convert.
NVIDIA_FILE = """\
version: v1
sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}
"""

# Commands that a test of another file runs, with other values: what the command or the output below
# it matches → the test, and what its file has of the command.
_REAL = "tests/real_node/"
_INSTALLED = f"{_REAL}test_chart_installed.py"
ELSEWHERE = (
    (
        r"^helm test ",
        f"{_INSTALLED}::test_a_release_offers_gpus_and_its_test_gets_one",
        'installed.helm("test", ',
    ),
    (
        r"^helm upgrade .* manifests/chart ",
        f"{_REAL}test_manifests_accepted.py::test_helm_takes_over_what_kustomize_has_installed",
        'applied.helm("upgrade --install", str(CHART))',
    ),
    (
        r"^helm template (?s:.*)\nError: values don't meet",
        f"{_REAL}test_chart.py::test_a_wrong_value_is_named",
        '"template"',
    ),
    (
        r"^helm package manifests/chart",
        f"{_REAL}test_chart.py::test_the_package_is_the_chart",
        '"package"',
    ),
    (
        r"rollout status deployment.vgpu-agent-webhook",
        f"{_REAL}test_webhook.py::test_the_deployment_becomes_ready",
        '"rollout", "status", f"deployment/{NAME}"',
    ),
    (
        r"^kubectl run wrong ",
        f"{_REAL}test_webhook.py::test_a_pod_that_can_never_run_is_refused_with_the_sentence",
        'hooked.create("wrong", limits={NUMBER: "1", CORES: "101"})',
    ),
    (
        r"^source <\(vgpu-agent completion bash\)",
        "tests/cli/test_completion.py::test_bash_completes_commands_flags_and_values",
        "def test_bash_completes_commands_flags_and_values",
    ),
    (
        r"^vgpu-agent man \| man -l -",
        "tests/cli/test_completion.py::test_the_manual_page_is_proper_roff_and_names_every_option",
        "def test_the_manual_page_is_proper_roff_and_names_every_option",
    ),
    (
        r"^sudo ctr --namespace k8s.io images import --local",
        f"{_REAL}test_manifests.py::test_the_daemon_set_serves_pods_with_the_rights_it_asks_for",
        "deployed_agent(rig)",  # it imports the image that scripts/image has built
    ),
)

_SIMULATED = {"vgpu-agent", ".venv/bin/vgpu-agent", "curl", "jq", "grep", "sed", "sleep", "install"}
# Of kubectl's verbs, the stand-in of the component tests knows those that reach into a pod.
_INTO_A_POD = re.compile(r"^kubectl (?:vgpu |-n vgpu-agent (?:logs AGENT |exec .*-- vgpu-agent ))")
_BLOCK = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)


class Way(enum.Enum):
    """The test of a command."""

    SIMULATED = "run by tests/component/test_commands_of_the_docs.py, beside a simulated node"
    CLUSTER = "run by tests/real_node/test_commands_of_the_docs.py, in a real cluster"
    ELSEWHERE = "run by a test of another file"
    SCRIPT = "a script of this repository, whose arguments are compared with it"
    UNTESTED = "marked as untested"
    NONE = "neither run nor marked"


class Command(NamedTuple):
    """One command of a page.

    Attributes:
        page: name of the file.
        line: its first line, from 1.
        text: the command without its comment, with its here-document.
        comment: the text behind ``#``.
        output: what the page shows below it.
    """

    page: str
    line: int
    text: str
    comment: str
    output: str

    @property
    def place(self) -> str:
        """The place and the text, for messages."""
        return f"{self.page}:{self.line}: {self.text}"

    @property
    def way(self) -> Way:
        """The test of the command."""
        if self.comment.startswith(MARK):
            return Way.UNTESTED
        if self.elsewhere is not None:
            return Way.ELSEWHERE
        if re.match(r"(?:sudo )?scripts/", self.text):
            return Way.SCRIPT
        if _INTO_A_POD.search(self.text):
            return Way.SIMULATED
        if re.search(r"(?:^|[ (])kubectl ", self.text):
            return Way.CLUSTER
        programs = {words[0] for words in calls(self.text)}
        return Way.SIMULATED if programs <= _SIMULATED else Way.NONE

    @property
    def elsewhere(self) -> tuple[str, str] | None:
        """The id of the test of another file that runs it, and what that file has of it."""
        shown = f"{self.text}\n{self.output}"
        return next(
            ((test, part) for pattern, test, part in ELSEWHERE if re.search(pattern, shown)), None
        )


def calls(text: str) -> list[list[str]]:
    """The words of each program that a command line calls, without redirections."""
    line = text.partition("\n")[0]
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    redirected = False
    for word in lexer:
        if set(word) <= set("|&;()"):
            found.append([])
            redirected = False
        elif set(word) <= set("<>"):
            redirected = True
        elif not redirected and (found[-1] or word != "sudo"):
            found[-1].append(word)
    return [words for words in found if words]


def _split(line: str) -> tuple[str, str]:
    """The command of a line, and its comment, which begins outside of quotes behind a space."""
    quote = ""
    for index, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and line[index - 1] == " ":
            return line[:index].strip(), line[index + 1 :].strip()
    return line.strip(), ""


def _blocks(text: str) -> list[tuple[int, str, list[str]]]:
    """Line number of the first line, language and lines of each block, without its indent."""
    found: list[tuple[int, str, list[str]]] = []
    fence = re.compile(r"^( *)```(\w*)$")
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        match = fence.match(line)
        if match and not inside:
            indent = len(match[1])
            found.append((number + 1, match[2], []))
        elif not match and inside:
            found[-1][2].append(line[indent:])
        inside ^= match is not None
    return found


def _read(page: Path) -> list[Command]:
    found: list[Command] = []
    for first, language, lines in _blocks(page.read_text()):
        if language != "console":
            continue
        rest, mark = list(enumerate(lines, first)), ""
        while rest:
            number, line = rest.pop(0)
            if line.startswith(f"# {MARK}"):  # of all commands from here to the end of the block
                mark = line.removeprefix("# ")
            if not line.startswith("$ "):
                continue
            text, comment = _split(line.removeprefix("$ "))
            while text.endswith("\\"):
                more, comment = _split(rest.pop(0)[1])
                text = f"{text[:-1].strip()} {more}"
            if here := re.search(r"<<(\w+)", text):
                while not text.endswith(f"\n{here[1]}"):
                    text += f"\n{rest.pop(0)[1]}"
            output = []
            while rest and not rest[0][1].startswith(("$ ", f"# {MARK}")):
                output.append(rest.pop(0)[1])
            shown = "\n".join(output)
            found.append(Command(page.name, number, text, mark or comment, shown))
    return found


COMMANDS = tuple(command for page in PAGES for command in _read(page))
# Outside of blocks, and complete: a name in a sentence is no command, nor one with an ellipsis.
INLINE = tuple(
    Command(page.name, text[: match.start()].count("\n") + 1, match[1].replace("\n", " "), "", "")
    for page in PAGES
    for text in [_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), page.read_text())]
    for match in re.finditer(
        r"`((?:kubectl|curl|scripts/\w+(?:\.py)?|(?:\.venv/bin/)?vgpu-agent)(?: [^`…]+)?)`", text
    )
)
OTHER_BLOCKS = tuple(
    (page.name, number, line)
    for page in PAGES
    for first, language, lines in _blocks(page.read_text())
    if language in {"", "sh", "bash", "shell", "text"}
    for number, line in enumerate(lines, first)
)
