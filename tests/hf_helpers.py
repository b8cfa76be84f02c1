"""Tiny ladders of installed variants, for the tests of what users of transformers expect."""

import contextlib

import pytest
import torch

from elman_core.model import LadderConfig, LadderForCausalLM
from elman_core.registry import ConfigError, Mixer, list_variants, resolve

TEXT = b"the quick brown fox jumps over the lazy dog, and again: " * 8
PROMPT = torch.tensor([list(TEXT[:9]), list(TEXT[30:39])])
GREEDY = {"max_new_tokens": 8, "do_sample": False}


def width(name):
    """The smallest of a few widths that a variant's default options allow, or those of each variant in "one+other"."""
    if "+" in name:
        return max(map(width, name.split("+")))
    found = resolve(name)
    for dim in (16, 64, 128):
        with contextlib.suppress(ConfigError):
            found.variant.check(dim, found.config)
            return dim
    raise AssertionError(f"{name} needs a width that these tests do not try")


def mixers(name):
    """The mixers of one small layer of a variant."""
    found = resolve(name)
    return [found.variant.branch(index)(width(name), found.config, index) for index in range(found.variant.branches)]


def written_by(name):
    """The class of elman_core that keeps a variant's states and steps, or its own class."""
    mixer = mixers(name)[0]
    base = next(kind for kind in type(mixer).__mro__ if kind.__module__.startswith("elman_core."))
    return type(mixer) if base is Mixer else base


VARIANTS = sorted(list_variants())
KINDS = sorted({written_by(v): v for v in VARIANTS}.values())  # the contract has each variant's states and steps
OF_EACH_KIND = ["e1", "e65", "lstm", "e88", "e2", "e23", "transformer", "mamba2"]  # of state, for what takes seconds
CONSTANT, CONSTANT_KINDS = (
    [v for v in some if all(m.state_growth == "constant" for m in mixers(v))] for some in (VARIANTS, KINDS)
)
MIXES = [  # the same kinds, as layers of few models
    "+".join(names[at : at + 4])
    for some in (CONSTANT_KINDS, [v for v in KINDS if v not in CONSTANT])
    for names in ([v for v in some if width(v) == 16], [v for v in some if width(v) > 16])
    for at in range(0, len(names), 4)
]
CONSTANT_MIXES = [mix for mix in MIXES if {*mix.split("+")} <= {*CONSTANT}]
RAW = {  # matrices that are no linear layer's: LoRA reaches them by name
    v: [n for m in mixers(v) for n, p in m.named_parameters() if p.ndim == 2 and not n.endswith(".weight")]
    for v in KINDS
}


every_kind = pytest.mark.parametrize("variant", MIXES)


@pytest.fixture(autouse=True)
def no_gradients():
    """In each test of a file that imports this: no graph of gradients."""
    with torch.no_grad():
        yield


def tiny(variant, depth=None, seed=0, dtype=torch.float64, **config):
    """A model whose predictions are far from uniform, in evaluation mode; no byte ends its texts. depth: two layers, or one for
    each variant of a mix, unless given."""
    torch.manual_seed(seed)
    depth = depth or max(2, len(variant.split("+")))
    model = LadderForCausalLM(
        LadderConfig(variant=variant, hidden_size=width(variant), num_hidden_layers=depth, **config)
    )
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(20)
    model.generation_config.eos_token_id = None
    return model.to(dtype).eval()


def examples(count=8, length=24):
    return [{"input_ids": list(TEXT[i * 7 : i * 7 + length])} for i in range(count)]
