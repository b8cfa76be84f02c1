"""A mixer that meets the contract, and one for each way of breaking it, with the tests that must notice."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from elman_core.registry import ConfigError, Mixer, option


@dataclass(frozen=True)
class SoundConfig:
    gain: float = option(0.5, "gain of the recurrent matrix at the start", gt=0.0, le=2.0)
    gate: Literal["none", "silu"] = option("none", "activation of the output")
    bias: bool = option(True, "whether there is a bias")


class Sound(Mixer):
    """h = tanh(W x + U h' + b), y = V act(h). Its parts are methods, so that each can be broken alone."""

    def __init__(self, dim: int, config: Any, layer_idx: int = 0) -> None:
        super().__init__(dim, config, layer_idx)
        self.in_proj = nn.Linear(dim, dim, bias=False)
        self.u = nn.Parameter(torch.empty(dim, dim))
        self.b = nn.Parameter(torch.empty(dim)) if config.bias else None
        self.out_proj = nn.Linear(dim, dim, bias=False)
        self.register_buffer("scale", torch.full((dim,), 0.5), persistent=False)
        self.extra()
        self.reset_parameters()

    def extra(self) -> None:
        pass

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.in_proj.weight)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.xavier_uniform_(self.u, self.config.gain)
        if self.b is not None:
            nn.init.zeros_(self.b)

    def reset_buffers(self) -> None:
        self.scale.fill_(0.5)

    @classmethod
    def state_spec(cls, dim: int, config: Any) -> Any:
        return {"h": ((dim,), torch.float32)}

    def start(self, x_BTD: Tensor, state: Any) -> Tensor:
        wide = torch.float64 if x_BTD.dtype == torch.float64 else torch.float32
        return x_BTD.new_zeros(x_BTD.shape[0], self.dim, dtype=wide) if state is None else state["h"]

    def project(self, x_BTD: Tensor) -> Tensor:
        return self.in_proj(x_BTD)

    def step(self, u_BD: Tensor, h_BD: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            a = u_BD.to(h_BD.dtype) * self.scale.to(h_BD.dtype) + h_BD @ self.u.to(h_BD.dtype).T
            return torch.tanh(a if self.b is None else a + self.b.to(h_BD.dtype))

    def hold(self, new_BD: Tensor, old_BD: Tensor, keep_B: Tensor) -> Tensor:
        return torch.where(keep_B[:, None], new_BD, old_BD)

    def restart(self, h_BD: Tensor, start_B: Tensor, t: int) -> Tensor:
        return torch.where(start_B[:, None], 0, h_BD)

    def read(self, h_BTD: Tensor) -> Tensor:
        return self.out_proj(h_BTD if self.config.gate == "none" else torch.nn.functional.silu(h_BTD))

    def forward(self, x_BTD: Tensor, state: Any = None, mask_BT: Any = None, starts_BT: Any = None) -> Any:
        h, u_BTD, seen = self.start(x_BTD, state), self.project(x_BTD), []
        for t in range(x_BTD.shape[1]):
            h = h if starts_BT is None else self.restart(h, starts_BT[:, t], t)
            new = self.step(u_BTD[:, t], h)
            h = new if mask_BT is None else self.hold(new, h, mask_BT[:, t])
            seen.append(h)
        return self.finish(self.read(torch.stack(seen, 1).to(x_BTD.dtype)), {"h": h}, state, mask_BT)

    def finish(self, y_BTD: Tensor, new: Any, state: Any, mask_BT: Any) -> Any:
        return y_BTD, new

    @classmethod
    def validate(cls, dim: int, config: Any) -> None:
        if dim % 2:
            raise ConfigError(f"the width must be even, not {dim}")


BROKEN: dict[type[Mixer], tuple[str, ...]] = {}
"""{broken mixer: the contract tests that must fail for it}"""


def caught_by(*tests: str) -> Any:
    def note(cls: type[Mixer]) -> type[Mixer]:
        BROKEN[cls] = tests
        return cls

    return note


@caught_by("test_initial_values_are_as_stated")
class StartsWithABias(Sound):
    def reset_parameters(self):
        super().reset_parameters()
        if self.b is not None:
            nn.init.constant_(self.b, 0.1)


@caught_by("test_initial_values_are_as_stated")
class StartsASeventhTooLarge(Sound):
    def reset_parameters(self):
        super().reset_parameters()
        nn.init.xavier_uniform_(self.u, 1.14 * self.config.gain)


@caught_by("test_initial_values_are_as_stated")
class StartsNormalWithTheRightSpread(Sound):
    def reset_parameters(self):
        super().reset_parameters()
        nn.init.xavier_normal_(self.out_proj.weight)


@caught_by("test_initial_values_are_as_stated")
class HasAParameterOfUnknownStart(Sound):
    def extra(self):
        self.more = nn.Parameter(torch.zeros(self.dim))


@caught_by("test_output_and_state_are_as_declared")
class ForgetsItsState(Sound):
    def finish(self, y_BTD, new, state, mask_BT):
        return y_BTD, {}


@caught_by("test_packed_rows_equal_separate_rows")
class ForgetsWhereDocumentsStart(Sound):
    def restart(self, h_BD, start_B, t):
        return h_BD


@caught_by("test_packed_rows_equal_separate_rows")
class KeepsAGivenStateAtTheFirstPosition(Sound):
    def restart(self, h_BD, start_B, t):
        return super().restart(h_BD, start_B, t) if t else h_BD


@caught_by("test_packed_rows_equal_separate_rows")
class LetsGradientsPassTheStart(Sound):
    def restart(self, h_BD, start_B, t):
        return super().restart(h_BD, start_B, t) + (h_BD - h_BD.detach())


@caught_by(
    "test_masked_positions_hold_the_state_exactly",
    "test_a_mask_removes_positions",
    "test_masked_inputs_get_no_gradient",
)
class IgnoresTheMask(Sound):
    def hold(self, new_BD, old_BD, keep_B):
        return new_BD


@caught_by("test_masked_positions_hold_the_state_exactly", "test_a_mask_removes_positions")
class HoldsAlmost(Sound):
    def hold(self, new_BD, old_BD, keep_B):
        keep = keep_B[:, None].to(new_BD.dtype) + 1e-7
        return keep * new_BD + (1 - keep) * old_BD


@caught_by("test_masked_positions_hold_the_state_exactly")
class NotANumberWhereMasked(Sound):
    def finish(self, y_BTD, new, state, mask_BT):
        return (y_BTD if mask_BT is None else y_BTD.masked_fill(~mask_BT[..., None], torch.nan)), new


@caught_by("test_output_does_not_see_later_inputs", "test_pieces_equal_whole")
class LooksAhead(Sound):
    def project(self, x_BTD):
        return self.in_proj(x_BTD + 1e-3 * x_BTD.roll(-1, 1))


@caught_by("test_rows_do_not_see_each_other")
class MixesRows(Sound):
    def step(self, u_BD, h_BD):
        return super().step(u_BD + 1e-3 * u_BD.mean(0), h_BD)


@caught_by("test_pieces_equal_whole", "test_gradients_flow_through_the_state")
class ForgetsTheState(Sound):
    def start(self, x_BTD, state):
        return super().start(x_BTD, None)


@caught_by("test_pieces_equal_whole")
class HasAWrongStep(Sound):
    def read(self, h_BTD):
        return super().read(h_BTD) * (1.0 if h_BTD.shape[1] > 1 else 0.999)


@caught_by("test_pieces_equal_whole")
class HasAWrongStepWithoutGradients(Sound):
    def read(self, h_BTD):
        return super().read(h_BTD) * (1.0 if h_BTD.shape[1] > 1 or torch.is_grad_enabled() else 0.999)


@caught_by("test_long_pieces_equal_whole")
class CutsTheGradientEvery64Steps(Sound):
    def forward(self, x_BTD, state=None, mask_BT=None, starts_BT=None):
        outputs = []
        for t in range(0, x_BTD.shape[1], 64):
            part, state = slice(t, t + 64), {n: v.detach() for n, v in state.items()} if t else state
            flags = (f if f is None else f[:, part] for f in (mask_BT, starts_BT))
            y_BTD, state = super().forward(x_BTD[:, part], state, *flags)
            outputs.append(y_BTD)
        return torch.cat(outputs, 1), state


@caught_by("test_long_pieces_equal_whole")
class ForgetsTheMaskAfter64Steps(Sound):
    def forward(self, x_BTD, state=None, mask_BT=None, starts_BT=None):
        if mask_BT is not None:
            mask_BT = mask_BT | (torch.arange(mask_BT.shape[1]) >= 64)
        return super().forward(x_BTD, state, mask_BT, starts_BT)


@caught_by("test_inputs_are_never_changed")
class ChangesTheStateInPlace(Sound):
    def step(self, u_BD, h_BD):
        new = super().step(u_BD, h_BD)
        return h_BD.copy_(new) if not h_BD.requires_grad and not torch.is_grad_enabled() else h_BD.data.copy_(new)


@caught_by("test_inputs_are_never_changed")
class MarksTheFirstPositionAsAStart(Sound):
    def forward(self, x_BTD, state=None, mask_BT=None, starts_BT=None):
        if state is None and starts_BT is not None:
            starts_BT[:, 0] = True
        return super().forward(x_BTD, state, mask_BT, starts_BT)


@caught_by("test_inputs_are_never_changed")
class ChangesTheDict(Sound):
    def finish(self, y_BTD, new, state, mask_BT):
        if state is not None:
            state.update(new)
        return y_BTD, new


@caught_by("test_no_state_means_the_initial_state")
class StartsElsewhereThanItSays(Sound):
    def forward(self, x_BTD, state=None, mask_BT=None, starts_BT=None):
        if state is None and (mask_BT is None or mask_BT.any()):
            state = {"h": self.start(x_BTD, None) + 0.1}
        return super().forward(x_BTD, state, mask_BT, starts_BT)


@caught_by("test_output_and_state_are_as_declared")
class KeepsTheStateIn16Bits(Sound):
    def finish(self, y_BTD, new, state, mask_BT):
        return y_BTD, {"h": new["h"].to(y_BTD.dtype)}


@caught_by("test_output_and_state_are_as_declared")
class DeclaresAnotherShape(Sound):
    @classmethod
    def state_spec(cls, dim, config):
        return {"h": ((dim + 1,), torch.float32)}


@caught_by("test_reset_parameters_covers_every_parameter")
class ForgetsAParameterInReset(Sound):
    def extra(self):
        nn.init.zeros_(self.b) if self.b is not None else None

    def reset_parameters(self):
        bias, self.b = self.b, None
        super().reset_parameters()
        self.b = bias


@caught_by("test_tensors_are_parameters_or_buffers")
class KeepsItsLastState(Sound):
    def finish(self, y_BTD, new, state, mask_BT):
        self.last = new
        return y_BTD, new


@caught_by("test_initialisation_depends_on_the_seed_alone")
class DrawsFromElsewhere(Sound):
    def reset_parameters(self):
        super().reset_parameters()
        nn.init.normal_(self.u, generator=torch.Generator().manual_seed(torch.seed() % 1000003))


@caught_by("test_the_state_dict_is_the_function", "test_a_mixer_from_the_meta_device_computes_the_same")
class DrawsABuffer(Sound):
    def extra(self):
        nn.init.uniform_(self.scale)

    def reset_buffers(self):
        nn.init.uniform_(self.scale)


@caught_by("test_reset_buffers_makes_lost_buffers_anew", "test_a_mixer_from_the_meta_device_computes_the_same")
class DoesNotRemakeItsBuffer(Sound):
    def reset_buffers(self):
        pass


@caught_by("test_tensors_are_parameters_or_buffers")
class KeepsAPlainTensor(Sound):
    def extra(self):
        self.ones = torch.ones(self.dim)


@caught_by("test_a_call_with_unchanged_weights_changes_nothing")
class CountsItsCalls(Sound):
    def extra(self):
        self.register_buffer("calls", torch.zeros(()))

    def reset_parameters(self):
        super().reset_parameters()
        nn.init.zeros_(self.calls)

    def read(self, h_BTD):
        self.calls.add_(1)
        return super().read(h_BTD) * (1 + 0.01 * self.calls).to(h_BTD.dtype)


@caught_by("test_gradients_flow_through_the_state")
class CutsTheGradientOfTheState(Sound):
    def finish(self, y_BTD, new, state, mask_BT):
        return y_BTD, {"h": new["h"].detach()}


@caught_by("test_gradients_reach_everything", "test_gradients_equal_finite_differences")
class TakesNoGradientForTheInitialState(Sound):
    def start(self, x_BTD, state):
        return super().start(x_BTD, state).detach()


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * (1 - 0.99 * y * y)


@caught_by("test_gradients_equal_finite_differences")
class HasAWrongBackward(Sound):
    def read(self, h_BTD):
        return super().read(_WrongBackward.apply(h_BTD))


@caught_by("test_gradients_reach_everything")
class HasAParameterForNothing(Sound):
    def extra(self):
        self.idle = nn.Parameter(torch.empty(self.dim))

    def reset_parameters(self):
        super().reset_parameters()
        nn.init.ones_(self.idle)


@caught_by("test_a_state_holds_no_other_memory")
class KeepsTheWholeText(Sound):
    def finish(self, y_BTD, new, state, mask_BT):
        return y_BTD, {"h": new["h"][:, None].repeat(1, y_BTD.shape[1], 1)[:, -1]}


@caught_by("test_linear_maps_are_called_as_modules")
class BypassesItsModule(Sound):
    def project(self, x_BTD):
        return nn.functional.linear(x_BTD, self.in_proj.weight)


@caught_by("test_strides_do_not_matter")
class ReadsMemoryAsItLies(Sound):
    def project(self, x_BTD):
        B, T, D = x_BTD.shape
        return self.in_proj(torch.as_strided(x_BTD, (B, T, D), (T * D, D, 1)))


@caught_by("test_long_sequences_stay_finite")
class Explodes(Sound):
    def step(self, u_BD, h_BD):
        return 2.0 * h_BD + u_BD.to(h_BD.dtype) * self.scale.to(h_BD.dtype)


@caught_by("test_every_option_matters")
class IgnoresAnOption(Sound):
    def reset_parameters(self):
        super().reset_parameters()
        nn.init.xavier_uniform_(self.u)


@caught_by("test_every_option_matters", "test_every_choice_matters")
class HasOneChoiceTwice(Sound):
    def read(self, h_BTD):
        return self.out_proj(h_BTD)


@caught_by("test_bf16_is_close_to_fp32")
class IsFarOffIn16Bits(Sound):
    def read(self, h_BTD):
        return super().read(h_BTD) * (1.1 if h_BTD.dtype == torch.bfloat16 else 1.0)


@caught_by("test_fp32_is_close_to_fp64")
class PassesThrough16Bits(Sound):
    def read(self, h_BTD):
        return super().read(h_BTD.bfloat16().to(h_BTD) if h_BTD.dtype == torch.float32 else h_BTD)
