"""The op of a matrix-state cell. That its numbers are right is the contract's matter."""

from contextlib import nullcontext

import pytest
import torch
from elman_authors import grids

from elman_core.kernels import dispatch
from elman_core.kernels.matrix import native as matrix_native
from elman_core.kernels.matrix.native import extension
from elman_core.kernels.matrix.problems import case
from elman_core.kernels.matrix.spec import FAMILY, Maps, Size
from elman_core.kernels.verify import failures, modules_of, verify
from elman_core.registry import ConfigError, KernelError

e88 = pytest.importorskip("elman_e88.op").e88
PLAIN = e88.cell.form(Maps(), [False], False)


def test_a_size_is_verified_before_it_is_used(monkeypatch):
    """With stand-ins for the GPU, the compiler and the checker."""
    asked = []
    monkeypatch.setattr(torch.cuda, "device", lambda _index: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(matrix_native, "load", lambda *_: "a module")
    monkeypatch.setattr(
        dispatch, "ensure_verified", lambda spec, cases, _plan: asked.append((spec.name, *map(str, cases)))
    )
    monkeypatch.setattr(dispatch, "_decided", {})
    monkeypatch.delenv("ELMAN_KERNELS", raising=False)
    for _ in range(2):
        assert dispatch.runs("e88", torch.empty(0, dtype=torch.bfloat16), 16, 8, PLAIN)
    [(name, case)] = asked
    assert name == "e88"
    assert "N=16 V=8" in case


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"maps": Maps(scalars=("exp",))}, r"maps\.scalars has one of given, sigmoid, mamba for each of its 2 scalars"),
        ({"maps": Maps(scalars=("given", "mamba"))}, "mamba for the first alone"),
        ({"maps": Maps(("decay",))}, r"maps\.silu has q, k, v, not 'decay'"),
        ({"n_state": 0}, "30 columns, which 2 heads of 2 x 0 keys and 1 x V values do not fill"),
        ({"n_state": 8}, "30 columns, which 2 heads of 2 x 8 keys and 1 x V values do not fill"),
        ({"maps": e88.cell.maps[0]}, "A_log and dt_bias belong to the map 'mamba'"),
    ],
)
def test_a_fused_call_that_cannot_be_is_said_before_anything_runs(changed, said):
    with pytest.raises(ConfigError, match=said):
        e88.fused(torch.zeros(2, 5, 30), torch.zeros(2, 5, 2), **{"n_state": 4, "maps": Maps()} | changed)


@pytest.mark.parametrize(
    "size", [(6, 8, torch.bfloat16), (132, 8, torch.bfloat16), (16, 5000, torch.float32), (16, 16, torch.float64)]
)
def test_unsupported_sizes_raise_before_anything_is_compiled_and_name_what_there_is(
    size: tuple[int, int, torch.dtype],
) -> None:
    with pytest.raises(KernelError, match="multiples of 4 from 4 to 128"):
        extension(e88.cell, "cuda", Size(*size, PLAIN))


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [64, 40])
def test_a_workspace_in_slices_gives_the_same_gradients(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = case((5, 33, 2, 64, columns), torch.bfloat16)
    drawn = FAMILY.draw(e88.cell, problem, torch.Generator().manual_seed(0))
    inputs = {k: x.cuda().requires_grad_() for k, x in drawn.items() if x is not None}

    def gradients() -> tuple[torch.Tensor, ...]:
        keys = (inputs[n] for n in ("q", "k", "v", "decay"))
        o, state = e88(*keys, state_BHNV=inputs["S0"], maps=Maps(), backend="cuda")
        return torch.autograd.grad([o, state], list(inputs.values()), [torch.ones_like(o), torch.ones_like(state)])

    whole = gradients()
    monkeypatch.setattr(matrix_native, "workspace", lambda _device: 1)
    assert all(torch.equal(a, b) for a, b in zip(whole, gradients(), strict=True))


@pytest.mark.gpu
def test_a_sequence_in_pieces_equals_the_whole_on_the_gpu() -> None:
    drawn = FAMILY.draw(e88.cell, case((2, 48, 3, 16, 16), torch.bfloat16), torch.Generator().manual_seed(0))
    q, k, v, decay = (drawn[n].cuda() for n in ("q", "k", "v", "decay"))  # type: ignore[union-attr]
    with torch.no_grad():
        o, last = e88(q, k, v, decay, maps=Maps(), backend="cuda")
        state, pieces = None, []
        for first, end in ((0, 1), (1, 18), (18, 48)):
            some = (x[:, first:end] for x in (q, k, v, decay))
            piece, state = e88(*some, state_BHNV=state, maps=Maps(), backend="cuda")
            pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces, 1), o)
    torch.testing.assert_close(state, last)


def test_build_makes_a_module_for_each_size_and_verify_knows_what_its_cases_compile() -> None:
    builds = e88.spec().builds
    assert builds is not None
    made = builds("cuda", "sm_90", (16, 48), (torch.bfloat16, torch.float16))
    assert {e.name.removesuffix("_00_7_3_0_20") for e in made} == {
        f"e88_matrix_cuda_{dtype}_{size}" for dtype in ("bfloat16", "float16") for size in ("16x16", "48x48")
    }
    with pytest.raises(KernelError, match="multiples of 4"):
        builds("cuda", "sm_90", (18,), ())
    cases = grids.cases(e88.spec(), "cuda")
    needed = modules_of(e88.spec(), "cuda", [*cases, case((1, 2, 1, 6, 6), torch.bfloat16)])
    assert needed == modules_of(e88.spec(), "cuda", cases)  # nothing for a size that is not supported
    assert len(needed) > 10


@pytest.mark.gpu
def test_every_form_equals_the_float64_reference_on_the_gpu() -> None:
    cases = [
        case((3, 50, 5, rows, rows), dtype, masked=rows == 24, maps=e88.cell.maps[0] if rows == 16 else None)
        for rows in (8, 16, 24, 32)
        for dtype in (torch.bfloat16, torch.float16)
    ]
    report = verify(e88.spec(), "cuda", cases=cases, opcheck=False)
    assert report.passed, "\n".join(failures(report))
