"""The node's GPUs as the driver reports them: identity, health and use.
The only package that uses NVML.

`source` is the entry: `agent` starts one, nearly always a `GpuWatch`, and reads its snapshots. All
calls to the driver run in one thread (`thread`), because a driver call may block for ever and
nothing else in the agent may wait for it.
"""
