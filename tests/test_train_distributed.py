"""Several ranks train as one: the same losses, the same checkpoints, and one end for all, however it comes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from ranks import Launcher
from train_helpers import (
    losses,
    manifest,
    metrics,
    settings,
    tensors,
    three_texts,
    train_words,
    wait_for,
    wait_for_step,
    write_text,
)

from elman_core.model import LadderConfig, LadderForCausalLM
from elman_core.registry import ConfigError
from elman_core.storage import check_folder
from elman_core.training import rank_signals
from elman_core.training.modes import choose_mode
from elman_core.training.parallel import Summed, make_processes
from elman_core.training.rank_signals import RankSignals
from elman_core.training.ranks.group import Ranks
from elman_core.training.start import resume, start
from elman_core.training.step import OneProcess

ONE_LINE = 1
ON_GPUS = 45  # seconds after which ranks on GPUs, which take a fifth of it, say where they are and end


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def text(where):
    return write_text(where / "text", document=30)


@pytest.fixture(scope="module")
def launch(where):
    launcher = Launcher(where)
    yield launcher
    launcher.close()


def act(when, what, rank, hook="elman_before_optimizer_step"):
    """Python that registers a hook on every rank, which does something on one of them: before an update, unless told."""
    return f"""
import os, signal, sys, time, torch
from elman_core.registry import hookimpl, plugins
class Act:
    @hookimpl
    def {hook}(self, run):
        if RANK == {rank} and run.step == {when}:
            {what}
