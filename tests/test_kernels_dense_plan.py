"""Launch plans of the dense kernels: which shapes run how, on which device."""

from __future__ import annotations

from math import ceil

import pytest
import torch

from elman_core.kernels.dense.plan import Device, plan, shared_bytes
from elman_core.registry.errors import KernelError

H200 = Device(132, 232448, (9, 0))
A100 = Device(108, 166912, (8, 0))
SLICE = Device(16, 232448, (9, 0))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = (16, 48, 64, 272, 512, 640, 768, 1024, 1280, 1536, 2048)


@pytest.mark.parametrize("device", [H200, A100, SLICE], ids=["h200", "a100", "slice"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_batch_row_is_in_exactly_one_tile_and_every_group_has_one(device, dtype):
    for width in WIDTHS:
        for batch in (1, 3, 8, 31, 32, 33, 64, 100, 256, 511, 512):
            found = plan((5, batch, width), dtype, device)
            if found.kind == "steps":
                continue
            tiles = ceil(batch / found.rows)
            assert 1 <= found.rows <= 8 * found.wide
            assert found.wide == 1 or (found.kind == "tiles" and dtype != torch.float32)
            assert 1 <= found.groups <= tiles
            assert found.kind == "tiles" or found.groups == tiles


@pytest.mark.parametrize("device", [H200, A100, SLICE], ids=["h200", "a100", "slice"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_that_wait_for_each_other_fit_on_the_device_together(device, dtype):
    for width in range(16, 4097, 16):
        for batch in (1, 32, 512):
            found = plan((5, batch, width), dtype, device)
            if found.kind in ("grid", "tiles"):
                assert found.groups * found.parts <= device.processors
            if found.kind == "cluster":
                assert found.parts <= 16
                assert device.capability >= (9, 0)
            if found.kind != "steps":
                assert shared_bytes(found, ceil(width / 256), 4 // dtype.itemsize, batch) <= device.shared_bytes


def test_the_plan_depends_on_the_sizes_alone_and_not_on_the_number_of_steps():
    for width in WIDTHS:
        assert plan((1, 32, width), torch.bfloat16, H200) == plan((65536, 32, width), torch.bfloat16, H200)


def test_widths_that_do_not_fit_on_the_chip_run_step_by_step():
    assert plan((512, 32, 4096), torch.bfloat16, H200).kind == "steps"
    assert plan((512, 32, 2048), torch.bfloat16, Device(16, 232448, (9, 0))).kind == "steps"


def test_clusters_need_hopper():
    assert plan((512, 32, 512), torch.bfloat16, H200).kind == "cluster"
    assert plan((512, 32, 512), torch.bfloat16, A100).kind in ("grid", "tiles")


@pytest.mark.parametrize(
    ("sizes", "dtype", "device", "says"),
    [
        ((5, 2, 24), torch.bfloat16, H200, "multiples of 16 up to 4096, not 24"),
        ((5, 2, 4112), torch.bfloat16, H200, "multiples of 16 up to 4096, not 4112"),
        ((5, 2, 64), torch.float64, H200, "bfloat16, float16 or float32, not torch.float64"),
        ((5, 2, 64), torch.bfloat16, Device(40, 65536, (7, 5)), "8.0 or newer, not 7.5"),
        ((65536, 65536, 64), torch.bfloat16, H200, "B up to 65535"),
    ],
)
def test_what_is_not_supported_is_refused_with_what_is(sizes, dtype, device, says):
    with pytest.raises(KernelError, match=says):
        plan(sizes, dtype, device)
