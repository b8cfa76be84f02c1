"""Names, sizes and limits of E88: published parameter counts, every published level, and what is refused."""

import pytest
import torch

from elman_core import ConfigError
from elman_core.registry import PluginError, resolve
from elman_core.size import count

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
WORDS = {
    "gate": {"use_gate": True},
    "norm": {"use_output_norm": True},
    "conv": {"use_conv": True},
    "silu_gate": {"gate_activation": "silu"},
    "linear": {"linear_state": True},
    "tied": {"tie_kv": True},
    "simple": {"decay": "simple"},
    "no_silu": {"use_silu": False},
    "no_l2": {"l2_norm": False},
    "weighted_sum": {"head_mix": "weighted_sum"},
    "per_head": {"head_mix": "per_head"},
    "input_weighted": {"head_mix": "input_weighted"},
    "sum": {"head_mix": "sum"},
}
LEVELS = {  # of every family: heads and n, and what differs from the plain form (no gate, no norm, no convolution)
    "E88": "h16n32 gate norm",
    "E88h16n24": "h16n24 gate norm",
    "E88sh8n96": "h8n96 gate norm",
    "E88th16n64": "h16n64 gate norm tied",
    "E88a_noconv_linear": "h16n32 gate norm linear",
    "E88a_noconv_nogate": "h16n32 norm",
    "E88a_minimal": "h16n32 norm simple",
    "E88b_nosilu_nol2": "h16n32 gate norm no_silu no_l2",
    "E88b_nogate_nonorm": "h16n32",
    "E88_dim1792": "h16n32",
    "E88_1B": "h16n32",
    "E88c_h8n64": "h8n64 gate",
    "E88c_simpledecay": "h16n32 gate simple",
    "E88d_tiekv_linear": "h16n32 tied linear",
    "E88_h8n32_500m": "h8n32",
    "E88e_h10_75m": "h10n32",
    "E88e_h12_linear": "h12n32 linear",
    "E88f_h24n24": "h24n24",
    "E88g_h256n8": "h256n8",
    "E88h_wsum": "h8n32 weighted_sum",
    "E88h_perhead": "h8n32 per_head",
    "E88h_inputw": "h8n32 input_weighted",
    "E88h_sum": "h8n32 sum",
    "E88_h83n32": "h83n32",
    "E88_b48n16": "h48n16",
    "E88_n24": "h16n24",
    "E88_gated_silu": "h56n32 gate silu_gate",
    "E88_full_fla": "h56n32 gate silu_gate norm conv",
}


@pytest.mark.parametrize(("name", "dim", "depth", "parameters"), PUBLISHED)
def test_parameter_counts_are_the_published_ones(name, dim, depth, parameters):
    found = resolve(name)
    assert count(found, dim, depth) == parameters


@pytest.mark.parametrize(("level", "form"), LEVELS.items())
def test_a_level_means_what_was_published(level, form):
    size, *changes = form.split()
    heads, n = (int(x) for x in size[1:].split("n"))
    expected = {"n_heads": heads, "n_state": n, "use_gate": False, "use_output_norm": False}
    for word in changes:
        expected |= WORDS[word]
    found = resolve(level)
    assert found.variant.name == "e88"
    assert found.config == found.variant.make_config(expected)


@pytest.mark.parametrize("level", ["E88z_h8", "E88_", "E88h", "E880", "E87h4n16", "E88h8m32"])
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
