"""Host time of one forward of a dense op beyond torch's own dispatch: python benchmarks/host_time.py [--device cpu]

Torch's own dispatch is a call of an operator that is registered the same way, takes the same arguments and returns existing
tensors. The problem is so small that the GPU waits for the host. Prints microseconds: the fastest of 200 short rounds, since
other processes only ever add to a time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from elman_e1.op import e1
from elman_e42.op import e42

from elman_core.kernels import DenseKernel
from elman_core.kernels.runtime import operator


def microseconds(call: Callable[[], Any], count: int = 100) -> float:
    """The host's time of a call."""
    found = []
    for _ in range(200):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - start) / count * 1e6)
    return min(found)


def measure(kernel: DenseKernel, device: str) -> tuple[float, float]:
    """(a call of the kernel, of the operator that does nothing)."""
    dtype, backend = (torch.bfloat16, "auto") if device == "cuda" else (torch.float32, "host")
    width = 64 if device == "cuda" else 4
    u, *extras = (torch.randn(2, 1, width, device=device, dtype=dtype) for _ in range(1 + len(kernel.cell.extras)))
    w, h0 = torch.randn(width, width, device=device, dtype=dtype), torch.zeros(1, width, device=device)
    kernel(u, *extras, w, h0, backend=backend)  # compiled and verified, if need be
    made = kernel.op(u, *extras, w, h0, None, None, "cuda" if device == "cuda" else "host")
    schema = str(kernel.op._schema).replace(f"elman::dense_{kernel.name}", f"nothing_{kernel.name}")
    nothing = operator(schema, lambda *_: made, lambda *_: made, lambda *_: None, lambda *_: None)
    with torch.no_grad():
        return (
            microseconds(lambda: kernel(u, *extras, w, h0, backend=backend)),
            microseconds(lambda: nothing(u, *extras, w, h0, None, None, backend)),
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    name = torch.cuda.get_device_name() if device == "cuda" else "host back end on a CPU"
    print(f"{name}, torch {torch.__version__}\nkernel      call  nothing   beyond")
    for kernel in (e42, e1):
        whole, empty = measure(kernel, device)
        print(f"{kernel.name:8} {whole:8.1f} {empty:8.1f} {whole - empty:8.1f}")
