"""Creating, opening and changing a simulated node; what bad input gets."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from pathlib import Path

import pytest

from tests.simulated import simulated_node
from vgpu_agent.errors import SimulationError
from vgpu_agent.sim import layout
from vgpu_agent.sim.state import SimulatedNode


def test_a_node_can_be_opened_again(tmp_path: Path) -> None:
    """With everything as it was left."""
    first = simulated_node(tmp_path, gpus=3)
    first.lose(1)

    again = SimulatedNode.open(first.directory)

    assert again.uuids == first.uuids
    assert [gpu.condition for gpu in again.describe()] == ["answers", "lost", "answers"]


def test_default_uuids_repeat_for_the_same_seed_only(tmp_path: Path) -> None:
    """Two nodes of one test do not share GPUs, and a test's GPUs are the same tomorrow."""
    one, same, other = (
        SimulatedNode.create(tmp_path / name, seed=seed).uuids
        for name, seed in (("a", ""), ("b", ""), ("c", "node-2"))
    )

    assert one == same
    assert set(one).isdisjoint(other)


def test_every_condition_is_described(tmp_path: Path) -> None:
    """For ``sim list``."""
    node = simulated_node(tmp_path, gpus=4, numa=[0, 0, 1, -1])
    node.lose(1)
    node.lose(2, entirely=True)
    node.unplug(3)
    node.recovery_action(0, "drain-and-reset")

    gpus = node.describe()

    assert [gpu.condition for gpu in gpus] == ["answers", "lost", "lost entirely", "unplugged"]
    assert [gpu.numa_node for gpu in gpus] == [0, 0, 1, None]
    assert [gpu.recovery_action for gpu in gpus] == ["drain-and-reset", "none", "none", "none"]
    assert gpus[0].pci_address == "0000:07:00.0"


def test_a_gpu_is_named_by_number_or_uuid(tmp_path: Path) -> None:
    """Everywhere."""
    node = simulated_node(tmp_path, gpus=2)

    assert [node.gpu_number(1), node.gpu_number("1"), node.gpu_number(node.uuids[1])] == [1, 1, 1]


@pytest.mark.parametrize("gpu", [2, -1, "two", "GPU-none", ""])
def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path, gpu: int | str) -> None:
    """With those there are."""
    node = simulated_node(tmp_path, gpus=2)

    with pytest.raises(SimulationError, match=f"has no GPU {gpu}; it has 0 to 1"):
        node.lose(gpu)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"gpus": 0}, "cannot simulate 0 GPUs; choose 1 to 16"),
        ({"gpus": 17}, "cannot simulate 17 GPUs; choose 1 to 16"),
        ({"model": "RTX"}, "unknown GPU model 'RTX'"),
        ({"gpus": 2, "numa": [0]}, "NUMA nodes 0 do not suit 2 GPUs"),
        ({"gpus": 1, "numa": [-2]}, "NUMA nodes -2 do not suit 1 GPUs"),
        (
            {"gpus": 2, "uuids": ["GPU-aaaaaaaa-0000-4000-8000-000000000000"]},
            "1 UUIDs do not suit 2 GPUs",
        ),
        ({"gpus": 1, "uuids": ["GPU-0"]}, "'GPU-0' is no GPU UUID"),
        (
            {"gpus": 2, "uuids": ["GPU-aaaaaaaa-0000-4000-8000-000000000000"] * 2},
            "two GPUs cannot share a UUID",
        ),
    ],
    ids=str,
)
def test_a_node_that_cannot_be_is_refused(
    tmp_path: Path, arguments: dict[str, object], complaint: str
) -> None:
    """Nothing is left behind."""
    with pytest.raises(SimulationError, match=complaint):
        # parametrised
        SimulatedNode.create(tmp_path / "gpus", **arguments)  # type: ignore[arg-type]  # the test's own keywords

    assert not (tmp_path / "gpus").exists()


def test_a_node_is_not_overwritten_unless_forced(tmp_path: Path) -> None:
    """Another process may be using it."""
    simulated_node(tmp_path, gpus=2)

    with pytest.raises(
        SimulationError,
        match=(
            "holds a simulated node already; choose another directory, or replace it with --force"
        ),
    ):
        simulated_node(tmp_path, gpus=3)

    forced = SimulatedNode.create(tmp_path / "gpus", gpus=3, force=True)
    assert len(forced.uuids) == 3


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    """Its path and the system's reason."""
    (tmp_path / "gpus").touch()

    with pytest.raises(SimulationError, match=r"cannot create a simulated node in .*/gpus: "):
        simulated_node(tmp_path)


def test_a_directory_that_is_missing(tmp_path: Path) -> None:
    """The remedy is the command that makes one."""
    with pytest.raises(
        SimulationError,
        match=r"/none holds no simulated node; create one with: vgpu-agent sim create .*/none",
    ):
        SimulatedNode.open(tmp_path / "none")


def test_a_state_file_that_is_too_short(tmp_path: Path) -> None:
    """A truncated copy, or something else altogether."""
    (tmp_path / "state").write_bytes(b"hello")

    with pytest.raises(
        SimulationError,
        match=r"is not the state of a simulated node \(too short\); create one with",
    ):
        SimulatedNode.open(tmp_path)


def test_a_state_file_that_is_junk(tmp_path: Path) -> None:
    """Long enough, and still not ours."""
    (tmp_path / "state").write_bytes(os.urandom(ctypes.sizeof(layout.Node)))

    with pytest.raises(
        SimulationError, match="is not the state of a simulated node; create one with"
    ):
        SimulatedNode.open(tmp_path)


def test_a_state_file_of_another_version(tmp_path: Path) -> None:
    """Made by an older or a newer program."""
    node = simulated_node(tmp_path)
    node.state.layout = 99

    with pytest.raises(
        SimulationError, match="has layout 99, this program writes layout 1; create one with"
    ):
        SimulatedNode.open(node.directory)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_state_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Root may write anything, so the system's refusal is put in its mouth."""
    node = simulated_node(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "open", refuse)

    with pytest.raises(
        SimulationError, match=f"cannot open .*/state for reading and writing: {os.strerror(code)}"
    ):
        SimulatedNode.open(node.directory)


def test_a_directory_in_the_place_of_the_state_file(tmp_path: Path) -> None:
    """One sentence, not a traceback."""
    (tmp_path / "state").mkdir()

    with pytest.raises(
        SimulationError, match=r"cannot open .*/state for reading and writing: Is a directory"
    ):
        SimulatedNode.open(tmp_path)


def test_authors_at_once_lose_no_event(tmp_path: Path) -> None:
    """Each takes the lock beside the state for its change."""
    node = simulated_node(tmp_path)

    def raise_fifty() -> None:
        for _ in range(50):
            node.xid(0, 1)

    authors = [threading.Thread(target=raise_fifty) for _ in range(4)]
    for author in authors:
        author.start()
    for author in authors:
        author.join()

    assert node.state.event_head == 200
    assert [event.sequence for event in node.state.events[:200]] == list(range(200))


@pytest.mark.parametrize("percent", [-1, 101])
def test_impossible_utilisation_is_refused(tmp_path: Path, percent: int) -> None:
    """0 to 100."""
    with pytest.raises(SimulationError, match=f"utilisation is 0 to 100 percent, not {percent}"):
        simulated_node(tmp_path).utilisation(0, percent)
