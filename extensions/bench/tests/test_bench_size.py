"""Sizes: the number that is printed is the number of parameters of the model that is built."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from elman_bench.size import ALIGN, TOLERANCE, candidates, parse_parameters, solve_width
from toy_mixers import ToyConfig, ToyElman

from elman_core import LadderConfig, LadderForCausalLM
from elman_core.cli import main
from elman_core.registry import ConfigError, Variant


def built(name: str, width: int, depth: int, options: dict[str, Any] | None = None, tied: bool = True) -> int:
    config = LadderConfig(
        variant=name, options=options, hidden_size=width, num_hidden_layers=depth, tie_word_embeddings=tied
    )
    with torch.device("meta"):
        model = LadderForCausalLM(config)
    return sum(p.numel() for p in model.parameters())


def sized(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["size", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["e1", "e42:radius099", "e88:h32n16", "gru", "e1*3+e42:radius099"])
def test_the_width_is_found_and_counts_what_is_built(name: str) -> None:
    best = candidates(name, None, 5_000_000, depth=4)[0]
    assert abs(best.off) <= TOLERANCE
    assert best.fits
    assert best.width % best.aligned == 0
    assert best.parameters == built(name, best.width, 4)
    assert best.off == (best.parameters - 5_000_000) / 5_000_000
    assert solve_width(name, None, 5_000_000, 4) == best.width


def test_finer_widths_are_tried_when_no_multiple_of_128_fits() -> None:
    sizes = candidates("e88:h32n16", None, 50_000_000, depth=20)
    assert (sizes[0].width, sizes[0].aligned) == (1216, 64)
    assert not any(s.fits for s in sizes if s.width % ALIGN == 0)
    assert all(s.parameters == built("e88:h32n16", s.width, 20) for s in sizes)


def test_options_and_an_untied_head_count() -> None:
    options = {"expansion": 2.0}
    size = candidates("e42", options, 10_000_000, depth=3, tie_word_embeddings=False)[0]
    assert size.parameters == built("e42", size.width, 3, options, tied=False)
    assert size.parameters - built("e42", size.width, 3, options) == 256 * size.width


@pytest.mark.parametrize("depth", [0, 4097, 10**6])
def test_a_depth_that_no_machine_builds_is_refused_at_once(depth: int) -> None:
    with pytest.raises(ConfigError, match="a depth is a number of layers from 1 to 4,096"):
        candidates("e1", None, 10_000_000, depth=depth)


def test_the_depth_is_found() -> None:
    sizes = candidates("e42", None, 43_000_000, width=1536)
    assert (sizes[0].depth, sizes[0].parameters) == (6, 42_880_512)
    assert [s.depth for s in sizes] == [6, 7]
    assert all(s.parameters == built("e42", 1536, s.depth) for s in sizes)
    assert candidates("e42", None, 10, width=1536)[0].depth == 1


def test_without_width_and_depth_every_aligned_width_is_listed() -> None:
    sizes = candidates("e42", None, 100_000_000)
    widths = [s.width for s in sizes]
    assert widths == sorted(set(widths), reverse=True)
    assert len(widths) > 5
    assert all(s.fits and s.width % ALIGN == 0 and s.depth <= 64 for s in sizes)
    assert all(s.parameters == built("e42", s.width, s.depth) for s in sizes[:2])
    assert {(s.width, s.depth) for s in sizes} >= {(1280, 20), (1536, 14)}


def test_a_width_that_the_variant_refuses_is_never_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiples of 96 only, so that no power of two is among them."""

    class Only96(ToyElman):
        @classmethod
        def validate(cls, dim: int, config: Any) -> None:
            if dim % 96:
                raise ConfigError("a multiple of 96")

    _install(monkeypatch, Variant("only96", "", ToyConfig, Only96))
    size = candidates("only96", None, 1_000_000, depth=2, multiple=32)[0]
    assert size.width % 96 == 0
    assert size.parameters == built("only96", size.width, 2)
    assert all(s.width % 96 == 0 for s in candidates("only96", None, 1_000_000, depth=2))
    with pytest.raises(ConfigError, match="a multiple of 96"):
        candidates("only96", None, 1_000_000, width=128)


def test_a_layer_unlike_the_others_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(ToyElman):
        def __init__(self, dim: int, config: Any, layer_idx: int = 0) -> None:
            super().__init__(dim, config, layer_idx)
            if layer_idx == 2:
                self.extra = torch.nn.Parameter(torch.empty(dim))

    _install(monkeypatch, Variant("odd", "", ToyConfig, Odd))
    size = candidates("odd", None, 1_000_000, depth=4)[0]
    assert size.parameters == built("odd", size.width, 4)


def _install(monkeypatch: pytest.MonkeyPatch, variant: Variant) -> None:
    from elman_core.registry import Installed, plugins

    monkeypatch.setitem(plugins().installed, variant.name, Installed(variant, "toys", "0"))


def test_what_does_not_fit_is_an_error_that_names_what_would() -> None:
    with pytest.raises(ConfigError, match=r"512x20 with 42,335,904 \(-15.3 %\).* 512x24 has 50,776,768 \(\+1.6 %\)"):
        solve_width("gdn", None, 50_000_000, 20)  # whole heads of 128
    with pytest.raises(ConfigError, match=r"comes no closer to 100 parameters than 8x2.*, or take e42@8x2 as it is"):
        solve_width("e42", None, 100, 2)
    with pytest.raises(ConfigError, match="over 4096 layers"):
        candidates("e42", None, 10**9, width=16)


def test_the_command_prints_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "transformer", "--params", "49_496_320", "--depth", "6"]) == 0
    printed = capsys.readouterr().out
    assert "transformer, 49,496,320 parameters" in printed
    assert "832      6  51,341,888   +3.73 %" in printed
    assert "more than 2 % off" in printed
    assert "768x7 has 49,753,344 (+0.5 %)" in printed


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("e42", "--params", "1M", "--depth", "2", "--dim", "64"), "not both"),
        (("e42", "--depth", "2"), "Missing option '--params'"),
        (("gdn", "--params", "1M", "--dim", "100"), "not a multiple of head_dim"),
    ],
)
def test_what_cannot_be_answered_is_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    assert main(["size", *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "number"), [("100M", 10**8), ("1.3B", 1_300_000_000), ("480_000", 480_000), ("64k", 64_000), ("7", 7)]
)
def test_numbers_of_parameters_are_read(text: str, number: int) -> None:
    assert parse_parameters(text) == number


@pytest.mark.parametrize("text", ["", "M", "-3M", "0", "1e400", "nan", "many"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write a number of parameters as"):
        parse_parameters(text)


def test_an_mlp_counts() -> None:
    size = candidates("e1", None, 10_000_000, depth=4, mlp_ratio=1.5)[0]
    more = 4 * (3 * size.width * (3 * size.width // 2) + size.width)
    assert size.width % 128 == 0
    assert size.parameters == built("e1", size.width, 4) + more


def test_the_command_imports_neither_the_compiler_nor_transformers() -> None:
    """Each of the two takes as long to import as torch."""
    code = (
        "import sys; from elman_core.cli import main; assert main(sys.argv[1:]) == 0; "
        "assert not {'torch._dynamo', 'transformers'} & set(sys.modules)"
    )
    words = ["size", "e42", "--params", "10M", "--depth", "4"]
    subprocess.run([sys.executable, "-c", code, *words], check=True, stdout=subprocess.DEVNULL)
