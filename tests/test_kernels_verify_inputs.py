"""What `verify` says where the kernel is not what is wrong: the inputs, the reference, a zero, a kink; and what it draws."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from elman_authors import grids
from elman_authors.testing.kernel import need_host_compiler
from elman_e1.op import e1
from linear_cells import CELLS
from torch import Tensor

from elman_core.kernels import Case, KernelSpec, verify_cache
from elman_core.kernels import verify as verify_module
from elman_core.kernels.verify import Row, failures, verify
from elman_core.registry import KernelError

f64, bf16 = torch.float64, torch.bfloat16
SMALL = Case({"T": 7, "B": 3, "d": 5}, f64)


def spec_of(reference: Callable[..., Tensor], kernel: Callable[..., Tensor], draw: Callable[..., Any]) -> KernelSpec:
    """y = f(x, s), in the place of the reference and of the back end "torch"."""
    return KernelSpec(
        name="made_up",
        cases=lambda *_: (),
        make_inputs=lambda problem, generator: draw(problem, generator),
        call=lambda backend, inputs, _: {"y": (reference if backend == "reference" else kernel)(**inputs)},
        states=(),
        extension=e1.spec().extension,
        op=lambda *_: None,
        portable=("torch",),
    )


def test_inputs_on_which_the_reference_overflows_blame_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = e1.spec()
    far = dataclasses.replace(
        spec, make_inputs=lambda *given: spec.make_inputs(*given) | {"z": torch.full((7, 3, 5), torch.inf)}
    )
    report = verify(far, "torch", cases=[dataclasses.replace(SMALL, dtype=torch.float32)], opcheck=False)
    assert not report.passed
    assert (report.rows, report.faults) == ([], [])
    assert "inputs unsuitable: the reference in float" in report.unsuitable[0]
    assert "adjust=" in report.unsuitable[0]
    monkeypatch.setattr(verify_cache, "verify", lambda *_, **__: report)
    monkeypatch.setattr(verify_cache, "stamp", lambda *_: None)
    monkeypatch.delenv("ELMAN_VERIFY", raising=False)
    with pytest.raises(KernelError, match=r"cannot be verified: .* inputs unsuitable"):
        verify_cache.ensure_verified(far, SMALL, "plan")


@pytest.mark.parametrize("wrong", [0.0, 1e-6])
def test_a_gradient_that_is_zero_in_theory_is_measured_against_the_others(wrong: float) -> None:
    def draw(problem: Case, generator: torch.Generator) -> dict[str, Tensor]:
        return {n: torch.randn(40, generator=generator, dtype=problem.dtype) for n in ("x", "s")}

    spec = spec_of(
        lambda x, s: x + (0.1 * s + 0.2 * s - 0.3 * s), lambda x, s: x + (0.1 * s - 0.3 * s + (0.2 + wrong) * s), draw
    )
    report = verify(spec, "torch", cases=[Case({"T": 40}, f64)], opcheck=False)
    assert report.passed == (wrong == 0.0), list(failures(report))


@pytest.mark.parametrize(("slope", "scale"), [(0.0, 1.0), (0.1, 1.0), (0.0, 1.1), (0.0, 1.03)])
def test_what_rounding_chooses_at_a_kink_is_said_and_hides_nothing_else(slope: float, scale: float) -> None:
    def cell(x: Tensor, s: Tensor, z: Tensor, slope: float = 0.0, scale: float = 1.0, rounded: bool = False) -> Tensor:
        h, states = torch.zeros_like(z[0], dtype=torch.float32 if rounded else torch.float64), []
        for step in zip(x, s, z, strict=True):
            x_t, s_t, z_t = (scale * v - (scale - 1) * v.detach() for v in (v.to(h.dtype) for v in step))
            product = x_t * s_t
            if rounded:
                product = product + (product.detach().to(x.dtype).to(h.dtype) - product.detach())
            h = torch.nn.functional.leaky_relu(product + z_t + 0.5 * h, slope)
            states.append(h)
        return torch.stack(states).to(x.dtype)

    def draw(problem: Case, generator: torch.Generator) -> dict[str, Tensor]:
        return {n: torch.randn(4, 5_000, generator=generator).to(problem.dtype) for n in "xsz"}

    spec = spec_of(cell, lambda **given: cell(**given, slope=slope, scale=scale, rounded=True), draw)
    report = verify(spec, "torch", cases=[Case({"T": 4}, bf16)], opcheck=False)
    assert report.passed == ((slope, scale) == (0.0, 1.0)), list(failures(report))
    assert any(0 < row.kink < 0.02 for row in report.rows)


@pytest.mark.parametrize("scale", [1.0, 1.03])
def test_a_gradient_that_sums_what_jumps_may_move_as_it_does(scale: float) -> None:
    """A kernel that exchanges its state in 16 bits takes other sides of relu than the reference; few, and d h sums them all."""

    def cell(u: Tensor, w: Tensor, h: Tensor, rounded: bool = False) -> Tensor:
        exact = torch.promote_types(u.dtype, torch.float32)
        u_, w_, state = u.to(exact), w.to(exact), h.to(exact)
        if rounded:
            state = scale * state - (scale - 1) * state.detach()
        for step in u_:
            sent = state + (state.detach().to(u.dtype).to(exact) - state.detach()) if rounded else state
            state = 0.9 * state + torch.relu(sent @ w_.T + step)
        return state.to(u.dtype)

    def draw(problem: Case, generator: torch.Generator) -> dict[str, Tensor]:
        shapes = {"u": (16, 16, 256), "w": (256, 256), "h": (16, 256)}
        made = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
        return {n: (x / 90 if n == "w" else x).to(problem.dtype) for n, x in made.items()}

    report = verify(
        spec_of(cell, lambda **given: cell(**given, rounded=True), draw),
        "torch",
        cases=[Case({}, torch.float16)],
        opcheck=False,
    )
    assert report.passed == (scale == 1.0), list(failures(report))
    (row,) = (row for row in report.rows if row.tensor == "d h")
    assert 0 < row.kink < 0.01
    assert row.limit < 0.01


@pytest.mark.parametrize("drops", [False, True])
def test_few_sums_that_cancel_are_judged_by_their_usual_norm(drops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sums of 16 products that are rounded to 16 bits. A term less in these two alone is seen in every draw."""

    def kernel(x: Tensor, s: Tensor) -> Tensor:
        terms = (x.float() * s)[..., drops and len(x) == 1 :]
        return (terms + (terms.to(bf16) - terms).detach()).sum(-1).to(x.dtype)

    def draw(problem: Case, generator: torch.Generator) -> dict[str, Tensor]:
        drawn = 2 * torch.rand(2, problem.sizes["T"], 2, 16, generator=generator) - 1
        return dict(zip("xs", (drawn + drawn.sign()).to(problem.dtype), strict=True))

    def check(steps: int, first: int, **special: Any) -> list[Row]:
        cases = [Case({"T": steps}, bf16, options={"n": n}) for n in range(first, first + 40)]
        return [row for row in verify(spec, "torch", cases=cases, opcheck=False, **special).rows if row.tensor == "y"]

    def right(x: Tensor, s: Tensor) -> Tensor:
        return (x.to(torch.promote_types(x.dtype, torch.float32)) * s).sum(-1).to(x.dtype)

    spec = dataclasses.replace(spec_of(right, kernel, draw), targets=("torch",))
    many = check(40, 0)
    record = {"bfloat16 y": max(row.error for row in many)}
    monkeypatch.setattr(verify_module, "recorded_errors", lambda *_: record)
    assert all(row.passed and row.usual == 1 for row in many)
    few = check(1, 0, recorded=False)  # as when errors are recorded again
    assert any(row.usual > 4 for row in few)
    if not drops:
        record["bfloat16 y"] = max(row.error for row in few)
        assert record["bfloat16 y"] < 3 * max(row.error for row in many)
    assert [row for row in (*few, *check(1, 40)) if row.passed == drops] == []