plugins().manager.register(Act(), name="elman-test:act")
"""


# the same training -----------------------------------------------------------------------------------------------------

SHORT = ("train.steps=12", "train.eval_every=6", "train.lr=0.01")
SUMMED = "import elman_core.training.parallel as p; p.Replicated = p.Summed"
CASES = {
    "four ranks, the time as seed": (4, ("train.seed=1764507532123456789",)),
    "accumulated, recomputed": (2, ("train.accumulate=2", "train.gradient_checkpointing=true", "train.loss_chunk=5")),
    "summed after the backward": (2, ("train.accumulate=2",)),  # as a captured step does
    "carried": (2, ("data.sampling=tbptt", "data.documents=reset")),
    "rows of documents": (4, ("data.documents=pack", "train.chunk_size=50", "train.launch=eager")),
    "muon": (2, ("train.optimizer=muon", "train.lr=3e-4")),  # at 1e-2 rounding to bfloat16 adds up to 6e-5
    "schedule-free": (2, ("train.optimizer=schedulefree",)),
    "sharded, recomputed": (
        2, ("train.parallel=fsdp", "train.gradient_checkpointing=true", "train.accumulate=2", "train.loss_chunk=5"),
    ),
    "eight ranks, three texts, a mask": (8, ("train.batch_size=16", "train.accumulate=2", "data.path=three")),
    "sharded, three texts, a mask": (2, ("train.parallel=fsdp", "data.path=three")),
    "sharded matrix": (2, ("train.parallel=fsdp", "model.variant=e88", "model.options.n_heads=2", "model.options.n_state=4",
                           "train.lr=3e-4")),  # at 1e-2 it is chaotic: accumulation on one device departs as far
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_several_ranks_train_as_one_device(case, launch, text, tmp_path):
    ranks, sets = CASES[case]
    sets = [three_texts(text) if s == "data.path=three" else s for s in sets]
    start(settings(text, *SHORT, *(s for s in sets if "parallel" not in s)), tmp_path / "one", quiet=True).fit()
    words = train_words(text, tmp_path / "several", *SHORT, *sets)
    ended = launch.expect([0] * ranks, words, SUMMED if "summed" in case else "")
    assert ended.err == [""] * ranks
    assert ended.out[1:] == [""] * (ranks - 1)  # one of them speaks
    one, several = tmp_path / "one", tmp_path / "several"
    assert losses(several) == pytest.approx(losses(one), abs=2e-5)
    if "documents" in case:
        assert [m["fill"] for m in metrics(several)] == [m["fill"] for m in metrics(one)]
        assert [m["bytes_seen"] for m in metrics(several)] == [m["bytes_seen"] for m in metrics(one)]
    norms = [[m["grad_norm"] for m in metrics(run)] for run in (one, several)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    scores = [[m["bits_per_byte"] for m in metrics(run, "evaluation")] for run in (one, several)]
    assert scores[1] == pytest.approx(scores[0], abs=3e-5)
    assert manifest(several)["protocol_hash"] == manifest(one)["protocol_hash"]
    kind = "fsdp" if "sharded" in case else "ddp"
    assert manifest(several)["parallel"] == {"kind": kind, "ranks": ranks, "backend": "gloo"}
    paths = [run / "checkpoints" / "step-00000012" for run in (one, several)]
    check_folder(paths[1])
    names = [sorted(p.relative_to(path).as_posix() for p in path.rglob("*")) for path in paths]
    assert names[1] == names[0]
    first, second = (tensors(path) for path in paths)
    assert {n for n in second if "rank" not in n} == first.keys()
    for name, tensor in first.items():
        assert second[name].shape == tensor.shape, name
        if "rng" not in name and ".seen" not in name and "step/" not in name:
            assert (second[name] - tensor).abs().max() <= 2e-3 * max(1, tensor.abs().max()), name


def test_sharded_ranks_that_accumulate_in_bf16_have_the_gradient_of_whole_ones(launch, text, tmp_path):
    runs = [tmp_path / kind for kind in ("ddp", "fsdp")]
    for run in runs:
        sets = "train.steps=1", "train.precision=bf16", "train.accumulate=2", f"train.parallel={run.name}"
        launch.expect([0, 0], train_words(text, run, *sets))
    whole, sharded = (tensors(run / "checkpoints/step-00000001") for run in runs)
    for name in (name for name in whole if "exp_avg/" in name):
        torch.testing.assert_close(sharded[name], whole[name], rtol=1e-4, atol=1e-7, msg=name)


ON_CUDA = ("model.hidden_size=256", "train.batch_size=32", "train.chunk_size=128", "train.device=cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("several", [2, 4], ids=["two", "four"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("sets", [(), ("train.launch=eager",), ("train.parallel=fsdp",)], ids=["auto", "eager", "fsdp"])
def test_gpus_train_as_one(sets, precision, several, launch, text, where, tmp_path):
    if torch.cuda.device_count() < several:
        pytest.skip(f"needs {several} NVIDIA GPUs")
    shape = (*ON_CUDA, "train.steps=30", "train.eval_every=10", f"train.precision={precision}")
    one, all_of_them = where / f"one-gpu-{precision}", tmp_path / "several"
    for ranks, run, more in ((1, one, ()), (several, all_of_them, sets)):
        if not (ranks == 1 and run.exists() and manifest(run)["status"] == "ok"):  # it is the same for all
            launch.expect([0] * ranks, train_words(text, run, *shape, *more), limit=ON_GPUS, ELMAN_PHASES="1")
    assert losses(all_of_them) == pytest.approx(losses(one), abs=1e-3)
    found = manifest(all_of_them)["parallel"]
    assert (found["ranks"], found["backend"]) == (several, "nccl")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize(
    "sets",
    [("train.precision=fp32",), ("train.precision=bf16", "train.launch=eager")],
    ids=["graph-fp32", "eager-bf16"],
)
def test_a_killed_rank_on_gpus_ends_all_and_the_run_goes_on(sets, launch, text, tmp_path):
    """NCCL says nothing of a rank that is gone, and a collective operation in a graph waits for ever: it is noticed."""
    run = tmp_path / "run"
    asked = train_words(text, run, *ON_CUDA, "train.steps=600", "train.save_every=50", "train.eval_every=0", *sets)
    launch.start(2, asked, limit=ON_GPUS, ELMAN_RANK_TIMEOUT="15", ELMAN_PHASES="1")
    began = time.monotonic()
    wait_for_step(run, 100)
    os.kill(launch.pids[1], signal.SIGKILL)
    ended = launch.wait()
    assert time.monotonic() - began < 60
    assert ended.codes == [1, -9], ended.err
    assert "a rank has ended or" in ended.err[0]
    assert manifest(run)["status"] == "crashed"
    assert manifest(run)["step"]["mode"] == ("eager" if "train.launch=eager" in sets else "graph")
    ended = launch.expect([0, 0], ["resume", run], limit=ON_GPUS, ELMAN_PHASES="1")
    assert sorted(losses(run)) == list(range(1, 601))
    assert manifest(run)["resumed"][0]["at_step"] >= 50


AVERAGED = """
import torch
from elman_core.training.ranks import tensors as sums
from elman_core.training.ranks.group import join, leave
ranks, sums.SMALL = join(), 64

