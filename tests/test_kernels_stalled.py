"""A wait that gives up ends in an error, never in a fault: blocks of emulated GPUs stall until others have waited for too long.

The emulated GPU stops at what a real one may answer with a fault: a barrier that is armed twice or counts too much, and a store
into a block that has left. Each kernel runs in a process of its own.
"""

import os
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
import torch
from elman_authors.testing.kernel import need_host_compiler

from elman_core.kernels import Case, KernelSpec
from elman_core.kernels.dense import native as dense
from elman_core.kernels.dense.plan import Device
from elman_core.registry.errors import KernelTimeoutError

bf16 = torch.bfloat16
KERNELS = {  # module, name of the kernel, (T, B, d), dtype
    "cluster": ("elman_e42.op", "e42", (4, 3, 192), bf16),
    "grid": ("elman_e42.op", "e42", (4, 3, 192), bf16),
    "tiles": ("elman_e42.op", "e42", (4, 11, 192), bf16),
    "gates": ("elman_baselines.rnn.op", "lstm_gates", (4, 3, 128), bf16),
    "stages": ("elman_baselines.rnn.op", "gru_before_gates", (4, 3, 128), bf16),
    "e23": ("elman_e23.op", "KERNEL", (4, 3, 96), torch.float32),  # a module that its own tests compile, too
}
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_whose_blocks_stall_says_so_and_runs_again(name: str) -> None:
    need_host_compiler()
    pytest.importorskip(KERNELS[name][0])
    done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(done.stdout.split()) == {"right", "gave-up"}  # both occurred


def main(name: str) -> None:
    module, attribute, sizes, dtype = KERNELS[name]
    kernel = getattr(import_module(module), attribute)
    for holder in (dense, import_module("elman_core.kernels.gates.native"), sys.modules[module]):
        vars(holder)["TIMEOUT_NS"] = 1
    if processors := {"grid": 132, "tiles": 3}.get(name):  # no clusters; more rows than the blocks take at once
        vars(dense)["_device"] = lambda _: Device(processors, 227 << 10, (8, 0))
    spec: KernelSpec = kernel.spec()
    inputs = spec.make_inputs(Case.of("TBd", sizes, dtype), torch.Generator().manual_seed(0))
    leaves = [x.requires_grad_() for x in inputs.values() if x is not None and x.is_floating_point()]

    def stalled(turns: int, call: Any) -> Any:
        """The results, or None if a wait gave up."""
        os.environ["EMULATED_STALLED"] = str(turns)
        made = call()
        try:
            spec.after(CPU)
        except KernelTimeoutError:
            return None
        finally:
            os.environ["EMULATED_STALLED"] = "0"
        return made

    def forward() -> list[torch.Tensor]:
        return list(spec.call("emulated", inputs, {}).values())

    outputs = forward()

    def backward() -> tuple[torch.Tensor, ...]:
        ones = [torch.ones_like(y) for y in outputs]
        return torch.autograd.grad(outputs, leaves, ones, retain_graph=True, allow_unused=True)

    for call in (forward, backward):
        expected = call()
        for turns in (0, 525, 580, 1500, 0):
            found = stalled(turns, call)
            assert found is not None or turns, "a wait gave up although nothing had stalled"
            sys.stdout.write("gave-up " if found is None else "right ")
            for a, b in zip(found or (), expected if found else (), strict=True):
                assert a is b is None or torch.equal(a, b)


if __name__ == "__main__":
    main(sys.argv[1])
