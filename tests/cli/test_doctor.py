"""The frame of ``vgpu-agent doctor``: settings from an agent's answer, time limits, lines. The
checks are tested on a simulated node in tests/component.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from tests.cluster.fake_api import FakeApi
from vgpu_agent.cli import doctor
from vgpu_agent.cli.doctor import settings_of
from vgpu_agent.cli.node_checks import Finding, Level, runtime_class
from vgpu_agent.config import load, schema
from vgpu_agent.errors import ClusterError, ConfigError


def test_settings_survive_the_way_through_debug_config(tmp_path: object) -> None:
    """With sections in lists, whose paths have an index."""
    file = f"{tmp_path}/config.yaml"
    with open(file, "w", encoding="utf-8") as config:
        config.write(
            "version: v1\n"
            "kubelet: {directory: /srv/kubelet}\n"
            "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
        )
    settings = load.load({"--config": file}, {}).settings
    assert settings_of(dict(schema.values(settings))) == settings


def test_a_value_of_another_version_is_refused() -> None:
    """The doctor then falls back to files, and says so."""
    with pytest.raises(ConfigError, match="unknown field"):
        settings_of({"kubelet.colour": "red"})


def test_a_check_that_hangs_does_not_hang_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver call may never return; the other checks still tell something."""
    monkeypatch.setattr(doctor, "_CHECK_SECONDS", 0.05)
    for_ever = threading.Event()

    def hanging() -> tuple[Finding, ...]:
        for_ever.wait()
        return ()

    (finding,) = doctor._within_time("driver", hanging)
    for_ever.set()
    assert (finding.level, finding.text) == (Level.ERROR, "did not answer within 0.05 s")


def test_a_check_that_breaks_is_an_error_of_its_own() -> None:
    """Its bug is shown, and the report goes on."""

    def broken() -> tuple[Finding, ...]:
        raise KeyError("x")

    (finding,) = doctor._within_time("cgroups", broken)
    assert finding.text == "could not be checked: KeyError: 'x'"


def test_a_finding_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the level is coloured, so that a copy of the text stays plain."""
    monkeypatch.setenv("COLUMNS", "80")
    finding = Finding("driver", Level.ERROR, "word " * 40, "do this " * 20)
    shown = doctor._shown(finding, colour=False)
    assert max(map(len, shown.splitlines())) <= 80
    assert "\n" + " " * 28 + "remedy: do this" in shown
    assert doctor._shown(finding, colour=True).startswith("\033[31merror\033[0m    driver")


class RuntimeClasses(FakeApi):
    """Answers with a RuntimeClass, or with a status."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self._status = status

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> bytes:
        assert path == "/apis/node.k8s.io/v1/runtimeclasses/nvidia"
        if self._status != 200:
            raise ClusterError("refused", status=self._status)
        return b"{}"


@pytest.mark.parametrize(
    ("status", "texts"),
    [
        (200, ["nvidia is there, for pods that name it"]),
        (404, ["none is named nvidia: NVIDIA's runtime has to be the node's default"]),
        (403, []),
    ],
)
async def test_the_runtime_class_is_looked_for_where_that_is_allowed(
    status: int, texts: list[str]
) -> None:
    """The agent's own service account may not read it, which is no fault."""
    assert [finding.text for finding in await runtime_class(RuntimeClasses(status))] == texts


async def test_an_api_server_that_fails_is_no_missing_runtime_class() -> None:
    """It is the finding about the API server."""
    with pytest.raises(ClusterError):
        await runtime_class(RuntimeClasses(500))
