"""Mamba-3 (Lahoti et al. 2026) with one input and output a head (SISO): the module of mamba_ssm 2.3.2, parameter for parameter.

    [z, x, B, C, dt, a, λ, θ] = W_in u;   Δ = softplus(dt + b);   α = exp(-max(softplus(a), 1e-4) Δ);   λ ← sigmoid(λ)
    φ_t = φ_{t-1} + π tanh(θ_t) Δ_t;   k = R(φ) (RMSNorm(B) + B_bias);   q = R(φ) (RMSNorm(C) + C_bias)
    h_t = α_t h_{t-1} + (1 - λ_t) Δ_t α_t x_{t-1} k_{t-1}ᵀ + λ_t Δ_t x_t k_tᵀ;   y_t = h_t q_t + D x_t
    out = W_out (y ⊙ silu(z))

R turns pairs of neighbouring channels by the angles φ, which every head has for itself.

Best practice, and where it comes from (mamba_ssm 2.3.2, its module and its language model):

* softplus(dt_bias) log-uniform in (0.001, 0.1), both biases and D 1, maps as torch starts them; heads of 64, state 128,
  expand 2, one group, half of a key turned, no norm before the output projection.
* its language model divides W_out by the square root of the number of layers at the start: option `init_depth`.
* dt_bias, D and both biases stay float32; dt_bias and D are not decayed.

Not here: several inputs and outputs a head (MIMO), whose kernels need tilelang. The sources after 2.3.2 replace softplus(a) by
1 + a, or 1 / (1 - a) below 0; flash-linear-attention's layer keeps softplus.
"""

from __future__ import annotations

from elman_core import Variant

from .mixer import Mamba3, Mamba3Config
from .op import INSTALL, angles, trapezoid

__all__ = ["Mamba3", "Mamba3Config", "mamba3_variant"]


def mamba3_variant() -> Variant:
    return Variant(
        name="mamba3",
        summary="Mamba-3 (SISO), a linear state-space model with rotated keys and two writes a step: mamba_ssm's module",
        equation="h_t = α_t h_{t-1} + (1 - λ_t) Δ_t α_t x_{t-1} k_{t-1}ᵀ + λ_t Δ_t x_t k_tᵀ,  y_t = h_t q_t + D x_t",
        config=Mamba3Config,
        mixer=Mamba3,
        kernels=(*trapezoid.specs(), *angles.specs()),
        presets={"x20": {"init_depth": 20}},
        accelerated_by={"mamba_ssm": INSTALL},
    )
