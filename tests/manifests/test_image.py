"""The Containerfile and the script that builds the image, against the manifests that deploy it."""

from __future__ import annotations

import re
from typing import Any

from tests.manifests.documents import ROOT
from vgpu_agent import __version__


def test_the_image_is_of_this_version_and_knows_its_commit() -> None:
    """The label and the variable that ``build_info`` shows. The build ignores what it does not copy."""
    containerfile = (ROOT / "Containerfile").read_text()
    assert f'org.opencontainers.image.version="{__version__}"' in containerfile
    assert "VGPU_AGENT_COMMIT=${COMMIT}" in containerfile
    allowed = {line[1:] for line in (ROOT / ".containerignore").read_text().splitlines() if line.startswith("!")}
    copied = set(re.findall(r"^COPY (?!--)(\S+)", containerfile, flags=re.MULTILINE))
    assert copied == allowed


def test_the_image_script_builds_what_the_manifests_deploy(kustomization: Any) -> None:
    """Under the name that the kustomization sets; from the files that the Containerfile takes, so that no change of one is overlooked."""
    script = (ROOT / "scripts" / "image").read_text()
    image = kustomization["images"][0]
    assert f'default="{image["newName"]}:{image["newTag"]}"' in script
    (names,) = re.findall(r"^SOURCES = \((.*)\)$", script, flags=re.MULTILINE)
    allowed = {line[1:] for line in (ROOT / ".containerignore").read_text().splitlines() if line.startswith("!")}
    assert set(re.findall(r'"([^"]+)"', names)) == allowed | {"Containerfile", ".containerignore"}


def test_the_last_stage_of_the_image_needs_no_shell() -> None:
    """Its base may have none. Each RUN there names a program, and the command is Python."""
    containerfile = (ROOT / "Containerfile").read_text()
    last = containerfile[containerfile.rindex("\nFROM ") :]
    assert [line for line in last.splitlines() if line.startswith("RUN ") and not line.startswith('RUN ["python3"')] == []
    assert "#!/bin/sh" not in containerfile
