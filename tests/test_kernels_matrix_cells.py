"""The matrix-state skeleton with other cells than E88's: its C++ loops, its GPU source on emulated threads, and nvcc."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import LIBRARY, compile_emulated, emulated_spec
from torch import Tensor

from elman_core.kernels import Maps, MatrixKernel, launch
from elman_core.kernels.build import build
from elman_core.kernels.matrix import modules
from elman_core.kernels.matrix import run as matrix_run
from elman_core.kernels.matrix.spec import case, make_inputs
from elman_core.kernels.spec import Case, Cell
from elman_core.kernels.verify import failures, verify
from elman_core.nn import full_precision
from elman_core.registry import ConfigError, KernelError
from elman_core.testing.kernel import need_host_compiler, need_nvcc

CELL = """
#pragma once
#include <elman/matrix_state_cell.h>
namespace {name} {{
{template}
struct Cell : elman::MatrixCell {{
  static constexpr int {counts};
  static constexpr bool {flags};
  template <class Math, class T>
  static ELMAN_HD elman::MatrixLine<T> line(elman::MatrixIn<T> x) {{
    {line}
  }}
  template <class Math, class T>
  static ELMAN_HD elman::MatrixGrad<Cell, T> line_backward(elman::MatrixLine<T> d, elman::MatrixIn<T> x) {{
    {back}
  }}
}};
}}  // namespace {name}
"""


@dataclass(frozen=True)
class Made:
    """A cell, what its kernel declares, its step(S, k, inputs, linear) in PyTorch, and problems."""

    counts: str
    flags: str
    line: str
    back: str
    step: Any
    declared: dict[str, Any]
    template: str = ""
    host: tuple[Case, ...] = ()
    emulated: tuple[Case, ...] = ()


def retrieved_after_the_decay(s: Tensor, k: Tensor, x: Any, linear: bool) -> Tensor:  # linear: gated DeltaNet
    kept = x["decay"] * s
    new = kept + k * (x["v"] - (kept * k).sum(-2, keepdim=True)) * x.get("write", 1)
    return new if linear else new.tanh()


def kept_and_read_by_one(s: Tensor, k: Tensor, x: Any, _linear: bool) -> Tensor:  # Kimi delta attention
    kept = x["decay"] * s
    return kept + k * x["beta"] * (x["v"] - (k * kept).sum(-2, keepdim=True))


def written_twice(s: Tensor, k: Tensor, x: Any, _linear: bool) -> Tensor:  # RWKV-7
    return x["decay"] * s + k * x["v"] - x["again"] * (x["read"] * s).sum(-2, keepdim=True)


def decayed_by_line(s: Tensor, k: Tensor, x: Any, _linear: bool) -> Tensor:
    return x["gate"].sigmoid() * s + k * x["v"]


f64, f32, bf16, f16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
GATED = Maps(("q", "k", "v"), ("q", "k"), ("mamba", "sigmoid"))
VALUES = Maps(("v",), ("k",))  # of some inputs, and not of others
CELLS = {
    "made_up_after": Made(  # so that the decay has two gradients
        template="template <bool Linear, bool Gated>",
        counts="scalars = Gated ? 2 : 1",
        flags="squashes = !Linear",
        line="return {{x.c[0], (Gated ? x.c[scalars - 1] : T(1)) * (x.in[0] - x.c[0] * x.r)}};",
        back="""elman::MatrixGrad<Cell, T> g{{}};
    g.in[0] = (Gated ? x.c[scalars - 1] : T(1)) * d.write;
    g.r = -x.c[0] * g.in[0];
    g.c[0] = d.keep - g.in[0] * x.r;
    if (Gated) g.c[scalars - 1] = d.write * (x.in[0] - x.c[0] * x.r);
    return g;""",
        step=retrieved_after_the_decay,
        declared={
            "scalars": ("decay", "write"),
            "optional": ("write",),
            "options": ("linear_state",),
            "maps": (GATED,),
        },
        host=(
            case((2, 21, 2, 8, 8), f64, maps=GATED, packed=True, on=("write",), masked=True),
            case((1, 17, 2, 4, 3), f64, on=("linear_state",), strided=True),
        ),
        emulated=(case((2, 35, 3, 16, 16), bf16, maps=GATED, packed=True, on=("write",), masked=True),),
    ),
    "made_up_kept_and_read": Made(
        counts="scalars = 1, vectors = 1, keep_vector = 0, read_vector = 0",
        flags="squashes = false",
        line="return {{T(1), x.c[0] * (x.in[0] - x.r)}};",
        back="""const T b = x.c[0] * d.write;
    return {{-b, {{b}}, {{d.write * (x.in[0] - x.r)}}}};""",
        step=kept_and_read_by_one,
        declared={"vectors": ("decay",), "scalars": ("beta",), "maps": (Maps(("k",), ("k",), ("sigmoid",)),)},
        host=(case((2, 21, 2, 8, 6), f64, maps=Maps(("k",), ("k",), ("sigmoid",)), packed=True, masked=True),),
        emulated=(
            case((2, 20, 3, 16, 16), bf16, maps=Maps(("k",), ("k",), ("sigmoid",)), masked=True),
            case((1, 18, 1, 28, 24), f16),
            case((1, 17, 1, 36, 20), bf16),
        ),
    ),
    "made_up_written_twice": Made(
        counts="vectors = 3, keep_vector = 0, read_vector = 1, second_vector = 2",
        flags="squashes = false, reads_with_k = false, backward_uses_r = false",
        line="return {{T(1), x.in[0], -x.r}};",
        back="return {{-d.second, {{d.write}}}};",
        step=written_twice,
        declared={"vectors": ("decay", "read", "again")},
        host=(case((2, 21, 2, 8, 6), f64, packed=True, masked=True),),
        emulated=(
            case((2, 20, 3, 16, 16), bf16, packed=True, masked=True),
            case((1, 18, 1, 32, 24), bf16),
            case((1, 18, 1, 8, 20), f32),
        ),
    ),
    "made_up_decayed": Made(  # nothing is retrieved, and heads share their keys
        counts="lines = 2",
        flags="retrieves = false, squashes = false, backward_uses_r = false",
        line="return {{Math::gate(x.in[1]).open, x.in[0]}};",
        back="const auto a = Math::gate(x.in[1]);\n    return {{T(0), {{d.write, d.keep * a.open * a.shut}}}};",
        step=decayed_by_line,
        declared={"lines": ("gate",), "shared": ("q", "k")},
        host=(case((2, 21, 3, 8, 6), f64, strided=True, masked=True), case((1, 5, 1, 8, 6), f64)),
        emulated=(
            case((2, 18, 3, 24, 17), bf16, bare=True),
            case((1, 9, 2, 36, 5), bf16),
            case((1, 18, 2, 32, 20), f32),
        ),
    ),
}
e14, e97 = (vars(pytest.importorskip(f"elman_{name}.op"))[name] for name in ("e14", "e97"))
e73, e74 = pytest.importorskip("elman_e73.op").full, pytest.importorskip("elman_e74.op").KERNELS
KEYS, GATED_BY_READ = Maps((), ("k",)), e74["retrieved_gate"]
SHIPPED = [  # whose loops on the host their own contracts check
    (e97, case((2, 35, 3, 16, 16), bf16, maps=e97.cell.maps[0], packed=True, on=("write",), masked=True)),
    (e97, case((1, 34, 2, 32, 32), bf16, maps=e97.cell.maps[0])),
    (e97, case((2, 18, 1, 20, 7), f16, maps=e97.cell.maps[0], on=("linear_state",))),
    (e97, case((1, 18, 2, 16, 20), f32, maps=e97.cell.maps[1], masked=True)),
    (e97, case((1, 17, 1, 64, 72), bf16, maps=e97.cell.maps[2])),
    (GATED_BY_READ, case((2, 35, 3, 16, 16), f32, maps=KEYS, masked=True)),  # fewer heads a block than usual
    (GATED_BY_READ, case((1, 18, 2, 16, 20), bf16, maps=KEYS, masked=True)),
    (GATED_BY_READ, case((1, 18, 1, 32, 24), bf16, maps=KEYS)),  # keeps what was retrieved
    (GATED_BY_READ, case((2, 17, 1, 64, 72), bf16, maps=KEYS, masked=True)),
    (e74["sized"], case((2, 20, 3, 16, 16), bf16, maps=KEYS, masked=True)),
    (e74["sized"], case((1, 18, 1, 32, 24), bf16)),
    (e74["sized"], case((1, 17, 1, 64, 20), f16)),
    (e74["residual"], case((2, 20, 3, 16, 16), bf16, masked=True)),
    (e74["residual"], case((1, 18, 1, 32, 24), bf16)),
    (e74["residual"], case((1, 17, 1, 48, 20), bf16, masked=True)),
    (e74["ntm"], case((2, 20, 3, 16, 16), bf16, maps=KEYS, masked=True)),
    (e74["ntm"], case((1, 18, 1, 28, 24), f16)),
    (e14, case((2, 18, 3, 24, 17), bf16)),
    (e14, case((1, 9, 2, 64, 40), bf16)),
    (e73, case((2, 35, 3, 16, 16), bf16, packed=True, masked=True)),
    (e73, case((1, 18, 2, 32, 24), bf16)),
    (e73, case((1, 18, 1, 24, 20), f32, masked=True)),
]
PROBLEMS = [(name, problem) for name, made in CELLS.items() for problem in made.emulated]
PROBLEMS += [(kernel.name, problem) for kernel, problem in SHIPPED]


def reference_of(made: Made) -> Any:
    vectors, lines, scalars, params = (made.declared.get(n, ()) for n in ("vectors", "lines", "scalars", "params"))

    @full_precision
    def reference(
        q_BTHN: Tensor, k_BTHN: Tensor, *given: Tensor | None, linear_state: bool = False
    ) -> tuple[Tensor, Tensor]:
        *inputs, s, mask_BT, _starts = given
        named = {n: x for n, x in zip((*vectors, "v", *lines, *scalars, *params), inputs, strict=True) if x is not None}
        s = q_BTHN.new_zeros(*q_BTHN[:, 0].shape, named["v"].shape[-1]) if s is None else s
        outputs = []
        for t in range(q_BTHN.shape[1]):
            x = {n: named[n][:, t, :, None] for n in ("v", *lines)} | {n: named[n][:, None] for n in params}
            x |= {n: named[n][:, t, :, None, None] for n in scalars if n in named}
            x |= {n: named[n][:, t, :, :, None] for n in vectors}
            new = made.step(s, k_BTHN[:, t, :, :, None], x, linear_state)
            s = new if mask_BT is None else torch.where(mask_BT[:, t, None, None, None], new, s)
            outputs.append((s * q_BTHN[:, t, :, :, None]).sum(-2))
        return torch.stack(outputs, 1), s

    return reference


@pytest.fixture(scope="session")  # an operator's name is taken for the life of a process
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MatrixKernel]:
    found = {kernel.name: kernel for kernel, _ in SHIPPED}
    for name, made in CELLS.items():
        header = tmp_path_factory.mktemp(name) / f"{name}_cell.h"
        parts = {n: getattr(made, n).format() for n in ("template", "counts", "flags", "line", "back")}
        header.write_text(CELL.format(name=name, **parts))
        found[name] = MatrixKernel(
            name, header=header, cell=f"{name}::Cell", reference=reference_of(made), **made.declared
        )
    return found


@pytest.mark.parametrize("name", CELLS)
def test_the_loops_of_the_host_equal_the_reference(name: str, kernels: dict[str, MatrixKernel]) -> None:
    need_host_compiler()
    checked = name in ("made_up_after", "made_up_written_twice")  # signatures of every kind
    report = verify(kernels[name].spec(), "host", cases=CELLS[name].host, opcheck=checked)
    assert report.passed, "\n".join(failures(report))


def load_emulated(folder: Path, cell: Cell, _target: str, size: Any) -> Any:
    extension = modules.extension(cell, "cuda", size)
    made = folder / f"{extension.name}.so"
    if not made.exists():
        compile_emulated(extension, extension.binding, made, *LIBRARY, "-D__CUDA_ARCH_LIST__=900")
    return launch.open_module(made, "matrix")


@pytest.mark.parametrize(("name", "problem"), PROBLEMS, ids=str)
def test_the_gpu_source_equals_the_reference(
    name: str, problem: Case, kernels: dict[str, MatrixKernel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_host_compiler()

    monkeypatch.setattr(matrix_run, "load", partial(load_emulated, tmp_path))
    report = verify(emulated_spec(kernels[name]), "emulated", cases=[problem], opcheck=False)
    assert report.passed, "\n".join(failures(report))


def test_room_for_other_states_than_a_module_saves_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cell that is elementwise, and not declared so."""
    need_host_compiler()
    monkeypatch.setattr(matrix_run, "load", partial(load_emulated, tmp_path))
    cell = e74["residual"].cell
    other = MatrixKernel(
        "undeclared",
        header=cell.header,
        cell=cell.type,
        reference=cell.reference,
        params=("rho",),
        options=cell.options,
    )
    problem = case((1, 17, 1, 48, 20), bf16)
    inputs = make_inputs(other.cell, problem, torch.Generator().manual_seed(0))
    with pytest.raises(KernelError, match="saves a state every 16 steps, and the call has room for one every 8"):
        emulated_spec(other).call("emulated", inputs, problem.options)


