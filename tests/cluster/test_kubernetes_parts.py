"""Importing next to nothing of kubernetes_asyncio."""

from __future__ import annotations

import json
import subprocess
import sys

_PROGRAM = """
import json, sys, aiohttp, msgspec, yaml
def mib():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) / 1024
before, modules = mib(), len(sys.modules)
from vgpu_agent.cluster import kubernetes_parts
parts = kubernetes_parts.load()
configuration = parts.configuration()
configuration.host = "https://api:6443"
print(json.dumps({
    "grown": mib() - before,
    "modules": len(sys.modules) - modules,
    "host": configuration.host,
    "models": [name for name in sys.modules if name.startswith("kubernetes_asyncio.client.") and ".models" in name or ".api." in name],
    "urllib3": [name for name in sys.modules if name.partition(".")[0] == "urllib3"],
    "same": kubernetes_parts.load() == parts,
}))
"""


def test_only_configuration_is_loaded() -> None:
    """In a fresh process: no models, a few dozen modules, at most 4 MiB above aiohttp, and a Configuration that works."""
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], check=True, capture_output=True, text=True)
    seen = json.loads(ran.stdout)
    assert seen["host"] == "https://api:6443"
    assert seen["models"] == []
    assert seen["urllib3"] == []
    assert seen["modules"] < 60
    assert seen["grown"] <= 4.0
    assert seen["same"]
