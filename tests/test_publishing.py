"""docs/publishing.md and its workflow: files, flags and versions that exist here."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from vgpu_agent import __version__

pytestmark = pytest.mark.component  # it starts programs

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "publishing.md").read_text()
WORKFLOW: Any = yaml.safe_load((ROOT / "docs" / "publishing" / "github.yaml").read_text())
STEPS = WORKFLOW["jobs"]["publish"]["steps"]
SCRIPTS = {step["name"]: step["run"] for step in STEPS if "run" in step}


def _without_expressions(script: str) -> str:
    """A script as a shell gets it: GitHub replaces ${{ … }} before."""
    return re.sub(r"\$\{\{.*?\}\}", "value", script)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_step_is_a_script_that_bash_can_read(name: str) -> None:
    """A script that cannot be run here can at least be parsed."""
    script = _without_expressions(SCRIPTS[name])
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_tag_is_compared_with_the_version(tmp_path: Path) -> None:
    """The first step, run: it ends with an error for another tag."""
    script = _without_expressions(SCRIPTS["Check that the tag is the version"])
    for tag, status in ((f"v{__version__}", 0), ("v9.9.9", 1)):
        environment = {
            "GITHUB_REF_NAME": tag,
            "GITHUB_ENV": str(tmp_path / "env"),
            "PATH": "/usr/bin:/bin",
        }
        command = ["bash", "-e", "-c", script]
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        assert done.returncode == status, tag
    assert (tmp_path / "env").read_text() == f"VERSION={__version__}\n"


def test_the_chart_is_given_the_image_that_was_pushed(tmp_path: Path) -> None:
    """The line that the step replaces is in values.yaml."""
    values = tmp_path / "manifests" / "chart" / "values.yaml"
    values.parent.mkdir(parents=True)
    values.write_text((ROOT / "manifests" / "chart" / "values.yaml").read_text())
    script = SCRIPTS["Package, push and sign the chart"].splitlines()[0]
    environment = {"REGISTRY": "ghcr.io/someone", "PATH": "/usr/bin:/bin"}
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, check=True)
    assert yaml.safe_load(values.read_text())["image"]["repository"] == "ghcr.io/someone/vgpu-agent"


def test_build_arguments_are_those_of_the_containerfile() -> None:
    """A wrong one is only a warning of podman."""
    containerfile = (ROOT / "Containerfile").read_text()
    known = set(re.findall(r"^ARG (\w+)", containerfile, flags=re.MULTILINE))
    used = set(re.findall(r"--build-arg (\w+)=", PAGE + "\n".join(SCRIPTS.values())))
    assert used <= known
    assert {"BASE", "COMMIT"} <= used


def test_the_page_speaks_of_this_version() -> None:
    """Commands are copied as they are."""
    assert set(re.findall(r"vgpu-agent[-:](\d+\.\d+\.\d+)", PAGE)) == {__version__}


def test_the_workflow_is_not_active() -> None:
    """It has never run: turning it on is a decision of whoever owns a registry."""
    assert not (ROOT / ".github").exists()


def test_the_number_of_wheels_is_that_of_the_lock_file() -> None:
    """Another one has not been looked at on both platforms."""
    requirements = (ROOT / "requirements" / "runtime.txt").read_text()
    count = len(re.findall(r"^\S+==", requirements, flags=re.MULTILINE))
    assert f"all {count} exist for both" in PAGE
