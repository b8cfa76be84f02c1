"""Small mixers for the tests of the backbone: they follow the contract by the simplest means."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from elman_core.nn import restart
from elman_core.registry import ConfigError, Installed, Mixer, Variant, option, plugins


@dataclass(frozen=True)
class ToyConfig:
    rho: float = option(0.9, "gain of the recurrent matrix", gt=0.0, le=2.0)
    width: int = option(3, "window of the convolution", ge=2)


class ToyElman(Mixer):
    """h_t = tanh(W_x x_t + b + W h_{t-1}); y_t = W_o h_t. Two tensors of state, a bias, a buffer that is not saved."""

    fp32_params = ("rec", "sigma")

    def __init__(self, dim, config, layer_idx=0):
        super().__init__(dim, config, layer_idx)
        self.in_proj = nn.Linear(dim, dim)
        self.rec = nn.Parameter(torch.empty(dim, dim))
        self.out_proj = nn.Linear(dim, dim, bias=False)
        self.conv = nn.Parameter(torch.empty(config.width, dim))
        self.register_buffer("scale", torch.full((dim,), 0.5), persistent=False)
        self.register_buffer("sigma", torch.ones((), dtype=torch.float32))

    def reset_parameters(self):
        nn.init.orthogonal_(self.rec)
        with torch.no_grad():
            self.rec.mul_(self.config.rho)  # in place, which transformers' guard does not protect
            self.sigma.copy_(torch.linalg.matrix_norm(self.rec.float(), 2))
        nn.init.xavier_uniform_(self.in_proj.weight)
        nn.init.uniform_(self.in_proj.bias, -0.5, 0.5)  # so that a zeroed input would move the state
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.uniform_(self.conv, -0.5, 0.5)

    def reset_buffers(self):
        self.scale.fill_(0.5)

    @classmethod
    def validate(cls, dim, config):
        if dim % 2:
            raise ConfigError(f"the width must be even, not {dim}; nearest: {dim - 1} or {dim + 1}")

    @classmethod
    def state_spec(cls, dim, config):
        return {"h": ((dim,), torch.float32), "conv": ((config.width - 1, dim), torch.float32)}

    def forward(self, x_BTD, state=None, mask_BT=None, starts_BT=None):
        wide = torch.float64 if x_BTD.dtype == torch.float64 else torch.float32
        batch, steps, dim = x_BTD.shape
        if state is None:
            h = x_BTD.new_zeros(batch, dim, dtype=wide)
            window = x_BTD.new_zeros(batch, self.config.width - 1, dim, dtype=wide)
        else:
            h, window = state["h"], state["conv"]
        u = self.in_proj(x_BTD).to(wide)
        rec = self.rec.to(wide) / self.sigma.to(wide)
        outputs = []
        for t in range(steps):
            if starts_BT is not None:
                h, window = restart(h, starts_BT[:, t]), restart(window, starts_BT[:, t])
            seen = torch.cat([window, u[:, t : t + 1]], dim=1)
            h_new = torch.tanh((seen * self.conv.to(wide)).sum(1) * self.scale.to(wide) + u[:, t] + h @ rec.T)
            if mask_BT is None:
                h, window = h_new, seen[:, 1:]
            else:
                keep = mask_BT[:, t, None]
                h, window = torch.where(keep, h_new, h), torch.where(keep[..., None], seen[:, 1:], window)
            outputs.append(h)
        y_BTD = self.out_proj(torch.stack(outputs, 1).to(x_BTD.dtype))
        return y_BTD, {"h": h, "conv": window}


class ToySum(Mixer):
    """S_t = 0.9 S_{t-1} + k_t v_t^T; y_t = W_o S_t^T q_t: a matrix state, made of linear layers only."""

    def __init__(self, dim, config, layer_idx=0):
        super().__init__(dim, config, layer_idx)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def reset_parameters(self):
        nn.init.normal_(self.qkv.weight, std=0.3)
        nn.init.normal_(self.out_proj.weight, std=0.3)

    @classmethod
    def state_spec(cls, dim, config):
        return {"S": ((dim, dim), torch.float32)}

    def forward(self, x_BTD, state=None, mask_BT=None, starts_BT=None):
        wide = torch.float64 if x_BTD.dtype == torch.float64 else torch.float32
        batch, steps, dim = x_BTD.shape
        S = x_BTD.new_zeros(batch, dim, dim, dtype=wide) if state is None else state["S"]
        q, k, v = self.qkv(x_BTD).to(wide).chunk(3, -1)
        outputs = []
        for t in range(steps):
            S = restart(S, None if starts_BT is None else starts_BT[:, t])
            new = 0.9 * S + k[:, t, :, None] * v[:, t, None, :]
            S = new if mask_BT is None else torch.where(mask_BT[:, t, None, None], new, S)
            outputs.append((S.transpose(1, 2) @ q[:, t, :, None]).squeeze(-1))
        return self.out_proj(torch.stack(outputs, 1).to(x_BTD.dtype)), {"S": S}


class ToyPair(Mixer):
    """The first of a layer's two branches: recurrent."""

    def __init__(self, dim, config, layer_idx=0):
        super().__init__(dim, config, layer_idx)
        self.proj = nn.Linear(dim, dim)

    def reset_parameters(self):
        nn.init.normal_(self.proj.weight, std=0.2)
        nn.init.zeros_(self.proj.bias)

    @classmethod
    def state_spec(cls, dim, config):
        return {"sum": ((dim,), torch.float32)}

    def forward(self, x_BTD, state=None, mask_BT=None, starts_BT=None):
        total = x_BTD.new_zeros(x_BTD.shape[0], self.dim) if state is None else state["sum"].to(x_BTD.dtype)
        rows = x_BTD if mask_BT is None else x_BTD * mask_BT[..., None]
        sums = total[:, None] + rows.cumsum(1)
        return self.proj(sums), {"sum": sums[:, -1].float() if x_BTD.dtype != torch.float64 else sums[:, -1]}


class ToySilu(ToyPair):
    """The second: without any state."""

    @classmethod
    def state_spec(cls, dim, config):
        return {}

    def forward(self, x_BTD, state=None, mask_BT=None, starts_BT=None):
        return torch.nn.functional.silu(self.proj(x_BTD)), {}


TOYS = (
    Variant("toy", "toy Elman", ToyConfig, ToyElman, equation="h' = tanh(W h + x)", presets={"tight": {"rho": 0.5}},
            aliases={"901": "", "Toy901b": "tight"}),
    Variant("toysum", "toy matrix state", ToyConfig, ToySum),
    Variant("toypair", "toy with two branches", ToyConfig, (ToyPair, ToySilu)),
)  # fmt: skip


def install() -> None:
    """Add the toys to the variants of this process."""
    for variant in TOYS:
        plugins().installed[variant.name] = Installed(variant, "toy-package", "1.2.3")


def uninstall() -> None:
    """Take them out again."""
    for variant in TOYS:
        plugins().installed.pop(variant.name, None)


@pytest.fixture(autouse=True)
def toys():
    """In each test of a file that imports this: the toys are installed, and what is drawn is the same every time."""
    install()
    torch.manual_seed(0)
    yield
    uninstall()
