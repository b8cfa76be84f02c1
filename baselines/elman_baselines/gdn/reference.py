"""The gated delta rule in plain PyTorch: step by step, as the reference, and in chunks, which is fast.

B batch, T time, H heads, K width of a key, V of a value; L steps of a chunk. States (B, H, K, V): rows keys, columns values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from elman_baselines.chunks import chunks, decays
from elman_core.nn import each_step, full_precision, restart

CHUNK = 64


@full_precision
def delta_rule_reference(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor | None,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = α S_{t-1} + β k (v - α S_{t-1}ᵀ k)ᵀ,  o_t = S_tᵀ q / sqrt(K), one step after the other.

    Retrieval reads the state after its decay.

    Args:
        q_BTHK, k_BTHK: of length 1 already. log_BTH: log α, at most 0. beta_BTH: with log α = 0 and β = 0 the state is held.
        state_BHKV: None is zeros. starts_BT: bool; where True S_{t-1} is 0.

    Returns:
        (o_BTHV in the dtype of q, the last state in float32 or float64).
    """
    s_BHKV, outputs = _start(k_BTHK, v_BTHV, state_BHKV), []
    by_step = (x.transpose(0, 1) for x in (q_BTHK, k_BTHK, v_BTHV, log_BTH, beta_BTH))
    for q, k, v, log, beta, start in each_step(*by_step, None if starts_BT is None else starts_BT.T):
        s_BHKV = restart(s_BHKV, start) * log.exp()[..., None, None]
        wrong_BHV = v - (s_BHKV * k[..., None]).sum(-2)
        s_BHKV = s_BHKV + k[..., None] * (beta[..., None] * wrong_BHV)[..., None, :]
        outputs.append((s_BHKV * q[..., None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), s_BHKV


@full_precision
def delta_rule_chunked(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor | None,
    starts_BT: Tensor | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The same chunk by chunk. Each step's write depends on the earlier writes in its chunk: a triangular system.

    With G the sums of log α inside a chunk, row i of what is written, w, solves
    w_i + β_i Σ_{j<i} exp(G_i - G_j) (k_i·k_j) w_j = β_i (v_i - exp(G_i) Sᵀ k_i).
    """
    if k_BTHK.shape[1] == 1:
        return delta_rule_reference(q_BTHK, k_BTHK, v_BTHV, log_BTH, beta_BTH, state_BHKV, starts_BT)
    s_BHKV, outputs = _start(k_BTHK, v_BTHV, state_BHKV), []
    inputs = (q_BTHK * q_BTHK.shape[-1] ** -0.5, k_BTHK, v_BTHV, beta_BTH[..., None])
    for *by_step, log, starts in chunks(chunk, *inputs, log_BTH, starts_BT):
        q, k, v, beta = (x.transpose(1, 2) for x in by_step)
        between_BHLL, since_BHL, to_end_BHL = decays(log, starts)
        since_BHL1 = since_BHL[..., None]
        system_BHLL = (beta * between_BHLL * (k @ k.mT)).tril(-1)
        wanted_BHLV = beta * (v - since_BHL1 * (k @ s_BHKV))
        written_BHLV = torch.linalg.solve_triangular(system_BHLL, wanted_BHLV, upper=False, unitriangular=True)
        outputs.append(since_BHL1 * (q @ s_BHKV) + (between_BHLL * (q @ k.mT)) @ written_BHLV)
        s_BHKV = since_BHL1[..., -1:, :] * s_BHKV + (to_end_BHL[..., None] * k).mT @ written_BHLV
    return torch.cat(outputs, 2).transpose(1, 2), s_BHKV


def _start(k_BTHK: Tensor, v_BTHV: Tensor, state_BHKV: Tensor | None) -> Tensor:
    if state_BHKV is not None:
        return state_BHKV
    return k_BTHK.new_zeros(k_BTHK.shape[0], *k_BTHK.shape[2:], v_BTHV.shape[-1])
