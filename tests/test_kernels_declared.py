"""A header that differs from its declaration in Python, or from what its functions do, is named on a CPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from elman_authors.testing.kernel import need_host_compiler
from linear_cells import CELLS, DELTANET, Made

from elman_core.kernels import DenseKernel, ElementwiseKernel, GatesKernel, MatrixKernel
from elman_core.kernels.matrix.problems import case
from elman_core.kernels.spec import Case
from elman_core.kernels.verify import failures, verify
from elman_core.registry import ConfigError, KernelError

rnn = pytest.importorskip("elman_baselines.rnn.op")
MATRIX = case((2, 18, 1, 4, 3), torch.float64)
WRITTEN = Made(
    lambda s, k, v, decay, beta: decay * s + k * beta * (v - k.mT @ s),
    counts="scalars = 2",
    flags="squashes = false, scalar_keep = true, delta = true",
    line="return {x.c[0], x.c[1] * (x.in[0] - x.r)};",
    back="const T b = x.c[1] * d.write;\n    return {-b, {b}, {d.keep, d.write * (x.in[0] - x.r)}};",
    declared={"scalars": ("decay", "beta"), "delta": True},
)
GATED, KIMI = CELLS["gated_deltanet"], CELLS["kimi_delta"]
SAID = {  # a cell with a fault, and what is said of it
    "right": (WRITTEN, None),
    "keep_of_another": (
        replace(DELTANET, flags="squashes = false, scalar_keep = true"),
        "the header says scalar_keep, and keep is not c[0]",
    ),
    "two_gradients": (
        replace(GATED, flags="squashes = !Linear, scalar_keep = true"),
        "the header says scalar_keep, and g.c[0] is not d.keep",
    ),
    "reads_a_share": (replace(WRITTEN, back=WRITTEN.back.replace("{-b,", "{-b + d.keep,")), "d k: error"),
    "delta_with_tanh": (
        replace(WRITTEN, flags="scalar_keep = true, delta = true"),
        "delta needs scalar_keep and retrieves, no squashes",
    ),
    "delta_curved": (
        replace(WRITTEN, line="return {x.c[0], x.c[1] * (x.in[0] - Math::tanh(x.r))};"),
        "the header says delta, and write is not a - b r",
    ),
    "undeclared_delta": (
        replace(WRITTEN, declared={"scalars": ("decay", "beta")}),
        "cell.h says delta = True, Python False",
    ),
    "undeclared_vector": (
        replace(KIMI, step=DELTANET.step, declared={"scalars": ("beta",)}),
        "cell.h says vectors = 1, Python 0",
    ),
    "vector_out_of_range": (
        replace(KIMI, counts="scalars = 1, vectors = 1, read_vector = 1"),
        "read_vector, keep_vector and second_vector count from 0 and are below `vectors`",
    ),
    "hides_r": (replace(DELTANET, flags="squashes = false, backward_uses_r = false"), "d beta: error"),
}


@pytest.mark.parametrize("name", SAID)
def test_a_promise_that_a_header_breaks_is_said(name: str, tmp_path: Path) -> None:
    need_host_compiler()
    made, said = SAID[name]
    spec = made.kernel(f"declared_{name}", tmp_path).spec()
    try:
        found = list(failures(verify(spec, "host", cases=[MATRIX], opcheck=False)))
    except KernelError as error:  # it does not compile
        found = [str(error)]
    assert found == [] if said is None else any(said in line for line in found), found


@pytest.mark.parametrize("name", ["right", "keep_of_another", "two_gradients"])
def test_the_kernel_of_a_cpu_relies_on_a_promise_so_that_verification_finds_it_broken(
    name: str, tmp_path: Path
) -> None:
    need_host_compiler()
    spec = SAID[name][0].kernel(f"relied_{name}", tmp_path).spec()
    problem = replace(MATRIX, dtype=torch.float32)
    assert verify(spec, "cpu", cases=[problem], opcheck=False).passed == (name == "right")


LSTM = Path(__file__).parents[1] / "csrc_common" / "tests" / "elementwise_cells.h"
T, B, D = 3, 2, 4
GATES = {"header": rnn.gru_gates.cell.header, "cell": rnn.gru_gates.cell.type, "step": rnn.gru_gates.cell.reference}
DENSE = {"header": LSTM, "reference": max, "readout": max}
DIAGONAL = {"header": LSTM, "cell": "elman::made_up::DiagonalLstm", "states": ("h", "c")}


@pytest.mark.parametrize(
    ("kind", "declared", "said"),
    [
        (GatesKernel, {**GATES, "gates": 3, "kept": 3, "splits": True}, "rnn_cells.h says kept = 4, Python 3"),
        (GatesKernel, {**GATES, "gates": 3, "kept": 4}, "rnn_cells.h says splits = True, Python False"),
        (GatesKernel, {**GATES, "gates": 4, "kept": 4, "splits": True}, "says gates = 3, Python 4"),
        (
            ElementwiseKernel,
            {**DIAGONAL, "step": lambda h, c, i, f, o: (h, c, i + f + o), "streams": tuple("ifo")},
            "elementwise_cells.h says streams = 4, Python 3",
        ),
    ],
)
def test_a_count_or_flag_that_differs_is_said_with_both_values(kind: type, declared: dict, said: str) -> None:
    need_host_compiler()
    kernel = kind(f"differs_{abs(hash(said))}", **declared)
    problem = Case({"T": T, "B": B, "d": D}, torch.float64)
    report = verify(kernel.spec(), "host", cases=[problem], opcheck=False)
    assert [said in line for line in report.faults] == [True], report.faults


@pytest.mark.parametrize(
    ("kind", "declared", "said"),
    [
        (GatesKernel, {**GATES, "gates": 5, "kept": 4}, "a kernel takes 1 to 4 gates, not 5"),
        (
            GatesKernel,
            {**GATES, "gates": 4, "kept": 4, "states": tuple("hcnmx")},
            "a kernel takes 1 to 4 states, not 5",
        ),
        (GatesKernel, {**GATES, "gates": 3, "kept": 4, "splits": True, "inner": min}, "leave out splits"),
        (ElementwiseKernel, {**DIAGONAL, "step": max, "streams": ()}, "a kernel takes 1 to 6 streams, not 0"),
        (ElementwiseKernel, {**DIAGONAL, "step": max, "streams": ("h",)}, "'h' is reserved or used twice"),
        (GatesKernel, {**GATES, "gates": 3, "kept": 4, "states": ("h", "u")}, "'u' is reserved or used twice"),
        (DenseKernel, {**DENSE, "extras": ("z", "z")}, "'z' is reserved or used twice"),
        (DenseKernel, {**DENSE, "extras": "gate"}, "extras are a tuple of names, not a string: write ('gate',)"),
        (ElementwiseKernel, {**DIAGONAL, "step": max, "streams": "ab"}, "streams are a tuple of names"),
        (MatrixKernel, {"header": LSTM, "reference": max, "lines": "beta"}, "lines beside v are a tuple of names"),
        (MatrixKernel, {"header": LSTM, "reference": max, "lines": tuple("abcd")}, "0 to 3 lines beside v, not 4"),
        (MatrixKernel, {"header": LSTM, "reference": max, "maps": ({"silu": "v"},)}, "maps are Maps("),
    ],
)
def test_a_declaration_that_no_kernel_takes_is_refused_at_once(kind: type, declared: dict, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind("refused", **declared)
    assert said in str(caught.value)


def test_two_families_cannot_have_kernels_of_one_name():
    """The chooser would prepare and verify the later one in the place of both."""
    with pytest.raises(ConfigError, match=r"^elman_baselines\.rnn\.op has a kernel of this name \(gru\), too"):
        ElementwiseKernel("gru", header=Path("none.h"), step=lambda h, x: (h + x, h), streams=("x",))
