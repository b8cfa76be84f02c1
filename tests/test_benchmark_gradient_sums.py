"""benchmarks/gradient_sums.py: its ways under gloo, the shapes it takes, its file. Time needs GPUs."""

import json
import types
from pathlib import Path

import gradient_sums
import pytest
import torch
import torch.distributed as dist
from ranks import Launcher

from elman_core import LadderConfig, LadderForCausalLM

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

MEANS = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import torch
import gradient_sums
from elman_core.training.distributed import join
ranks = join()

def drawn(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) for shape in ((5, 7), (3,), (8, 4), (), (2, 9))]

expected = [torch.stack(each).double().mean(0) for each in zip(*map(drawn, range(ranks.size)))]
# a bucket of each, of some, of all; what is left at the end
ways = {{f"flat {{n}}": gradient_sums.flat(n) for n in (4, 150, 4000)}}
ways |= {{name: gradient_sums.WAYS[name] for name in ("grouped", "core")}}
for name, way in ways.items():
    mine = drawn(ranks.rank)
    where = [g.data_ptr() for g in mine]
    way(mine, ranks.size)
    for found, true in zip(mine, expected, strict=True):
        assert torch.allclose(found.double(), true, atol=1e-6), name
    assert [g.data_ptr() for g in mine] == where, name
"""


def test_every_way_that_gloo_knows_makes_the_means_where_the_gradients_lie(tmp_path):
    launcher = Launcher(tmp_path)
    try:
        ended = launcher.run(3, ["list"], MEANS)
    finally:
        launcher.close()
    assert ended.codes == [0, 0, 0], ended.err


def test_buckets_are_summed_as_soon_as_they_are_full(monkeypatch):
    summed = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: summed.append(tensor.numel()))
    gradient_sums.flat(40)([torch.ones(n) for n in (4, 4, 4, 20, 1)], 1)
    assert summed == [12, 20, 1]


def test_shapes_are_those_of_every_parameter_without_a_model_in_memory():
    made = LadderForCausalLM(LadderConfig(variant="e42", hidden_size=32, num_hidden_layers=2))
    assert gradient_sums.shapes_of("e42@32x2") == [p.shape for p in made.parameters()]


def test_two_replays_do_not_count_and_a_time_is_of_one_of_what_the_graph_holds(monkeypatch):
    durations = iter([900.0, 700.0, *([30.0] * 5), 40.0, *([50.0] * 4)])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            said.append("event")

        def synchronize(self):
            said.append("wait")

        def elapsed_time(self, _end):
            return next(durations)

    said = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    graph = types.SimpleNamespace(replay=lambda: said.append("replay"))
    found = gradient_sums.replayed(graph, 10, lambda: said.append("meet"))
    assert found == pytest.approx(3.5)
    assert said == ["meet", "event", "replay", "event", "wait"] * 12
    assert next(durations, None) is None


def test_rows_of_other_numbers_of_gpus_stay_in_the_file(tmp_path, monkeypatch):
    def spawn(_function, args, nprocs):
        ranks, models, _, into = args
        assert nprocs == ranks
        rows = [{"model": m, "gpus": ranks, "ms": len(made)} for m in models]
        made.append(ranks)
        Path(into).write_text(json.dumps(rows))

    made: list[int] = []
    monkeypatch.setattr(gradient_sums.mp, "spawn", spawn)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    out = tmp_path / "new" / "sums.json"
    for gpus in ("2,4", "2"):
        assert gradient_sums.main(["--gpus", gpus, "--models", "e,f", "--out", str(out), "--commit", "abc"]) == 0
    written = json.loads(out.read_text())
    assert [(r["gpus"], r["model"], r["ms"]) for r in written["rows"]] == [
        (4, "e", 1), (4, "f", 1), (2, "e", 2), (2, "f", 2)
    ]  # fmt: skip
    assert (written["commit"], written["nccl"]) == ("abc", "2.28.9")
