"""The mixers of Kimi delta attention and Gated DeltaNet 2: Gated DeltaNet's, with a decay for each channel of a key.

B batch, T time, D model width, C channels, H heads, K width of a key, V of a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_baselines.gdn import GatedDeltaNet, GDNConfig
from elman_baselines.gdn.mixer import GONE
from elman_baselines.library import fla_runs
from elman_core import State, option
from elman_core.nn import compute_dtype, linear, linears, without_autocast

from . import op


@dataclass(frozen=True)
class KDAConfig(GDNConfig):
    expand_v: float = option(1.0, "width of a value / width of a key", gt=0, le=8)
    allow_neg_eigval: bool = option(
        False,
        "β, or the gate of erasing, from 0 to 2: along k the state's sign may change, as counting and states need",
    )


class KimiDelta(GatedDeltaNet):
    """Parameters, with fla's names and shapes: those of `GatedDeltaNet` but a_proj, and low-rank maps f_proj.0 (V, D), f_proj.1
    (H K, V) of the decays, g_proj.0 (V, D), g_proj.1 (H V, V) with a bias of the output gate; dt_bias (H K).

    State: as `GatedDeltaNet`.

    On a GPU fla's kernels run, and α is 0 where a document begins, as in `GatedDeltaNet`; on a CPU a kernel of elman-csrc or
    plain PyTorch.
    """

    a_min = 1.0
    f_proj: nn.Sequential

    def make_gates(self, dim: int) -> int:
        config = self.config
        self.f_proj = _low_rank(dim, config.values, self.keys)
        self.b_proj = nn.Linear(dim, self.heads, bias=False)
        self.g_proj = _low_rank(dim, config.values, self.values, bias=True)
        return self.keys

    def strengths(self) -> tuple[nn.Linear, ...]:
        """The maps of the gates of erasing and writing; one is both."""
        return (self.b_proj,)

    def forward(
        self,
        x_BTD: Tensor,
        state: State | None = None,
        mask_BT: Tensor | None = None,
        starts_BT: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        found = op.kernels(x_BTD) if fla_runs(x_BTD) else None
        to_f, of_f, to_g, of_g = (*self.f_proj, *cast(nn.Sequential, self.g_proj))
        maps = (self.q_proj, self.k_proj, self.v_proj, to_f, to_g, *self.strengths())
        q, k, v, f_BTV, g_BTV, *raw = linears(maps, x_BTD)
        (q, k, v), window = self.convolved([q, k, v], state, mask_BT, starts_BT)
        g_BTHV = linear(of_g, g_BTV).unflatten(-1, (self.heads, -1))
        a_BTC, wide = linear(of_f, f_BTV), compute_dtype(x_BTD)
        with without_autocast(x_BTD):
            a_BTHK = (a_BTC.to(wide) + self.dt_bias.to(wide)).unflatten(-1, (self.heads, -1))
            # by logsigmoid, whose bits on a CPU do not depend on the number of rows
            log_BTHK = self.A_log.to(wide).exp()[:, None] * F.logsigmoid(-a_BTHK)
            gates = [F.logsigmoid(x.to(wide)).exp().unflatten(-1, (self.heads, -1)) for x in raw]
            if self.config.allow_neg_eigval:
                gates[0] = 2 * gates[0]
            erase, write = gates[0], gates[-1]
        start = None if state is None else state["S"]
        if found is not None:
            if mask_BT is not None:
                log_BTHK, erase, write = (torch.where(mask_BT[..., None, None], r, 0) for r in (log_BTHK, erase, write))
            if starts_BT is not None:
                log_BTHK = log_BTHK.masked_fill(starts_BT[..., None, None], GONE)
            o_BTHV, end = op.library_rule(found, q, k, v, log_BTHK, (erase, write), start)
            y_BTHV = op.gated_norm(found, o_BTHV, g_BTHV, self.o_norm)
        else:
            o_BTHV, end = op.rule(q, k, v, log_BTHK, (erase, write), start, mask_BT, starts_BT)
            y_BTHV = self.o_norm(o_BTHV) * g_BTHV.sigmoid()
        return linear(self.o_proj, y_BTHV.flatten(2)), {"conv": window, "S": end}

    def backend(self) -> str:
        weight, config = self.o_proj.weight, self.config
        if op.kernels(weight) is not None:
            return "fla"
        return op.channel_delta.backend(weight.device, config.head_dim, config.values)


class GatedDelta2(KimiDelta):
    """As `KimiDelta`, with a gate of erasing for each channel of the key, b_proj (H K, D), and one of writing for each of the
    value, w_proj (H V, D)."""

    def make_gates(self, dim: int) -> int:
        super().make_gates(dim)
        self.b_proj = nn.Linear(dim, self.keys, bias=False)
        self.w_proj = nn.Linear(dim, self.values, bias=False)
        return self.keys

    def strengths(self) -> tuple[nn.Linear, ...]:
        return self.b_proj, self.w_proj


def _low_rank(dim: int, rank: int, out: int, bias: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim, rank, bias=False), nn.Linear(rank, out, bias=bias))
