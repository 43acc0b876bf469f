"""Simulated GPUs and a simulated kubelet, for tests, the demo and ``vgpu-agent sim``;
never anything else.

GPUs: a real ``libnvidia-ml.so.1`` (native/, compiled by `build`, put below pynvml by `preload`)
whose answers are a state file that `state` writes. Nothing outside this package depends on the
simulation: the agent sees a driver.
"""

import os

# grpcio, under the simulated kubelet, prepares for forks by default, and a child that is forked
# while a call is running then dies now and then (SIGSEGV before exec). Read when grpcio is
# imported, so it is set before that.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
