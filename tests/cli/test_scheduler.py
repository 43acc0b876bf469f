"""The command ``vgpu-agent scheduler``: the flags of the extender that it replaces, and one line
for each mistake.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
from typing import Any

import pytest
import uvloop

from tests.families.vgpu_manager.scheduling.nodes import container, pod
from vgpu_agent import log
from vgpu_agent.cli import main as cli
from vgpu_agent.cli.scheduler import add_parser
from vgpu_agent.cluster import credentials
from vgpu_agent.errors import RequestRefusedError
from vgpu_agent.families.scheduling import SchedulingFamily
from vgpu_agent.scheduler import service
from vgpu_agent.scheduler.service import Lease, Options

# vgpu-manager §1.3, with its defaults
FLAGS = {
    "--kubeconfig": "/etc/kubeconfig",
    "--master": "https://10.0.0.1",
    "--kube-api-qps": "20",
    "--kube-api-burst": "30",
    "--domain": "nvidia.com",
    "--scheduler-name": "vgpu-scheduler",
    "--server-bind-port": "3456",
    "--pprof-bind-port": "0",
    "--enable-tls": "false",
    "--tls-key-file": "tls.key",
    "--tls-cert-file": "tls.crt",
    "--cert-refresh-interval": "5s",
    "--stuck-grace-period": "30s",
    "--watch-lease": "false",
    "--leader-elect": "false",
    "--leader-identity-prefix": "pod",
    "--leader-elect-resource-name": "vgpu-scheduler",
    "--leader-elect-resource-namespace": "kube-system",
    "--feature-gates": "SerializedNodeFilter=true,SchedulerGPUTopology=false",
}
SWITCHES = ("--enable-tls", "--watch-lease", "--leader-elect")


class Started:
    """The service, which only keeps what it was built with."""

    options: Options
    family: SchedulingFamily
    loop: asyncio.AbstractEventLoop

    def __init__(self, options: Options, family: SchedulingFamily, _: object) -> None:
        Started.options, Started.family = options, family

    async def run(self) -> None:
        """End at once."""
        Started.loop = asyncio.get_running_loop()


@pytest.fixture(autouse=True)
def _no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "Service", Started)
    monkeypatch.setattr(credentials, "from_place", lambda **_: object())
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(log, "configure", lambda **_: None)
    for name in ("POD_NAME", "POD_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)


def options(*flags: str) -> Options:
    """The options of a service that was started with these flags."""
    assert cli.main(["scheduler", *flags]) == 0
    return Started.options


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line with which a call ends, with status 2."""
    try:
        status: Any = cli.main(["scheduler", *flags])
    except SystemExit as left:
        status = left.code
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2, line
    return line


def test_the_defaults_are_those_of_the_contract() -> None:
    """A container without a flag does what the replaced one does."""
    assert options() == Options(
        host="127.0.0.1",
        port=3456,
        grace_seconds=30.0,
        certificate_seconds=5.0,
        event_source="vgpu-scheduler",
    )
    assert Started.family.number_resource == "nvidia.com/vgpu-number"


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_of_the_replaced_extender_is_accepted(flag: str) -> None:
    """In both forms. Switches take a value only after ``=``, or the words that follow, as here."""
    before = options()
    changed = {"--kubeconfig", "--tls-key-file", "--tls-cert-file"}
    for flags in ((flag, FLAGS[flag]), (f"{flag}={FLAGS[flag]}",)):
        found = options(*flags)
        assert found == before or flag in changed


def test_all_flags_at_once_are_accepted() -> None:
    """A chart passes all flags in one call, in the form ``--flag=value``."""
    given = {**FLAGS, "--enable-tls": "true", "--leader-elect": "true"}
    found = options(*(f"{flag}={value}" for flag, value in given.items()))
    assert (found.certificate_file, found.key_file) == ("tls.crt", "tls.key")
    assert found.lease is not None
    assert found.lease.identity.startswith("pod_")


