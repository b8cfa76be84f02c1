"""The kernels of a CPU: against float64, with starts of documents and masks, and when "auto" takes them."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from elman_authors.testing.kernel import need_host_compiler

from elman_core.kernels import Case, Maps, build, dispatch, toolchain
from elman_core.kernels.matrix.problems import case as matrix_case
from elman_core.kernels.rows.spec import case as rows_case
from elman_core.kernels.verify import failures, verify
from elman_core.registry import KernelError

e88 = pytest.importorskip("elman_e88.op").e88
m2rnn = pytest.importorskip("elman_m2rnn.op").m2rnn
gru_gates = pytest.importorskip("elman_baselines.rnn.op").gru_gates
e42, e68 = (getattr(pytest.importorskip(f"elman_{name}.op"), name) for name in ("e42", "e68"))
f32, bf16 = torch.float32, torch.bfloat16
MAPS = e88.cell.maps[0]
PROBLEMS = [
    (e88, matrix_case((2, 35, 3, 12, 20), f32, maps=MAPS, fused=True, on=("linear_state", "write"), masked=True)),
    (e88, matrix_case((2, 18, 2, 20, 7), bf16, maps=MAPS, strided=True)),
    (m2rnn, rows_case((2, 35, 3, 12, 20), f32, masked=True, packed=True)),
    (m2rnn, rows_case((1, 18, 1, 16, 16), bf16, strided=True, shared=True)),
    (e42, Case.of("TBd", (21, 6, 70), bf16, strided=True)),
    (gru_gates, Case.of("TBd", (21, 3, 40), bf16, strided=True)),
    (e68, Case.of("TBd", (21, 3, 70), bf16, strided=True)),
]


@pytest.mark.parametrize(("kernel", "problem"), PROBLEMS, ids=lambda x: getattr(x, "name", str(x)))
def test_a_kernel_of_a_cpu_equals_the_float64_reference(kernel, problem):
    need_host_compiler()
    report = verify(kernel.spec(), "cpu", cases=[problem])
    assert report.passed, "\n".join(failures(report))


def test_documents_of_a_row_of_a_matrix_state_do_not_see_each_other():
    need_host_compiler()
    B, T, H, N = 2, 40, 2, 8
    starts, mask = torch.rand(B, T) < 0.2, torch.rand(B, T) < 0.7
    given = [torch.randn(B, T, 3 * H * N), torch.randn(B, T, H), torch.zeros(B, H, N, N)]
    found = []
    for backend, dtype in (("cpu", f32), ("reference", torch.float64)):
        packed, decay, state = leaves = [x.to(dtype, copy=True).requires_grad_() for x in given]
        more = {
            "state_BHNV": state,
            "mask_BT": mask,
            "starts_BT": starts,
            "maps": Maps(("v",), ("q", "k"), ("sigmoid",)),
        }
        o, last = e88.fused(packed, decay, n_state=N, backend=backend, **more)
        o = o * mask[..., None, None]
        found.append([o, last, *torch.autograd.grad(o.sin().sum() + last.sin().sum(), leaves)])
    for made, right in zip(*found, strict=True):
        torch.testing.assert_close(made.double(), right, rtol=1e-5, atol=1e-5)


@pytest.fixture
def undecided(monkeypatch):
    monkeypatch.setattr(dispatch, "_decided", {})
    monkeypatch.setenv("ELMAN_VERIFY", "skip")
    monkeypatch.setenv("ELMAN_KERNELS", "auto")
    return dispatch._decided


H, K = 16, 16


def run(B, T, dtype=f32):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, T, H, K, generator=generator)[:B].to(dtype) for _ in range(3))
    return m2rnn(q, k, v, torch.full((B, T, H), 0.9), torch.eye(K).expand(H, K, K))[0]


def test_without_pythons_headers_plain_pytorch_runs_and_nothing_is_compiled_or_stamped(
    undecided, monkeypatch, caplog, tmp_path
):
    need_host_compiler()
    monkeypatch.setenv("ELMAN_VERIFY", "")
    monkeypatch.setenv("ELMAN_CACHE", str(tmp_path))
    monkeypatch.setattr(toolchain, "python_include_dirs", Mock(side_effect=KernelError("no Python.h: install it")))
    run(1, 64)
    assert list(undecided.values()) == [False]
    assert "NO KERNEL for m2rnn, running plain PyTorch, many times slower: no Python.h: install it" in caplog.text
    assert not list(tmp_path.iterdir())


def test_auto_takes_the_kernel_where_it_pays_whatever_the_batch(undecided, monkeypatch):
    need_host_compiler()
    run(1, 63)
    assert not undecided
    assert m2rnn.backend("cpu", K, K) == "reference, or cpu where that pays"
    alone, together = run(1, 64), run(4, 64)
    assert list(undecided.values()) == [True]
    assert m2rnn.backend("cpu", K, K) == "cpu"
    assert torch.equal(alone, together[:1])
    run(1, 64, torch.float16)
    assert len(undecided) == 1
    monkeypatch.setenv("ELMAN_KERNELS", "off")
    torch.testing.assert_close(run(1, 64), alone)
    assert list(undecided.values()) == [True, False]


def test_lengths_that_share_their_highest_power_of_two_get_the_same_back_end():
    x = torch.zeros(1)
    for low in (8, 16, 32, 64):
        for elements in (1, 4096, 5000, 8192, 12_000, 1 << 14):
            assert len({dispatch.pays(x, steps, elements) for steps in range(low, 2 * low)}) == 1
    assert not dispatch.pays(x, 15, 1 << 30)
    assert dispatch.pays(x, 16, 1 << 14)


def test_vector_states_take_it_in_training_and_a_text_alone_never_waits_for_a_compiler(undecided):
    need_host_compiler()
    given = torch.randn(512, 9, 128), torch.eye(128) / 2, torch.zeros(9, 128)

    def made(rows):
        u, w, h = (x[:, :rows] if x.dim() == 3 else x[:rows] if len(x) == 9 else x for x in given)
        return e42(u.requires_grad_(), w, h)[0]

    with torch.no_grad():
        plain = made(9)
    assert not undecided
    found = made(9)
    assert list(undecided.values()) == [True]
    torch.testing.assert_close(found, plain)
    for rows in (1, 2, 5):
        assert torch.equal(made(rows), found[:, :rows])
    assert len(undecided) == 1


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("exit 1", "the compiler left with status 1 and said nothing"),
        ("kill -9 $$", "the compiler left with status -9"),
        ("echo \"cc1plus: error: bad value 'x86-64-v4' for '-march=' switch\" >&2; exit 1", "bad value 'x86-64-v4'"),
    ],
)
def test_without_a_compiler_that_works_plain_pytorch_runs_after_one_line(
    compiler, said, undecided, monkeypatch, tmp_path, caplog
):
    fake = tmp_path / "cxx"
    fake.write_text(f"#!/bin/sh\n{compiler}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setenv("ELMAN_CACHE", str(tmp_path / "cache"))
    assert torch.isfinite(run(1, 64)).all()
    assert run(2, 64).shape == (2, 64, H, K)
    [line] = [record.getMessage() for record in caplog.records]
    assert "running plain PyTorch" in line
    assert said in line
    monkeypatch.setenv("ELMAN_KERNELS", "require")
    with pytest.raises(KernelError, match="does not compile"):
        run(1, 64)


def test_the_name_of_a_module_says_for_which_instructions_it_is(monkeypatch):
    extension = m2rnn.spec().extension("cpu")
    names = set()
    for capability, level in (
        ("AVX512", "x86-64-v4"),
        ("AVX2", "x86-64-v3"),
        ("DEFAULT", build.toolchain.host_architecture()),
    ):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        arch = build.local_arch(extension)
        assert arch == level
        assert (f"-march={arch}" in extension.flags(arch)) == arch.startswith("x86-64")
        names.add(extension.file_name(arch))
    assert len(names) == 3
