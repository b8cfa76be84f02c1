"""Names, sizes and limits of E88: published parameter counts, every published level, and what is refused."""

import pytest
import torch

from elman_core import ConfigError
from elman_core.registry import PluginError, resolve
from elman_core.training.recipes import find_recipe
from elman_core.training.settings import from_dict, read_recipe

# The predecessor also allocated a norm weight of V a layer where the output norm is off: taken off where its figure holds it.
PUBLISHED = [
    ("e88:h32n16", 1536, 20, 64_324_672 - 20 * 16),
    ("E88f_h32n16", 2432, 20, 101_846_464 - 20 * 16),
    ("E88f_h32n16", 896, 20, 37_523_072),
    ("E88f_h24n24", 1536, 20, 71_943_072 - 20 * 24),
    ("e88:h24n24", 2176, 20, 101_918_752 - 20 * 24),
    ("E88e_h8_75m", 1920, 20, 40_161_600 - 20 * 32),
    ("e88:h8n32", 896, 20, 18_741_952),
    ("E88b_nonorm", 1536, 20, 79_561_472 - 20 * 32),
    ("E88d_h12", 3200, 20, 99_959_520 - 20 * 32),
    ("E88d_h20", 1920, 20, 99_605_280 - 20 * 32),
    ("E88c_h8n64", 2432, 20, 125_582_784 - 20 * 64),
]
GATE, NORM, CONV = ("use_gate", True), ("use_output_norm", True), ("use_conv", True)
SILU = ("gate_activation", "silu")
LINEAR, TIED, SIMPLE = ("linear_state", True), ("tie_kv", True), ("decay", "simple")
NO_SILU, NO_L2 = ("use_silu", False), ("l2_norm", False)
LEVELS = {  # heads, n, and what differs from the plain form: no gate, no norm, no convolution, and all other defaults
    "E88": (16, 32, GATE, NORM),
    "E88h4": (4, 32, GATE, NORM),
    "E88h8": (8, 32, GATE, NORM),
    "E88h16n24": (16, 24, GATE, NORM),
    "E88sh8": (8, 32, GATE, NORM),
    "E88sh8n64": (8, 64, GATE, NORM),
    "E88sh8n96": (8, 96, GATE, NORM),
    "E88sh16n32": (16, 32, GATE, NORM),
    "E88sh16n64": (16, 64, GATE, NORM),
    "E88th8": (8, 32, GATE, NORM, TIED),
    "E88th16n64": (16, 64, GATE, NORM, TIED),
    "E88a_noconv": (16, 32, GATE, NORM),
    "E88a_linear": (16, 32, GATE, NORM, LINEAR),
    "E88a_nogate": (16, 32, NORM),
    "E88a_simpledecay": (16, 32, GATE, NORM, SIMPLE),
    "E88a_noconv_linear": (16, 32, GATE, NORM, LINEAR),
    "E88a_noconv_nogate": (16, 32, NORM),
    "E88a_minimal": (16, 32, NORM, SIMPLE),
    "E88b_nosilu": (16, 32, GATE, NORM, NO_SILU),
    "E88b_nol2": (16, 32, GATE, NORM, NO_L2),
    "E88b_nonorm": (16, 32, GATE),
    "E88b_nosilu_nol2": (16, 32, GATE, NORM, NO_SILU, NO_L2),
    "E88b_nogate_nonorm": (16, 32),
    "E88c_h32n16": (32, 16, GATE),
    "E88c_h8n64": (8, 64, GATE),
    "E88c_h24n24": (24, 24, GATE),
    "E88c_simpledecay": (16, 32, GATE, SIMPLE),
    "E88c_nogate": (16, 32),
    "E88d_tiekv": (16, 32, TIED),
    "E88d_linear": (16, 32, LINEAR),
    "E88d_h12": (12, 32),
    "E88d_h20": (20, 32),
    "E88d_simpledecay": (16, 32, SIMPLE),
    "E88d_tiekv_linear": (16, 32, TIED, LINEAR),
    "E88e_h8_75m": (8, 32),
    "E88e_h10_75m": (10, 32),
    "E88e_h12_75m": (12, 32),
    "E88e_h16_48m": (16, 32),
    "E88e_h12_linear": (12, 32, LINEAR),
    "E88f_h32n16": (32, 16),
    "E88f_h24n24": (24, 24),
    "E88f_h4": (4, 32),
    "E88f_h6": (6, 32),
    "E88f_h4n64": (4, 64),
    "E88g_h64n8": (64, 8),
    "E88g_h128n8": (128, 8),
    "E88g_h256n8": (256, 8),
    "E88g_h16n16": (16, 16),
    "E88g_h4n128": (4, 128),
    "E88h_concat": (8, 32),
    "E88h_wsum": (8, 32, ("head_mix", "weighted_sum")),
    "E88h_perhead": (8, 32, ("head_mix", "per_head")),
    "E88h_inputw": (8, 32, ("head_mix", "input_weighted")),
    "E88h_sum": (8, 32, ("head_mix", "sum")),
    "E88h_h32n32": (32, 32),
    "E88_h83n32": (83, 32),
    "E88_b48n16": (48, 16),
    "E88_h8n32_500m": (8, 32),
    "E88_dim1792": (16, 32),
    "E88_n24": (16, 24),
    "E88_100M": (16, 32),
    "E88_1B": (16, 32),
    "E88_gated_sigmoid": (56, 32, GATE),
    "E88_gated_silu": (56, 32, GATE, SILU),
    "E88_conv_silu": (56, 32, GATE, SILU, CONV),
    "E88_full_fla": (56, 32, GATE, SILU, NORM, CONV),
}


