"""The forward of a step: pieces, carried states, chunked losses are all the same function."""

import pytest
import torch

from elman_core.model import LadderConfig, LadderForCausalLM
from elman_core.training.objective import forward_loss, initial_states, restart_rows

B, T = 3, 14


@pytest.fixture(params=["e1", "e42", "e88"])
def model(request):
    torch.manual_seed(0)
    options = {"n_heads": 2, "n_state": 4, "use_conv": True} if request.param == "e88" else {"use_conv": True}
    config = LadderConfig(variant=request.param, options=options, hidden_size=16, num_hidden_layers=2)
    return LadderForCausalLM(config).double()


@pytest.fixture
def tokens():
    return torch.randint(0, 256, (B, T + 1), generator=torch.Generator().manual_seed(1))


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def test_the_loss_is_that_of_the_model_itself(model, tokens):
    ours = forward_loss(model, tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(ours.loss, model(tokens, return_loss=True).to(ours.loss.dtype))
    assert ours.logits.shape == (B, T, 256)


@pytest.mark.parametrize("chunk", [1, 5, T, 100])
def test_a_chunked_loss_has_the_same_value_and_gradients(model, tokens, chunk):
    whole = forward_loss(model, tokens[:, :-1], tokens[:, 1:])
    pieces = forward_loss(model, tokens[:, :-1], tokens[:, 1:], loss_chunk=chunk)
    assert (pieces.logits is None) == (chunk < T)
    torch.testing.assert_close(pieces.loss, whole.loss)
    one, two = gradients(model, whole.loss), gradients(model, pieces.loss)
    for name, grad in one.items():
        torch.testing.assert_close(grad, two[name], rtol=1e-5, atol=1e-8)


def test_a_reset_row_is_as_if_its_document_stood_alone(model, tokens):
    model.eval()
    fresh = torch.zeros((B, T), dtype=torch.bool)
    fresh[1, 6] = fresh[2, 3] = fresh[2, 6] = True
    with torch.no_grad():
        carried = forward_loss(model, tokens[:, :-1], tokens[:, 1:], return_states=True)
        got = forward_loss(
            model, tokens[:, :-1], tokens[:, 1:], states=carried.states, fresh_BT=fresh, return_states=True
        ).logits

        def alone(row, first, end, states=None):
            rows = None if states is None else [{n: t[row : row + 1] for n, t in s.items()} for s in states]
            inputs = tokens[row : row + 1, first:end]
            return forward_loss(model, inputs, inputs, states=rows).logits[0]

        torch.testing.assert_close(got[0], alone(0, 0, T, carried.states))
        torch.testing.assert_close(got[1, :6], alone(1, 0, 6, carried.states))
        torch.testing.assert_close(got[1, 6:], alone(1, 6, T))
        torch.testing.assert_close(got[2, 3:6], alone(2, 3, 6))
        torch.testing.assert_close(got[2, 6:], alone(2, 6, T))
        assert not torch.allclose(got[1, 6:], alone(1, 0, T)[6:])


def test_restarting_no_row_returns_the_states_themselves(model, tokens):
    states = forward_loss(model, tokens[:, :-1], tokens[:, 1:], return_states=True).states
    assert restart_rows(model, states, torch.zeros(B, dtype=torch.bool)) is states


def test_asking_for_the_initial_state_leaves_the_model_as_it_was(model):
    model.train()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    states = initial_states(model)
    assert model.training
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(t.shape[0] == 1 for s in states for t in s.values())
