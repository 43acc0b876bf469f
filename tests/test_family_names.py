"""The check that only the families' packages know a family by its name."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "family_names.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module."""
    specification = importlib.util.spec_from_file_location("family_names", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('kind = "volcano-vgpu"', "volcano-vgpu"),
        ("on = settings.families.volcano_gpushare", "volcano_gpushare"),
        ("Families(aws=True)", "aws"),
        ('text = f"set volcanoVgpu.isolation to {value}"', "volcanoVgpu"),
        ('startswith("volcano.sh/")', "volcano.sh/"),
        ('"k8s.amazonaws.com/vgpu" in limits', "k8s.amazonaws.com/"),
        ("import vgpu_agent.families.aws.settings", "aws"),
        ("from vgpu_agent.families import volcano_vgpu", "volcano_vgpu"),
        ("def volcano_vgpu(): pass", "volcano_vgpu"),
    ],
)
def test_a_name_or_a_domain_of_a_family_is_found(script: ModuleType, code: str, found: str) -> None:
    """A name is found as a string, a part of one, an attribute, a parameter or a module."""
    assert list(script.places(code, script.pattern())) == [(1, found)]


@pytest.mark.parametrize(
    "code",
    [
        '"""Volcano (volcano-vgpu D16) writes volcano.sh/vgpu-node."""',
        'def f():\n    """As volcano-vgpu does it."""',
        "x = 1  # volcano.sh/vgpu-node",
        'text = "nvidia.com/gpu, laws and Volcano"',
        "nvidia = flaws = 1",
        'group = "scheduling.volcano.sh/group-name"',
    ],
)
def test_what_explains_or_is_a_word_of_its_own_is_not(script: ModuleType, code: str) -> None:
    """Docstrings and comments may say what something is for, and NVIDIA is the vendor, too."""
    assert list(script.places(code, script.pattern())) == []


def test_the_product_has_no_such_place(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Places in families/ and in the simulator are none; in another file the line is named."""
    assert script.main() == 0
    for name in ("families/aws/spec.py", "sim/volcano/node.py", "agent/new.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('\nnames = ["aws"]\n')
    monkeypatch.setattr(script, "PRODUCT", tmp_path)
    assert script.main() == 1
    assert capsys.readouterr().err == (
        "vgpu_agent/agent/new.py:2: aws: only families/ and its registry know a family by its "
        "name\n"
    )
