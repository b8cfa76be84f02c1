"""The behaviour of a mixer as tests: points 1 to 7 of `elman_core.registry.Mixer`, in float64 unless a dtype is the point."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from elman_core import State

from .harness import Harness, Options, assert_close, assert_identical, assert_same_state, clone, leaves

BF16 = torch.bfloat16
# A result of 16 bits differs from one of 32 by a few roundings of 2^-9; sixteen of them, were they all to add up.
BF16_LIMIT = 16 * 2.0**-9
FP32_LIMIT = 256 * 2.0**-24  # of 16 bits, one rounding alone is 2^-11
LONG = 512
CHUNKS, PIECE = 300, 37


class MixerContract(Harness):
    # 1. shapes, state, masks ------------------------------------------------------------------------------------------

    def test_output_and_state_are_as_declared(self, opts: Options, branch: int) -> None:
        for dtype, rows, length in itertools.product((torch.float32, BF16), (1, 3), (1, 5)):
            mixer = self.make(opts, branch, dtype)
            x_BTD = self.input(length, rows, dtype)
            y_BTD, state = mixer(x_BTD)
            assert y_BTD.shape == x_BTD.shape
            assert y_BTD.dtype == dtype
            spec = mixer.state_spec(self.dim, mixer.config)
            assert state.keys() == spec.keys(), f"forward returned the states {[*state]}, state_spec has {[*spec]}"
            for name, (shape, state_dtype) in spec.items():
                got = state[name]
                assert got.shape[0] == rows, f"state {name!r} is not batch first"
                assert len(got.shape) == 1 + len(shape), f"state {name!r}: shape {tuple(got.shape)}, declared {shape}"
                # -1 marks the axis of a per-token state that grows
                assert all(d in (-1, s) for s, d in zip(got.shape[1:], shape, strict=True)), (name, got.shape, shape)
                assert got.dtype == state_dtype, f"state {name!r} is {got.dtype}, declared {state_dtype}"

    def test_a_state_holds_no_other_memory(self, opts: Options, branch: int) -> None:
        """A view of a call's inputs or outputs would keep them for as long as the state lives."""
        for rows in (1, 3):
            mixer = self.make(opts, branch, torch.float32)
            if mixer.state_growth != "constant":
                continue
            parts: dict[int, list[tuple[str, Tensor]]] = {}  # states may share a tensor that holds nothing else
            for name, x in mixer(self.input(64, rows, torch.float32))[1].items():
                parts.setdefault(x.untyped_storage().data_ptr(), []).append((name, x))
            for shared in parts.values():
                held, needed = shared[0][1].untyped_storage().nbytes(), sum(x.nbytes for _, x in shared)
                names = ", ".join(name for name, _ in shared)
                assert held <= 2 * needed, f"state {names} of {needed} bytes keeps {held} in memory: return a copy"

    def test_no_state_means_the_initial_state(self, opts: Options, branch: int) -> None:
        mixer, x_BTD = self.make(opts, branch), self.input(5)
        nothing_BT = torch.zeros(3, 5, dtype=torch.bool)
        initial = mixer(self.input(5, seed=9), None, nothing_BT)[1]
        y_BTD, end = mixer(x_BTD)
        again_BTD, end_again = mixer(x_BTD, initial)
        assert_close(again_BTD, y_BTD)
        if mixer.state_growth == "constant":
            assert_same_state(end_again, end)

    def test_inputs_are_never_changed(self, opts: Options, branch: int) -> None:
        mixer, x_BTD = self.make(opts, branch), self.input(5)
        mask_BT = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 0, 1, 0, 1]], dtype=torch.bool)
        starts_BT = ~mask_BT
        for mask, starts in ((None, None), (mask_BT, None), (None, starts_BT)):
            state = self.state(mixer)
            given = dict(state)
            before, x_before = clone(state), x_BTD.clone()
            mask_before, starts_before = mask_BT.clone(), starts_BT.clone()
            mixer(x_BTD, None, mask, starts)
            first = mixer(x_BTD, state, mask, starts)[1]
            kept = clone(first)
            mixer(self.input(5, seed=8), first, mask, starts)
            assert_identical(x_BTD, x_before, "x, which no call may change in place")
            assert_identical(mask_BT, mask_before, "the mask, which no call may change in place")
            assert_identical(starts_BT, starts_before, "the starts, which no call may change in place")
            assert all(state.get(n) is given[n] for n in given), "the state's dict was changed"
            for name in before:
                assert_identical(state[name], before[name], f"state {name!r}, which no call may change in place")
                assert_identical(first[name], kept[name], f"a returned state {name!r}, after a later call")

    def test_masked_positions_hold_the_state_exactly(self, opts: Options, branch: int) -> None:
        mixer = self.make(opts, branch)
        state = self.state(mixer)
        y_BTD, held = mixer(100 * self.input(6), state, torch.zeros(3, 6, dtype=torch.bool))
        assert torch.isfinite(y_BTD).all(), "the output at masked positions may be anything finite"
        if mixer.state_growth == "constant":
            for name in state:
                assert_identical(held[name], state[name], f"state {name!r} after masked positions alone")
        follow_BTD = self.input(4, seed=7)
        assert_close(mixer(follow_BTD, held)[0], mixer(follow_BTD, state)[0])

    def test_a_mask_removes_positions(self, opts: Options, branch: int) -> None:
        """Left padding, right padding and holes: each row equals the row without its masked positions."""
        mixer, x_BTD = self.make(opts, branch), self.input(7, rows=5)
        pattern = ("1111111", "0001111", "1110000", "1010011", "0110100")
        mask_BT = torch.tensor([[c == "1" for c in row] for row in pattern])
        x_BTD = torch.where(mask_BT[..., None], x_BTD, 100 * x_BTD)
        follow_BTD = self.input(3, rows=5, seed=6)
        for start in (None, self.state(mixer, rows=5)):
            y_BTD, end = mixer(x_BTD, start, mask_BT)
            after_BTD = mixer(follow_BTD, end)[0]
            for b in range(5):
                row = slice(b, b + 1)
                begin = None if start is None else {n: v[row] for n, v in start.items()}
                alone_BTD, end_alone = mixer(x_BTD[row, mask_BT[b]], begin)
                assert_close(y_BTD[row, mask_BT[b]], alone_BTD, what=f"output under mask {pattern[b]}")
                if mixer.state_growth == "constant":
                    assert_same_state({n: v[row] for n, v in end.items()}, end_alone)
                assert_close(after_BTD[row], mixer(follow_BTD[row], end_alone)[0], what=f"after mask {pattern[b]}")

    def test_packed_rows_equal_separate_rows(self, opts: Options, branch: int) -> None:
        """Several documents in a row, one that starts at a masked position among them, each from the initial state."""
        mixer, x_BTD = self.make(opts, branch), self.input(7, rows=4).requires_grad_()
        mask_BT = torch.tensor([[c == "1" for c in row] for row in ("1111111", "1111111", "0111011", "1100110")])
        starts_BT = torch.tensor([[c == "1" for c in row] for row in ("0001000", "1010011", "0100100", "0010001")])
        given = self.state(mixer, rows=4)
        y_BTD, end = mixer(x_BTD, given, mask_BT, starts_BT)
        after_BTD = mixer(self.input(2, rows=4, seed=6), end)[0]
        for b in range(4):
            row, edges = slice(b, b + 1), sorted({0, *starts_BT[b].nonzero()[:, 0].tolist(), 7})
            state: State | None = {n: v[row] for n, v in given.items()}
            for first, last in itertools.pairwise(edges):
                state = None if first or starts_BT[b, 0] else state
                alone_BTD, state = mixer(x_BTD[row, first:last], state, mask_BT[row, first:last])
                on = mask_BT[b, first:last]
                assert_close(y_BTD[row, first:last][:, on], alone_BTD[:, on], what=f"row {b}, document at {first}")
            assert_close(after_BTD[row], mixer(self.input(2, rows=4, seed=6)[row], state)[0], what=f"after row {b}")
            if mixer.state_growth == "constant":
                assert state is not None
                assert_same_state({n: v[row] for n, v in end.items()}, state)
        (grad_BTD,) = torch.autograd.grad(y_BTD[0, 3:].sum(), x_BTD)
        assert (grad_BTD[0, :3] == 0).all(), "a gradient flows back past the start of a document"
        without_BTD = mixer(x_BTD, given, None, torch.zeros_like(mask_BT))[0]
        assert_close(without_BTD, mixer(x_BTD, given)[0], what="output where no document starts, beside no starts_BT")

    def test_masked_inputs_get_no_gradient(self, opts: Options, branch: int) -> None:
        mixer = self.make(opts, branch)
        x_BTD = self.input(6).requires_grad_()
        mask_BT = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 0, 1], [1, 1, 1, 1, 1, 0]], dtype=torch.bool)
        y_BTD, end = mixer(x_BTD, None, mask_BT)
        (grad_BTD,) = torch.autograd.grad(y_BTD[mask_BT].sum() + _total(end), x_BTD)
        assert torch.isfinite(grad_BTD).all()
        assert (grad_BTD[~mask_BT] == 0).all()
        assert (grad_BTD[mask_BT] != 0).any()

    # 2. pieces --------------------------------------------------------------------------------------------------------

    def test_pieces_equal_whole(self, opts: Options, branch: int) -> None:
        """The last pieces are single steps, as in decoding."""
        mixer, x_BTD = self.make(opts, branch), self.input(7)
        for start, sizes in itertools.product((self.state(mixer), None), ((1, 3, 2, 1), (2, 5), (6, 1), (1,) * 7)):
            whole_BTD, end = mixer(x_BTD, start)
            for recorded in (True, False):  # a step without gradients may have a kernel of its own
                pieces, state = [], start
                with torch.set_grad_enabled(recorded):
                    for piece_BTD in x_BTD.split(sizes, 1):
                        y_BTD, state = mixer(piece_BTD, state)
                        pieces.append(y_BTD)
                said = f"pieces of {sizes}" if recorded else f"pieces of {sizes} without gradients"
                assert_close(torch.cat(pieces, 1), whole_BTD, what=said)
                assert state is not None
                assert_same_state(state, end)

    def test_long_pieces_equal_whole(self, opts: Options, branch: int) -> None:
        """Outputs, states and gradients over several chunks, should the mixer work in chunks."""
        mixer, x_BTD = self.make(opts, branch), self.input(CHUNKS, 2).requires_grad_()
        drawn_BT, weight_BTD = self.input(CHUNKS, 2, seed=4)[..., 0], self.input(CHUNKS, 2, seed=5)
        names = ["x", *(n for n, _ in mixer.named_parameters())]

        def run(size: int, *flags_BT: Tensor | None) -> tuple[Tensor, State | None, tuple[Tensor, ...]]:
            outputs: list[Tensor] = []
            state: State | None = None
            for t in range(0, CHUNKS, size):
                part = slice(t, t + size)
                y_BTD, state = mixer(x_BTD[:, part], state, *(f if f is None else f[:, part] for f in flags_BT))
                outputs.append(y_BTD)
            y_BTD = torch.cat(outputs, 1)
            y_BTD = y_BTD if flags_BT[0] is None else torch.where(flags_BT[0][..., None], y_BTD, 0)
            loss = (y_BTD * weight_BTD).sum()
            return y_BTD, state, torch.autograd.grad(loss, [x_BTD, *mixer.parameters()], materialize_grads=True)

        for said, *flags in (("", None, None), (", masked and packed", drawn_BT > -1, drawn_BT > 2)):
            (y_BTD, end, grads), (of_pieces_BTD, state, grads_of_pieces) = run(CHUNKS, *flags), run(PIECE, *flags)
            said = f"of {CHUNKS} steps{said}, beside pieces of {PIECE}"
            assert_close(y_BTD, of_pieces_BTD, what=f"output {said}")
            if mixer.state_growth == "constant":
                assert end is not None
                assert state is not None
                assert_same_state(end, state)
            for name, grad, of_pieces in zip(names, grads, grads_of_pieces, strict=True):
                assert_close(grad, of_pieces, what=f"the gradient of {name} {said}")

    def test_long_sequences_stay_finite(self, opts: Options, branch: int) -> None:
        mixer = self.make(opts, branch, torch.float32, stir=False)
        with torch.no_grad():
            y_BTD, end = mixer(self.input(LONG, 1, torch.float32))
        assert torch.isfinite(y_BTD).all()
        assert all(torch.isfinite(v).all() for v in end.values())

    # 3. causality, rows -----------------------------------------------------------------------------------------------

    def test_output_does_not_see_later_inputs(self, opts: Options, branch: int) -> None:
        mixer, x_BTD = self.make(opts, branch), self.input(6)
        y_BTD = mixer(x_BTD)[0]
        for t in range(1, 6):
            other_BTD = torch.cat([x_BTD[:, :t], 1 + 3 * x_BTD[:, t:]], 1)
            assert_close(mixer(other_BTD)[0][:, :t], y_BTD[:, :t], what=f"output before {t}")

    def test_rows_do_not_see_each_other(self, opts: Options, branch: int) -> None:
        mixer, x_BTD = self.make(opts, branch), self.input(5)
        start = self.state(mixer)
        y_BTD, end = mixer(x_BTD, start)
        for b in range(3):
            row = slice(b, b + 1)
            alone_BTD, end_alone = mixer(x_BTD[row], {n: v[row] for n, v in start.items()})
            assert_close(y_BTD[row], alone_BTD, what=f"row {b}")
            assert_same_state({n: v[row] for n, v in end.items()}, end_alone)

    def test_strides_do_not_matter(self, opts: Options, branch: int) -> None:
        mixer, x_BTD = self.make(opts, branch), self.input(5)
        y_BTD, end = mixer(x_BTD)
        for strided in (x_BTD.transpose(0, 1).contiguous().transpose(0, 1), x_BTD.mT.contiguous().mT):
            again_BTD, end_again = mixer(strided)
            assert_close(again_BTD, y_BTD)
            assert_same_state(end_again, end)

    # 4. modules -------------------------------------------------------------------------------------------------------

    def test_linear_maps_are_called_as_modules(self, opts: Options, branch: int) -> None:
        mixer = self.make(opts, branch)
        called: set[str] = set()
        linear = {n: m for n, m in mixer.named_modules() if isinstance(m, nn.Linear)}
        for name, module in linear.items():
            module.register_forward_hook(lambda *_, name=name: called.add(name))
        mixer(self.input(3))
        assert called == linear.keys(), "LoRA and quantisers replace a linear map by calling it"

    # 5. equal state dicts compute the same ----------------------------------------------------------------------------

    def test_the_state_dict_is_the_function(self, opts: Options, branch: int) -> None:
        for dtype in (torch.float32, BF16):
            one, two = self.make(opts, branch, dtype, seed=1), self.make(opts, branch, dtype, seed=2)
            one.train()(self.input(4, dtype=dtype))  # what training moves must be in the state dict too
            two.load_state_dict(one.state_dict())
            x_BTD = self.input(6, dtype=dtype)
            for mode in (True, False):
                torch.manual_seed(4)  # of dropout
                y_BTD, end = one.train(mode)(x_BTD)
                torch.manual_seed(4)
                again_BTD, end_again = two.train(mode)(x_BTD)
                assert_identical(again_BTD, y_BTD, "the output of equal state dicts")
                for name in end:
                    assert_identical(end_again[name], end[name], f"state {name!r} of equal state dicts")

    def test_a_call_with_unchanged_weights_changes_nothing(self, opts: Options, branch: int) -> None:
        mixer, x_BTD = self.make(opts, branch).train(), self.input(5)
        torch.manual_seed(4)
        first_BTD = mixer(x_BTD)[0]
        kept = {n: v.clone() for n, v in mixer.state_dict().items()}
        torch.manual_seed(4)
        assert_identical(mixer(x_BTD)[0], first_BTD, "the output of a second call in training, from the same seed")
        calm = torch.equal(mixer(x_BTD)[0], first_BTD)  # without dropout, training and evaluation are one function
        evaluated_BTD = mixer.eval()(x_BTD)[0]
        assert_identical(mixer(x_BTD)[0], evaluated_BTD, "the output of a second call in evaluation")
        if calm:
            assert_close(evaluated_BTD, first_BTD, what="output in evaluation, beside training without dropout")
        with torch.no_grad():
            assert_close(mixer(x_BTD)[0], evaluated_BTD, what="output without gradients")
        for name, value in mixer.state_dict().items():
            assert_identical(value, kept[name], f"{name}, after calls with unchanged weights")

    # 6. parameters and buffers on the meta device ---------------------------------------------------------------------

    def test_tensors_are_parameters_or_buffers(self, opts: Options, branch: int) -> None:
        mixer = self.make(opts, branch)
        for name, rows in mixer.stacked().items():
            assert sum(rows) == len(mixer.get_parameter(name)), f"stacked() divides {name} into {rows}"
        for name, module in mixer.named_modules():
            own = {k: tree_leaves(v) for k, v in vars(module).items() if k not in ("_parameters", "_buffers")}
            plain = [k for k, values in own.items() if any(isinstance(v, Tensor) for v in values)]
            assert not plain, f"{name or 'the mixer'} keeps plain tensors {plain}: they are lost on the meta device"

    def test_reset_parameters_covers_every_parameter(self, opts: Options, branch: int) -> None:
        mixer = self.make(opts, branch, torch.float32, stir=False)
        _fill(mixer.state_dict(), torch.nan)
        mixer.reset_parameters()
        mixer.reset_buffers()
        for name, tensor in mixer.state_dict().items():
            assert torch.isfinite(tensor).all(), f"reset_parameters left {name!r} as it was"
        assert torch.isfinite(mixer(self.input(4, dtype=torch.float32))[0]).all()

    def test_initialisation_depends_on_the_seed_alone(self, opts: Options, branch: int) -> None:
        one, two = (self.make(opts, branch, stir=False) for _ in range(2))
        for (name, a), b in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
            assert_identical(b, a, f"{name} of a second mixer of the same seed")

    def test_reset_buffers_makes_lost_buffers_anew(self, opts: Options, branch: int) -> None:
        mixer = self.make(opts, branch, torch.float32)
        kept = {n: v.clone() for n, v in mixer.state_dict().items()}
        lost = {n: v for n, v in mixer.named_buffers() if n not in kept}
        expected = {n: v.clone() for n, v in lost.items()}
        _fill({n: v for n, v in lost.items() if v.is_floating_point()}, torch.nan)
        mixer.reset_buffers()
        for name, value in expected.items():
            assert_identical(dict(mixer.named_buffers())[name], value, f"{name}, remade by reset_buffers")
        for name, value in mixer.state_dict().items():
            assert_identical(value, kept[name], f"{name}, which checkpoints hold, after reset_buffers")

    def test_a_mixer_from_the_meta_device_computes_the_same(self, opts: Options, branch: int) -> None:
        mixer = self.make(opts, branch, torch.float32)
        variant = self.declared()
        with torch.device("meta"):
            bare = variant.branch(branch)(self.dim, variant.make_config(opts), branch)
        assert all(t.is_meta for t in itertools.chain(bare.parameters(), bare.buffers()))
        bare = bare.to_empty(device="cpu").eval()
        bare.load_state_dict(mixer.state_dict())
        bare.reset_buffers()
        x_BTD = self.input(5, dtype=torch.float32)
        assert_identical(bare(x_BTD)[0], mixer(x_BTD)[0], "the output of a mixer from the meta device")

    # 7. gradients -----------------------------------------------------------------------------------------------------

    def test_gradients_equal_finite_differences(self, opts: Options, branch: int) -> None:
        """To the input, every parameter and the initial state; from the output and the final state; with and without mask."""
        mixer = self.make(opts, branch)
        buffers = dict(mixer.named_buffers())
        weights = {n: p.detach().clone().requires_grad_() for n, p in mixer.named_parameters()}
        start = leaves(self.state(mixer, rows=2))
        smooth = [n for n, v in start.items() if v.requires_grad]
        mask_BT = torch.tensor([[1, 0, 1], [0, 1, 1]], dtype=torch.bool)
        for mask in (None, mask_BT):

            def run(x_BTD: Tensor, *tensors: Tensor, mask: Tensor | None = mask) -> tuple[Tensor, ...]:
                state = {**start, **dict(zip(smooth, tensors[len(weights) :], strict=True))}
                given = {**buffers, **dict(zip(weights, tensors, strict=False))}
                y_BTD, end = functional_call(mixer, given, (x_BTD, state, mask))
                y_BTD = y_BTD if mask is None else y_BTD[mask]
                return (y_BTD, *(v for v in end.values() if v.requires_grad))

            inputs = (self.input(3, rows=2).requires_grad_(), *weights.values(), *(start[n] for n in smooth))
            assert torch.autograd.gradcheck(run, inputs, eps=1e-6, atol=1e-7, rtol=1e-5, fast_mode=True)

    def test_gradients_reach_everything(self, opts: Options, branch: int) -> None:
        mixer = self.make(opts, branch)
        start, x_BTD = leaves(self.state(mixer)), self.input(5).requires_grad_()
        weight_BTD = self.input(5, seed=5)
        for given in (start, None):  # a learned initial state is used by the second call alone
            y_BTD, end = mixer(x_BTD, given)
            ((y_BTD * weight_BTD).sum() + _total(end)).backward()
        wanted = {**dict(mixer.named_parameters()), "x": x_BTD}
        wanted |= {f"state {n}": v for n, v in start.items() if v.requires_grad}
        for name, tensor in wanted.items():
            assert tensor.grad is not None, f"no gradient reaches {name}"
            assert torch.isfinite(tensor.grad).all(), f"the gradient of {name} is not finite"
            assert (tensor.grad != 0).any(), f"the gradient of {name} is zero"

    def test_gradients_flow_through_the_state(self, opts: Options, branch: int) -> None:
        """Gradients of outputs after a cut reach the inputs before it, through the state alone."""
        mixer = self.make(opts, branch)
        if not mixer.state_spec(self.dim, mixer.config):
            return
        x_BTD = self.input(3).requires_grad_()
        state = mixer(x_BTD)[1]
        assert any(v.requires_grad for v in state.values()), "the state is cut off from what it was computed from"
        after_BTD = mixer(self.input(3, seed=4), state)[0]
        (grad_BTD,) = torch.autograd.grad(after_BTD.square().sum(), x_BTD, allow_unused=True)
        assert grad_BTD is not None, "the state that is passed in is not used"
        assert (grad_BTD != 0).any()

    # precision --------------------------------------------------------------------------------------------------------

    def test_bf16_is_close_to_fp32(self, opts: Options, branch: int) -> None:
        """With the weights rounded alike, the results differ by what 16-bit arithmetic explains; the state does not drift."""
        half = self.make(opts, branch, torch.float32)
        for name, tensor in itertools.chain(half.named_parameters(), half.named_buffers()):
            if (
                tensor.is_floating_point()
                and name.rpartition(".")[2] not in half.fp32_params
                and name not in half.fp32_params
            ):
                tensor.data = tensor.data.to(BF16)
        full = copy.deepcopy(half).float()
        x_BTD = self.input(8, dtype=BF16)
        with torch.no_grad():
            expected_BTD = full(x_BTD.float())[0]
            plain_BTD, _ = half(x_BTD)
            with torch.autocast("cpu", dtype=BF16):
                mixed_BTD, end = full(x_BTD)
        assert plain_BTD.dtype == mixed_BTD.dtype == BF16
        for name, (_, dtype) in full.state_spec(self.dim, full.config).items():
            assert end[name].dtype == dtype, f"autocast changes state {name!r} to {end[name].dtype}"
        for what, got_BTD in (("bf16 weights", plain_BTD), ("autocast", mixed_BTD)):
            error = ((got_BTD.float() - expected_BTD).norm() / expected_BTD.norm()).item()
            assert error < BF16_LIMIT, f"{what}: relative error {error:.3f}, limit {BF16_LIMIT:.3f}"

    def test_fp32_is_close_to_fp64(self, opts: Options, branch: int) -> None:
        mixer, x_BTD = self.make(opts, branch, torch.float32), self.input(8, dtype=torch.float32)
        y_BTD, end = mixer(x_BTD)
        exact_BTD, exact = copy.deepcopy(mixer).double()(x_BTD.double())
        assert_close(y_BTD, exact_BTD, FP32_LIMIT, "output in float32, beside float64")
        assert_same_state(end, exact, FP32_LIMIT)


def _total(end: State) -> Tensor:
    """A scalar that depends on every part of a final state."""
    total = torch.zeros((), dtype=torch.float64)
    for value in end.values():
        if value.is_floating_point() and value.requires_grad:
            total = total + value.square().sum() + value.sum()
    return total


def _fill(tensors: dict[str, Tensor], value: float) -> None:
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.fill_(value if tensor.is_floating_point() else -1)
