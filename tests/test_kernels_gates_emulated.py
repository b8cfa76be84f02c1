"""Gated kernels on an emulated GPU: the code that a GPU runs, with its exchanges between blocks, on any machine."""

import ctypes
import subprocess
from pathlib import Path

import elman_csrc
import pytest
import torch

from elman_core.kernels.gates import native
from elman_core.testing.kernel import need_host_compiler

rnn = pytest.importorskip("elman_baselines.rnn.op")


@pytest.mark.parametrize(
    ("kernel", "width", "steps", "batch", "rows", "backwards"),
    [  # more steps than are filled with the sentinel before a launch; several groups; two tiles of rows
        (rnn.lstm_gates, 32, 34, 3, 2, True),
        (rnn.gru_gates, 64, 3, 11, 11, False),
        (rnn.gru_before_gates, 64, 3, 11, 10, True),
    ],
    ids=["lstm", "gru", "gru_before"],
)
def test_outputs_and_gradients_are_those_of_the_reference(
    kernel, width, steps, batch, rows, backwards, tmp_path, monkeypatch
):
    need_host_compiler()
    made, cell = tmp_path / "gates.so", kernel.cell
    defines = {
        "ELMAN_CELL": cell.type,
        "ELMAN_CELL_HEADER": f'"{cell.header}"',
        "WIDTH": width,
        "TILES": 1 + (rows > 8),
    }
    options = ["-std=c++17", "-O1", "-fPIC", "-shared", *(f"-D{name}={value}" for name, value in defines.items())]
    folders = [f"-I{folder}" for folder in (elman_csrc.get_emulated(), elman_csrc.get_include())]
    source = Path(__file__).with_name("emulated_gates.cpp")
    subprocess.run(["g++", *options, *folders, str(source), "-o", str(made)], check=True, timeout=120)
    library = ctypes.CDLL(str(made))

    def run(_cell, function, _rows, _width, main, w, mask, **given):
        backward = function == "backward"
        first, last = (("g_last", "g_s_last"), ("dh0", "ds0")) if backward else (("h0", "s0"), ("last", "s_last"))
        names = ("bias", *first, "history", "kept", "memory", "y", "dp", "du", *last, "dbias")
        tensors = [x if x is None else x.contiguous() for x in (w, main, mask, *(given.get(name) for name in names))]
        addresses = (ctypes.c_void_p * 15)(*(None if x is None else x.data_ptr() for x in tensors))
        library.run(ctypes.c_bool(backward), addresses, rows, steps, batch, ctypes.c_bool(backwards))

    monkeypatch.setattr(native, "_run", run)
    generator = torch.Generator().manual_seed(0)
    gates = cell.gates * width
    shapes = [(steps, batch, gates), (gates, width), (gates,), *[(batch, width)] * len(cell.states)]
    u, w, b, *states = (torch.randn(s, generator=generator) for s in shapes)
    u, w = u.bfloat16(), (w / width**0.5).bfloat16()
    mask = torch.rand(steps, batch, generator=generator) > 0.3
    found = []
    for emulated in (True, False):
        leaves = [
            x.detach().clone().to(x.dtype if emulated else torch.float64).requires_grad_() for x in (u, w, b, *states)
        ]
        if emulated:
            y, last, *_ = kernel.op(*leaves[:3], torch.stack(leaves[3:]), mask, None, True, "host")
            outputs = (y, *last)
        else:
            outputs = kernel(*leaves, mask=mask, backend="reference")
        weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype) for x in outputs]
        found.append([*outputs, *torch.autograd.grad(outputs, leaves, weights)])
    for x, wanted in zip(*found, strict=True):
        assert float((x.detach().double() - wanted.detach()).norm() / wanted.detach().norm()) < 1e-2