def test_it_compiles_for_a_gpu(tmp_path: Path) -> None:
    need_nvcc()
    assert build(GATED_BY_READ.spec().extension("cuda"), "sm_90", tmp_path).is_file()


def test_other_inputs_than_the_cells_are_one_line() -> None:
    """From the call, from the declaration, and from C++ where the declaration is not what the header says."""
    need_host_compiler()
    q, v, slope = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 3), torch.zeros(1, 3)
    gated = GATED_BY_READ
    for inputs, more, said in (
        ((v, v), {}, "takes v, gate, b_g beside its keys; it was called without b_g"),
        ((v, v, slope, slope), {}, "called with one more"),
        ((v, v, slope), {"beta": v}, "has the options linear_state, not 'beta'"),
    ):
        with pytest.raises(TypeError, match=said):
            gated(q, q, *inputs, **more)
    with pytest.raises(ConfigError, match="at most 3 vectors, 3 lines beside v, 2 scalars and 4 params"):
        MatrixKernel("many", header=gated.cell.header, reference=gated.cell.reference, lines=tuple("abcd"))
    with pytest.raises(ConfigError, match=r"maps\.silu has q, k, v, gate, not 'slope'"):
        gated(q, q, v, v, slope, maps=Maps(("slope",)))
    cell = gated.cell
    fewer = MatrixKernel(
        "fewer", header=cell.header, cell=cell.type, reference=cell.reference, lines=("gate",), options=cell.options
    )
    with pytest.raises(
        KernelError, match=r"vectors, lines, scalars and params 0, 2, 0, 1 \(v is a line\); the call gives 0, 2, 0, 0"
    ):
        fewer(q, q, v, v, backend="host")