def drawn(rank):
    generator = torch.Generator().manual_seed(rank)
    shapes = {"large": (5, 7), "small": (3,), "wide": (8, 4), "narrow": (2, 9), "double": (40,), "scalar": ()}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {**made, "wide": made["wide"].t(), "narrow": made["narrow"].bfloat16(), "double": made["double"].double()}

mine = drawn(ranks.rank)
where = {name: (g.data_ptr(), g.stride()) for name, g in mine.items()}
sums.average(list(mine.values()), ranks.size)
for name, grad in mine.items():
    expected = torch.stack([drawn(r)[name] for r in range(ranks.size)]).double().mean(0)
    assert torch.allclose(grad.double(), expected, atol=1e-2 if name == "narrow" else 1e-6), name
    assert (grad.data_ptr(), grad.stride()) == where[name]
"""


def test_gradients_of_any_size_layout_and_dtype_become_their_means_where_they_lie(launch):
    launch.expect([0, 0, 0], ["list"], AVERAGED)


CAPTURED = f"""
import os, signal, sys, types
sys.path.insert(0, {os.path.dirname(__file__)!r})
import torch
from cpu_graph import CpuRecorder
from elman_core.registry import hookimpl, plugins
from elman_core.training import loop, modes, parallel
from elman_core.training.ranks import tensors as rank_tensors

# Operations that a tape can hold: torch's own give back a handle to wait for.
real, means, rank_tensors.SMALL = torch.distributed.all_reduce, rank_tensors.means, 1000
library = torch.library.Library("elman_test", "DEF")
library.define("all_reduce(Tensor(a!) x) -> ()")
library.impl("all_reduce", lambda x: [real(x), None][1], "CPU")
library.define("means(Tensor(a!)[] x, int ranks) -> ()")
library.impl("means", means, "CPU")
parallel.dist = types.SimpleNamespace(all_reduce=torch.ops.elman_test.all_reduce)
rank_tensors.means, parallel.Replicated = torch.ops.elman_test.means, parallel.Summed
recorder = CpuRecorder()
loop.make_step = lambda step, mode: modes.CapturedStep(step, recorder, required=True)
class Stop:
    @hookimpl
    def elman_step_end(self, step):
        if step == 8:
            assert recorder.replays == 8 - modes.WARM
            os.kill(os.getpid(), signal.SIGTERM)
plugins().manager.register(Stop(), name="elman-test:stop")
"""


def assert_as_the_eager_step(prelude, launch, text, folder, *sets):
    """Two ranks with the prelude stop after step 9 with the losses of an eager step, bit for bit. Returns how they ended."""
    launch.expect([0, 0], train_words(text, folder / "eager", *SHORT, *sets), SUMMED)
    ended = launch.expect([143, 143], train_words(text, folder / "other", *SHORT, *sets), prelude)
    eager, other = losses(folder / "eager"), losses(folder / "other")
    assert list(other) == list(range(1, 10))
    assert all(other[step] == eager[step] for step in other)
    return ended


def test_a_captured_step_of_several_ranks_is_the_eager_one_and_hears_signals(launch, text, tmp_path):
    """On a tape that replays what a CUDA graph would: sums of gradients, of the loss, and the notes that ride with it."""
    assert_as_the_eager_step(CAPTURED, launch, text, tmp_path, "data.sampling=tbptt", "train.accumulate=2")


UNSTOPPED = CAPTURED.partition("class Stop")[0]
REFUSE = """
class Recorded:  # a capture executes nothing, unlike the tape
    def __init__(self):
        recorder.held += 1
    def release(self):
        recorder.held -= 1
def record(run):
    if RANK == 1:
        raise RuntimeError("no graph today")
    return Recorded()
