"""Layers that several variants share. Public: plugins may import it. It needs torch, the registry and kernels, nothing else.

Shapes: B batch, T time, D model width, I inner width, C channels, K convolution width. Time-major tensors are `_TB…`.
"""

from elman_core.kernels.causal_conv.op import causal_conv
from elman_core.kernels.runtime import invariant_linear, spare_rows, with_spare

from .add_norm import add_rms_norm
from .computed import ComputedWeight, LowRank, scaled_once
from .conv import CausalConv
from .cross_entropy import linear_cross_entropy
from .dense import DenseMixer, InputGatedMixer, RecurrentMatrixConfig
from .elementwise import ElementwiseForm, ElementwiseMixer
from .functional import (
    compute_dtype,
    dense_reference,
    each_step,
    full_precision,
    gate,
    hold,
    l2_normalize,
    mamba_decay,
    matrix_reference,
    restart,
    self_gate,
    time_major,
    without_autocast,
)
from .gates import GatesMixer
from .init import mamba_decay_, orthogonal_, s4d_, xavier_uniform_
from .linear import aligned, columns, is_bare, is_unhooked, linear, linears
from .matrix import MatrixConfig, MatrixMixer
from .matrix_wrapper import MatrixForm, MatrixWrapperConfig, MatrixWrapperMixer
from .norm import RMSNorm
from .spectral import SpectralNorm
from .swiglu import SwiGLU, SwiGLUConfig
from .wrapper import WrapperConfig, WrapperMixer

__all__ = [
    "CausalConv", "ComputedWeight", "DenseMixer", "ElementwiseForm", "ElementwiseMixer", "GatesMixer",
    "InputGatedMixer", "LowRank", "MatrixConfig", "MatrixForm", "MatrixMixer", "MatrixWrapperConfig",
    "MatrixWrapperMixer", "RMSNorm", "RecurrentMatrixConfig", "SpectralNorm", "SwiGLU", "SwiGLUConfig", "WrapperConfig",
    "WrapperMixer", "add_rms_norm", "aligned", "causal_conv", "columns", "compute_dtype", "dense_reference",
    "each_step", "full_precision", "gate", "hold", "invariant_linear", "is_bare", "is_unhooked", "l2_normalize",
    "linear", "linear_cross_entropy", "linears", "mamba_decay", "mamba_decay_", "matrix_reference", "orthogonal_",
    "restart", "s4d_", "scaled_once", "self_gate", "spare_rows", "time_major", "with_spare", "without_autocast",
    "xavier_uniform_",
]  # fmt: skip