def test_a_reference_against_which_two_back_ends_agree_is_named() -> None:
    need_host_compiler()
    spec = e1.spec()

    def call(backend: str, inputs: Any, options: Any) -> dict[str, Tensor]:
        made = spec.call(backend, inputs, options)
        return made | {"y": 1.1 * made["y"]} if backend == "reference" else made

    for target, other in (("torch", "host"), ("host", "torch")):
        report = verify(dataclasses.replace(spec, call=call), target, cases=[SMALL], opcheck=False)
        assert f"{target} and {other} agree: the reference is what differs" in report.faults[0]


def test_a_reference_that_draws_random_numbers_is_named() -> None:
    need_host_compiler()
    spec = e1.spec()

    def call(backend: str, inputs: Any, options: Any) -> dict[str, Tensor]:
        made = spec.call(backend, inputs, options)
        return made | {"y": made["y"] + 0.1 * torch.rand(())} if backend == "reference" else made

    for target, dtype in (("host", f64), ("torch", torch.float32)):  # in float32 it might pass for a kink
        problem = dataclasses.replace(SMALL, dtype=dtype)
        report = verify(dataclasses.replace(spec, call=call), target, cases=[problem], opcheck=False)
        assert "the reference differs between two identical calls" in report.faults[0]


@pytest.mark.parametrize("rounds", [False, True])
def test_what_rounding_to_16_bits_does_to_a_decay_near_1_is_seen(rounds: bool, tmp_path: Path) -> None:
    spec = CELLS["kimi_delta"].kernel(f"near_1_{rounds:d}", tmp_path).spec()

    def call(backend: str, inputs: Any, options: Any) -> dict[str, Tensor]:
        given = inputs | {"decay": inputs["decay"].to(bf16).float()} if backend == "torch" and rounds else inputs
        return spec.call("reference" if backend == "torch" else backend, given, options)

    problem = next(c for c in grids.cases(spec, "cuda") if c.options.get("wide"))
    report = verify(dataclasses.replace(spec, call=call, portable=("torch",)), "torch", cases=[problem], opcheck=False)
    assert report.passed != rounds, list(failures(report))


def test_a_decay_near_1_in_float32_keeps_a_thousand_steps_beside_16_bits(tmp_path: Path) -> None:
    """In bfloat16 0.9985 is 1, and the state would stay 1 instead of 0.2229."""
    need_host_compiler()
    kernel, (B, T, H, N, V) = CELLS["kimi_delta"].kernel("near_1_kept", tmp_path), (1, 1000, 1, 16, 4)
    k, v, beta = (torch.zeros(B, T, H, *last, dtype=bf16) for last in ((N,), (V,), ()))
    kept = torch.tensor(0.9985).double()
    for backend in ("cpu", "emulated", "reference"):
        decay = torch.full((B, T, H, N), 0.9985).requires_grad_()
        o, s = kernel(k, k, decay, v, beta, state_BHNV=torch.ones(B, H, N, V), backend=backend)
        (d,) = torch.autograd.grad(s.sum(), decay)
        assert (o.dtype, d.dtype) == (bf16, torch.float32)
        torch.testing.assert_close(s.double(), kept.pow(T).expand_as(s), rtol=T * 2**-24, atol=0)
        # On tensor cores the sum over V has operands of 16 bits, the state before the step and what arrives.
        rtol = 2**-7 if backend == "emulated" else T * 2**-24
        torch.testing.assert_close(d.double(), V * kept.pow(T - 1).expand_as(d), rtol=rtol, atol=0)
