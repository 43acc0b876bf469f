"""``vgpu-agent sim …``: each action changes what NVML says, and bad input gets one sentence."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from tests.patience import PATIENCE_SECONDS
from tests.simulated import nvml_on
from vgpu_agent.errors import SimulationError
from vgpu_agent.sim.cli.sim import add_parser
from vgpu_agent.sim.models import models
from vgpu_agent.sim.state import SimulatedNode


def _sim(*words: object) -> int:
    parser = argparse.ArgumentParser(prog="vgpu-agent")
    add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["sim", *(str(word) for word in words)])
    return int(arguments.run(arguments))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A node of four A100."""
    SimulatedNode.create(tmp_path / "gpus", gpus=4)
    return tmp_path / "gpus"


def test_create_spreads_gpus_over_numa_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evenly, in order."""
    code = _sim(
        "create", tmp_path / "new", "--gpus", 8, "--model", "h100-80gb-hbm3", "--numa-nodes", 2
    )

    assert code == 0
    assert capsys.readouterr().out == (
        f"created 8 × NVIDIA H100 80GB HBM3 in {tmp_path / 'new'}\n"
        f"run an agent on it: vgpu-agent run --simulate {tmp_path / 'new'}\n"
    )
    assert [gpu.numa_node for gpu in SimulatedNode.open(tmp_path / "new").describe()] == [
        0,
        0,
        0,
        0,
        1,
        1,
        1,
        1,
    ]


def test_create_takes_a_numa_node_for_each_gpu(tmp_path: Path) -> None:
    """A GPU may have none, -1."""
    _sim("create", tmp_path / "new", "--gpus", 3, "--numa=1,0,-1")

    assert [gpu.numa_node for gpu in SimulatedNode.open(tmp_path / "new").describe()] == [
        1,
        0,
        None,
    ]


def test_list_as_a_table_and_as_json(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For people and for scripts, the same facts."""
    _sim("lose", directory, "--gpu", 1)
    assert capsys.readouterr().out == (
        f"GPU 1 of {directory} has fallen off the bus; undo it with `sim restore`\n"
    )
    _sim("list", directory)
    table = capsys.readouterr().out.splitlines()
    _sim("list", directory, "--json")
    rows = json.loads(capsys.readouterr().out)

    assert table[0].split() == [
        "GPU",
        "UUID",
        "MODEL",
        "MEMORY",
        "NUMA",
        "CONDITION",
        "RECOVERY",
        "ACTION",
        "PROCESSES",
        "MIG",
    ]
    assert "lost" in table[2]
    assert len(rows) == 4
    assert [row["condition"] for row in rows] == ["answers", "lost", "answers", "answers"]
    assert rows[1]["uuid"] in table[2]


