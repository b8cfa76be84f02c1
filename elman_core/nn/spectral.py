"""Spectral normalisation in its equality form: the weight is scaled, up as well as down, to a given largest singular value."""

from __future__ import annotations

from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from .computed import ComputedWeight
from .functional import compute_dtype, without_autocast

EPS = 1e-8
FIRST_ROUND = 15  # iterations from a random start: three leave the estimate 10-15 % short of the largest singular value
ROUND = 3  # warm-started iterations after a change of the weight


class SpectralNorm(ComputedWeight):
    """W_eff = W radius / (|sigma| + 1e-8), sigma = uᵀ W v; u and v come from the power iteration and are constant for the
    gradient.

    The vectors are persistent float32 buffers, so a model and its copy compute the same. They are zero until the weight is
    first used; then 15 iterations find them. Training keeps the result, evaluation does not. After that, in training mode, one
    warm-started round of three iterations runs whenever the weight differs from that of the last round; in evaluation nothing
    changes. The comparison runs on the device without a branch: the buffer `seen` keeps a checksum of the weight's bits, an
    integer and therefore independent of the order of summation. So there is one round per optimizer step, and none for a second
    micro-batch, for the recomputation of activation checkpointing, after a reload or in a resumed run. Called with
    `trained=False`, as where the weight is frozen, perhaps under an adapter, training changes nothing either.

    Args:
        width: rows of the weight. columns: equally many by default.
        radius: rho, the largest singular value of the result.
        blocks: n of a weight (n, width, width), whose matrices are scaled separately.
        clip: only scale down, by a factor that is constant for the gradient.
    """

    u: Tensor
    v: Tensor
    seen: Tensor

    def __init__(
        self, width: int, radius: float, *, columns: int | None = None, blocks: int | None = None, clip: bool = False
    ) -> None:
        super().__init__()
        self.radius, self.clip = radius, clip
        several = () if blocks is None else (blocks,)
        self.register_buffer("u", torch.zeros(*several, width))
        self.register_buffer("v", torch.zeros(*several, columns or width))
        self.register_buffer("seen", torch.zeros(8))  # bytes, which every floating-point dtype represents exactly
        # The `seen` that is known not to be zero, which spares the host another look; and whether there is one, for compiled
        # code, which knows no references.
        self._looked_at: ReferenceType[Tensor] | None = None
        self._started = False

    @torch.no_grad()
    def reset(self) -> None:
        """Forget the vectors: the next use of the weight finds new ones. Call it whenever the weight is drawn again."""
        for buffer in (self.u, self.v, self.seen):
            buffer.zero_()
        self._forget()

    @torch.no_grad()
    def start(self, weight: Tensor) -> None:
        """Find the vectors of `weight` now and keep them, in evaluation mode too."""
        with without_autocast(weight):
            full = _own(weight, compute_dtype(weight))
            self._store(*self._iterate(full, _start_vector(full), FIRST_ROUND), _checksum(weight))

    def compute(self, weight: Tensor, trained: bool = True) -> Tensor:  # type: ignore[override]
        """The normalised weight, in the dtype of `weight`; computed in float32 or float64 with autocast off."""
        with without_autocast(weight):
            full = _own(weight, compute_dtype(weight))
            u, v = self._vectors(weight, full.detach(), self.training and trained)  # no_grad alone leaves a tangent
            sigma = (u * _times(full, v)).sum(-1)[..., None, None]
            scale = self.radius / (sigma.abs() + EPS)
            if self.clip:
                scale = scale.detach().clamp(max=1.0)
            return (full * scale).to(weight.dtype)

    @torch.no_grad()
    def _vectors(self, weight: Tensor, full: Tensor, moving: bool) -> tuple[Tensor, Tensor]:
        """The vectors to use; new tensors, since autograd keeps them for the backward and a round overwrites the buffers."""
        u, v = _own(self.u, full.dtype), _own(self.v, full.dtype)
        if self._looks_started():
            if not moving:
                return u, v
            next_u, next_v = self._iterate(full, u, ROUND)
        else:
            next_u, next_v = self._iterate(full, torch.where(self.seen.any(), u, _start_vector(full)), FIRST_ROUND)
            if not moving and not self._is_hidden():
                return next_u, next_v
        checksum = _checksum(weight)
        # Where nothing can look whether there are vectors, the first round is like any other.
        same = (checksum == self.seen).all() if moving else self.seen.any()
        u, v = torch.where(same, u, next_u), torch.where(same, v, next_v)
        if moving:
            self._store(u, v, checksum)
        return u, v

    def _is_hidden(self) -> bool:
        """Whether no values can be looked at: compiled code has none yet, and `vmap` over models has many."""
        return torch.compiler.is_compiling() or is_functorch_wrapped_tensor(self.seen)

    def _looks_started(self) -> bool:
        if self.seen.is_meta:  # it has no values yet, or they are on a disk: ask again
            return True
        if self._is_hidden():
            return torch.compiler.is_compiling() and self._started
        if self._looked_at is None or self._looked_at() is not self.seen:  # `functional_call` puts other buffers in
            if not self.seen.any():
                return False
            self._remember()
        return True

    def _remember(self) -> None:
        self._started = True
        if not torch.compiler.is_compiling():
            self._looked_at = ReferenceType(self.seen)

    def _forget(self) -> None:
        self._started = False
        self._looked_at = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_looked_at": None}  # references cannot be pickled

    def train(self, mode: bool = True) -> SpectralNorm:
        """As `nn.Module.train`; also checks whether a loaded model has its vectors, before it is compiled."""
        super().train(mode)
        self._looks_started()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._forget()

    def _iterate(self, full: Tensor, u: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
        v = u
        for _ in range(iterations):
            v = _times(full.mT, u)
            v = v / (v.norm(dim=-1, keepdim=True) + EPS)
            u = _times(full, v)
            u = u / (u.norm(dim=-1, keepdim=True) + EPS)
        # Rounded as the buffers are, so that a reloaded model computes the same.
        return u.to(self.u.dtype).to(full.dtype), v.to(self.v.dtype).to(full.dtype)

    def _store(self, u: Tensor, v: Tensor, checksum: Tensor) -> None:
        self.u.copy_(u)
        self.v.copy_(v)
        self.seen.copy_(checksum)
        if not self.seen.is_meta and (torch.compiler.is_compiling() or not self._is_hidden()):
            self._remember()

    def extra_repr(self) -> str:
        return f"{', '.join(map(str, self.u.shape))}, radius={self.radius}"


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return matrix @ vector if vector.dim() == 1 else (matrix @ vector[..., None])[..., 0]


def _own(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy: loaded tensors may start at any address of a file, and the last bit of a BLAS product depends on alignment."""
    return x.to(dtype, copy=True)


def _checksum(weight: Tensor) -> Tensor:
    """The bytes of sum_ij (2i + 1) (j + 1) bits_ij modulo 2^64: exact in any order, and moved by any step of an optimizer."""
    bits_as = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    weight = weight.flatten(0, -2)
    rows = torch.arange(weight.shape[0], device=weight.device) * 2 + 1
    columns = torch.arange(weight.shape[1], device=weight.device) + 1
    total = ((weight.detach().view(bits_as) * columns).sum(1) * rows).sum()
    return (total >> torch.arange(0, 64, 8, device=weight.device)) & 255


def _start_vector(full: Tensor) -> Tensor:
    """Fixed numbers in [-1/2, 1/2) without a pattern: the same on every device, and no draw from a random stream."""
    mixed = (torch.arange(1, full.shape[-2] + 1, device=full.device) * 40503) & 0xFFFF
    return ((((mixed * mixed) >> 7) & 0xFFFF).to(full.dtype) / 0x10000 - 0.5).expand(full.shape[:-1])