@pytest.mark.parametrize(("name", "dim", "depth", "count"), PUBLISHED)
def test_parameter_counts_are_the_published_ones(name, dim, depth, count):
    found = resolve(name)
    found.variant.check(dim, found.config)
    with torch.device("meta"):
        mixer = found.variant.mixer(dim, found.config)
    built = sum(p.numel() for p in mixer.parameters())
    for layer in (found.variant.param_count(dim, found.config), built):
        assert 256 * dim + depth * (layer + dim) + dim == count


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_means_what_was_published(level):
    heads, n, *changes = LEVELS[level]
    plain = {
        "expansion": 1.0,
        "use_gate": False,
        "use_output_norm": False,
        "use_conv": False,
        "gate_activation": "sigmoid",
    }
    plain |= {"use_silu": True, "l2_norm": True, "decay": "mamba", "use_write_gate": False, "value_residual": False}
    plain |= {"tie_kv": False, "linear_state": False, "head_mix": "concat"}
    found = resolve(level)
    assert found.variant.name == "e88"
    assert found.options == {**plain, "n_heads": heads, "n_state": n, **dict(changes)}


@pytest.mark.parametrize("level", ["E88z_h8", "E88_", "E88h", "E880", "E75h4n16", "E88h8m32"])
def test_a_name_that_no_level_has_is_refused(level):
    with pytest.raises(PluginError, match="no variant"):
        resolve(level)


@pytest.mark.parametrize(("n", "expansion", "values"), [(20, 1.15, 23), (40, 1.1, 44), (12, 0.25, 3)])
def test_a_value_may_be_any_whole_number_wide(n, expansion, values):
    found = resolve("e88", {"n_state": n, "n_heads": 3, "expansion": expansion})
    found.variant.check(16, found.config)
    mixer = found.variant.mixer(16, found.config)
    _, state = mixer(torch.randn(1, 2, 16))
    assert state["S"].shape == (1, 3, n, values)


def test_convolution_adds_four_taps_a_channel():
    variant = resolve("e88").variant
    for tied in (False, True):
        plain, conv = ({"use_conv": c, "tie_kv": tied, "n_heads": 3, "n_state": 8} for c in (False, True))
        added = variant.param_count(64, variant.make_config(conv)) - variant.param_count(64, variant.make_config(plain))
        assert added == 4 * (2 if tied else 3) * 24


@pytest.mark.parametrize(
    ("options", "nearest"),
    [
        ({"n_state": 30}, "28 or 32"),
        ({"n_state": 2}, "at least 4"),
        ({"n_state": 132}, "at most 128"),
        ({"n_heads": 0}, "at least 1"),
        ({"n_heads": 1025}, "at most 1024"),
        ({"n_state": 32, "expansion": 1.3}, r"nearest: expansion 1\.3125"),
        ({"n_state": 4, "expansion": 0.1}, r"nearest: expansion 0\.25"),
        ({"tie_kv": True, "expansion": 2.0}, "needs expansion 1"),
    ],
)
def test_a_size_that_kernels_cannot_have_is_refused_with_the_nearest(options, nearest):
    def check():
        found = resolve("e88", options)
        found.variant.check(64, found.config)

    with pytest.raises(ConfigError, match=nearest):
        check()


@pytest.mark.parametrize(("recipe", "count"), [("e88-h32n16", 64_324_352), ("e88-h8n32", 40_160_960)])
def test_a_recipe_trains_the_published_size(recipe, count):
    path = find_recipe(recipe)
    assert path is not None
    settings = from_dict(read_recipe(path))
    found = resolve(settings.model.variant, settings.model.options)
    dim, depth = settings.model.hidden_size, settings.model.num_hidden_layers
    assert 256 * dim + depth * (found.variant.param_count(dim, found.config) + dim) + dim == count
