"""The records of the kubelet stand-in, and the way into its file."""

from __future__ import annotations

import concurrent.futures
import json
from pathlib import Path

from vgpu_agent.sim.kubelet.records import CHECKPOINT, Records, ResourceDevices


def test_writers_of_the_checkpoint_do_not_meet(tmp_path: Path) -> None:
    """Three plugins' lists come in one moment.
    A file that is renamed under its writer would end that plugin's stream.
    """
    records = Records(tmp_path)
    records.devices = {
        f"example.com/r{number}": ResourceDevices(dict.fromkeys(map(str, range(2000))))
        for number in range(3)
    }
    with concurrent.futures.ThreadPoolExecutor(8) as workers:
        for written in [workers.submit(records.write_checkpoint) for _ in range(200)]:
            written.result()
    assert len(json.loads((tmp_path / CHECKPOINT).read_text())["Data"]["RegisteredDevices"]) == 3
