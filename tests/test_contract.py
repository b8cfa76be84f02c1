"""The contract itself is tested: a sound mixer passes all of it, and each broken one fails the tests meant for it."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from broken_mixers import BROKEN, Sound, SoundConfig
from elman_authors.testing import KernelContract, VariantContract, initial
from elman_authors.testing.equation_contract import _assert_equal
from elman_authors.testing.harness import assert_close
from elman_authors.testing.mixer_contract import MixerContract
from elman_authors.testing.oracle import Form, Row
from torch.autograd.gradcheck import GradcheckError

from elman_core.registry import ConfigError, Installed, Mixer, Variant, list_variants, plugins

OPTIONS: tuple[dict[str, Any], ...] = ({}, {"gate": "silu", "bias": False})


class Contract(VariantContract):
    __test__ = False
    variant = "subject"
    options = OPTIONS

    def initial_values(self, o: Any) -> dict[str, Any]:
        maps = dict.fromkeys(("in_proj.weight", "out_proj.weight"), initial.xavier)
        return maps | {"u": lambda w: initial.xavier(w, o["gain"]), "b": 0.0}


@pytest.fixture
def install() -> Iterator[Callable[..., None]]:
    def put(mixer: type[Mixer], **changes: Any) -> None:
        settings: dict[str, Any] = {
            "summary": "a subject", "equation": "h = tanh(W x + U h)",
            "presets": {"gated": {"gate": "silu"}}, "aliases": {"old": "gated"}, **changes,
        }  # fmt: skip
        variant = Variant("subject", config=settings.pop("config", SoundConfig), mixer=mixer, **settings)
        plugins().installed["subject"] = Installed(variant, "elman-subject", "1.0")

    yield put
    plugins().installed.pop("subject", None)


def run(name: str, tmp_path: Path) -> None:
    """One test of the contract, with every set of options; raises as the test does."""
    test = getattr(Contract(), name)
    wanted = inspect.signature(test).parameters
    for i, opts in enumerate(OPTIONS if "opts" in wanted else ({},)):
        folder = tmp_path / f"{name}-{i}"
        folder.mkdir()
        given = {"opts": opts, "branch": 0, "tmp_path": folder}
        torch.manual_seed(0)
        test(**{k: v for k, v in given.items() if k in wanted})


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# The subject is not installed where another process would look for it; the plugins' own tests run that one.
IN_PROCESS = [
    n
    for n in dir(VariantContract)
    if n.startswith("test_") and "checkpoint_computes" not in n and n not in vars(KernelContract)
]


@pytest.mark.parametrize("name", IN_PROCESS)
def test_a_sound_mixer_passes(install: Callable[..., None], name: str, tmp_path: Path) -> None:
    install(Sound)
    run(name, tmp_path)


@pytest.mark.parametrize(("mixer", "name"), [(m, t) for m, tests in BROKEN.items() for t in tests])
def test_a_broken_mixer_is_caught(install: Callable[..., None], mixer: type[Mixer], name: str, tmp_path: Path) -> None:
    install(mixer)
    with pytest.raises((AssertionError, pytest.fail.Exception, GradcheckError)):
        run(name, tmp_path)


def test_every_test_of_the_mixer_contract_catches_something() -> None:
    caught = {t for tests in BROKEN.values() for t in tests}
    assert caught >= {n for n in vars(MixerContract) if n.startswith("test_")}


def test_nothing_to_read_and_the_state_of_others_are_one_line_from_every_mixer() -> None:
    for variant in (entry.variant for entry in list_variants().values()):
        for index in range(variant.branches):
            with torch.device("meta"):
                mixer = variant.branch(index)(256, variant.make_config(), index)
                for shape in ((2, 0, 256), (0, 3, 256)):
                    with pytest.raises(ConfigError, match=r"needs a row and a step"):
                        mixer(torch.empty(shape))
                shapes = {name: shape for name, (shape, _) in mixer.state_spec(256, mixer.config).items()}
                for rows, more in ((2, 0), (4, 0), (1, 0), (3, 1)) if shapes else ():
                    state = {name: torch.empty(rows, *(abs(n) + more for n in shape)) for name, shape in shapes.items()}
                    with pytest.raises(
                        ConfigError, match=r"the state .* is .*, not \(3, .*: of another batch or model"
                    ):
                        mixer(torch.empty(3, 5, 256), state)
                    with pytest.raises(ConfigError, match=r"the state .* is \(\), not"):
                        mixer(torch.empty(3, 5, 256), {})


def test_checks_that_allocate_are_caught(install: Callable[..., None], tmp_path: Path) -> None:
    class Allocates(Sound):
        @classmethod
        def validate(cls, dim: int, config: Any) -> None:
            torch.zeros(dim)

    install(Allocates)
    with pytest.raises(AssertionError, match="while sizes were checked"):
        run("test_sizes_are_refused_before_anything_is_allocated", tmp_path)


def test_a_preset_that_cannot_be_built_is_caught(install: Callable[..., None], tmp_path: Path) -> None:
    install(Sound, presets={"odd": {"no_such_option": 1}})
    with pytest.raises(ConfigError):
        run("test_presets_and_aliases_build", tmp_path)


@pytest.mark.parametrize("broken", [{"summary": "two\nlines"}, {"equation": ""}, {"summary": ""}])
def test_a_variant_that_does_not_describe_itself_is_caught(
    install: Callable[..., None], broken: dict[str, Any], tmp_path: Path
) -> None:
    install(Sound, **broken)
    with pytest.raises(AssertionError):
        run("test_variant_describes_itself", tmp_path)


def test_a_weakened_contract_is_caught() -> None:
    class Weak(VariantContract):
        __test__ = False
        variant = "subject"

        def test_pieces_equal_whole(self) -> None: ...

    class Lenient(VariantContract):
        __test__ = False
        variant = "subject"

        def input(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return torch.zeros(1, 1, 16)

    class Honest(VariantContract):
        __test__ = False
        variant = "subject"
        options = ({"gate": "silu"},)

        @pytest.mark.xfail(reason="its state cannot be cut")
        def test_pieces_equal_whole(self) -> None:
            super().test_pieces_equal_whole({}, 0)

        def test_something_of_its_own(self) -> None: ...

    for cls in (Weak, Lenient):
        with pytest.raises(AssertionError, match="without xfail"):
            cls().test_contract_is_not_weakened()
    Honest().test_contract_is_not_weakened()
    with pytest.raises(TypeError, match="replaces test_contract_is_not_weakened"):
        type("Sly", (VariantContract,), {"test_contract_is_not_weakened": None})


def test_a_rounding_to_float32_is_told_from_a_wrong_equation() -> None:
    x = torch.randn(64, dtype=torch.float64)
    for wrong, told in ((x.float().double(), True), (1.01 * x, False)):
        for compare in (lambda a: assert_close(a, x), lambda a: _assert_equal("y", a, x.numpy(), "{}")):
            with pytest.raises(AssertionError) as caught:
                compare(wrong)
            assert ("as if a number passed float32" in str(caught.value)) == told


@pytest.mark.parametrize(
    ("step", "gradient", "said"),
    [
        (lambda h: h, None, r"step must return \(y, states\), not a ndarray"),
        (lambda h: (h, {"H": h}), None, "step returns states of H, where there are h"),
        (lambda h: (h, {"h": h[None]}), None, r"states of h has shape \(1, 2\), not \(2,\)"),
        (None, lambda g: ({}, {"h": g}, g), "step_gradient must return .* not 3 parts"),
        (None, lambda g: ({"wh": g}, {"h": g}, g, None), "gradients of wh, where there are in_proj.weight, out_proj"),
        (None, lambda g: ({}, {}, g, None), "gradients of nothing, where there are h"),
    ],
)
def test_what_an_equation_in_numpy_must_return_is_said(step: Any, gradient: Any, said: str) -> None:
    class Cell:
        def step(self, o: Any, p: Any, s: Any, x: Any, z: Any) -> Any:
            return step(s["h"] + x) if step else (s["h"] + x, {"h": s["h"] + x})

        def step_gradient(self, o: Any, p: Any, s: Any, x: Any, z: Any, gy: Any, gs: Any) -> Any:
            return gradient(gy + gs["h"])

    p = {name: np.eye(2) for name in ("in_proj.weight", "out_proj.weight")}
    form = Form(gated=False, pre_silu=False, matrix="", low_rank=False, spectral=False)
    rest = {"use_conv": False}, p, np.ones((3, 2)), {"h": np.zeros(2)}, np.zeros(3, bool), np.ones((3, 2))
    with pytest.raises(AssertionError, match=said):
        Row(Cell(), form, *rest).backward(dict(p), np.ones((3, 2)), {"h": np.ones(2)})  # type: ignore[arg-type]


def test_a_gradient_that_the_equation_in_numpy_leaves_out_is_said() -> None:
    with pytest.raises(AssertionError, match=r"the gradient of w differs .* as the test's derivative leaves it out"):
        _assert_equal("w", torch.ones(2, dtype=torch.float64), np.zeros(2), "{}")
