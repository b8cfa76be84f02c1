"""Run the dense op in compiled modules: on a GPU after a launch plan (plan.py), on a CPU in the host build of its cell, which
serves the tests in float32 and float64, or, for the target "cuda", on an emulated GPU. A call compiles what it needs at its
first use. The index of the emulated GPU is None.

A GPU has one module for each cell, dtype, width and kind of plan. So only the shapes of a model are compiled, in seconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels import build, launch
from elman_core.kernels.build import Extension, Target
from elman_core.kernels.family import Family, Row
from elman_core.kernels.launch import readable
from elman_core.kernels.runtime import DTYPE_CODES
from elman_core.kernels.spec import Cell
from elman_core.registry.errors import KernelError, KernelTimeoutError

from .plan import MAX_PLACES, Device, Kind, Plan, plan

FAMILY = Family(
    "dense",
    sizes={"T": "steps", "B": "batch", "d": "width"},
    functions={
        "forward": "main w h0 history y last", "backward": "main w history g_last da dh0",
        "forward_step": "main w history y product state", "backward_step": "main w history da product state",
    },
    members=(
        Row("main", "TBd", strides="TB"), Row("extra", "TBd", names="extras", strides="TB"), Row("w", "d?"),
        Row("h0", "Bd", "compute"), Row("history", "UBd"), Row("y", "TBd"), Row("last", "Bd", "compute"),
        Row("g_last", "Bd", "compute"), Row("da", "TBd"), Row("dextra", "TBd", names="extras"), Row("dh0", "Bd", "compute"),
        Row("mask", "TB", "bool"), Row("a", "TBd"), Row("x", "TBd", strides="TB"), Row("bias", "d", "compute"),
        Row("sums", "UBd"), Row("dx", "TBd"), Row("dbias", "?d", "compute"), Row("product", "Bd", "compute"),
        Row("state", "Bd", "compute"),
    ),
    numbers="error stream rows groups delay timeout_ns slots t",
)  # fmt: skip
_WARPS = 8  # of a block: kWarps of dense_product.cuh
TIMEOUT_NS = 2_000_000_000  # of one wait for other blocks
_error_words: dict[int, tuple[Tensor, ctypes.c_int32]] = {}


def forward(
    cell: Cell,
    target: Target,
    u_TBd: Tensor,
    extras: Sequence[Tensor],
    w_dd: Tensor,
    h0_Bd: Tensor,
    mask_TB: Tensor | None,
    bias_d: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """y (T, B, d), h_T (B, d) in float32, history (T+1, B, d), a (T, B, d) or empty; in the dtype of u.

    Args:
        bias_d: the bias of tied weights, where u is x. Then what W multiplied, (T+1, B, d), is returned too.

    Raises:
        KernelError: the size or dtype is not supported, or an earlier launch gave up waiting.
    """
    u_TBd, extras, h0_Bd = readable(u_TBd), [readable(e) for e in extras], h0_Bd.contiguous()
    steps, rows, width = u_TBd.shape
    history, y_TBd = u_TBd.new_empty(steps + 1, rows, width), u_TBd.new_empty(steps, rows, width)
    a = u_TBd.new_empty(steps, rows, width) if cell.uses_a else u_TBd.new_empty(0)
    given: dict[str, Any] = {"main": u_TBd, "extra": extras, "history": history, "y": y_TBd}
    sums = [] if bias_d is None else [torch.empty_like(history)]
    if bias_d is not None:
        given |= {"bias": bias_d.float().contiguous(), "sums": sums[0]}
    with launch.on(u_TBd):
        module, apart = _prepared(cell, target, given, w_dd, a, mask_TB)
        if not apart:
            last_Bd = torch.empty_like(h0_Bd)
            module.run("forward", **given, h0=h0_Bd, last=last_Bd)
            return y_TBd, last_Bd, history, a, *sums
        history[0] = h0_Bd
        state_Bd, product_Bd, w_t = h0_Bd.clone(), torch.empty_like(h0_Bd), w_dd.t()
        call = module.call(**given, product=product_Bd, state=state_Bd)
        for t in range(steps):
            _multiply(history[t], w_t, product_Bd)
            call.run("forward_step", t=t)
    return y_TBd, state_Bd, history, a


def backward(
    cell: Cell,
    target: Target,
    gy_TBd: Tensor,
    g_last_Bd: Tensor,
    extras: Sequence[Tensor],
    w_dd: Tensor,
    history: Tensor,
    a: Tensor,
    mask_TB: Tensor | None,
    x_TBd: Tensor | None = None,
) -> tuple[Any, ...]:
    """(da (T, B, d) in the dtype of the history, the gradients of the extras, dh_0 (B, d) in float32).

    Args:
        x_TBd: the x of a forward with tied weights. Then dx, in the shape and dtype of da, and db (d,) are returned too.
    """
    gy_TBd, extras, g_last_Bd = readable(gy_TBd), [readable(e) for e in extras], g_last_Bd.contiguous()
    da_TBd, dextras = history.new_empty(*gy_TBd.shape), [history.new_empty(*gy_TBd.shape) for _ in extras]
    given: dict[str, Any] = {"main": gy_TBd, "extra": extras, "history": history, "da": da_TBd, "dextra": dextras}
    with launch.on(gy_TBd):
        module, apart = _prepared(cell, target, given, w_dd, a, mask_TB)
        if not apart:
            if x_TBd is not None:
                dbias_Gd = g_last_Bd.new_empty(_WARPS * given["groups"], gy_TBd.shape[2])
                given |= {"x": readable(x_TBd), "dx": torch.empty_like(da_TBd), "dbias": dbias_Gd}
            dh0_Bd = torch.empty_like(g_last_Bd)
            module.run("backward", **given, g_last=g_last_Bd, dh0=dh0_Bd)
            tied = () if x_TBd is None else (given["dx"], given["dbias"].sum(0))
            return da_TBd, dextras, dh0_Bd, *tied
        carry_Bd, product_Bd = g_last_Bd.clone(), torch.zeros_like(g_last_Bd)
        call = module.call(**given, product=product_Bd, state=carry_Bd)
        for t in range(len(gy_TBd) - 1, -1, -1):
            call.run("backward_step", t=t)
            _multiply(da_TBd[t], w_dd, product_Bd)
    return da_TBd, dextras, product_Bd.add_(carry_Bd)


def source(cell: Cell, target: Target) -> Extension:
    """What is compiled for a cell, at the usual size on a GPU. Raises as `build.shipped`."""
    input_: dict[str, Any] = {} if cell.bare is None else {"INPUT": "TiedSilu"}
    binding = "dense_host.cpp" if target == "host" else "dense_cuda.cu"
    declared = {"extras": len(cell.extras), "uses_a": cell.uses_a}
    return build.shipped(
        f"{cell.name}_dense_{target}", binding, cell.header, declared=declared, CELL=cell.type, **input_
    )


@cache
def plan_for(cell: Cell, batch: int, width: int, dtype: torch.dtype, index: int | None, slots: int = 1) -> Plan:
    """The first plan whose blocks that GPU holds together; a part of a GPU may hold fewer than it reports. Compiles to ask."""
    without: set[Kind] = set()
    while True:
        chosen = plan((1, batch, width), dtype, _device(index), without, slots)
        if chosen.kind == "steps" or index is None:
            return chosen
        with torch.cuda.device(index):
            fit, _ = capacity(cell, chosen, dtype, width, chosen.tiles_each(batch))
        if fit >= (1 if chosen.kind == "cluster" else chosen.groups):
            return chosen
        without.add(chosen.kind)


def extension(cell: Cell, chosen: Plan, dtype: torch.dtype, width: int) -> Extension:
    """What is compiled for a plan. Steps are never tied."""
    bare = source((cell.bare or cell) if chosen.kind == "steps" else cell, "cuda")
    defines = [("ELMAN_DTYPE", str(DTYPE_CODES[dtype])), ("ELMAN_WIDTH", str(width))]
    binding = bare.binding
    if chosen.kind == "steps":
        binding = binding.with_name("dense_cuda_steps.cu")
    else:
        defines += [("ELMAN_KIND", chosen.kind), ("ELMAN_SPILL", str(chosen.spill)), ("ELMAN_WIDE", str(chosen.wide))]
    if chosen.slots > 1:
        defines.append(("ELMAN_SLOTS", str(chosen.slots)))
    name = f"{bare.name}_{'wide_' if chosen.wide == 2 else ''}{chosen.kind}_{str(dtype).removeprefix('torch.')}_{width}"
    name += f"_{chosen.slots}" if chosen.slots > 1 else ""
    return replace(bare, name=name, binding=binding, defines=(*bare.defines, *defines))


def capacity(cell: Cell, chosen: Plan, dtype: torch.dtype, width: int, tiles: int = 1) -> tuple[int, int]:
    """(groups of `tiles` tiles that the current device holds together, bytes of shared memory of a block)."""
    module = launch.opened(extension(cell, chosen, dtype, width), FAMILY)
    return min(module.ask("capacity", tiles, backward) for backward in (0, 1)), module.ask("shared_bytes", tiles)


def check_errors(device: torch.device) -> None:
    """Raise if a launch on this device has given up waiting. Synchronise first to cover every launch so far.

    Raises:
        KernelTimeoutError: one did; its outputs are worthless.
    """
    _, word = _error_words.get(_index(device), (None, None))
    if word is not None and word.value != 0:
        word.value = 0
        raise KernelTimeoutError(
            "a dense kernel timed out waiting for its other blocks, so its results are invalid: another program keeps the GPU "
            "from running them together. Free the GPU, or set ELMAN_KERNELS=off"
        )


def error_word(device: torch.device) -> int:
    """The address of the pinned word that a launch on this device sets when it gives up waiting.

    Raises:
        KernelTimeoutError: an earlier launch gave up, as `check_errors` says.
    """
    check_errors(device)
    index = _index(device)
    if index not in _error_words:
        pinned = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        _error_words[index] = pinned, ctypes.c_int32.from_address(pinned.data_ptr())
    return ctypes.addressof(_error_words[index][1])


def _index(device: torch.device) -> int:
    return (device.index or 0) if device.type == "cuda" else -1


def _prepared(
    cell: Cell, target: Target, given: dict[str, Any], w_dd: Tensor, a: Tensor, mask_TB: Tensor | None
) -> tuple[Any, bool]:
    """The module for a call, and whether it runs step by step. Adds the arguments of both directions to `given`."""
    main_TBd: Tensor = given["main"]
    dtype, slots = main_TBd.dtype, 1
    given["w"], given["mask"] = w_dd.contiguous(), launch.whole(mask_TB)
    if cell.blocks:
        given["slots"] = slots = len(w_dd)
        given["w"] = given["w"].flatten(0, 1)
    if cell.uses_a:
        given["a"] = a
    if target == "host":
        if dtype not in (torch.float32, torch.float64):
            raise KernelError(f"the host build of {cell.name} runs in float32 and float64, not {dtype}")
        module, apart = _host_module(cell), False
    else:
        (steps, batch, width), device = main_TBd.shape, main_TBd.device
        if steps * batch > MAX_PLACES:
            plan((steps, batch, width), dtype, _device(device.index))  # which says so
        module, apart, constants = ready(cell, batch, width, dtype, device.index, slots)
        given |= {"error": error_word(device), "stream": launch.stream(main_TBd), **constants}
    if cell.bare is not None and (apart or target == "host"):
        raise KernelError(
            f"{cell.name}: only a persistent launch of a GPU has tied weights, and none holds this matrix"
        )
    return module, apart


@cache
def ready(
    cell: Cell, batch: int, width: int, dtype: torch.dtype, index: int | None, slots: int = 1
) -> tuple[Any, bool, dict[str, int]]:
    """The module for a batch and width on this GPU, whether it runs step by step, and a launch's arguments from its plan."""
    chosen = plan_for(cell, batch, width, dtype, index, slots)
    constants = {"rows": chosen.rows, "groups": chosen.groups, "delay": chosen.delay, "timeout_ns": TIMEOUT_NS}
    what = extension(cell, chosen, dtype, width)
    return launch.opened(what, FAMILY, index is None), chosen.kind == "steps", constants


@cache
def _device(index: int | None) -> Device:
    if index is None:  # emulated: as cuda_runtime.h of elman_csrc's emulated/ says
        return Device(132, 227 << 10, (9, 0))
    found: Any = torch.cuda.get_device_properties(index)
    return Device(found.multi_processor_count, found.shared_memory_per_block_optin, (found.major, found.minor))


@cache
def _host_module(cell: Cell) -> Any:
    return launch.opened(source(cell, "host"), FAMILY)


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b in float32."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
