"""A process that really computes on a GPU, for `test_driver_contract`: nothing but the driver's own
``libcuda.so.1``, so that it runs wherever a driver does.

usage: ``python burn.py MEBIBYTES``; says ``ready`` once it holds that memory and computes, and
ends with its standard input.
"""

from __future__ import annotations

import ctypes
import select
import sys

# Each thread of a block runs until the SM's clock has moved on by ``cycles``.
_KERNEL = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry burn(.param .u64 cycles)
{
    .reg .u64 %start, %now, %wanted;
    .reg .pred %more;
    ld.param.u64 %wanted, [cycles];
    mov.u64 %start, %clock64;
again:
    mov.u64 %now, %clock64;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %more, %now, %wanted;
    @%more bra again;
    ret;
}
"""
_CYCLES = 20_000_000  # some ten milliseconds
_BLOCKS, _THREADS = 1024, 256


def main() -> None:
    """See the module."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        code = getattr(cuda, name)(*arguments)
        if code != 0:
            raise SystemExit(f"{name}: CUDA error {code}")

    context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    memory = ctypes.c_uint64()
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(int(sys.argv[1]) << 20))
    call("cuModuleLoadData", ctypes.byref(module), _KERNEL)
    call("cuModuleGetFunction", ctypes.byref(function), module, b"burn")
    cycles = ctypes.c_uint64(_CYCLES)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(cycles))
    started = False
    while not select.select([sys.stdin], [], [], 0)[0]:
        call("cuLaunchKernel", function, _BLOCKS, 1, 1, _THREADS, 1, 1, 0, None, parameters, None)
        call("cuCtxSynchronize")
        if not started:
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            started = True


if __name__ == "__main__":
    main()
