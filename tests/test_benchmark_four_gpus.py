"""The call on several GPUs: what it checks, packs and makes tables of; and all of the watching, on GPUs that are names."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import time
import types
from pathlib import Path

import pytest
from seen_gpus import SeenMonitor
from train_helpers import write_text

from elman_core.experiments.jobs.job import Attempt, State, write_state

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


four, watching, results, texts, filling = (
    load(n) for n in ("four_gpus", "suite_watch", "results_page", "python_sources", "fill_triton_cache")
)


# the text


def test_the_text_is_the_same_wherever_the_files_lie(tmp_path):
    for place, names in (("a", ("x/one.py", "two.py", "again.py")), ("b", ("two.py", "y/z/other.py"))):
        for name in names:
            path = tmp_path / place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("print(2)\n" if "two" in name or "again" in name else "print(1)\n")
    (tmp_path / "a/elman_core").mkdir()
    (tmp_path / "a/elman_core/new.py").write_text("print(3)\n")
    (tmp_path / "a/none.py").write_bytes(b"\xff\xfe")
    (tmp_path / "a/empty.py").touch()
    (tmp_path / "a/no.txt").write_text("text")
    first, second = (texts.write(tmp_path / f"{p}.txt", [tmp_path / p]) for p in "ab")
    assert first["sha256"] == second["sha256"]
    assert (first["files"], first["bytes"]) == (2, 20)
    assert sorted((tmp_path / "a.txt").read_bytes().split(b"\x1e")) == [b"", b"print(1)\n", b"print(2)\n"]
    assert json.loads((tmp_path / "a.txt.json").read_text()) == first
    assert texts.main([str(tmp_path / "c.txt"), "--from", str(tmp_path / "b"), "--least", "21"]) == 1


# candidates of kernels


def test_every_candidate_is_somebodys_and_nobody_has_none():
    for count in (1, 3, 16, 17):
        shares = [filling.share(list(range(count)), worker, 16) for worker in range(16)]
        assert {c for some in shares for c in some} == set(range(count))
        assert all(shares)


class Autotuner:
    """What `triton.runtime.autotuner.Autotuner` does with one candidate: runs it."""

    def __init__(self, configs):
        self.configs, self.ran = configs, []

    def run(self, limit):
        assert len(self.configs) == 1, "with several it would time them"
        self.ran += self.configs
        if self.configs[0] > limit:
            raise RuntimeError("out of shared memory")
        return self.configs[0]


def test_a_worker_runs_its_share_and_another_candidate_only_where_its_own_cannot_run(monkeypatch):
    module = types.SimpleNamespace(Autotuner=type("Copy", (Autotuner,), {"run": Autotuner.run}))
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.runtime", types.SimpleNamespace(autotuner=module))
    with filling.compile_a_share(1, 3):
        tuner = module.Autotuner([0, 1, 2, 3, 4, 5])
        assert tuner.run(9) == 4
        assert tuner.ran == [1, 4]
        tuner.run(9)
        assert tuner.ran == [1, 4, 1, 4], "the next call has the same share"
        tuner = module.Autotuner([0, 1, 2, 3, 4, 5])
        assert tuner.run(0) == 0
        assert tuner.ran == [1, 4, 0], "what follows needs some result"
        with pytest.raises(RuntimeError, match="shared memory"):
            module.Autotuner([1, 2]).run(0)
    assert tuner.configs == [0, 1, 2, 3, 4, 5]
    assert module.Autotuner.run is Autotuner.run, "others choose as ever"


# the checks


def moment(at, **gpus):
    return {"time": float(at), "gpus": {u: [[pid, session, "python"] for pid, session in on] for u, on in gpus.items()}}


@pytest.fixture
def folder(tmp_path):
    """A suite of two jobs, of which the first was killed and resumed."""
    folder = tmp_path / "suite"
    jobs = {"a": State("a", "ok", False, [Attempt(pid=10, exit_code=137), Attempt(pid=12, exit_code=0)])}
    jobs["b"] = State("b", "ok", True, [Attempt(pid=11, exit_code=0, strangers=["pid 77 (python)"])])
    for id, state in jobs.items():
        (folder / "runs" / id).mkdir(parents=True)
        write_state(folder / "jobs" / f"{id}.json", state)
    (folder / "suite.json").write_text(json.dumps({"jobs": [{"id": id} for id in jobs]}))
    steps = [{"kind": "step", "step": n} for n in range(1, 8)]
    (folder / "runs/a/metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
    (folder / "runs/a/manifest.json").write_text(json.dumps({"resumed": [{"at_step": 5}]}))
    return folder


def seen():
    samples = [moment(t, one=[(110, 10)], two=[(111, 11)], three=[(99, 1)]) for t in range(4)]
    samples.append(moment(5, one=[(112, 12)], two=[(111, 11), (77, 1)], three=[]))
    planted, company = {"pid": 99, "uuid": "three"}, {"pid": 77, "uuid": "two", "job": "b"}
    killed = {"job": "a", "pid": 110, "checkpoint": "step-00000005"}
    return watching.Watch(samples, planted, company, killed, "gpu 2 used by pid 99 (python)")


def test_all_checks_hold_where_all_went_as_it_should(folder):
    found = watching.checks(seen(), folder, 0)
    assert all(holds for holds, _ in found.values()), found


def broken(name):
    """What was seen, with one thing wrong, and the check that must fail for it."""
    watch = seen()
    if name == "crowded":
        watch.samples.append(moment(6, one=[(110, 10), (111, 11)], two=[], three=[]))
        return watch, "the driver saw every job"
    if name == "spread":
        watch.samples.append(moment(6, one=[(110, 10)], two=[(110, 10)], three=[]))
        return watch, "the driver saw every job"
    if name == "unseen":
        watch.samples = [moment(t, one=[(110, 10)], two=[], three=[(99, 1)]) for t in range(5)]
        return watch, "the driver saw every job"
    if name == "beside":
        watch.samples.append(moment(6, one=[], two=[], three=[(99, 1), (110, 10)]))
        return watch, "the planted process"
    if name == "unnamed":
        watch.said = "gpu 2 free"
        return watch, "elman jobs status"
    if name == "unflagged":
        watch.company["pid"] = 78
        return watch, "company was flagged"
    watch.killed = {} if name == "nobody killed" else {**watch.killed, "checkpoint": "step-00000006"}
    return watch, "the killed training"


@pytest.mark.parametrize(
    "name", ["crowded", "spread", "unseen", "beside", "unnamed", "unflagged", "nobody killed", "older"]
)
def test_each_check_fails_for_what_it_is_about_and_no_other(name, folder):
    watch, expected = broken(name)
    failed = [check for check, (holds, _) in watching.checks(watch, folder, 0).items() if not holds]
    assert len(failed) == 1
    assert failed[0].startswith(expected)


@pytest.mark.parametrize("numbers", [[1, 2, 4], [1, 2, 2, 3]])
def test_a_step_that_is_missing_or_repeated_is_found(numbers, folder):
    steps = [json.dumps({"kind": "step", "step": n}) + "\n" for n in numbers]
    (folder / "runs/a/metrics.jsonl").write_text("".join(steps))
    assert not watching.checks(seen(), folder, 0)["the killed training was resumed and misses and repeats no step"][0]


def test_events_are_read_from_a_terminals_log(tmp_path):
    (tmp_path / "log").write_bytes(b"\x1b[?25l[  0:01] a: started on gpu 0\r\n\x1b[2K job\x1b[1A\r[  1:02] b: ok\r\n")
    assert watching.plain(tmp_path / "log") == ["[  0:01] a: started on gpu 0", "[  1:02] b: ok"]


SMALL = """
seeds = 1
models = ["gru@32x1", "lstm@32x1", { model = "gru@24x1", label = "c" }]
[protocol.train]
batch_size = 4
chunk_size = 32
minutes = 1.0
warmup = 10
[protocol.data]
eval_bytes = 1000
"""


@pytest.mark.slow  # four real trainings
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_suite_is_watched_on_gpus_that_are_names(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ELMAN_LOCKS", str(tmp_path / "locks"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    script = Path(__file__).with_name("seen_gpus.py")
    monkeypatch.setattr(watching, "ELMAN", (sys.executable, str(script), "3"))

    def hold(uuid, seconds):
        code = f"import time; print('on', flush=True); time.sleep({seconds})"
        code = f"import os, sys; input(); os.execv(sys.executable, ['python', '-c', {code!r}, 'SEEN_HOLD'])"
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": uuid}
        return subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    monkeypatch.setattr(watching, "hold", hold)
    (tmp_path / "small.toml").write_text(SMALL)
    text = write_text(tmp_path / "text", 100_000)
    words = ["--out", str(tmp_path / "out"), "--data", str(text), "--suite", str(tmp_path / "small.toml")]
    words += ["--minutes", "0.1", "--planted", "12", "--save-every", "20", "--limit", "100"]
    code = watching.main(words, SeenMonitor(3))
    said = capsys.readouterr().out
    assert code == 0, said
    assert said.count("ok  ") == 6


# the call


def test_a_part_that_takes_too_long_is_ended_and_the_rest_goes_on(tmp_path, capsys):
    call = four.Call(tmp_path, four.LAST + 3)
    children = [
        call.start("slow", ["sh", "-c", "sleep 60 & sleep 60"], 1),
        call.start("bad", ["sh", "-c", "echo no good; exit 3"], 1),
        call.start("good", ["sh", "-c", "echo $THIS $CUDA_VISIBLE_DEVICES"], 100, gpus="1", THIS="is"),
    ]
    began = time.monotonic()
    call.wait(*children)
    assert time.monotonic() - began < 10
    assert {o["part"]: (o["status"], o["code"]) for o in call.outcomes} == {
        "slow": ("stopped", None), "bad": ("failed", 3), "good": ("ok", 0),
    }  # fmt: skip
    assert "no good" in capsys.readouterr().out
    assert (tmp_path / "good.log").read_text() == "is 1\n"
    assert children[2].until <= call.end, "nothing has longer than the whole call"
    assert [o["part"] for o in json.loads((tmp_path / "summary.json").read_text())["parts"]] != []


def test_what_is_asked_to_end_is_given_time_to_save(tmp_path):
    call = four.Call(tmp_path, 100)
    child = call.start("saves", ["sh", "-c", "trap 'echo saved; exit 0' INT; sleep 60 & wait"], 0.5, stop=2)
    call.wait(child)
    assert child.outcome["status"] == "stopped"
    assert (tmp_path / "saves.log").read_text() == "saved\n"


def test_what_is_packed_holds_everything_but_weights_and_locks(tmp_path):
    for name in ("100mb/suite.json", "100mb/runs/a/manifest.json", "100mb/runs/a/checkpoints/step-1/x", "100mb/runs/a/.lock",
                 "100mb/jobs/a.1.lock", "python-sources.txt", "python-sources.txt.json"):  # fmt: skip
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).touch()
    four.pack(tmp_path / "out", tmp_path / "all.tar.gz")
    with tarfile.open(tmp_path / "all.tar.gz") as tar:
        assert tar.getnames() == ["100mb/runs/a/manifest.json", "100mb/suite.json", "python-sources.txt.json"]


def test_the_parts_run_what_a_user_could_type(tmp_path, monkeypatch):
    started = []

    def start(self, name, words, limit, gpus="", stop=0, **more):
        started.append((name, words))
        return four.Child(name, None, 0.0, 0.0, outcome={"status": "ok"})

    monkeypatch.setattr(four.Call, "start", start)
    monkeypatch.setattr(four, "all_begun", lambda _: True)
    given = argparse.Namespace(
        triton="gdn@640x8",
        workers=2,
        gpus=4,
        steps=60,
        data=tmp_path / "t",
        minutes=0.1,
        planted=9.0,
        suite="100mb",
        tuning=5,
    )
    four.run(four.Call(tmp_path, 500), given, four.PARTS)
    assert [name for name, _ in started] == [
        "ranks", "triton", "tests-equal", "tests-killed", "tests-four", "scaling", "scaling-2", "scaling-fsdp",
        "scaling-eager", "sums", "suite", "comparison",
    ]  # fmt: skip
    for _, words in started:
        scripts = [Path(w) for w in words if str(w).endswith(".py")]
        assert all((BENCHMARKS.parent / s).exists() for s in scripts), words
    assert started[-1][1][-2:] == ["--tuning", "5"]
    started.clear()
    given.gpus = 2
    four.run(four.Call(tmp_path, 500), given, ["tests", "scaling", "sums"])
    assert [name for name, _ in started] == [
        "triton",
        "tests",
        "scaling",
        "scaling-fsdp",
        "scaling-eager",
        "sums",
    ]
    assert started[-1][1][2:4] == ["--gpus", "2"]
    assert "1,2" in started[2][1]
    seconds = float(started[2][1][started[2][1].index("--seconds") + 1])
    assert 200 < seconds < four.LIMITS["scaling"], "it says itself where ranks hang, before it is ended"


def test_the_comparison_begins_when_no_run_of_the_suite_waits(folder):
    assert four.all_begun(folder)
    for status, begun in (("running", True), ("diverged@3", True), ("killed", False), ("waiting", False)):
        write_state(folder / "jobs/a.json", State("a", status))
        assert four.all_begun(folder) == begun, status
    assert not four.all_begun(folder / "nowhere")


# the page


def test_the_page_says_what_the_files_say(tmp_path):
    root = BENCHMARKS.parent
    assert not any((results.ROOT / "benchmarks/results" / f).exists() for f in results.FILES.values()) or (
        root / "docs/results.md"
    ).read_text() == results.page(root / "benchmarks/results"), "run: python benchmarks/results_page.py page"


def made_suite(folder):
    """A suite of two models with two trials each; the second has not ended."""
    settings = {"train": {"lr": 1e-3}}
    jobs, sizes = [], {"fast": 26_500_000, "slow": 26_600_000}
    for model, parameters in sizes.items():
        common = {"model": model, "what": f"{model}@8x1", "parameters": parameters, "seed": 42, "settings": settings}
        trials = [f"{model}-lr{r}-trial" for r in (1, 2)]
        jobs += [{**common, "id": id, "trials": []} for id in trials] + [{**common, "id": model, "trials": trials}]
    for name in ("jobs", "runs"):
        (folder / name).mkdir(parents=True)
    for i, job in enumerate(jobs):
        status = "running" if job["id"] == "slow" else "ok"
        write_state(folder / "jobs" / f"{job['id']}.json", State(job["id"], status))
        result = {
            "bits_per_byte": 2 - i / 10,
            "loss_last_100_steps": 1.0,
            "tok_s": 1e6,
            "peak_memory": 2**31,
            "bytes_seen": 7,
        }
        manifest = {
            "status": status, "settings": {"train": {"lr": 1e-3 * (1 + i % 3 % 2)}}, "result": result if status == "ok" else {},
            "hardware": {"gpu": "NVIDIA Test"}, "versions": {"torch": "9.9"}, "protocol_hash": f"hash{'trial' in job['id']:d}",
            "backends": ["layers 0-1 X: torch"], "step": {"mode": "graph"},
        }  # fmt: skip
        (folder / "runs" / job["id"]).mkdir()
        (folder / "runs" / job["id"] / "manifest.json").write_text(json.dumps(manifest))
    facts = {"name": "100mb", "summary": "made up", "jobs": jobs}
    (folder / "suite.json").write_text(json.dumps(facts))
    (folder / "suite.toml").write_text("models = []\n")


def test_a_folder_that_came_back_becomes_result_files_and_a_page(tmp_path, capsys):
    back = tmp_path / "back"
    made_suite(back / "100mb")
    (back / "python-sources.txt.json").write_text(json.dumps({"bytes": 123456789, "sha256": "ab" * 32}))
    rows = [
        {"model": "e", "gpus": 1, "kind": "one", "rows_per_gpu": 32, "tok_s": 100, "memory_gib": 1.5, "launch": "graph",
         "parallel": {"kind": "none"}, "hardware": {"gpu": "NVIDIA Test"}, "beside": 2, "times_one": 1.0},
        {"model": "e", "gpus": 4, "kind": "fsdp", "rows_per_gpu": 32, "reason": "not done after 40 s"},
    ]  # fmt: skip
    (back / "scaling.json").write_text(json.dumps({"rows": rows, "length": 512, "target_on_four": 3.6}))
    out, docs = tmp_path / "results", tmp_path / "results.md"
    (back / "gradient_sums.json").write_text(json.dumps({"commit": "unknown", "rows": []}))
    words = ["collect", str(back), "--commit", "abc123", "--results", str(out), "--docs", str(docs)]
    assert results.main(words) == 0
    assert sorted(p.name for p in out.iterdir()) == [
        "100mb_h200.json", "gradient_sums_h200.json", "scaling_h200.json"
    ]  # fmt: skip
    assert json.loads((out / "gradient_sums_h200.json").read_text()) == {"commit": "abc123", "rows": []}
    text = docs.read_text()
    assert "| `fast@8x1` | 26,500,000 | 0.001 | 1.8000 | 1.0000 | 1,000,000 | 2.0 |" in text
    assert "Without a result: `slow@8x1` (running)." in text
    assert "on 123,456,789 bytes" in text
    assert "NVIDIA Test; torch 9.9" in text
    assert "| `fast@8x1` | **2.0000** | 1.9000 |" in text
    assert "| `slow@8x1` | 1.7000 | 1.6000 |" in text, "nothing was chosen yet"
    assert "of the trials on 7 bytes" in text, "a trial that did not end is not one of that length"
    assert "Not of one protocol" not in text
    assert "| `e` | 4 | fsdp | not done after 40 s |" in text
    assert "Commit abc123" in text
    assert "The scheduler on real GPUs" not in text
    assert "no pictures: there is nothing to draw" in capsys.readouterr().err
    assert "![" not in text
    for name in results.PICTURES:
        (out / f"100mb_h200_{name}.svg").write_text("<svg/>")
    assert results.page(out).count("](../benchmarks/results/100mb_h200_") == 3
    with pytest.raises(SystemExit, match="nothing of it is in"):
        results.collect([tmp_path / "nowhere"], out, "x")


def test_runs_of_another_text_or_protocol_are_named(tmp_path):
    model = {"model": "a", "what": "a@8x1", "parameters": 1, "seed": 1, "lr": 0.1, "status": "ok", "trials": [], "step": {},
             "backends": [], "hardware": {}, "versions": {}, "protocol_hash": "p",
             "result": {"bits_per_byte": 1.0, "loss_last_100_steps": 1.0, "tok_s": 1.0, "peak_memory": 1}}  # fmt: skip
    models = [model, {**model, "what": "b@8x1"}, {**model, "what": "c@8x1", "protocol_hash": "q"}]
    facts = {"suite": "100mb", "models": models, "text": {}, "commit": "x"}
    (tmp_path / "100mb_h200.json").write_text(json.dumps(facts))
    assert "Not of one protocol and text with the others: `c@8x1`." in results.page(tmp_path)


def test_links_to_the_page_are_made_once(tmp_path):
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/README.md"):
        (tmp_path / name).write_text((BENCHMARKS.parent / name).read_text().replace("results.md", "elsewhere.md"))
    assert results.link(tmp_path) == [tmp_path / "README.md", tmp_path / "docs/README.md"]
    assert results.link(tmp_path) == []
    assert "(docs/results.md)" in (tmp_path / "README.md").read_text()