recorder.record = record
loop.make_step = lambda step, mode: modes.CapturedStep(step, recorder, required=REQUIRED)
"""


def test_a_step_that_one_rank_cannot_record_is_eager_on_all(launch, text, tmp_path):
    """NCCL wants an operation in a graph on every rank, or on none."""
    captured = CAPTURED.replace(
        "assert recorder.replays == 8 - modes.WARM", "assert recorder.replays == recorder.held == 0"
    )
    ended = assert_as_the_eager_step(f"REQUIRED = False\n{captured}{REFUSE}", launch, text, tmp_path)
    for rank, why in ((0, "rank 1: no graph today"), (1, "no graph today")):
        assert f"cannot be captured as a CUDA graph and runs eager: {why}" in ended.err[rank]


def test_a_step_that_has_to_be_recorded_and_cannot_be_on_one_rank_ends_all_with_a_line(launch, text, tmp_path):
    ended = launch.expect([5, 5], train_words(text, tmp_path / "run", *SHORT), f"REQUIRED = True\n{UNSTOPPED}{REFUSE}")
    said = "elman: the step cannot be captured as a CUDA graph, use train.launch='eager': rank 1: no graph today"
    assert ended.err == [f"{said}\n", ""]
    assert manifest(tmp_path / "run")["status"] == "crashed"


PARTING = """
from elman_core.training.ranks import group
def watched(real):
    def part():
        if recorder.held:
            os._exit(71)  # NCCL would wait here for ever, for the graph that holds its operations
        print("parted", flush=True)
        real()
    return part
for owner, name in ((group.dist, "destroy_process_group"), (group.dist.distributed_c10d, "_abort_process_group")):
    setattr(owner, name, watched(getattr(owner, name)))
"""


ENDS = {
    "finished": (UNSTOPPED, [0, 0]),
    "stopped": (CAPTURED, [143, 143]),
    "diverged": (UNSTOPPED + act(6, "run.model.model.norm.weight.data[0] = float('nan')", 0, "elman_step_end"), [4, 4]),
    "failed": (UNSTOPPED + act(6, "raise OSError('no good')", 0, "elman_step_end"), [2, 2]),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_graph_is_given_up_before_the_ranks_part(end, launch, text, tmp_path):
    """However the training ends: NCCL closes no communicator while a graph holds an operation of it."""
    prelude, codes = ENDS[end]
    ended = launch.expect(codes, train_words(text, tmp_path / "run", *SHORT), prelude + PARTING)
    assert all(out.splitlines()[-1:] == ["parted"] for out in ended.out), ended.out


def test_a_step_of_several_gpus_is_captured_unless_the_weights_are_shared_out(text):
    """Chosen by what is known without a GPU: that it runs there, only a GPU can say."""
    model, gpu = torch.nn.Module(), torch.device("cuda")
    assert choose_mode(settings(text), model, gpu).name == "graph"
    assert choose_mode(settings(text), model, gpu, sharded=True).name == "eager"
    with pytest.raises(ConfigError, match=r"does not work with train\.parallel='fsdp'"):
        choose_mode(settings(text, "train.launch=graph"), model, gpu, sharded=True)
    ranks, model = Ranks(0, 2), torch.nn.Linear(2, 2)
    assert type(make_processes("ddp", ranks, model, gpu, captured=True)) is Summed


def test_a_training_that_stands_still_is_noticed_from_outside_it(monkeypatch):
    """A collective operation inside a CUDA graph has no limit of its own."""
    monkeypatch.setenv("ELMAN_RANK_TIMEOUT", "0.5")
    monkeypatch.setattr(rank_signals, "SLACK", 0.0)
    silent = []
    signals = RankSignals(Ranks(0, 2), OneProcess())
    with signals.watched(silent.append):
        for _ in range(10):
            time.sleep(0.1)
            signals.beat()
        assert silent == []
        time.sleep(1.5)
    assert len(silent) == 1


def test_a_wish_to_save_lasts_until_it_is_asked_for():
    signals = RankSignals(Ranks(0, 2), OneProcess())
    for save in (1.0, 0.0):
        signals.hear(SimpleNamespace(read=lambda save=save: [0.0, 0.0, 0.0, 0.0, save, 0.0]))
    assert [signals.saves(), signals.saves()] == [True, False]


def test_an_evaluation_does_not_depend_on_the_number_of_ranks_in_any_bit(launch, text, tmp_path):
    prelude = f"""