def test_values_reach_the_service() -> None:
    """Each flag with an effect."""
    found = options(
        "--server-bind-address=0.0.0.0",
        "--server-bind-port=0",
        "--probe-bind-port=8080",
        "--stuck-grace-period=1m30s",
        "--cert-refresh-interval=500ms",
        "--scheduler-name=placer",
        "--enable-tls",
        "--tls-cert-file=a",
        "--tls-key-file=b",
        "--domain=example.com",
    )
    assert found == Options(
        host="0.0.0.0",
        port=0,
        grace_seconds=90.0,
        certificate_file="a",
        key_file="b",
        certificate_seconds=0.5,
        event_source="placer",
        probe_port=8080,
    )
    assert Started.family.number_resource == "example.com/vgpu-number"
    assert "example.com/pre-allocated" in Started.family.pod_keys.annotations
    assert "example.com/node-scheduler-policy" in Started.family.pod_keys.annotations


def test_the_service_runs_on_the_faster_event_loop() -> None:
    """In a large cluster that is a fifth more pods a second."""
    options()
    assert isinstance(Started.loop, uvloop.Loop)


@pytest.mark.parametrize("switch", SWITCHES)
def test_switches_take_what_go_takes(switch: str) -> None:
    """And nothing else (strconv.ParseBool)."""
    files = ("--tls-cert-file=a", "--tls-key-file=b")

    def is_on(*flags: str) -> bool:
        found = options(*files, *flags)
        return bool(found.certificate_file or found.lease)

    for word in ("1", "t", "T", "true", "TRUE", "True"):
        assert is_on(f"{switch}={word}")
    for word in ("0", "f", "F", "false", "FALSE", "False"):
        assert not is_on(f"{switch}={word}")
    assert is_on(switch)
    assert is_on(switch, "--domain=nvidia.com")
    assert not is_on(switch, f"{switch}=false")


def test_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Lease of the extenders gets another holder name each time a process starts. The holder of
    kube-scheduler's Lease is recognised by the pod's name.
    """
    monkeypatch.setenv("POD_NAME", "extender-abc")
    monkeypatch.setenv("POD_NAMESPACE", "gpu")
    first, second = options("--leader-elect"), options("--leader-elect")
    assert first.lease is not None
    assert second.lease is not None
    assert (first.lease.namespace, first.lease.name) == ("gpu", "vgpu-scheduler")
    assert first.lease.identity.startswith("extender-abc_")
    assert first.lease.identity != second.lease.identity
    assert (first.pod_namespace, first.pod_name) == ("gpu", "extender-abc")
    assert options("--watch-lease").lease == Lease(
        "gpu", "vgpu-scheduler", "extender-abc", is_schedulers=True
    )
    other = options("--watch-lease", "--leader-elect-resource-namespace=kube-system")
    assert other.lease is not None
    assert other.lease.namespace == "kube-system"
    assert options().pod_name == ""


def test_incomplete_requests_are_served_as_asked() -> None:
    """vgpu-manager §5.3: compute alone takes all of a card's memory, which surprises many."""
    cores, memory = pod(container(cores=30)), pod(container(memory=5))
    options()
    for asked in (cores, memory):
        assert Started.family.read_demand(asked) is not None
    options("--cores-only=proportional", "--memory-only=refused")
    wanted = Started.family.read_demand(cores)
    assert wanted is not None
    assert wanted.demand.containers[0].memory_mib(1000, 1) == 300
    with pytest.raises(RequestRefusedError, match=r"vgpu-memory, and not for nvidia.com/vgpu-cor"):
        Started.family.read_demand(memory)
    options("--cores-only", "refused")
    with pytest.raises(RequestRefusedError, match=r"this cluster wants both, so add nvidia"):
        Started.family.read_demand(cores)


