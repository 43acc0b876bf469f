"""The flags of ``vgpu-agent webhook``: those of the replaced webhook, and its own."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import pytest

from vgpu_agent.cli import main as command_line
from vgpu_agent.cli import webhook
from vgpu_agent.errors import ConfigError
from vgpu_agent.webhook import service
from vgpu_agent.webhook.new_pod import Pinned
from vgpu_agent.webhook.options import CertificateFiles, Options, OwnCertificateOptions

CERTIFICATES = "/tmp/k8s-webhook-server/serving-certs"


@pytest.fixture(autouse=True)
def _no_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POD_NAMESPACE", raising=False)


def parsed(*words: str) -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser()
    webhook.add_parser(parser.add_subparsers())
    return parser.parse_args(["webhook", *words])


def options(*words: str) -> Options:
    """The options of the service."""
    return webhook._options(parsed(*words))


def test_the_flags_of_the_replaced_webhook_have_its_defaults() -> None:
    """vgpu-manager §1.5: its Deployment starts ours with the same arguments."""
    found = options()
    assert found == Options(CertificateFiles(f"{CERTIFICATES}/tls.crt", f"{CERTIFICATES}/tls.key"))
    assert found.port == 9443
    assert vars(parsed()) | {
        "scheduler_name": "",
        "domain": "",
        "default_node_policy": "",
        "default_device_policy": "",
        "default_topology_mode": "",
        "default_runtime_class": "",
        "dra_admission_enabled": False,
        "default_convert2_dra": False,
        "combined_resource_claim": False,
    } == vars(parsed())


def test_all_flags_of_the_replaced_webhook_are_understood() -> None:
    """Also those that mean nothing here, with a value or without, as Go's flags allow."""
    found = parsed(
        "--kube-api-qps=20",
        "--kube-api-burst=30",
        "--scheduler-name=vgpu-scheduler",
        "--server-bind-port=8443",
        "--pprof-bind-port=0",
        "--domain=a.example",
        "--cert-dir=/certs",
        "--tls-cert-name=a.crt",
        "--tls-key-name=a.key",
        "--default-node-policy=binpack",
        "--default-device-policy=spread",
        "--default-topology-mode=link",
        "--default-runtime-class=nvidia",
        "--vgpu-device-class-name=x",
        "--dra-admission-enabled=false",
        "--default-convert2-dra=false",
        "--combined-resource-claim=F",
        "--v=4",
        "--logtostderr",
    )
    made = webhook._options(found)
    assert made.certificate == CertificateFiles("/certs/a.crt", "/certs/a.key")
    assert made.port == 8443
    family: Any = webhook._family(found)
    assert family._options.scheduler_name == "vgpu-scheduler"
    assert family._options.device_policy == "spread"
    assert family._keys.number == "a.example/vgpu-number"


def test_a_certificate_of_its_own_knows_its_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """The namespace is that of the pod."""
    monkeypatch.setenv("POD_NAMESPACE", "gpu")
    found = options("--certificate-secret=tls", "--webhook-configurations=a, b,")
    assert found.certificate == OwnCertificateOptions(
        "gpu", "tls", "vgpu-agent-webhook", ("a", "b")
    )


def test_own_flags_reach_the_service() -> None:
    """One by one."""
    found = options(
        "--bind-address=127.0.0.1",
        "--pinned-pods=hostname",
        "--watch-nodes=false",
        "--largest-node=16",
        "--body-seconds=3",
        "--drain-seconds=0",
        "--stop-seconds=1.5s",
        "--max-body-bytes=2000000",
    )
    assert found == Options(
        CertificateFiles(f"{CERTIFICATES}/tls.crt", f"{CERTIFICATES}/tls.key"),
        host="127.0.0.1",
        pinned=Pinned.HOSTNAME,
        watches_nodes=False,
        assumed_largest_node=16,
        body_seconds=3.0,
        drain_seconds=0.0,
        stop_seconds=1.5,
        max_body_bytes=2_000_000,
    )
    family: Any = webhook._family(parsed("--complete-limits=false"))
    assert family._options.completes_limits is False


@pytest.mark.parametrize(
    "flag", ["--dra-admission-enabled", "--default-convert2-dra=true", "--combined-resource-claim"]
)
def test_resource_claims_are_refused_and_not_ignored(flag: str) -> None:
    """Pods would get nothing, silently."""
    with pytest.raises(ConfigError, match="resource claims are not supported; leave the flag out"):
        options(flag)


def test_all_names_that_cannot_be_ones_are_named() -> None:
    """They become parts of requests."""
    with pytest.raises(ConfigError) as caught:
        options(
            "--certificate-secret=a/b",
            "--namespace=..",
            "--service-name=",
            "--webhook-configurations=,",
        )
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "--certificate-secret",
        "--namespace",
        "--service-name",
        "--webhook-configurations",
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--server-bind-port=70000"], "expected a number from 0 to 65535, got '70000'"),
        (["--largest-node=-1"], "expected a number from 0 to 1024, got '-1'"),
        (["--watch-nodes=maybe"], "expected true or false, got 'maybe'"),
        (["--drain-seconds=nan"], "expected seconds from 0 to 3600, got 'nan'"),
        (["--default-device-policy=tight"], "--default-device-policy: 'tight' is unknown, "),
        (["--certificate-secret=x", "--kubeconfig="], "--watch-nodes needs the API server; "),
    ],
)
def test_a_wrong_flag_is_one_line_and_status_2(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is served."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    try:
        status: object = command_line.main(["webhook", *words])
    except SystemExit as err:
        status = err.code
    assert status == 2
    assert line in capsys.readouterr().err


def test_a_certificate_that_is_not_there_is_one_line_and_status_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    """With the flags that name it."""
    assert command_line.main(["webhook", "--watch-nodes=false", f"--cert-dir={tmp_path}"]) == 1
    assert f"{tmp_path}/tls.crt does not exist" in capsys.readouterr().err


def test_the_service_runs_with_the_garbage_collector_of_a_running_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The thresholds of a start would let a webhook keep megabytes of garbage."""
    thresholds = list[int]()

    async def run(*_: object) -> None:
        thresholds.append(gc.get_threshold()[0])

    monkeypatch.setattr(service, "run", run)
    assert command_line.main(["webhook", "--watch-nodes=false", f"--cert-dir={tmp_path}"]) == 0
    assert thresholds[0] < 5000
