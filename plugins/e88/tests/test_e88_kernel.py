import pytest
import torch
from elman_e88.op import e88

from elman_core.kernels import KernelError, matrix_run
from elman_core.kernels.matrix_build import Size
from elman_core.kernels.matrix_spec import case, make_inputs
from elman_core.kernels.verify import failures, verify


@pytest.mark.parametrize(
    "size", [(6, 8, torch.bfloat16), (132, 8, torch.bfloat16), (16, 5000, torch.float32), (16, 16, torch.float64)]
)
def test_unsupported_sizes_raise_before_anything_is_compiled_and_name_what_there_is(
    size: tuple[int, int, torch.dtype],
) -> None:
    with pytest.raises(KernelError, match="multiples of 4 from 4 to 128"):
        e88.load("cuda", Size(*size, False, False, "0000"))


def test_the_fused_form_refuses_columns_that_its_heads_do_not_fill() -> None:
    with pytest.raises(ValueError, match="do not fill"):
        e88.fused(torch.randn(1, 2, 25), torch.randn(1, 2, 2), n_state=4, decay="sigmoid")


def test_a_mamba_decay_needs_its_parameters() -> None:
    with pytest.raises(ValueError, match="A_log and dt_bias"):
        e88.fused(torch.randn(1, 2, 24), torch.randn(1, 2, 2), n_state=4, decay="mamba")


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [64, 40])
def test_a_workspace_in_slices_gives_the_same_gradients(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    problem = case((5, 33, 2, 64, columns), torch.bfloat16)
    drawn = make_inputs(problem, torch.Generator().manual_seed(0))
    inputs = {k: x.cuda().requires_grad_() for k, x in drawn.items() if x is not None}

    def gradients() -> tuple[torch.Tensor, ...]:
        o, state = e88(*(inputs[n] for n in ("q", "k", "v", "decay")), None, inputs["S0"], backend="cuda")
        return torch.autograd.grad([o, state], list(inputs.values()), [torch.ones_like(o), torch.ones_like(state)])

    whole = gradients()
    monkeypatch.setattr(matrix_run, "WORKSPACE", 1)
    assert all(torch.equal(a, b) for a, b in zip(whole, gradients(), strict=True))


@pytest.mark.gpu
def test_a_sequence_in_pieces_equals_the_whole_on_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    drawn = make_inputs(case((2, 48, 3, 16, 16), torch.bfloat16), torch.Generator().manual_seed(0))
    q, k, v, decay = (drawn[n].cuda() for n in ("q", "k", "v", "decay"))  # type: ignore[union-attr]
    with torch.no_grad():
        o, last = e88(q, k, v, decay, backend="cuda")
        state, pieces = None, []
        for first, end in ((0, 1), (1, 18), (18, 48)):
            piece, state = e88(
                q[:, first:end], k[:, first:end], v[:, first:end], decay[:, first:end], None, state, backend="cuda"
            )
            pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces, 1), o)
    torch.testing.assert_close(state, last)


def test_build_makes_a_module_for_each_size_and_verify_knows_what_its_cases_compile() -> None:
    builds = e88.spec().builds
    assert builds is not None
    made = builds("cuda", "sm_90", (16, 48), (torch.bfloat16, torch.float16))
    assert {e.name.rsplit("_", 1)[0] for e in made} == {
        f"e88_matrix_cuda_{dtype}_{size}" for dtype in ("bfloat16", "float16") for size in ("16x16", "48x48")
    }
    with pytest.raises(KernelError, match="multiples of 4"):
        builds("cuda", "sm_90", (18,), ())
    cases = e88.spec().cases("cuda", "quick")
    needed = e88.spec().needs("cuda", [*cases, case((1, 2, 1, 6, 6), torch.bfloat16)])
    assert len(needed) == len(cases)
    assert len({e.name for e in needed}) < len(cases)  # several cases share a module


@pytest.mark.gpu
def test_every_form_equals_the_float64_reference_on_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    cases = [
        case((3, 50, 5, rows, rows), dtype, masked=rows == 24, maps="1120" if rows == 16 else None)
        for rows in (8, 16, 24, 32)
        for dtype in (torch.bfloat16, torch.float16)
    ]
    report = verify(e88.spec(), "cuda", cases=cases, opcheck=False)
    assert report.passed, "\n".join(failures(report))
