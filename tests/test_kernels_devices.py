"""On a host with several GPUs a kernel is launched on the device of its tensors, and is the one compiled for that device."""

import sys
from types import SimpleNamespace

import pytest
import torch
from elman_e42.op import e42 as dense
from elman_e88.op import e88 as matrix

from elman_core.kernels import build
from elman_core.kernels.dense import native as dense_run
from elman_core.kernels.dense.plan import Plan
from elman_core.kernels.matrix import native as matrix_native
from elman_core.kernels.matrix.spec import Size
from elman_core.nn import add_norm, cross_entropy


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs of different architectures, as far as torch says; `now` is the current one."""
    found = SimpleNamespace(now=0, built=[])

    class Within:
        def __init__(self, device):
            self.index = device if isinstance(device, int) else device.index

        def __enter__(self):
            self.before = found.now
            found.now = self.index if self.index >= 0 else found.now

        def __exit__(self, *_):
            found.now = self.before

    monkeypatch.setattr(torch.cuda, "device", Within)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.now)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: [(8, 0), (9, 0)][found.now])
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(shared_memory_per_block_optin=1 << 18)
    )
    return found


class OnGPU1:
    """What the seams ask of a tensor."""

    is_cuda, dtype, device, shape = True, torch.float32, torch.device("cuda", 1), torch.Size((4, 8))

    def numel(self):
        return 32

    def get_device(self):
        return 1

    def __matmul__(self, _other):
        return self

    def t(self):
        return self


def test_a_module_is_the_one_for_the_current_gpu(gpus, monkeypatch):
    monkeypatch.setattr("elman_core.kernels.build.build", lambda _extension, arch: arch)
    monkeypatch.setattr(
        matrix_native.launch,
        "opened",
        lambda what, *_: SimpleNamespace(arch=build.local_arch(what), info=lambda: (0, 0, 16)),
    )
    monkeypatch.setattr(dense_run, "plan_for", lambda *_: Plan("grid"))
    size = Size(16, 16, torch.bfloat16, "00_0_0_0_00")
    for index, arch in enumerate(("sm_80", "sm_90")):
        with torch.cuda.device(index):
            assert dense_run.ready(dense.cell, 4, 48, torch.bfloat16, index, 1)[0].arch == arch
            assert matrix_native.load(matrix.cell, "cuda", size, index).arch == arch
    dense_run.ready.cache_clear()
    matrix_native.load.cache_clear()


def test_the_op_asks_for_its_module_on_the_device_of_its_tensors(gpus, monkeypatch):
    def load(*_):
        gpus.built.append(gpus.now)
        raise KeyError  # all that is of interest has happened

    monkeypatch.setattr(matrix_native, "load", load)
    values = {"heads": 3, "rows": 4, "form": "00_0_0_0_00", "backend": "cuda"}
    with pytest.raises(KeyError):
        matrix_native.run(matrix.cell, "forward", {"packed": OnGPU1(), "o": torch.empty(1, 2, 3, 4)}, values)
    assert gpus.built == [1]


def test_triton_launches_on_the_device_of_its_tensors(gpus, monkeypatch):
    seen = []

    def kernel(*_):
        seen.append(gpus.now)
        return (None, None, None)

    monkeypatch.setattr(add_norm, "has_triton", lambda: True)
    monkeypatch.setattr(
        add_norm, "_kernels", lambda: SimpleNamespace(add_norm=kernel, add_norm_backward=lambda *a: kernel(*a)[:2])
    )
    monkeypatch.setattr(add_norm, "_empty_gradient", lambda *_: None)
    monkeypatch.setitem(sys.modules, "elman_core.nn.cross_entropy_triton", SimpleNamespace(overwrite=kernel))
    x = OnGPU1()
    add_norm._run(x, x, x, 1e-5, torch.float32)
    add_norm._run_backward(x, None, x, x, x, torch.float32, [])
    monkeypatch.setattr(cross_entropy, "without_autocast", lambda _: torch.no_grad())
    cross_entropy._run(x, x, x)
    assert seen == [1, 1, 1]


def test_what_a_launch_says_of_its_failure_is_in_memory_whatever_the_default_device_is(monkeypatch):
    monkeypatch.setattr(dense_run, "_error_words", {})
    with torch.device("meta"):
        assert dense_run.error_word(torch.device("cpu")) != 0
