"""How far the baselines are from float64, outputs and gradients, beside the libraries' own layers with the same weights.

One layer of each: float32 weights under bfloat16 autocast. The truth is the same layer in float64, without kernels. Figures
are relative errors in L2, of the output and of the worst gradient (parameters and input); `limit` is 3 times the error of
plain PyTorch in the same precision, and 4 eps. Peers are the libraries' own modules, given our weights by name. Triton's
autotuners take the first candidate that fits, because all must be correct and choosing takes minutes.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from harness import Row, Setting
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from elman_core.registry import get_variant

BF16 = torch.bfloat16
FULL: dict[str, tuple[int, dict[str, Any]]] = {
    "gru": (512, {}), "lstm": (512, {}), "transformer": (640, {}), "mamba2": (896, {}), "mamba3": (896, {}),
    "gdn": (768, {}),
}  # fmt: skip
TINY: dict[str, tuple[int, dict[str, Any]]] = {
    "gru": (16, {}), "lstm": (16, {}), "transformer": (16, {"head_dim": 8, "mlp_multiple": 8}),
    "mamba2": (16, {"headdim": 8, "d_state": 8}), "mamba3": (16, {"headdim": 8, "d_state": 8}), "gdn": (16, {"head_dim": 8}),
}  # fmt: skip


@contextmanager
def plain_code() -> Iterator[None]:
    """No kernels: recurrences step by step, attention as products of matrices, and what ELMAN_KERNELS=off switches off."""
    from elman_baselines.rnn import mixer, reference

    with (
        patch.object(mixer, "gru", reference.gru_reference), patch.object(mixer, "lstm", reference.lstm_reference),
        patch.dict(os.environ, {"ELMAN_KERNELS": "off"}), sdpa_kernel(SDPBackend.MATH),
    ):  # fmt: skip
        yield


@contextmanager
def first_that_fits() -> Iterator[None]:
    """Inside, every autotuner runs its first candidate, or the next if that one does not fit on the GPU."""
    from triton.runtime import autotuner

    run = autotuner.Autotuner.run

    def run_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        every, error = self.configs, None
        try:
            for config in every:
                self.configs = [config]
                try:
                    return run(self, *args, **kwargs)
                except Exception as raised:  # too much shared memory, say: the autotuner passes over it, too
                    error = raised
        finally:
            self.configs = every
        assert error is not None
        raise error

    with patch.object(autotuner.Autotuner, "run", run_first):
        yield


def results(
    module: nn.Module, read: Callable[[Any], Tensor], x_BTD: Tensor, weight_BTD: Tensor, autocast: bool
) -> dict[str, Tensor]:
    """Output, gradient of the input and of every parameter, by name, in float64."""
    x_BTD = x_BTD.clone().requires_grad_()
    with torch.autocast(x_BTD.device.type, BF16, enabled=autocast):
        y_BTD = read(module(x_BTD))
    (y_BTD.to(weight_BTD.dtype) * weight_BTD).sum().backward()
    grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    assert x_BTD.grad is not None
    return {n: t.detach().double() for n, t in {"y": y_BTD, "x": x_BTD.grad, **grads}.items()}


def errors(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Relative error in L2 of every tensor."""
    assert found.keys() == truth.keys(), f"{sorted(found.keys() ^ truth.keys())} on one side only"
    return {n: float((found[n] - t).norm() / t.norm().clamp(min=1e-30)) for n, t in truth.items()}


def mamba_ssm(dim: int) -> nn.Module:
    from elman_baselines.mamba2 import op

    found = op.library.functions()
    from mamba_ssm.modules.mamba2 import Mamba2

    return Mamba2(dim, d_state=128, headdim=64, expand=2, use_mem_eff_path=found.whole is not None)


def mamba_ssm_3(dim: int) -> nn.Module:
    from elman_baselines.mamba3 import op

    op.library.functions()
    from mamba_ssm.modules.mamba3 import Mamba3

    return Mamba3(dim, d_state=128, headdim=64, expand=2)


def fla(dim: int) -> nn.Module:
    from elman_baselines.gdn import op

    op.library.functions()
    from fla.layers import GatedDeltaNet

    return GatedDeltaNet(hidden_size=dim, expand_v=2, head_dim=128, num_heads=dim // 128)


LIBRARIES: dict[str, tuple[str, Callable[[int], nn.Module], Callable[[Any], Tensor]]] = {
    "mamba2": ("mamba_ssm", mamba_ssm, lambda y: y), "mamba3": ("mamba_ssm", mamba_ssm_3, lambda y: y),
    "gdn": ("fla", fla, lambda y: y[0]),
}  # fmt: skip


def judged(found: dict[str, float], plain: dict[str, float]) -> Row:
    limits = {n: 3 * e + 4 * torch.finfo(BF16).eps for n, e in plain.items()}
    worst = max((n for n in found if n != "y"), key=lambda n: found[n] / limits[n])
    return {
        "output": found["y"], "output_plain": plain["y"], "output_limit": limits["y"], "worst": worst, "gradient": found[worst],
        "gradient_plain": plain[worst], "gradient_limit": limits[worst], "agrees": all(found[n] <= limits[n] for n in found),
    }  # fmt: skip


def rows(setting: Setting) -> Iterator[Row]:
    batch, length = (2, 9) if setting.tiny else (4, 512)
    cuda = setting.device.type == "cuda"
    for name, (dim, options) in (TINY if setting.tiny else FULL).items():
        variant = get_variant(name)
        for index in range(variant.branches if setting.wants(variant=name) else 0):
            torch.manual_seed(0)
            mixer = variant.branch(index)(dim, variant.make_config(options), index).to(setting.device)
            x_BTD, weight_BTD = (setting.randn(batch, length, dim, dtype=BF16) for _ in range(2))

            def error(
                module: nn.Module, read: Callable[[Any], Tensor], x: Tensor = x_BTD, weight: Tensor = weight_BTD
            ) -> dict[str, float]:
                return errors(results(module, read, x, weight, True), truth)  # noqa: B023

            def first(y: Any) -> Tensor:
                return y[0]

            def ours(mixer: nn.Module = mixer) -> Row:
                with first_that_fits() if cuda else nullcontext():
                    return {"backend": mixer.backend(), **judged(error(copy.deepcopy(mixer), first), plain)}  # type: ignore[operator]  # noqa: B023

            def theirs(name: str = name, dim: int = dim, mixer: nn.Module = mixer) -> Row:
                _, make, read = LIBRARIES[name]
                module = make(dim)
                module.load_state_dict(mixer.state_dict())
                with first_that_fits():
                    return judged(error(module.to(setting.device), read), plain)  # noqa: B023

            with plain_code():
                truth = results(copy.deepcopy(mixer).double(), first, x_BTD.double(), weight_BTD.double(), False)
                plain = error(copy.deepcopy(mixer), first)
            shape = {"variant": name, "branch": type(mixer).__name__, "width": dim, "B": batch, "T": length}
            yield setting.row(ours, **shape, who="ours", kind="ours")
            if setting.peers and cuda and name in LIBRARIES:
                yield setting.row(theirs, **shape, who=LIBRARIES[name][0], kind="peer")
