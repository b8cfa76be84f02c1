"""Baselines: the models to compare recurrent variants with. They use the hook and the contract of any plugin."""

from __future__ import annotations

from collections.abc import Iterator

from elman_core import Variant, hookimpl

from .gdn import gdn_variant
from .kda import gdn2_variant, kda_variant
from .mamba2 import mamba2_variant
from .mamba3 import mamba3_variant
from .mlstm import mlstm_variant
from .rnn import gru_variant, lstm_variant, slstm_variant
from .rwkv7 import rwkv7_variant
from .transformer import transformer_variant

__version__ = "0.1.0"


@hookimpl
def elman_variants() -> Iterator[Variant]:
    yield gru_variant()
    yield lstm_variant()
    yield slstm_variant()
    yield mlstm_variant()
    yield transformer_variant()
    yield mamba2_variant()
    yield mamba3_variant()
    yield gdn_variant()
    yield kda_variant()
    yield gdn2_variant()
    yield rwkv7_variant()
