"""`elman check` finds on a CPU what only a GPU would run, and says where to look."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from elman_authors.checks import Plugin, _denied, kernel_checks
from elman_authors.testing.kernel import need_host_compiler
from linear_cells import CELLS, DELTANET, Made

from elman_core.cli import main
from elman_core.kernels import Case, toolchain
from elman_core.kernels.spec import Inputs
from elman_core.registry import KernelError

ON_A_GPU = """const T b = x.c[0] * d.write;
#if defined(__CUDA_ARCH__)
    return {b, {b}, {d.write * (x.in[0] - x.r)}};
#else
    return {-b, {b}, {d.write * (x.in[0] - x.r)}};
#endif"""


@pytest.mark.parametrize(
    ("name", "cell", "says"),
    [
        ("right", DELTANET, ""),
        ("wrong_sign", replace(DELTANET, back=ON_A_GPU), "__CUDA_ARCH__ in line 16 of wrong_sign_cell.h"),
        (  # the decay is also in what is written
            "wrong_flag",
            replace(CELLS["gated_deltanet"], flags="squashes = !Linear, scalar_keep = true"),
            "the header says scalar_keep, and g.c[0] is not d.keep",
        ),
        (
            "hides_r",
            replace(DELTANET, flags="squashes = false, backward_uses_r = false"),
            "hides_r_cell.h says backward_uses_r = false, and line_backward reads r",
        ),
    ],
)
def test_a_gpu_alone_would_go_wrong(
    name: str, cell: Made, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_host_compiler()

    def no_nvcc() -> Path:
        raise KernelError("no nvcc")

    monkeypatch.setattr(toolchain, "find_nvcc", no_nvcc)
    finite, (_, problem), (what, unchecked) = kernel_checks([cell.kernel(name, tmp_path).spec()])
    assert finite == (f"{name} is finite on the inputs of a GPU's grid", "")
    assert (what, unchecked) == (f"{name} for a GPU: not compiled: no nvcc", None)
    assert problem is not None
    assert says in problem
    assert bool(problem) == bool(says)


@pytest.mark.parametrize("named", [False, True])
def test_a_dense_cell_that_denies_reading_the_state_before_is_told(named: bool, tmp_path: Path) -> None:
    header = tmp_path / "e99_cell.h"
    given = f"backward(T gy, T gh, T h, T{' h_prev' * named}, const T*)"
    header.write_text(f"static constexpr bool uses_prev = false;\nstatic DenseGrad<T, 0> {given} {{}}\n")
    said = "; e99_cell.h says uses_prev = false, and backward takes h_prev by name: one of the two is wrong"
    assert _denied(header) == (said if named else "")
    ours = [_denied(path) for path in Path(__file__).parents[3].glob("plugins/*/*/csrc/*.h")]
    assert [*filter(None, ours)] == []


def test_a_recurrence_that_explodes_on_long_rows_of_a_gpu_alone_is_found_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler() -> Path:
        raise KernelError("no compiler")

    def draw(case: Case, generator: torch.Generator) -> Inputs:
        made = spec.make_inputs(case, generator)
        far = {n: 30 * x for n in ("k", "packed") if (x := made.get(n)) is not None}
        return made | far if case.sizes["T"] > 100 else made

    for name in ("find_host_compiler", "find_nvcc"):
        monkeypatch.setattr(toolchain, name, no_compiler)
    spec = DELTANET.kernel("grows", tmp_path).spec()
    (_, problem), *_ = kernel_checks([replace(spec, make_inputs=draw)])
    assert re.match(r"B=\d+ T=(512|2049) .*: inputs unsuitable: .* adjust=", problem or "")


def test_what_is_not_checked_without_tests_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(Path(__file__).parents[3] / "plugins/e33"), "--no-tests"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "  -     kernels on an emulated GPU and its own tests: not checked: --no-tests"


def test_the_slow_part_is_announced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    checked: list[str] = []
    monkeypatch.setattr(Plugin, "checks", lambda _: ())
    monkeypatch.setattr("elman_authors.cli.kernel_checks", lambda specs: [checked.extend(s.name for s in specs)][:0])
    monkeypatch.setattr("elman_authors.cli.tests_of", lambda _: (0, "1 passed"))
    for name in ("e33", "x_gated"):  # whose package is elman-x-gated
        assert main(["check", str(Path(__file__).parents[3] / "plugins" / name)]) == 0
        said = capsys.readouterr()
        assert "kernels on an emulated GPU, then its own tests: minutes" in said.err
        assert "its tests name every variant" in said.out
        assert any(kernel.startswith(name) for kernel in checked)


def test_check_ends_at_the_first_kernel_that_does_not_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need_host_compiler()
    made = DELTANET.kernel("no_cell", tmp_path).spec()
    header = made.extension("cuda").header
    header.write_text(header.read_text().replace("return", "re_turn", 1))
    folder = Path(__file__).parents[3] / "plugins/e33"
    ran: list[Path] = []
    monkeypatch.setattr(Plugin, "checks", lambda _: ())
    monkeypatch.setattr("elman_authors.cli.kernel_checks", lambda _: kernel_checks([made, made]))
    monkeypatch.setattr("elman_authors.cli.tests_of", lambda folder: ran.append(folder) or (0, ""))
    assert main(["check", str(folder)]) == 2
    said = capsys.readouterr()
    wrong = [line for line in said.out.splitlines() if "FAIL" in line]
    assert len(wrong) == 1
    assert re.search(r"does not compile: \S*no_cell_cell.h:\d+:\d+: error: .*; to reproduce: ", wrong[0])
    assert said.err.endswith(
        f"elman-e33 does not compile, so nothing after that was checked: mend its source, then elman check {folder}\n"
    )
    assert ran == []


def test_the_core_may_be_spelled_as_any_package(tmp_path: Path) -> None:
    """Names of packages differ neither by case nor by - and _."""
    project = """[project]
name = "elman-toy"
dependencies = ["Elman_Core>=0.1,<99"]
entry-points.elman.toy = "elman_toy"
"""
    (tmp_path / "pyproject.toml").write_text(project)
    assert Plugin(tmp_path)._core() == ""


@pytest.mark.parametrize("tests", ["def test_of_its_own(): ...", "class TestToy(VariantContract):\n    variant = 'e1'"])
def test_a_variant_whose_contract_is_not_run_is_found(tests: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "elman-toy"\nentry-points.elman.toy = "elman_toy"\n')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_toy.py").write_text(tests)
    assert Plugin(tmp_path).untested(["e1", "toy"]).endswith('a VariantContract with variant = "toy"')
    (tmp_path / "tests" / "test_toy.py").write_text("VariantContract: 'toy', 'e1'")
    assert Plugin(tmp_path).untested(["e1", "toy"]) == ""


def test_the_name_of_a_shipped_recipe_is_a_model_to_build(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Path(__file__).parents[3] / "plugins/e88/elman_e88/recipes/hybrid.toml"
    listed = []
    for name in ("hybrid", str(recipe)):
        assert main(["build", name, "--arch", "sm_90", "--dry-run"]) == 0
        listed.append(capsys.readouterr().out)
    assert listed[0] == listed[1]
    assert "lstm_gates_cuda_bfloat16_512" in listed[0]
