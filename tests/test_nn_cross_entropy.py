"""Head and cross-entropy in one operator: the loss, its gradient by hand, and the Triton kernel under Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F
from triton_helpers import compare_interpreted, interprets_loops, needs_triton

from elman_core.nn import cross_entropy, linear_cross_entropy


def drawn(rows, width, classes, dtype=torch.float64):
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, rows, width, dtype=dtype), torch.randn(classes, width, dtype=dtype)
    targets = torch.randint(classes, (2, rows))
    targets[0, 1] = targets[1, 0] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def apart(hidden, weight, targets):
    return F.cross_entropy((hidden @ weight.t()).flatten(0, 1), targets.flatten(), reduction="sum")


@pytest.mark.parametrize(
    ("rows", "classes", "smaller"),
    [
        (7, 11, {}),
        (7, 11, {"SOFTMAX": 33}),
        (7, 11, {"WIDEST": 10}),
        (7, 11, {"WIDEST": 10, "LOGITS": 50}),
        (20, 150_000, {}),
    ],
)
def test_loss_and_gradient_are_those_of_torch(rows, classes, smaller, monkeypatch):
    """With all logits at once, with the softmax in pieces, with the logits in pieces."""
    for name, value in smaller.items():
        monkeypatch.setattr(cross_entropy, name, value)
    sizes, real = [], cross_entropy._overwrite
    monkeypatch.setattr(cross_entropy, "_overwrite", lambda z, t: (sizes.append(z.numel()), real(z, t))[1])
    hidden, weight, targets = drawn(rows, 5, classes)
    ours, theirs = linear_cross_entropy(hidden, weight, targets), apart(hidden, weight, targets)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=0)
    assert sum(sizes) == 2 * rows * classes
    assert classes <= cross_entropy.WIDEST or max(sizes) <= cross_entropy.LOGITS
    for a, b in zip(
        torch.autograd.grad(ours / 3, (hidden, weight)), torch.autograd.grad(theirs / 3, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("classes", [11, 5000])
def test_what_is_ignored_may_overflow(classes):
    """As on a GPU, whose kernel reads no logit of such a row."""
    hidden, weight, targets = drawn(7, 5, classes, torch.float16)
    with torch.no_grad():
        hidden[targets == -100] = 6e4
        alone = linear_cross_entropy(hidden[targets != -100], weight, targets[targets != -100])
    loss = linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(loss, alone)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, (hidden, weight)))


def test_a_graph_that_is_kept_gives_its_gradients_again(monkeypatch):
    """The last backward scales the gradient of the weight in place."""
    monkeypatch.setattr(cross_entropy, "WIDEST", 10)
    hidden, weight, targets = drawn(7, 5, 11)
    loss = linear_cross_entropy(hidden, weight, targets)
    first = torch.autograd.grad(loss / 3, (hidden, weight), retain_graph=True)
    for again in (True, False):
        for a, b in zip(first, torch.autograd.grad(loss / 3, (hidden, weight), retain_graph=again), strict=True):
            assert torch.equal(a, b)


def test_sixteen_bits_are_as_good_as_logits_upcast_for_the_softmax():
    hidden, weight, targets = drawn(200, 32, 256)
    exact = torch.autograd.grad(apart(hidden, weight, targets) / 389, (hidden, weight))
    errors = {}
    for name, loss in (("ours", linear_cross_entropy), ("torch", lambda h, w, t: apart_upcast(h, w, t))):
        h, w = (x.detach().bfloat16().requires_grad_() for x in (hidden, weight))
        grads = torch.autograd.grad(loss(h, w, targets) / 389, (h, w))
        errors[name] = [float((g.double() - e).norm() / e.norm()) for g, e in zip(grads, exact, strict=True)]
    assert all(a <= 1.05 * b for a, b in zip(errors["ours"], errors["torch"], strict=True)), errors


def apart_upcast(hidden, weight, targets):
    return F.cross_entropy((hidden @ weight.t()).flatten(0, 1).float(), targets.flatten(), reduction="sum")


def test_a_weight_in_float32_gets_its_gradient_in_float32_and_autocast_stays_outside():
    hidden, weight, targets = drawn(6, 4, 8, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden.bfloat16(), weight, targets)
    loss.backward()
    assert (loss.dtype, weight.grad.dtype, hidden.grad.dtype) == (torch.float32, torch.float32, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_is_sound(dtype):
    hidden, weight, targets = drawn(4, 3, 5, dtype)
    arguments = (hidden.detach().flatten(0, 1).requires_grad_(), weight, targets.flatten())
    torch.library.opcheck(torch.ops.elman.linear_cross_entropy.default, arguments)
    torch.library.opcheck(torch.ops.elman.linear_cross_entropy_wide.default, (*arguments, True))


def test_a_gradient_of_the_gradient_is_refused():
    hidden, weight, targets = drawn(3, 4, 5)
    with pytest.raises(NotImplementedError, match="create_graph"):
        torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), hidden, create_graph=True)


def compare(device: str) -> None:
    """The kernel against plain PyTorch in float64, for sizes that fill programs and sizes that do not; and twice."""
    from elman_core.nn import cross_entropy_triton

    torch.manual_seed(0)
    for rows, classes, dtype in (
        (5, 256, torch.bfloat16),
        (33, 256, torch.float32),
        (16, 37, torch.float16),
        (3, 1000, torch.float32),
        (3, 20_000, torch.bfloat16),
        (2, 4097, torch.float32),
    ):
        logits = (4 * torch.randn(rows, classes, device=device)).to(dtype)
        targets = torch.randint(classes, (rows,), device=device)
        targets[0] = -100
        targets = torch.stack((targets, targets.flip(0)), 1)[:, 0]  # of one step of several: not adjacent
        expected = logits.double()
        loss64 = cross_entropy._overwrite(expected, targets)
        gradient, again = logits.clone(), logits.clone()
        loss = cross_entropy_triton.overwrite(gradient, targets, -100)
        assert abs(float(loss) - float(loss64)) <= 1e-6 * rows * 10
        assert (gradient.double() - expected).abs().max() <= torch.finfo(dtype).eps + 1e-6
        assert torch.equal(gradient[0], torch.zeros_like(gradient[0]))
        assert torch.equal(cross_entropy_triton.overwrite(again, targets, -100), loss)
        assert torch.equal(again, gradient)
        for wrong in (-1, classes):
            targets[-1] = wrong
            assert cross_entropy_triton.overwrite(logits.clone(), targets, -100).isnan()


@needs_triton
@interprets_loops
def test_the_kernel_under_the_interpreter():
    compare_interpreted(__file__)


@pytest.mark.gpu
def test_the_kernel_on_a_gpu():
    compare("cuda")


@pytest.mark.parametrize("wrong", [-1, 11])
def test_a_target_that_is_no_class_stops_as_in_torch(wrong):
    hidden, weight, targets = drawn(3, 5, 11)
    targets[0, 0] = wrong
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy(hidden, weight, targets)