import json, sys
from pathlib import Path
sys.path.insert(0, {os.path.dirname(__file__)!r})
from train_helpers import settings
from elman_core.training.start import start
trainer = start(settings(Path({str(text)!r}), "data.eval_bytes=1100"), Path(OUT), quiet=True)
print(json.dumps(trainer.evaluate()))
"""
    results = []
    for ranks in (1, 2, 4):
        ended = launch.expect([0] * ranks, ["list"], prelude.replace("OUT", repr(str(tmp_path / str(ranks)))))
        results += [out.splitlines()[0] for out in ended.out]
    assert len(set(results)) == 1
    assert len(results) == 7


@pytest.mark.parametrize("sets", [("data.sampling=tbptt",), ("train.parallel=fsdp",)], ids=["carried", "sharded"])
def test_a_run_goes_on_with_another_number_of_ranks(sets, launch, text, tmp_path):
    """Two ranks until a signal, then four, then one: the losses of one device throughout."""
    alone = [s for s in sets if "parallel" not in s]
    start(settings(text, "train.steps=24", *alone), tmp_path / "straight", quiet=True).fit()
    run = tmp_path / "run"
    stop = act(7, "os.kill(os.getpid(), signal.SIGTERM)", rank=1)
    ended = launch.expect([143, 143], train_words(text, run, "train.steps=24", *sets), stop)
    assert f"elman resume {run}" in ended.out[0]
    assert (manifest(run)["status"], manifest(run)["steps_done"]) == ("killed", 9)  # known to all a step later
    stop = act(15, "os.kill(os.getpid(), signal.SIGINT)", rank=3)
    ended = launch.expect([130] * 4, ["resume", run, "--set", "train.log_every=1"], stop)
    assert (manifest(run)["status"], manifest(run)["steps_done"]) == ("incomplete", 17)
    assert resume(run, quiet=True, sets=["train.parallel=auto"]).fit().status == "ok"
    assert losses(run) == pytest.approx(losses(tmp_path / "straight"), abs=2e-5)
    assert manifest(run)["parallel"]["ranks"] == 1
    assert [r["at_step"] for r in manifest(run)["resumed"]] == [9, 17]


def test_minutes_end_at_the_same_step_on_every_rank_whatever_their_clocks_say(launch, text, tmp_path):
    slow = "import time\nreal = time.perf_counter\nif RANK == 1: time.perf_counter = lambda: real() / 1000"
    out = tmp_path / "run"
    sized = train_words(text, out, "train.warmup=1")
    at = sized.index("train.steps=40")
    launch.expect([0, 0], [*sized[: at - 1], *sized[at + 1 :], "--minutes", "0.01"], slow)
    assert 0.6 <= metrics(out)[-1]["seconds"] < 5
    assert manifest(out)["status"] == "ok"


def test_a_wish_to_save_of_any_rank_is_heard_by_all(launch, text, tmp_path):
    wish = act(3, "os.kill(os.getpid(), signal.SIGUSR1)", rank=1)
    launch.expect([0, 0], train_words(text, tmp_path / "run", "train.steps=8", "train.keep=0"), wish)
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000005", "step-00000008"]


# one end for all -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all_with_a_line_and_the_run_goes_on(rank, launch, text, tmp_path):
    run = tmp_path / "run"
    began = time.monotonic()
    kill = act(6, "os.kill(os.getpid(), signal.SIGKILL)", rank)
    launch.start(2, train_words(text, run, "train.steps=10", "train.save_every=4"), kill)
    wait_for_step(run, 6)
    time.sleep(0.5)
    with contextlib.suppress(ProcessLookupError):  # the other may have ended by now
        os.kill(launch.pids[1 - rank], signal.SIGTERM)  # as torchrun does when it sees that a rank is gone
    ended = launch.wait()
    assert time.monotonic() - began < 60
    assert ended.codes == [-9 if r == rank else 1 for r in range(2)], ended.err
    said = ended.err[1 - rank]
    assert "a rank has ended or has not answered" in said
    assert said.count("\n") == ONE_LINE
    found = manifest(run)
    assert found["status"] == ("crashed" if rank else "running")  # nobody writes for the first rank
    assert "a rank has ended" in (found["error"] if rank else said)
    assert launch.run(2, ["resume", run]).codes == [0, 0]
    assert sorted(losses(run)) == list(range(1, 11))


def test_a_rank_that_does_not_answer_ends_all_within_the_time_given(launch, text, tmp_path):
    freeze = act(3, "os.kill(os.getpid(), signal.SIGSTOP)", rank=1)
    launch.start(2, train_words(text, tmp_path / "run", "train.steps=10"), freeze, ELMAN_RANK_TIMEOUT="4")
    run = tmp_path / "run"
    wait_for(lambda: (run / "manifest.json").exists() and manifest(run)["status"] == "crashed", 60)
    os.kill(launch.pids[1], signal.SIGKILL)
    ended = launch.wait()
    assert ended.codes == [1, -9]
    assert "has not answered for 4" in ended.err[0]


def test_a_rank_that_never_comes_is_not_waited_for_for_ever(launch, text, tmp_path):
    ended = launch.expect([1], train_words(text, tmp_path / "run"), WORLD_SIZE="2", ELMAN_RANK_TIMEOUT="2")
    assert "the 2 ranks did not find each other" in ended.err[0]
    assert not (tmp_path / "run").exists()


def test_what_fails_on_one_rank_is_said_once_with_its_number(launch, text, tmp_path):
    """Out of memory on rank 1: all exit with 3, and the run says oom."""
    prelude = """
