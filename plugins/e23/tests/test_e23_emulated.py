"""E23's kernels on emulated clusters of blocks: the code that a GPU runs, on any machine."""

import ctypes
import subprocess
from pathlib import Path

import elman_csrc
import pytest
import torch
from elman_e23 import op
from elman_e23.reference import e23_reference

from elman_core.testing.kernel import need_host_compiler

HERE = Path(__file__).parent
SOURCES = Path(op.__file__).parent / "csrc"
TYPES = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16"}
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


@pytest.mark.parametrize(
    ("dtype", "width", "rows", "masked", "backwards"),
    [(torch.float32, 96, 2, True, False), (torch.float32, 288, 3, False, True), (torch.bfloat16, 64, 3, True, True)],
)
def test_outputs_and_gradients_are_those_of_the_reference(
    dtype: torch.dtype,
    width: int,
    rows: int,
    masked: bool,
    backwards: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need_host_compiler()
    made = tmp_path / "e23.so"
    folders = (elman_csrc.get_emulated(), elman_csrc.get_include(), SOURCES)
    options = ["-std=c++17", "-O1", "-fPIC", "-shared", f"-DELEM={TYPES[dtype]}", f"-DWIDTH={width}"]
    command = ["g++", *options, *(f"-I{f}" for f in folders), str(HERE / "emulated_e23.cpp"), "-o", str(made)]
    subprocess.run(command, check=True, timeout=120)
    library = ctypes.CDLL(str(made))

    def run(backward, main, mask, tensors):
        steps, batch, _ = main.shape
        given = op.arguments(main, mask, tensors)
        addresses = (ctypes.c_void_p * 15)(*(None if x is None else x.data_ptr() for x in given))
        library.run(ctypes.c_bool(backward), addresses, rows, steps, batch, ctypes.c_bool(backwards))

    monkeypatch.setattr(op, "_run", run)
    case = op.Case.of("TBd", (4, 5, width), dtype, masked=masked)
    inputs = op._make_inputs(case, torch.Generator().manual_seed(0))
    mask = inputs.pop("mask")
    found = []
    for kernel in (True, False):
        leaves = [x.detach().clone().requires_grad_() for x in inputs.values()]
        if kernel:
            y, h, tape, *_ = op._op(*leaves, mask, True)
        else:
            y, h, tape = e23_reference(*leaves, torch.zeros(op.SLOTS, width), mask)
            y = y if mask is None else torch.where(mask[..., None], y, 0.0)
        outputs = (y.float(), h, tape)
        weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) for x in outputs]
        found.append([*outputs, *torch.autograd.grad(outputs, leaves, weights)])
    for x, wanted in zip(*found, strict=True):
        assert float((x.detach() - wanted.detach()).norm() / wanted.detach().norm()) < LIMITS[dtype]
