"""E74: ablations of a delta rule on a matrix state, or on its diagonal.

    S_t = φ(S_{t-1} + k_t δ_tᵀ)        δ_t = v_t - S_{t-1}ᵀ k_t        o_t = S_tᵀ q_t, y_t = o_t silu(o_t)

u = silu(W_in x); q, k, v are products with u, k of length 1. Five axes: state, update, gate, proj, nonlinearity. Updates beside
delta: σ(a) S + k vᵀ (simple); a S + k ((1 - a) v)ᵀ, a = σ(W_α u + b_α) (ema); S + ρ tanh(k δᵀ) (residual);
S (1 - k eᵀ) + k (w v)ᵀ (ntm); S + k (g δ)ᵀ, g = σ(W_g u + b_g) (retrieved_gate), with the mean of δ² inside (surprise_gate, the
first publication's). The gates retain and state multiply what is written by 1 - σ and σ of d_g mean(S²) + b_g. Refused are
combinations without a meaning, which the published code took for others, and left out states of low rank, whose fixed factor it
drew anew at every call. Its diagonal kernels passed no gradient and ignored q: figures of "Diag" are those of a random feature.
S has keys as rows: it is the transpose of the published one.

surprise_gate and both norms mix the columns of a state in every step: no kernel does that. They run in plain PyTorch, as
diagonal states do.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import E74Config, E74Mixer
from .op import KERNELS

ALONE = "10 min; mean of 1000 steps; its own model of the language: no silu behind W_in, all maps N(0, 0.02²)"


def equation(o: E74Config) -> str:
    phi = {"tanh": "tanh", "linear": "", "rmsnorm": "rms_norm", "frobnorm": "frob_norm"}[o.nonlinearity]
    gate = f"σ(d_g {'S' if o.state == 'diagonal' else 'mean(S²)'} + b_g)"
    gate = f"(1 - {gate})" if o.gate == "retain" else gate
    new = {
        "delta": "S + k (v - Sᵀ k)ᵀ",
        "read": "S + k (v - Sᵀ (z k))ᵀ",
        "sized": f"S + k ({gate} (v - Sᵀ k))ᵀ",
        "simple": "α S + k vᵀ",
        "ema": "S diag(a) + k ((1 - a) v)ᵀ, a = σ(W_α u + b_α)",
        "residual": "S + tanh(k (v - Sᵀ k)ᵀ) diag(ρ)",
        "ntm": "S (1 - k eᵀ) + k (w v)ᵀ, e = σ(W_e u + b_e), w = σ(W_w u + b_w)",
        "retrieved_gate": "S + k (σ(W_g u + b_g) δ)ᵀ, δ = v - Sᵀ k",
        "surprise_gate": "S + k (σ(W_g u + b_g + mean(δ²)) δ)ᵀ, δ = v - Sᵀ k",
    }[o.rule]
    new, _, where = new.partition(", ")
    out = "silu(W_zg u + b_zg)" if o.gate == "input" else "silu(o)"
    diagonal = ",  S of n numbers" if o.state == "diagonal" else ""
    return f"S' = {phi}({new}){f',  {where}' if where else ''},  o = S'ᵀ q,  y = o {out},  k of length 1{diagonal}"


@hookimpl
def elman_variants() -> Iterable[Variant]:
    updates = {
        name: {"update": name} for name in ("simple", "ema", "residual", "ntm", "retrieved_gate", "surprise_gate")
    }
    inputs = {f"{update}_input": {"update": update, "gate": "input"} for update in ("delta", "ema", "residual", "ntm")}
    diagonal = {"diagonal": {"state": "diagonal"}, "diagonal_ema": {"state": "diagonal", "update": "ema"}}
    sizes = {f"n{n}e2": {"n_state": n, "expansion": 2.0} for n in (4, 8, 16, 32, 48, 64, 96)}
    yield Variant(
        name="e74",
        summary="ablations of a delta rule on a tanh matrix state: updates, gates, projections, nonlinearities",
        equation=equation,
        config=E74Config,
        mixer=E74Mixer,
        presets={**sizes, **updates, **inputs, **diagonal, "retain": {"gate": "retain"}, "state": {"gate": "state"}},
        aliases={
            "74": "", "74v2": "", "74v2-delta": "", "74v2-delta-input": "delta_input", "74v2-ema-input": "ema_input",
            **{f"74v2-{name}": name for name in ("residual", "ntm", "retrieved_gate", "ema")},
        },
        kernels=tuple(spec for kernel in KERNELS.values() for spec in kernel.specs()),
        published=(
            Published("e74@2176x20", 100_872_832, "no loss", "a count in a log"),
            Published("e74:n16e2@1536x20", 98_237_952, "1.815 nats/byte, 99k tok/s", ALONE),
            Published("e74:n32e2@1536x20", 101_678_592, "1.667 nats/byte, 78k tok/s", ALONE),
        ),
    )  # fmt: skip
