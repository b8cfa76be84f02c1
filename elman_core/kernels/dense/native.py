"""Run the dense op in compiled modules: on a GPU after a launch plan (plan.py), on a CPU in the host build of its cell, which
serves the tests in float32 and float64, or, for the target "cuda", on an emulated GPU. A call compiles what it needs at its
first use. The index of the emulated GPU is None.

A GPU has one module for each cell, dtype, width and kind of plan. So only the shapes of a model are compiled, in seconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels import build, launch
from elman_core.kernels.build import Extension, Target
from elman_core.kernels.family import Values
from elman_core.kernels.runtime import CPU_DTYPES
from elman_core.kernels.spec import Case
from elman_core.registry.errors import KernelError, KernelTimeoutError

from .plan import GPUS, MAX_PLACES, Device, Kind, Plan, plan
from .spec import DenseCell, family_of

_USUAL_WIDTHS = (512, 768, 1024, 1280, 1536, 2048)
_USUAL_SLOTS = 8
_USUAL_BATCHES = (1, 8, 16, 32, 64, 128, 256, 512)
_WARPS = 8  # of a block: kWarps of dense_product.cuh
TIMEOUT_NS = 2_000_000_000  # of one wait for other blocks
_error_words: dict[int, tuple[Tensor, ctypes.c_int32]] = {}


def run(cell: DenseCell, function: str, given: Values, values: Values) -> None:
    """As `Operator` calls it. Raises `KernelError`: no support for the size or dtype, or an earlier launch gave up waiting."""
    first = "u" if cell.bare is None else "x"
    main = given["gy" if function == "backward" else first]
    with launch.on(main):
        module, chosen = _prepared(cell, values["backend"], given, main)
        if chosen is not None and chosen.kind == "steps":
            _run_steps(module, function, given)
            return
        total = given.pop("db", None)
        if total is not None:
            given["dbias"] = total.new_empty(_WARPS * given["groups"], len(total))
        with nullcontext() if chosen is None or chosen.kind == "cluster" else launch.together(chosen.blocks):
            module.run(function, **given)
        if total is not None:
            torch.sum(given["dbias"], 0, out=total)


def _run_steps(module: Any, function: str, given: Values) -> None:
    """The fallback: a product and a pointwise kernel for each step."""
    history, w_dd = given["history"], given["w"]
    if function == "forward":
        history[0] = given["h0"]
        product_Bd, w_t = torch.empty_like(given["h0"]), w_dd.t()
        call = module.call(**given, product=product_Bd, state=given["last"].copy_(given["h0"]))
        for t in range(len(history) - 1):
            _multiply(history[t], w_t, product_Bd)
            call.run("forward_step", t=t)
        return
    carry_Bd, product_Bd = given["g_last"].clone(), torch.zeros_like(given["g_last"])
    call = module.call(**given, product=product_Bd, state=carry_Bd)
    for t in range(len(history) - 2, -1, -1):
        call.run("backward_step", t=t)
        _multiply(given["da"][t], w_dd, product_Bd)
    torch.add(product_Bd, carry_Bd, out=given["dh0"])
    if "starts" in given:
        given["dh0"].masked_fill_(given["starts"][0, :, None], 0.0)


def source(cell: DenseCell, target: Target, dtype: torch.dtype = torch.float32, **defines: Any) -> Extension:
    """What is compiled for a cell, on a GPU at the usual size or as `defines` say; dtype: of storage on a CPU. Raises as
    `build.shipped`."""
    declared = {"extras": len(cell.extras), "uses_a": cell.uses_a}
    macros: dict[str, Any] = {"CELL": cell.type}
    if target == "cpu":
        macros["DTYPE"] = dtype
    elif cell.bare is not None:
        macros["INPUT"] = "TiedSilu"
    macros |= defines
    return build.for_target(f"{cell.name}_dense", "dense", target, header=cell.header, declared=declared, **macros)


@cache
def plan_for(
    cell: DenseCell, batch: int, width: int, dtype: torch.dtype, index: int | None, slots: int = 1, packed: bool = False
) -> Plan:
    """The first plan whose blocks that GPU holds together; a part of a GPU may hold fewer than it reports. Compiles to ask."""
    without: set[Kind] = set()
    while True:
        chosen = plan((1, batch, width), dtype, _device(index), without, slots)
        if chosen.kind == "steps" or index is None:
            return chosen
        with torch.cuda.device(index):
            fit, _ = capacity(cell, chosen, dtype, width, chosen.tiles_each(batch), packed)
        if fit >= (1 if chosen.kind == "cluster" else chosen.groups):
            return chosen
        without.add(chosen.kind)


def extension(cell: DenseCell, chosen: Plan, dtype: torch.dtype, width: int, packed: bool = False) -> Extension:
    """What is compiled for a plan; packed: for calls with starts of documents. Steps are never tied."""
    steps = chosen.kind == "steps"
    if steps and cell.bare is not None:
        cell = cell.bare
    kind = f"wide_{chosen.kind}" if chosen.wide == 2 else chosen.kind
    words = [cell.name, "dense_cuda", kind, str(dtype).removeprefix("torch."), str(width)]
    defines: dict[str, Any] = {"DTYPE": dtype, "WIDTH": width}
    if not steps:
        defines |= {"KIND": chosen.kind, "SPILL": chosen.spill, "WIDE": chosen.wide}
    if chosen.slots > 1:
        words.append(str(chosen.slots))
        defines["SLOTS"] = chosen.slots
    if packed:
        words.append("packed")
        defines["PACKED"] = 1
    made = replace(source(cell, "cuda", **defines), name="_".join(words))
    return _per_step(made) if steps else made


def _per_step(made: Extension) -> Extension:
    return replace(made, binding=made.binding.with_name("dense_cuda_steps.cu"))


def module_for(cell: DenseCell, target: Target, case: Case) -> Extension:
    if target != "cuda":
        return source(cell, target, case.dtype)
    steps, rows, width = (case.sizes[k] for k in "TBd")
    device = _device(torch.cuda.current_device() if torch.cuda.is_available() else None)
    chosen = plan((steps, rows, width), case.dtype, device, slots=case.sizes.get("S", 1))
    return extension(cell, chosen, case.dtype, width, case.has("packed"))


def builds(
    cell: DenseCell, target: Target, arch: str, widths: Sequence[int], dtypes: Sequence[torch.dtype], slots: int = 0,
    packed: bool = False,
) -> list[Extension]:  # fmt: skip
    """A module for each width, dtype and kind of launch that a usual batch takes on a GPU of this architecture."""
    if target != "cuda":
        return [source(cell, target, dtype) for dtype in dtypes or CPU_DTYPES[:1]]
    if arch not in GPUS:
        raise KernelError(f"{arch!r} is not an architecture dense kernels are built for: {', '.join(GPUS)}")
    found: dict[Extension, None] = {}
    slots = slots or (_USUAL_SLOTS if cell.blocks else 1)
    for width in widths or ((512 * slots,) if cell.blocks else _USUAL_WIDTHS):
        for dtype in dtypes or (torch.bfloat16,):
            for batch in _USUAL_BATCHES:
                chosen = plan((1, batch, width), dtype, GPUS[arch], slots=slots)
                if chosen.kind != "steps" or cell.bare is None:
                    found[extension(cell, chosen, dtype, width, packed)] = None
    return list(found)


def steps_sources(cell: DenseCell) -> tuple[Path, ...]:
    """The sources of the per-step fallback on a GPU, beside those of the persistent launch."""
    return tuple(_per_step(source(cell, "cuda")).sources()) if build.targets() else ()


def capacity(
    cell: DenseCell, chosen: Plan, dtype: torch.dtype, width: int, tiles: int = 1, packed: bool = False
) -> tuple[int, int]:
    """(groups of `tiles` tiles that the current device holds together, bytes of shared memory of a block)."""
    module = launch.opened(extension(cell, chosen, dtype, width, packed), family_of(cell))
    groups = min(module.ask("capacity", tiles, backward) for backward in (0, 1))
    return groups, module.ask("shared_bytes", tiles)


def check_errors(device: torch.device) -> None:
    """Raise `KernelTimeoutError` if a launch on this device has given up waiting: its outputs are worthless. Synchronise
    first to cover every launch so far."""
    _, word = _error_words.get(_index(device), (None, None))
    if word is not None and word.value != 0:
        word.value = 0
        raise KernelTimeoutError(
            "a dense kernel timed out waiting for its other blocks, so its results are invalid: another program keeps the GPU "
            "from running them together. Free the GPU, or set ELMAN_KERNELS=off"
        )


def error_word(device: torch.device) -> int:
    """The address of the pinned word that a launch on this device sets when it gives up waiting. Raises as `check_errors`."""
    check_errors(device)
    index = _index(device)
    if index not in _error_words:
        pinned = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        _error_words[index] = pinned, ctypes.c_int32.from_address(pinned.data_ptr())
    return ctypes.addressof(_error_words[index][1])


def _index(device: torch.device) -> int:
    return (device.index or 0) if device.type == "cuda" else -1


def _prepared(cell: DenseCell, target: Target, given: Values, main_TBd: Tensor) -> tuple[Any, Plan | None]:
    """The module for a call, and on a GPU its plan. Adds the arguments of a launch to `given`."""
    dtype = main_TBd.dtype
    chosen: Plan | None = None
    slots = 1
    if cell.blocks:
        given["slots"] = slots = len(given["w"])
    if target in ("host", "cpu"):
        if target == "host" and dtype not in (torch.float32, torch.float64):
            raise KernelError(f"the host build of {cell.name} runs in float32 and float64, not {dtype}")
        module = _cpu_module(cell, target, dtype)
        given["threads"] = torch.get_num_threads()
    else:
        steps, batch, width = main_TBd.shape
        device = main_TBd.device
        if steps * batch > MAX_PLACES:
            plan((steps, batch, width), dtype, _device(device.index))  # which says so
        packed = given.get("starts") is not None
        module, chosen = ready(cell, batch, width, dtype, device.index, slots, packed)
        given |= {"rows": chosen.rows, "groups": chosen.groups, "delay": chosen.delay, "timeout_ns": TIMEOUT_NS}
        given |= {"error": error_word(device), "stream": launch.stream(main_TBd)}
    if cell.bare is not None and (chosen is None or chosen.kind == "steps"):
        raise KernelError(f"{cell.name}: only a GPU's persistent launch has tied weights, and none holds this matrix")
    return module, chosen


@cache
def ready(
    cell: DenseCell, batch: int, width: int, dtype: torch.dtype, index: int | None, slots: int = 1, packed: bool = False
) -> tuple[Any, Plan]:
    """The module for a batch and width on this GPU, and its plan."""
    chosen = plan_for(cell, batch, width, dtype, index, slots, packed)
    return launch.opened(extension(cell, chosen, dtype, width, packed), family_of(cell), index is None), chosen


@cache
def _device(index: int | None) -> Device:
    if index is None:  # emulated: as cuda_runtime.h of elman_csrc's emulated/ says
        return Device(132, 227 << 10, (9, 0))
    found: Any = torch.cuda.get_device_properties(index)
    return Device(found.multi_processor_count, found.shared_memory_per_block_optin, (found.major, found.minor))


@cache
def _cpu_module(cell: DenseCell, target: Target, dtype: torch.dtype) -> Any:
    return launch.opened(source(cell, target, dtype), family_of(cell))


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b in float32."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