def test_words_for_product_names_match_as_asked() -> None:
    """``A10`` means ``A100`` only where the operator wants that (vgpu-manager §12.3)."""
    for flags, expected in (
        ((), False),
        (("--type-match=words",), False),
        (("--type-match", "substring"), True),
    ):
        options(*flags)
        wanted = Started.family.read_demand(pod(include_type="a10"))
        assert wanted is not None
        assert wanted.demand.types_match_substrings is expected


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--server-bind-port", "65536"], "expected a port from 0 to 65535, got '65536'"),
        (["--server-bind-port=-1"], "expected a port"),
        (["--server-bind-port=٣"], "expected a port"),
        (["--server-bind-address="], "expected an address such as 0.0.0.0, got ''"),
        (["--stuck-grace-period", "soon"], "expected a duration such as 30s or 1m, got 'soon'"),
        (["--stuck-grace-period=-5s"], "expected a duration"),
        (["--stuck-grace-period=500ms"], "--stuck-grace-period: expected 1s or more, got 0.5s"),
        (["--cert-refresh-interval=1e9s"], "expected a duration"),
        (["--cert-refresh-interval=NaN"], "expected a duration"),
        (["--enable-tls=yes"], "expected true or false, got 'yes'"),
        (["--enable-tls="], "expected true or false, got ''"),
        (["--enable-tls"], "--enable-tls needs --tls-cert-file and --tls-key-file"),
        (["--enable-tls", "--tls-cert-file=a"], "--enable-tls needs"),
        (["--watch-lease", "--leader-elect"], "--watch-lease and --leader-elect exclude each"),
        (["--domain", "NVIDIA"], "expected a DNS name in lower case such as nvidia.com"),
        (["--domain="], "expected a DNS name"),
        (["--domain", "a" * 300], "expected a DNS name"),
        (["--family", "neither"], "--family: expected "),
        (["--type-match", "regex"], "invalid choice: 'regex'"),
        (["--log-level", "loud"], "invalid choice: 'loud'"),
        (["--leader-elect-resource-name=../pods"], "expected a name that Kubernetes allows"),
        (["--leader-elect-resource-namespace=A"], "expected a name that Kubernetes allows"),
        (["--no-such-flag"], "--no-such-flag"),
        (["stray"], "stray"),
        (["--domain"], "--domain"),
    ],
)
def test_a_wrong_value_is_one_line_and_status_2(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names flag, value and what is expected."""
    line = refused(capsys, *flags)
    assert text in line
    assert len(line) < 600


def test_without_access_to_the_api_server_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Outside of a cluster, and without a kubeconfig."""
    monkeypatch.setattr(credentials, "from_place", lambda **_: None)
    assert "or name --kubeconfig" in refused(capsys)


@pytest.mark.parametrize(
    "flags",
    [["--logtostderr"], ["--logtostderr=true"], ["-v", "4"], ["-v=4"], ["-v4"], ["--v=4"]],
)
def test_klogs_flags_are_accepted_as_go_accepts_them(flags: list[str]) -> None:
    """A switch needs no value, and one dash is as good as two for its number."""
    assert options(*flags, "--scheduler-name=placer").event_source == "placer"
    assert options("--scheduler-name=placer", *flags).event_source == "placer"


@pytest.mark.parametrize(
    "flags",
    [["--cores-only=proportional"], ["--memory-only", "refused"], ["--domain=example.com"]],
)
def test_a_flag_that_the_family_does_not_know_is_refused(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator must not believe that it has an effect."""
    line = refused(capsys, "--family=volcano-vgpu", *flags)
    name = flags[0].partition("=")[0]
    assert f"{name}: has no effect with --family volcano-vgpu; remove it" in line
    assert options("--family=volcano-vgpu", "--type-match=substring") is not None
    assert options("--family=vgpu-manager", *flags) is not None


def test_help_shows_each_default_once(capsys: pytest.CaptureFixture[str]) -> None:
    """In the form in which it can be given."""
    with pytest.raises(SystemExit):
        cli.main(["scheduler", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    texts = re.split(r" (?=--[a-z][a-z-]* )", text.partition("options:")[2])
    shown = {each.split()[0]: re.findall(r"\(default:? ([^)]*)\)", each) for each in texts}
    assert all(len(found) <= 1 for found in shown.values()), shown
    assert shown["--cert-refresh-interval"] == ["5s"]
    assert shown["--stuck-grace-period"] == ["30s"]
    assert shown["--server-bind-port"] == ["3456"]
    assert shown["--domain"] == ["nvidia.com"]
    assert FLAGS.keys() <= shown.keys()


def test_flags_without_effect_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody should look for what they do."""
    parsers = argparse.ArgumentParser().add_subparsers()
    add_parser(parsers)
    text = " ".join(parsers.choices["scheduler"].format_help().split())
    for flag in ("--master", "--kube-api-qps", "--kube-api-burst", "--pprof-bind-port"):
        assert f"{flag} VALUE accepted, without effect: " in text
