"""diagonal: a linear recurrence with one number per channel, and an output gate driven by the input of the cell.

    h_t = alpha h_{t-1} + W_x x_t + b        y_t = h_t silu(x_t + b_g)        alpha = sigmoid(alpha_hat)

x is the input projection itself. In the published model, alpha_hat starts at -2, which gives a memory of about one step; this
alone may explain its poor loss. `alpha_init` of 2 to 4.6 (presets slow, slower) starts with memories of 8 to 100 steps.
"""

from collections.abc import Iterable

from elman_core import Variant, hookimpl
from elman_core.registry import Published

from .mixer import DiagonalConfig, DiagonalMixer
from .op import diagonal, diagonal_tanh


def equation(o: DiagonalConfig) -> str:
    new = "σ(α̂) h_{t-1} + W_x x_t + b"
    return f"x = W_in x̂;  h_t = {f'tanh({new})' if o.form == 'tanh' else new},  y_t = h_t silu(x_t + b_g)"


@hookimpl
def elman_variants() -> Iterable[Variant]:
    yield Variant(
        name="diagonal",
        summary="linear diagonal recurrence with an output gate from the input",
        equation=equation,
        config=DiagonalConfig,
        mixer=DiagonalMixer,
        presets={
            "tanh": {"form": "tanh"},
            "slow": {"alpha_init": 2.0},
            "slower": {"alpha_init": 4.6},
            "mamba2_init": {"mamba2_init": True},
        },
        recommended="slower",
        aliases={"diagonal_tanh": "tanh", "diagonal-tanh": "tanh"},
        kernels=(*diagonal.specs(), *diagonal_tanh.specs()),
        published=(Published("diagonal", None, "2.52 nats/byte, 39k tok/s", "500 steps, about 50M; its size is lost"),),
    )
