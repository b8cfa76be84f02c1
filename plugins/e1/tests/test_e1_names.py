"""Names, sizes and limits of E1: published parameter counts, by formula and by building the layer."""

import pytest
import torch

from elman_core import ConfigError
from elman_core.registry import resolve
from elman_core.training.recipes import find_recipe
from elman_core.training.settings import from_dict, read_recipe

PUBLISHED = [
    ("e1", {}, 1280, 6, 49_496_320),
    ("1", {"expansion": 1.5}, 512, 21, 49_703_680),
    ("e1:e2", {}, 640, 20, 114_890_880),
]


def ladder_params(layer, dim, depth):
    """Embedding (256 bytes, tied with the head), a norm before every layer, and a last one."""
    return 256 * dim + depth * (layer + dim) + dim


@pytest.mark.parametrize(("name", "options", "dim", "depth", "count"), PUBLISHED)
def test_parameter_counts_are_the_published_ones(name, options, dim, depth, count):
    found = resolve(name, options)
    with torch.device("meta"):
        mixer = found.variant.mixer(dim, found.config)
    assert ladder_params(found.variant.param_count(dim, found.config), dim, depth) == count
    assert ladder_params(sum(p.numel() for p in mixer.parameters()), dim, depth) == count


def test_the_convolution_adds_its_taps_and_bias():
    variant = resolve("e1").variant
    with_conv, without = (variant.param_count(64, variant.make_config({"use_conv": c})) for c in (True, False))
    assert with_conv - without == 64 * 5


@pytest.mark.parametrize("name", ["1", "E1", "mamba-gated", "Mamba_Gated"])
def test_old_names_resolve(name):
    assert resolve(name).variant.name == "e1"


def test_the_inner_width_is_rounded_down():
    found = resolve("e1", {"expansion": 1.5})
    assert found.variant.mixer(5, found.config).w_h.shape == (7, 7)


def test_a_width_without_channels_is_refused_with_the_smallest_expansion():
    found = resolve("e1", {"expansion": 0.01})
    with pytest.raises(ConfigError, match=r"use at least 0\.015625"):
        found.variant.check(64, found.config)
    near = resolve("e1", {"expansion": 0.015625})
    near.variant.check(64, near.config)


def test_the_recipe_trains_the_published_size():
    path = find_recipe("e1-1280x6")
    assert path is not None
    settings = from_dict(read_recipe(path))
    found = resolve(settings.model.variant, settings.model.options)
    dim, depth = settings.model.hidden_size, settings.model.num_hidden_layers
    assert ladder_params(found.variant.param_count(dim, found.config), dim, depth) == 49_496_320