def test_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every one, by the name that ``--model`` takes."""
    _sim("models")

    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(models())


def test_a_gpu_is_lost_restored_unplugged_and_plugged(directory: Path) -> None:
    """By number or by UUID."""
    uuid = SimulatedNode.open(directory).uuids[2]
    conditions = []
    for words in (["lose"], ["lose", "--entirely"], ["restore"], ["unplug"], ["plug"]):
        _sim(words[0], directory, "--gpu", uuid, *words[1:])
        conditions.append(SimulatedNode.open(directory).describe()[2].condition)

    assert conditions == ["lost", "lost entirely", "answers", "unplugged", "answers"]


def test_xid_mig_and_health_reach_nvml(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything in one session of a running client."""
    with nvml_on(SimulatedNode.open(directory)):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        events = pynvml.nvmlEventSetCreate()
        pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
        _sim("xid", directory, "--gpu", 0, "--code", 79, "--mig", "7:0")
        _sim("recovery-action", directory, "--gpu", 0, "drain-and-reset")
        _sim("remap", directory, "--gpu", 0, "--uncorrected", 2, "--pending")
        _sim("temperature", directory, "--gpu", 0, 77)
        _sim("utilisation", directory, "--gpu", 0, "--percent", 60)

        event = pynvml.nvmlEventSetWait_v2(events, 1000)
        action = pynvml.nvmlDeviceGetFieldValues(
            handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        )[0]

        assert (event.eventData, event.gpuInstanceId, event.computeInstanceId) == (79, 7, 0)
        assert action.value.uiVal == pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET
        assert pynvml.nvmlDeviceGetRemappedRows(handle) == (0, 2, 1, 0)
        assert pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU) == 77
        assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu == 60
        _sim("utilisation", directory, "--gpu", 0, "--percent", "auto")
        assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu == 0
        assert capsys.readouterr().out.splitlines() == [
            f"GPU 0 of {directory} has reported XID 79, MIG instance 7:0",
            f"GPU 0 of {directory} has the recovery action drain-and-reset",
            (
                f"GPU 0 of {directory} has remapped 0 rows for corrected and 2 for uncorrected "
                "errors, more are pending"
            ),
            f"GPU 0 of {directory} has 77 °C",
            f"GPU 0 of {directory} has a utilisation of 60 %",
            f"GPU 0 of {directory} has the utilisation of its processes",
        ]
        _sim("mig", directory, "--gpu", 0, "--profiles", "3g.40gb, 1g.10gb")
        assert pynvml.nvmlDeviceGetMigMode(handle) == [1, 1]
        assert len(capsys.readouterr().out.splitlines()) == 2
        _sim("mig", directory, "--gpu", 0, "--profiles", "")
        assert pynvml.nvmlDeviceGetMigMode(handle) == [0, 0]