from elman_core.training.step import TrainStep
real = TrainStep.forward
calls = []
def forward(self, windows, counted=None):
    calls.append(1)
    if RANK == 1 and len(calls) == 3:
        raise MemoryError
    return real(self, windows)
TrainStep.forward = forward
"""
    ended = launch.expect([3, 3], train_words(text, tmp_path / "run"), prelude)
    said = "".join(ended.err)
    assert said.startswith("elman: rank 1: out of memory on cpu in step 3")
    assert "try train.accumulate=2" in said
    assert said.count("\n") == ONE_LINE
    assert "rank 1: out of memory" in manifest(tmp_path / "run")["error"]
    assert manifest(tmp_path / "run")["status"] == "oom"


def test_an_observer_that_fails_stops_all_ranks_and_what_was_done_is_saved(launch, text, tmp_path):
    prelude = """
from elman_core.registry import hookimpl, plugins
class Bad:
    @hookimpl
    def elman_step_end(self, step):
        assert RANK == 0, "observers are called on the first rank"
        if step == 3:
            raise RuntimeError("no good")
plugins().manager.register(Bad(), name="elman-bad:bad")
"""
    ended = launch.expect([2, 2], train_words(text, tmp_path / "run", "train.steps=10"), prelude)
    assert "plugin elman-bad:bad failed in elman_step_end: RuntimeError: no good" in ended.err[0]
    assert ended.err[0].count("\n") == ONE_LINE
    assert ended.err[1] == ""
    assert manifest(tmp_path / "run")["status"] == "crashed"
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]
    assert launch.run(2, ["resume", tmp_path / "run"]).codes == [0, 0]
    assert sorted(losses(tmp_path / "run")) == list(range(1, 11))


def test_divergence_is_found_by_all_ranks_and_named_with_all_rows(launch, text, tmp_path):
    ended = launch.expect([4, 4], train_words(text, tmp_path / "run", "train.lr=1e6", "train.warmup=0"))
    assert ended.err[0].count("\n") == ONE_LINE
    assert ended.err[1] == ""
    report = json.loads((tmp_path / "run" / "diverged.json").read_text())
    assert len(report["batch"]["offsets"]) == 4
    assert manifest(tmp_path / "run")["status"] == f"diverged@{report['step']}"


def test_ranks_that_have_drifted_apart_save_nothing(launch, text, tmp_path):
    drift = act(3, "run.model.model.norm.weight.data[0] += 1e-6", rank=1)
    ended = launch.expect([1, 1], train_words(text, tmp_path / "run", "train.steps=6"), drift)
    assert "rank 1 no longer holds the weights of rank 0" in ended.err[0]
    assert not (tmp_path / "run" / "checkpoints").exists()


# what is refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "sets", "said"),
    [
        (2, ("train.batch_size=5",), "train.batch_size 5 does not divide into 2 ranks: the nearest that does is 4"),
        (2, ("train.accumulate=4",), "does not divide into 2 ranks of 4 micro-batches: the nearest that does is 8"),
        (2, ("train.parallel=fsdp", "train.optimizer=schedulefree"), "train.parallel='fsdp' needs train.optimizer='adamw'"),
        (2, ("train.parallel=fsdp", "data.sampling=tbptt"), "does not work with data.sampling='tbptt': use 'ddp'"),
        (2, ("train.device=cuda",), "there are 0 CUDA devices here, too few for the ranks"),
        (2, ("train.device='cuda:1'",), "with 2 ranks each has its own"),
        (2, ("train.stesp=1",), "Did you mean 'train.steps'"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_of_one_rank_and_exit_2(ranks, sets, said, launch, text, tmp_path):
    ended = launch.expect([2] * ranks, train_words(text, tmp_path / "run", *sets))
    assert said in "".join(ended.err)
    assert "".join(ended.err).count("\n") == ONE_LINE
    assert not (tmp_path / "run").exists()


def test_a_parameter_without_a_gradient_is_one_line_that_says_what_helps(launch, text, tmp_path):
    sets = "model.variant=e23", "train.chunk_size=1", "train.steps=3"
    ended = launch.expect([2, 2], train_words(text, tmp_path / "run", *sets))
    model = LadderForCausalLM(LadderConfig(variant="e23", hidden_size=16, num_hidden_layers=2))
    model(torch.zeros(1, 1, dtype=torch.int64)).logits.sum().backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None]
    assert f"{idle[0]} got no gradient: use train.parallel=fsdp" in "".join(ended.err)
    assert "".join(ended.err).count("\n") == ONE_LINE
    launch.expect([0, 0], train_words(text, tmp_path / "sharded", *sets, "train.parallel=fsdp"))


@pytest.mark.parametrize(
    ("prelude", "said"),
    [
        ("import os\nif RANK: os.chdir('other')", "rank 1 has a text with the fingerprint"),
        ("import os\nif RANK: os.chdir('missing')", "rank 1: there is no file text"),
        ("import elman_core\nif RANK: elman_core.__version__ = '0.0.9'", "rank 1 has elman-core 0.0.9, rank 0 has"),
    ],
    ids=["another text", "no text", "another version"],
)
def test_ranks_that_would_train_on_different_things_are_refused(prelude, said, launch, text, tmp_path):
    (tmp_path / "text").write_bytes(text.read_bytes())
    (tmp_path / "other").mkdir()
    (tmp_path / "missing").mkdir()
    (tmp_path / "other" / "text").write_bytes(bytes([65]) * text.stat().st_size)
    prelude = f"import os; os.chdir({str(tmp_path)!r})\n{prelude}"
    ended = launch.expect([2, 2], train_words("text", tmp_path / "run"), prelude)
    assert said in ended.err[0]
    assert ended.err[0].count("\n") == ONE_LINE
    assert ended.err[1] == ""
    assert not (tmp_path / "run").exists()


# the launcher itself -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_torchrun_passes_a_signal_on_and_the_run_is_saved(text, tmp_path):
    """SIGTERM to torchrun alone, as a cluster's scheduler sends it to the first process of a job."""
    run = tmp_path / "run"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "elman_core"]
    command = [sys.executable, *torchrun, *train_words(text, run, "train.steps=100000", "train.warmup=1")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        wait_for_step(run, 3)
        asked = time.monotonic()
        job.send_signal(signal.SIGTERM)
        out, err = job.communicate(timeout=60)
    finally:
        job.kill()
    assert time.monotonic() - asked < 30  # torchrun waits so long before it kills
    assert job.returncode != 0
    assert manifest(run)["status"] == "killed"
    done = manifest(run)["steps_done"]
    assert f"elman resume {run}" in out
    check_folder(run / "checkpoints" / f"step-{done:08d}")
    assert "rank has ended" not in err
    assert resume(run, steps="+2", quiet=True).fit().step == done + 2
