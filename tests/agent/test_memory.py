"""Modules that the agent loads when it starts: fewer imports save memory and start-up time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Of a key that has been deleted; valid for a hundred years, which is not checked.
_CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBiTCCAS+gAwIBAgIUKIpPsyao5B8XYPq67qqcxqastk4wCgYIKoZIzj0EAwIw
GTEXMBUGA1UEAwwOdGVzdCBhdXRob3JpdHkwIBcNMjYxMTIxMjIwNTIzWhgPMjEy
NjEwMjgyMjA1MjNaMBkxFzAVBgNVBAMMDnRlc3QgYXV0aG9yaXR5MFkwEwYHKoZI
zj0CAQYIKoZIzj0DAQcDQgAE+fMo2bY1iCfru1qPPKnj7AnYIXrpBn+RAC5gOYxE
YKJDHXxaux//B61d8IYu2UszAOrU9IEpb020z2Q+x10d2qNTMFEwHQYDVR0OBBYE
FNQTKPfqHxUI0d6X2Xtde4SS6MChMB8GA1UdIwQYMBaAFNQTKPfqHxUI0d6X2Xtd
e4SS6MChMA8GA1UdEwEB/wQFMAMBAf8wCgYIKoZIzj0EAwIDSAAwRQIgMFbKsme9
FNlWvsr1cX86HeVOcpqBGR6fKXBkG98f0mcCIQDBbmYgN2tL2UGOijKOwmMPQkVm
cXKWYp4TyvI/nx+3FA==
-----END CERTIFICATE-----
"""
_HEAVY = ["kubernetes_asyncio", "grpc", "google.protobuf", "pydantic", "uvloop", "numpy", "vgpu_agent.sim"]


def test_the_agent_loads_nothing_heavy_and_no_simulator() -> None:
    """Neither an independent gRPC stack nor the simulator is part of a node with real GPUs."""
    program = f"import sys, vgpu_agent.agent; print([name for name in {_HEAVY!r} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "[]"


def test_big_blocks_go_back_to_the_system() -> None:
    """After 40 MB of messages that are gone, no more is held than before, but for a little; in a process of its own."""
    program = """
import threading
from vgpu_agent.agent.memory import keep_small
def kib(): return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
def work():
    for size in (8_000_000, 4_000_000, 100_000) * 5:
        held = [bytes(size) for _ in range(5)]
        pinned.append(bytes(600))
pinned = []
keep_small()
before = kib()
for _ in range(3):
    thread = threading.Thread(target=work); thread.start(); thread.join()
print(kib() - before)
"""
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert int(ran.stdout) < 2048


def test_what_lies_between_blocks_in_use_goes_back_too() -> None:
    """Freed blocks between blocks in use go back only when `give_back` is called.

    Of 20 MB in blocks of 4,000 bytes all but every fiftieth are freed. Hardly anything goes back before the call,
    nearly all after it.
    """
    program = """
from vgpu_agent.agent.memory import give_back, keep_small
def kib(): return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
keep_small()
before = kib()
blocks = [bytes(4000) for _ in range(5000)]
pinned = blocks[::50]
del blocks
kept = kib() - before
give_back()
print(kept, kib() - before)
"""
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    kept, left = map(int, ran.stdout.split())
    assert kept > 15_000
    assert left < 3_000


def test_a_message_that_arrives_takes_no_block_of_its_own() -> None:
    """Blocks from 64 KiB on are mapped and unmapped; asyncio would take 256 KiB for a hundred bytes."""
    program = """
import asyncio, socket, tracemalloc
from vgpu_agent.agent.memory import keep_small
keep_small()
async def main():
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    tracemalloc.start()
    theirs.send(bytes(100))
    before, _ = tracemalloc.get_traced_memory()
    await reader.readexactly(100)
    print(tracemalloc.get_traced_memory()[1] - before)
    writer.close()
asyncio.run(main())
"""
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert int(ran.stdout) < 64 * 1024


def test_what_the_start_has_made_is_not_searched_again() -> None:
    """Everything that is there when the start is over stays, and a search for cycles passes it over. Later ones are found as ever."""
    program = """
import gc, weakref
from vgpu_agent.agent.memory import settle
class Thing: pass
there = [Thing() for _ in range(5000)]
settle()
thing = Thing(); thing.itself = thing; gone = weakref.ref(thing); del thing
gc.collect()
print(gc.get_freeze_count() > 5000, len(gc.get_objects()) < 5000, gone() is None)
"""
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert ran.stdout.split() == ["True", "True", "True"]


def test_the_systems_certificates_are_loaded_only_for_who_asks_for_them(tmp_path: Path) -> None:
    """aiohttp's own TLS contexts stay empty, 2 MiB less; one that is made later has them, and the shell's own choice of a file is kept.

    Also where two threads import at once: the second must not take the first one's environment for the shell's.
    """
    program = """
import os, ssl, threading
from vgpu_agent.agent.memory import load_http
parts = [threading.Thread(target=load_http, args=(f"vgpu_agent.{name}",)) for name in ("web.server", "cluster.client")]
[part.start() for part in parts]
[part.join() for part in parts]
from aiohttp import connector
made = connector._SSL_CONTEXT_VERIFIED, connector._SSL_CONTEXT_UNVERIFIED, ssl.create_default_context()
print([context.cert_store_stats()["x509"] for context in made], os.environ["SSL_CERT_FILE"], "SSL_CERT_DIR" in os.environ)
"""
    (path := tmp_path / "authority.pem").write_text(_CERTIFICATE)
    environment = {name: value for name, value in os.environ.items() if name != "SSL_CERT_DIR"} | {"SSL_CERT_FILE": str(path)}
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment)
    assert ran.stdout.split() == ["[0,", "0,", "1]", str(path), "False"]
