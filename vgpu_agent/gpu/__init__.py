"""The node's GPUs as the driver tells of them: what there is, how it is, what it does. The only room that knows NVML.

`source` is the door: `agent` starts one, nearly always a `GpuWatch`, and reads its snapshots. Everything that talks to the driver runs in
one thread (`thread`), because a driver call may block for ever and nothing else in the agent may wait for it.
"""