def test_faults_are_set_and_cleared(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A running client meets them at its next call."""
    with nvml_on(SimulatedNode.open(directory)):
        handle = pynvml.nvmlDeviceGetHandleByIndex(1)
        _sim(
            "fault",
            directory,
            "nvmlDeviceGetMemoryInfo",
            "--gpu",
            1,
            "--code",
            999,
            "--times",
            1,
            "--delay-ms",
            1,
        )
        with pytest.raises(pynvml.NVMLError_Unknown):
            pynvml.nvmlDeviceGetMemoryInfo(handle)
        pynvml.nvmlDeviceGetMemoryInfo(handle)
        _sim("fault", directory, "nvmlDeviceGet*", "--code", 15)
        _sim("fault", directory, "--clear")
        pynvml.nvmlDeviceGetMemoryInfo(handle)
    assert capsys.readouterr().out.splitlines() == [
        "calls of nvmlDeviceGetMemoryInfo of GPU 1 take 1 ms and fail with NVML code 999 1 times",
        "calls of nvmlDeviceGet* fail with NVML code 15",
        f"{directory} has no faults now",
    ]


def test_a_process_runs_until_it_is_interrupted(directory: Path) -> None:
    """In the foreground; Ctrl-C ends it with 0."""
    program = "import sys; from vgpu_agent.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [
        sys.executable,
        "-c",
        program,
        "sim",
        "process",
        str(directory),
        "--gpu",
        "2",
        "--memory-mib",
        "300",
        "--mig",
        "7:0",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    announced = process.stdout.readline()
    with nvml_on(SimulatedNode.open(directory)):
        rows = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(pynvml.nvmlDeviceGetHandleByIndex(2))
        process.send_signal(signal.SIGINT)

        assert announced == f"holding 300 MiB on GPU 2 as pid {process.pid}\n"
        assert [(row.pid, row.usedGpuMemory >> 20, row.gpuInstanceId) for row in rows] == [
            (process.pid, 300, 7)
        ]
        assert process.wait(PATIENCE_SECONDS) == 0
        assert (
            pynvml.nvmlDeviceGetComputeRunningProcesses_v3(pynvml.nvmlDeviceGetHandleByIndex(2))
            == []
        )
    process.stdout.close()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["xid", "--gpu", 9, "--code", 1], r"has no GPU 9; it has 0 to 3"),
        (["fault", "nvmlNonsense", "--code", 1], r"NVML has no function 'nvmlNonsense'"),
        (["create", "--force", "--numa", "0,1,2"], r"NUMA nodes 0,1,2 do not suit 2 GPUs"),
        (["create"], r"holds a simulated node already"),
        (
            ["mig", "--gpu", 0, "--profiles", "9g.9gb"],
            r"has no MIG profile '9g.9gb'; it has 1g.10gb",
        ),
    ],
    ids=str,
)
def test_what_this_node_cannot_take_gets_one_sentence(
    directory: Path, words: list[object], complaint: str
) -> None:
    """The command line prints this sentence, and the node stays as it was."""
    with pytest.raises(SimulationError, match=complaint):
        _sim(words[0], directory, *words[1:])

    assert len(SimulatedNode.open(directory).uuids) == 4


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            ["xid", "--gpu", 0, "--code", 1, "--mig", "7"],
            "--mig: expected the ids of a GPU and a compute instance, like 7:0, got '7'",
        ),
        (
            ["xid", "--gpu", 0, "--code", "-4"],
            "--code: expected a whole number from 1 to 65535, got '-4'",
        ),
        (
            ["utilisation", "--gpu", 0, "--percent", "50%"],
            "--percent: expected 0 to 100, or auto, got '50%'",
        ),
        (
            ["temperature", "--gpu", 0, "hot"],
            "CELSIUS: expected a whole number from 0 to 150, got 'hot'",
        ),
        (["recovery-action", "--gpu", 0, "dance"], "ACTION: invalid choice: 'dance'"),
        (
            ["remap", "--gpu", 0, "--corrected", "-3"],
            "--corrected: expected a whole number from 0 to 65535, got '-3'",
        ),
        (
            ["process", "--gpu", 0, "--memory-mib", "-1"],
            "--memory-mib: expected a whole number from 0 to 1048576, got '-1'",
        ),
        (
            ["process", "--gpu", 0, "--memory-mib", 1, "--sm-percent", 200],
            "--sm-percent: expected a whole number from 0 to 100, got '200'",
        ),
        (
            ["process", "--gpu", 0, "--memory-mib", 1, "--seconds", "-1"],
            "--seconds: expected seconds above 0 and up to 86400, got '-1'",
        ),
        (["fault"], "name one NVML function, or give --clear, which forgets all faults"),
        (
            ["fault", "nvmlInit", "--clear"],
            "name one NVML function, or give --clear, which forgets all faults",
        ),
        (["fault", "nvmlInit"], "a fault of nvmlInit needs --code, --delay-ms or both"),
        (
            ["fault", "nvmlInit", "--code", 1, "--times", 0],
            "--times: expected 1 to 1000000, or -1 for ever, got '0'",
        ),
        (["create", "--gpus", 17], "--gpus: expected a whole number from 1 to 16, got '17'"),
        (["create", "--numa", "0,x"], "--numa: expected numbers like 0,0,1,1, got '0,x'"),
        (["create", "--numa-nodes", 3], "--numa-nodes: expected 1 to the number of GPUs, 2, got 3"),
    ],
    ids=str,
)
def test_a_wrong_word_is_a_wrong_call(
    directory: Path, words: list[object], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2, and the line says what would have been right."""
    with pytest.raises(SystemExit) as ended:
        _sim(words[0], directory, *words[1:])

    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_directory_without_a_node(tmp_path: Path) -> None:
    """The sentence says how to make one."""
    with pytest.raises(SimulationError, match="create one with: vgpu-agent sim create"):
        _sim("list", tmp_path)


def test_the_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    """Users can copy the examples."""
    with pytest.raises(SystemExit):
        _sim("--help")

    assert (
        "vgpu-agent sim create /tmp/node --gpus 8 --model A100-SXM4-80GB" in capsys.readouterr().out
    )
