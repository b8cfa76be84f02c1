"""M²RNN: a tanh recurrence of a matrix state, with a full matrix inside the loop for each head.

    Z_t = tanh(S_{t-1} W_h + k_t v_tᵀ)        S_t = f_t S_{t-1} + (1 - f_t) Z_t        o_t = S_tᵀ q_t + D v_t

q, k, v, f, g are one projection of x; f is Mamba-2's decay, one a head; the output is multiplied by silu(g). W_h starts as the
identity. Rows of S share it and are recurrences of their own. On a GPU a kernel runs the published sizes in 16 bits; plain
PyTorch runs other sizes and float32, step by step.
Two published programs differ: one clips the gradient of the state, the other clamps the state itself. Here nothing is clipped.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import M2RNNConfig, M2RNNMixer
from .op import m2rnn

PAPER = {
    "n_heads": 759,
    "n_state": 64,
    "expansion": 0.25,
    "shared_keys": True,
    "use_conv": True,
    "use_output_norm": True,
}


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="m2rnn",
        summary="tanh recurrence of a matrix state with a matrix in the loop",
        equation="S_t = f_t S_{t-1} + (1 - f_t) tanh(S_{t-1} W_h + k_t v_tᵀ),  o_t = S_tᵀ q_t + D v_t,  y_t = o_t silu(g_t)",
        config=M2RNNConfig,
        mixer=M2RNNMixer,
        presets={"h370n16": {"n_heads": 370}, "paper": PAPER, "demo": {"n_heads": 4, "n_state": 8}},
        aliases={"m2rnn-cma": "h370n16", "m2rnn-paper": "paper"},
        kernels=m2rnn.specs(),
        published=(
            Published(
                "m2rnn:h370n16@1920x21",
                1_211_053_140,
                "0.958 bits/byte held out",
                "15B tokens; its own count, 1,307,101,140, has a vocabulary of 50,281; a tie with e88 and gdn within the noise",
            ),
            Published("m2rnn:paper", None, "diverged at step 8,400", "10 layers of 3072"),
        ),
    )
