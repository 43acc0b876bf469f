"""Specs that are refused before a runtime has to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu_agent.cdi.document import Spec, decode, encode
from vgpu_agent.cdi.rules import problems, with_sufficient_version
from vgpu_agent.errors import CdiError

EDITS = {"env": ["A=b"]}
GOOD = {
    "cdiVersion": "0.6.0",
    "kind": "vendor.com/gpu",
    "devices": [{"name": "0", "containerEdits": EDITS}],
}


def _spec(**changes: Any) -> Spec:
    return decode(json.dumps({**GOOD, **changes}).encode())


def _edited(**edits: Any) -> dict[str, Any]:
    return {"devices": [{"name": "0", "containerEdits": edits}]}


def test_a_good_spec_has_no_problems() -> None:
    """All kinds of edits, written and read back as they were."""
    spec = _spec(
        containerEdits={
            "env": ["A=b=c"],
            "deviceNodes": [
                {
                    "path": "/dev/a",
                    "hostPath": "/h/dev/a",
                    "type": "c",
                    "major": 1,
                    "minor": 3,
                    "permissions": "rwm",
                }
            ],
            "mounts": [{"hostPath": "/h", "containerPath": "/c", "options": ["ro"]}],
            "hooks": [
                {
                    "hookName": "createContainer",
                    "path": "/hook",
                    "args": ["hook", "x"],
                    "env": ["A=b"],
                    "timeout": 3,
                }
            ],
        }
    )
    assert problems(spec) == []
    assert decode(encode(spec)) == spec


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cdiVersion": "9.0.0"}, "cdiVersion '9.0.0' is none of"),
        ({"cdiVersion": "0.3.0"}, "does not know all that is used, which takes 0.5.0"),
        ({"kind": "gpu"}, "kind 'gpu' is not of the form"),
        ({"devices": []}, "there are no devices"),
        ({"devices": [*GOOD["devices"], *GOOD["devices"]]}, "device 0 appears twice"),
        ({"devices": [{"name": "a b", "containerEdits": EDITS}]}, "device name 'a b'"),
        ({"devices": [{"name": "0", "containerEdits": {}}]}, "device 0 changes nothing"),
        ({"annotations": {"a/b/c": "d"}}, "not an annotation key"),
        (_edited(env=["NOVALUE"]), "env 'NOVALUE' is not of the form"),
        (_edited(deviceNodes=[{"path": "dev/a"}]), "device node 'dev/a' is not an absolute path"),
        (_edited(deviceNodes=[{"path": "/dev/a", "type": "x"}]), "of type 'x'"),
        (_edited(deviceNodes=[{"path": "/dev/a", "permissions": "rx"}]), "permissions 'rx'"),
        (
            _edited(mounts=[{"hostPath": "", "containerPath": "/a"}]),
            "needs a host path and an absolute container path",
        ),
        (_edited(hooks=[{"hookName": "later", "path": "/a"}]), "hook 'later' is none of"),
        (
            _edited(hooks=[{"hookName": "poststop", "path": "a"}]),
            "hook program 'a' is not an absolute path",
        ),
        (_edited(additionalGids=[44]), "which takes 0.7.0"),
    ],
)
def test_what_a_runtime_would_refuse_is_named(changes: dict[str, Any], said: str) -> None:
    """One sentence that says what and where."""
    (found,) = problems(_spec(**changes))
    assert said in found


def test_a_version_that_is_too_low_is_raised_to_what_is_needed() -> None:
    """Paths of the node, which we add, are not known to the oldest version.
    A spec that needs nothing keeps its version.
    """
    spec = _spec(
        cdiVersion="0.3.0", **_edited(deviceNodes=[{"path": "/dev/a", "hostPath": "/h/dev/a"}])
    )
    assert with_sufficient_version(spec).cdi_version == "0.5.0"
    assert with_sufficient_version(_spec()).cdi_version == "0.6.0"


@pytest.mark.parametrize(
    "text",
    ["kind: a.com/b\ncdiVersion: 0.5.0\ndevices:\n- name: x\n  containerEdits: {env: [A=b]}\n"],
)
def test_a_spec_may_be_yaml(text: str) -> None:
    """The container toolkit writes YAML by default."""
    assert decode(text.encode(), is_yaml=True).names == ("a.com/b=x",)


@given(
    st.binary(max_size=200) | st.text(max_size=100).map(str.encode) | st.just(b"[" * 5000),
    st.booleans(),
)
def test_junk_never_raises_anything_else(content: bytes, is_yaml: bool) -> None:
    """Any tool may have printed the text."""
    with pytest.raises(CdiError):
        decode(content, is_yaml=is_yaml)


def test_the_order_of_keys_and_the_spacing_do_not_change_the_file() -> None:
    """A tool may print an unchanged spec in another form. Its file is then not written again."""
    printed = json.dumps(dict(reversed(GOOD.items())), indent=4).encode()
    assert encode(decode(printed)) == encode(_spec())
