"""The other shared layers: convolution, norms, decay, initialisers, dtypes."""

import math

import pytest
import torch
import torch.nn.functional as F
from elman_e42.mixer import E42Mixer

from elman_core.nn import (
    CausalConv,
    RecurrentMatrixConfig,
    RMSNorm,
    WrapperConfig,
    WrapperMixer,
    full_precision,
    l2_normalize,
    mamba_decay,
    mamba_decay_,
    orthogonal_,
    s4d_,
)
from elman_core.registry import ConfigError

FLOAT64 = torch.float64


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("width", [2, 4, 9])
def test_convolution_equals_a_padded_conv1d(width, dim, bias):
    conv = CausalConv(6, width, bias=bias, dim=dim).double()
    u_BTC = torch.randn(3, 7, 6, dtype=FLOAT64)
    expected = F.conv1d(F.pad(u_BTC.mT, (width - 1, 0)), conv.weight, conv.bias, groups=6).mT
    y, window_BKC = conv(u_BTC.transpose(0, 1) if dim == 0 else u_BTC)
    torch.testing.assert_close(y.transpose(0, 1) if dim == 0 else y, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(window_BKC, F.pad(u_BTC, (0, 0, width - 1, 0))[:, -(width - 1) :])


def test_the_window_of_16_bits_is_kept_in_float32_without_loss():
    conv = CausalConv(5).bfloat16()
    u_TBC = torch.randn(6, 2, 5).bfloat16()
    y, window_BKC = conv(u_TBC)
    assert y.dtype == torch.bfloat16
    assert window_BKC.dtype == torch.float32
    first, middle = conv(u_TBC[:2])
    second, end = conv(u_TBC[2:], middle)
    assert torch.equal(torch.cat([first, second]), y)
    assert torch.equal(end, window_BKC)
    with pytest.raises(ConfigError, match="7 taps need a window of 6 inputs, not 3"):
        CausalConv(5, 7)(u_TBC, window_BKC)  # a cache of another model


@pytest.mark.parametrize("steps", [1, 5])
def test_a_cell_of_a_tied_matrix_can_be_overridden(steps):
    class Doubled(E42Mixer):
        def cell(self, x_TBI, *rest):
            y_TBI, state = super().cell(x_TBI, *rest)
            return 2 * y_TBI, state

    plain, x_BTD = E42Mixer(8, RecurrentMatrixConfig()), torch.randn(2, steps, 8)
    doubled = Doubled(8, RecurrentMatrixConfig())
    doubled.load_state_dict(plain.state_dict())
    torch.testing.assert_close(doubled(x_BTD)[0], 2 * plain(x_BTD)[0])


class Decays(WrapperMixer):
    def build_cell(self, inner):
        self.rate = torch.nn.Parameter(torch.empty(inner))

    def reset_cell(self):
        self.rate.uniform_(1, 2).log_()


def test_a_cell_draws_its_parameters_in_place():
    rate = Decays(64, WrapperConfig()).rate
    assert rate.requires_grad
    assert 0 <= rate.min() < rate.max() <= math.log(2)


@pytest.mark.parametrize("function", [RMSNorm(8), l2_normalize])
def test_norms_of_16_bits_are_computed_in_float32(function):
    x = (100 * torch.randn(3, 8)).bfloat16()
    assert torch.equal(function(x), function(x.float()).bfloat16())


def test_l2_norm_is_one_and_harmless_at_zero():
    x = torch.randn(3, 8, dtype=FLOAT64, requires_grad=True)
    torch.testing.assert_close(l2_normalize(x).norm(dim=-1), torch.ones(3, dtype=FLOAT64), rtol=1e-11, atol=0)
    assert torch.autograd.gradcheck(l2_normalize, (x,))
    zero = torch.zeros(2, 8, requires_grad=True)
    y = l2_normalize(zero)
    y.sum().backward()
    assert (y == 0).all()
    assert torch.isfinite(zero.grad).all()


def test_initial_decays_span_the_published_range():
    a_log, dt_bias = torch.empty(20000), torch.empty(20000)
    mamba_decay_(a_log, dt_bias)
    rate, dt = a_log.exp(), F.softplus(dt_bias)
    assert rate.max() <= 16
    assert rate.mean().item() == pytest.approx(8, abs=0.2)
    assert dt.min() >= 0.999e-3
    assert dt.max() <= 0.1001
    assert dt.log().mean().item() == pytest.approx((math.log(1e-3) + math.log(1e-1)) / 2, abs=0.05)
    decay = mamba_decay(torch.zeros(20000), a_log, dt_bias)
    assert math.exp(-1.6) <= decay.min()
    assert decay.max() <= 1


def test_decay_of_16_bits_is_float32_and_outside_autocast():
    a, a_log, dt_bias = torch.randn(4, 5), torch.randn(5), torch.randn(5)
    expected = mamba_decay(a.bfloat16().float(), a_log, dt_bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mamba_decay(a.bfloat16(), a_log, dt_bias), expected)
    assert expected.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, FLOAT64])
def test_matrices_are_orthogonal_or_have_the_given_eigenvalues(dtype):
    w = torch.empty(12, 12, dtype=dtype)
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
    product = orthogonal_(w, 0.5).double() @ w.double().T
    torch.testing.assert_close(product, 0.25 * torch.eye(12, dtype=FLOAT64), rtol=0, atol=tolerance)
    eigenvalues = torch.linalg.eigvalsh(s4d_(w).double())
    torch.testing.assert_close(eigenvalues, torch.linspace(0.99, 0.9999, 12, dtype=FLOAT64), rtol=0, atol=tolerance)


def test_full_precision_lifts_every_tensor_to_the_widest():
    @full_precision
    def product(a, b, *, scale=None):
        return a @ b * scale, a.dtype, b.dtype, torch.is_autocast_enabled("cpu")

    a, b = torch.randn(3, 3).bfloat16(), torch.randn(3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        y, *inside = product(a, b, scale=torch.ones(()))
    assert inside == [torch.float32, torch.float32, False]
    assert torch.equal(y, (a.float() @ b).bfloat16())
    y, *inside = product(a, b.double(), scale=torch.ones(()))
    assert inside[:2] == [FLOAT64, FLOAT64]
    assert y.dtype == torch.bfloat16
