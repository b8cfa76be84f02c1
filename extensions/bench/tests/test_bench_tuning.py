"""A suite that tries values on short runs and goes on with the best, here, later, and on another machine."""

import contextlib
import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import test_bench_suite
from elman_bench.jobs.job import Attempt, State, read_state, write_state
from elman_bench.results.runs import read_suite
from elman_bench.suite import folder as folder_module
from elman_bench.suite import record as record_module
from elman_bench.suite.record import Record
from scheduler_helpers import cpu_executor, schedule, shell_job, state
from test_bench_cli import states
from test_bench_suite import TINY, Overrides, ids, plan, suite
from train_helpers import write_text

from elman_core import storage
from elman_core.cli import main
from elman_core.metrics import read_metrics
from elman_core.registry import CheckpointError, ConfigError, StorageError
from elman_core.storage import read_json, write_json
from elman_core.training.settings import from_dict, read_recipe

TRIED = TINY + '[tuned]\n"train.lr" = [1e-3, 3e-3]\n[tuning]\ntokens = 64\n'


def opened(tmp_path, text=TRIED, **overrides):
    return test_bench_suite.opened(tmp_path, text, **overrides)


def ended(tmp_path, id, bits, status="ok"):
    """A trial that ended so."""
    run = tmp_path / "out/runs" / id
    run.mkdir(parents=True)
    result = {} if bits is None else {"bits_per_byte": bits, "loss_last_100_steps": -bits}
    (run / "manifest.json").write_text(json.dumps({"status": status, "result": result}))


def test_trials_of_a_model_come_before_its_run_and_are_made_once_for_all_seeds(tmp_path):
    planned = plan(suite(tmp_path, TRIED), Overrides("/text"))
    trials = {m: tuple(f"{m}-16x1-lr{lr}-s42-trial" for lr in ("0.001", "0.003")) for m in ("e42", "g")}
    assert ids(planned) == [
        *trials["e42"], "e42-16x1-s42", *trials["g"], "g-16x1-s42", "e42-16x1-s43", "g-16x1-s43",
    ]  # fmt: skip
    jobs = {job.id: job for job in planned.jobs}
    assert jobs["e42-16x1-s43"].trials == trials["e42"]
    assert jobs["g-16x1-s42"].trials == trials["g"]
    assert [jobs[id].lr for id in trials["g"]] == [1e-3, 3e-3]
    trial, final = jobs[trials["g"][0]].settings, jobs["g-16x1-s42"].settings
    assert (trial.train.steps, trial.train.save_every, trial.train.eval_every) == (2, 0, 0)
    assert final.train.steps == 4
    assert jobs[trials["g"][0]].trials == ()


def test_the_command_line_sets_how_long_trials_are_and_one_value_needs_none(tmp_path):
    short = plan(suite(tmp_path, TRIED), Overrides("/text", ("g",), 1, tuning=100))
    assert [job.settings.train.steps for job in short.jobs] == [4, 4, 4]
    alone = plan(suite(tmp_path, TRIED), Overrides("/text", ("g",), 1, sets=("train.lr=0.5",)))
    assert [(job.id, job.trials, job.lr) for job in alone.jobs] == [("g-16x1-s42", (), 0.5)]
    minutes = plan(suite(tmp_path, TRIED), Overrides("/text", ("g",), 1, minutes=2))
    assert [(job.settings.train.steps, job.settings.train.minutes) for job in minutes.jobs] == [(2, None)] * 2 + [
        (None, 2.0)
    ]


def test_a_value_of_an_option_is_another_model_with_trials_of_its_own(tmp_path):
    overrides = Overrides("/text", ("e42",), 1, sets=("model.options.expansion=[1.0,2.0]",))
    jobs = plan(suite(tmp_path, TRIED), overrides).jobs
    finals = [job for job in jobs if job.trials]
    assert [job.id for job in finals] == ["e42-16x1-expansion1-s42", "e42-16x1-expansion2-s42"]
    assert [len(job.trials) for job in finals] == [2, 2]
    assert finals[0].parameters < finals[1].parameters
    assert {job.parameters for job in jobs if job.id in finals[1].trials} == {finals[1].parameters}


def test_the_best_of_those_that_ended_well_is_chosen_and_stays(tmp_path):
    jobs = {job.id: job for job in opened(tmp_path, models=("g",), seeds=1)}
    low, high = "g-16x1-lr0.001-s42-trial", "g-16x1-lr0.003-s42-trial"
    final = jobs["g-16x1-s42"]
    assert final.after == (low, high)
    assert jobs[low].after == ()
    with pytest.raises(ConfigError, match="no trial ended well"):
        final.prepare()
    ended(tmp_path, low, 3.0)
    ended(tmp_path, high, 2.0)
    final.prepare()
    made = from_dict(read_recipe(tmp_path / "out/jobs/g-16x1-s42.toml"))
    assert (made.train.lr, made.train.steps) == (3e-3, 4)
    entry = next(j for j in json.loads((tmp_path / "out/suite.json").read_text())["jobs"] if j["id"] == "g-16x1-s42")
    assert (entry["chosen"], entry["lr"], entry["settings"]["train"]["lr"]) == ({"train.lr": 3e-3}, 3e-3, 3e-3)
    write_state(tmp_path / "out/jobs/g-16x1-s42.json", State("g-16x1-s42", "ok"))
    again = {job.id: job for job in opened(tmp_path, models=("g",), seeds=1)}
    assert again["g-16x1-s42"].after == (low, high)
    kept = next(j for j in json.loads((tmp_path / "out/suite.json").read_text())["jobs"] if j["id"] == "g-16x1-s42")
    assert kept == entry, "opening the folder again does not forget it"


@pytest.mark.parametrize("write", ["write_json", "write_text"])
def test_a_choice_that_could_not_be_written_is_made_again(tmp_path, monkeypatch, write):
    jobs = {job.id: job for job in opened(tmp_path, models=("g",), seeds=1)}
    ended(tmp_path, "g-16x1-lr0.001-s42-trial", 3.0)
    ended(tmp_path, "g-16x1-lr0.003-s42-trial", 2.0)
    with monkeypatch.context() as patched:
        patched.setattr(folder_module, write, Mock(side_effect=StorageError("the disk is full")))
        with pytest.raises(StorageError):
            jobs["g-16x1-s42"].prepare()
    jobs["g-16x1-s42"].prepare()
    assert from_dict(read_recipe(tmp_path / "out/jobs/g-16x1-s42.toml")).train.lr == 3e-3


def test_a_trial_of_a_value_that_was_added_or_left_out_later_stays_a_trial(tmp_path):
    opened(tmp_path, models=("g",), seeds=1)
    opened(tmp_path, sets=("train.lr=[3e-3,1e-2]",), models=("g",), seeds=1)
    trials = {f"g-16x1-lr{lr}-s42-trial" for lr in ("0.001", "0.003", "0.01")}
    assert read_suite(tmp_path / "out")[0].trials == trials
    write_state(tmp_path / "out/jobs/g-16x1-s42.json", State("g-16x1-s42", "ok"))
    opened(tmp_path, sets=("train.lr=[3e-3,1e-2,3e-2]",), models=("g",), seeds=1)
    assert read_suite(tmp_path / "out")[0].trials == {*trials, "g-16x1-lr0.03-s42-trial"}


def test_a_trial_that_diverged_has_no_say_and_the_last_losses_decide_where_nothing_is_held_out(tmp_path):
    opened(tmp_path, models=("g",), seeds=1)
    entries = json.loads((tmp_path / "out/suite.json").read_text())["jobs"]
    ended(tmp_path, "g-16x1-lr0.001-s42-trial", 3.0)
    ended(tmp_path, "g-16x1-lr0.003-s42-trial", 1.0, "diverged@2")
    assert folder_module.best(tmp_path / "out", entries[:2]) == {"train.lr": 1e-3}
    for id, loss in (("g-16x1-lr0.001-s42-trial", 2.0), ("g-16x1-lr0.003-s42-trial", 1.5)):
        manifest = {"status": "ok", "result": {"loss_last_100_steps": loss}}
        (tmp_path / "out/runs" / id / "manifest.json").write_text(json.dumps(manifest))
    assert folder_module.best(tmp_path / "out", entries[:2]) == {"train.lr": 3e-3}


# the scheduler


def test_a_job_waits_for_others_and_does_not_hold_up_those_behind_it(tmp_path):
    order = tmp_path / "order"
    said = f"echo $ID >> {order}"
    first = shell_job(tmp_path, "first", f"until grep -q behind {order}; do sleep 0.05; done; {said}")
    bad = shell_job(tmp_path, "bad", f"{said}; exit 4")
    prepared = []
    later = replace(shell_job(tmp_path, "later", said), after=("first", "bad"), prepare=lambda: prepared.append(1))
    statuses, _ = schedule([first, bad, later, shell_job(tmp_path, "behind", said)], cpu_executor(2))
    assert statuses == {"first": "ok", "bad": "crashed", "later": "ok", "behind": "ok"}
    assert order.read_text().split() == ["bad", "behind", "first", "later"]
    assert prepared == [1]


def test_a_job_that_cannot_be_prepared_says_why_and_gives_its_place_back(tmp_path):
    def refuse():
        raise ConfigError("no trial ended well")

    jobs = [replace(shell_job(tmp_path, "a", "true"), prepare=refuse), shell_job(tmp_path, "b", "true")]
    statuses, said = schedule(jobs, cpu_executor(1))
    assert statuses == {"a": "crashed", "b": "ok"}
    assert "a: crashed: no trial ended well" in said.events
    assert state(jobs[0]).attempts[0].cause == "no trial ended well"


def test_a_job_whose_trials_have_no_answer_stays_waiting(tmp_path):
    jobs = [shell_job(tmp_path, "a", "kill -9 $$"), replace(shell_job(tmp_path, "b", "true"), after=("a",))]
    statuses, said = schedule(jobs, cpu_executor(1), retries=0)
    assert statuses == {"a": "killed", "b": "waiting"}
    assert "b: not started: it waits for a, which did not all end" in said.events
    jobs[0] = shell_job(tmp_path, "a", "true")
    assert schedule(jobs, cpu_executor(1))[0] == {"a": "ok", "b": "ok"}


# all of it


SMALL = """
models = ["gru@16x1"]
seeds = 1
[tuned]
"train.lr" = [1e-6, 1e-2]
[tuning]
tokens = 1920
[protocol.train]
batch_size = 2
chunk_size = 16
steps = 200
[protocol.data]
eval_bytes = 1000
"""


# A training in a few milliseconds: `train RECIPE --out RUN`; the larger the learning rate, the better.
STUB = """
import json, pathlib, sys, tomllib
recipe, run = tomllib.loads(pathlib.Path(sys.argv[2]).read_text()), pathlib.Path(sys.argv[4])
run.mkdir(parents=True)
result = {"bits_per_byte": 1 - recipe["train"]["lr"]}
(run / "manifest.json").write_text(json.dumps({"status": "ok", "settings": recipe, "result": result}))
"""


def test_a_suite_is_carried_to_another_machine_without_its_weights_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text", 100_000)
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setattr(folder_module, "_launcher", lambda _: (sys.executable, str(tmp_path / "stub.py")))
    words = ["bench", "small.toml", "--data", "text", "--gpus", "none", "--slots", "2", "--json"]
    assert main(words) == 0
    first = {job["id"]: job for job in json.loads(capsys.readouterr().out)["jobs"]}
    assert [job["status"] for job in first.values()] == ["ok"] * 3
    folder, final = tmp_path / "runs/small", "gru-16x1-s42"
    manifest = folder / "runs" / final / "manifest.json"
    whole = manifest.read_text()
    assert json.loads(whole)["settings"]["train"]["lr"] == 1e-2
    # On the other machine: what was being trained there says so, and neither weights nor locks came along.
    state_file = folder / "jobs" / f"{final}.json"
    facts = {k: v for k, v in json.loads(state_file.read_text()).items() if k != "digest"}
    facts["status"] = "running"
    facts["attempts"][0] |= {"host": "elsewhere", "ended": None, "exit_code": None}
    state_file.write_text(json.dumps(facts))
    (folder / "logs" / f"{final}.1.exit").unlink()
    manifest.write_text(json.dumps({**json.loads(whole), "status": "running"}))
    for lock in folder.rglob("*.lock"):
        lock.unlink()
    assert main(words) == 0
    assert [job["status"] for job in json.loads(capsys.readouterr().out)["jobs"]] == ["ok"] * 3
    assert [len(states(folder)[id].attempts) for id in first] == [1, 1, 2], "what had ended well is not repeated"
    assert manifest.read_text() == whole


LOGS = """
(run / "accuracy.jsonl").write_text('{"kind": "accuracy", "step": 1}\\n')
lines = [{"kind": "step", "step": i, "loss": 5 / i, "seconds": i / 4, "bytes_seen": 32 * i} for i in range(1, 251)]
(run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
(run.parent / "ran").open("a").write(run.name + " ")
"""


def test_a_suite_goes_on_from_its_file_of_results_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text", 100_000)
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "stub.py").write_text(STUB + LOGS)
    monkeypatch.setattr(folder_module, "_launcher", lambda _: (sys.executable, str(tmp_path / "stub.py")))
    words = ["bench", "small.toml", "--data", "text", "--gpus", "none", "--slots", "1", "--results", "kept.json"]

    def statuses(out, *more):
        """The exit code, and the status of each job."""
        code = main([*words, "--json", "--out", out, *more])
        return code, [job["status"] for job in json.loads(capsys.readouterr().out)["jobs"]]

    assert statuses("none", "--seconds", "0") == (1, ["waiting"] * 3)
    assert not Path("kept.json").exists()
    assert statuses("whole") == (0, ["ok"] * 3)
    assert main([*words, "--out", "other", "--set", "train.clip=0.5"]) == 2
    assert "kept.json holds this suite with other settings (train.clip was" in capsys.readouterr().err
    assert not Path("other/runs").exists(), "runs of other settings do not get into the folder"
    kept = json.loads(Path("kept.json").read_text())
    trials, final = [id for id in kept["runs"] if "trial" in id], "gru-16x1-s42"
    Path("kept.json").write_text(json.dumps({"format": 1, "runs": {id: kept["runs"][id] for id in trials}}))
    assert statuses("rest") == (0, ["ok"] * 3)
    assert Path("rest/runs/ran").read_text() == f"{final} ", "trials of the file choose, and are not repeated"
    again = json.loads(Path("kept.json").read_text())["runs"]
    assert again[final]["manifest"] == kept["runs"][final]["manifest"]
    assert {id: again[id] for id in trials} == {id: kept["runs"][id] for id in trials}
    early = [Record(Path("together.json"), Path("rest")) for _ in range(2)]
    for record, id in zip(early, (trials[0], final), strict=True):
        record.add([read_state(Path(f"rest/jobs/{id}.json"), id)])
    assert [*json.loads(Path("together.json").read_text())["runs"]] == [trials[0], final], (
        "two suites may write at once"
    )
    assert statuses("all", "--seconds", "0") == (0, ["ok"] * 3)
    assert not Path("all/runs/ran").exists()
    assert Path("all/report.html").exists()
    old, new = (Path(folder, "runs", final) for folder in ("rest", "all"))
    assert (new / "accuracy.jsonl").read_bytes() == (old / "accuracy.jsonl").read_bytes()
    metrics = read_metrics(new)
    assert (metrics.broken, list(metrics.columns["step"])) == (0, [*range(4, 249, 4), 250])
    assert metrics.columns["loss"][-1] == pytest.approx(5 / 250, rel=1e-5)
    kept["runs"][final]["state"]["later"] = "a field of a later version"
    write_json(Path("kept.json"), {"format": 1, "runs": kept["runs"]})
    assert statuses("later", "--seconds", "0") == (0, ["ok"] * 3)
    outside = [
        {"../../outside": kept["runs"][final]},
        {final: {**kept["runs"][final], "logs": {"../../../outside": []}}},
    ]
    damaged = [Path("kept.json").read_text().replace("accuracy", "accuracies")]
    for text in damaged + [json.dumps({"format": 1, "runs": runs}) for runs in outside]:
        Path("kept.json").write_text(text)
        assert main([*words, "--out", "damaged"]) == 2
        assert "kept.json" in capsys.readouterr().err
    assert not [*tmp_path.rglob("outside*")]


def test_a_file_of_results_with_other_content_is_one_line_and_makes_no_run(tmp_path):
    run = {
        "job": {"id": "a", "settings": {}},
        "state": {"id": "a", "status": "ok", "attempts": []},
        "manifest": {"id": "x"},
    }
    run |= {"logs": {}, "evaluations": [], "curve": {"step": "1 2", "loss": "5 4"}}
    record = Record(tmp_path / "kept.json", tmp_path)
    for tree in (
        {"runs": [run]},
        {"runs": None},
        {"runs": {"a": run}, "format": 2},
        {"runs": {"a": {**run, "job": {}}}},
        {"runs": {"a": {**run, "state": {"id": "b"}}}},
        {"runs": {"a": {**run, "logs": {"some.jsonl": 3}}}},
        *(
            {"runs": {"a": {**run, "curve": curve}}}
            for curve in ({"loss": "5"}, {"step": "1", "loss": "5 4"}, {"step": "a"})
        ),
    ):
        record.file.write_text(json.dumps(tree))
        with pytest.raises(CheckpointError, match=r"kept.json .*give another --results"):
            Record(record.file, tmp_path).restore()
        assert not (tmp_path / "runs").exists()


def test_a_restore_that_is_killed_anywhere_is_completed_by_the_next(tmp_path, monkeypatch):
    planned = [{"id": id, "settings": {"train": {"lr": 1.0}}} for id in "ab"]
    runs = {
        id: {
            "job": {**job, "chosen": {"train.lr": 2.0}},
            "state": {"id": id, "status": "ok", "attempts": []},
            "manifest": {"id": f"run {id}", "status": "ok"},
            "logs": {"accuracy.jsonl": ["a line"]},
            "evaluations": [],
            "curve": {"step": "1 2", "loss": "5 4"},
        }
        for id, job in zip("ab", planned, strict=True)
    }
    write_json(tmp_path / "kept.json", {"format": 1, "runs": runs})

    def restored(name, writes):
        folder, left = tmp_path / name, iter(range(writes))
        folder.mkdir()
        write_json(folder / "suite.json", {"format": 1, "created": "then", "jobs": planned})

        def killed(write):
            def instead(path, value):
                if next(left, None) is None:
                    raise KeyboardInterrupt
                write(path, value)

            return instead

        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            patched.setattr(record_module, "write_json", killed(write_json))
            patched.setattr(record_module, "write_text", killed(storage.write_text))
            Record(tmp_path / "kept.json", folder).restore()
        Record(tmp_path / "kept.json", folder).restore()
        return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    whole = restored("whole", 100)
    assert json.loads(whole[Path("suite.json")])["jobs"] == [run["job"] for run in runs.values()]
    for writes in range(9):
        assert restored(f"after {writes}", writes) == whole, f"killed after {writes} of 9 writes"


def test_a_file_of_results_is_written_again_only_when_a_run_has_ended(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(
        record_module, "write_json", lambda path, value: written.append(value) or write_json(path, value)
    )
    write_json(tmp_path / "suite.json", {"jobs": [{"id": "a", "settings": {}}]})
    first, again = State("a", "crashed", attempts=[Attempt()]), State("a", "crashed", attempts=[Attempt(), Attempt()])
    for ended in (State("a", "running"), first, first, again, again):
        Record(tmp_path / "kept.json", tmp_path).add([ended])
    assert [len(value["runs"]["a"]["state"]["attempts"]) for value in written] == [1, 2]


def test_a_file_of_results_that_could_not_be_read_again_is_not_written(tmp_path, monkeypatch):
    write_json(tmp_path / "suite.json", {"jobs": [{"id": id, "settings": {"text": "x" * 2000}} for id in "ab"]})
    Record(tmp_path / "kept.json", tmp_path).add([State("a", "ok")])
    monkeypatch.setattr(storage, "MOST_READ", (tmp_path / "suite.json").stat().st_size)
    with pytest.raises(StorageError) as caught:
        Record(tmp_path / "kept.json", tmp_path).add([State("b", "ok")])
    end = f" that are read; no run is lost: the same command without --results goes on in {tmp_path}"
    assert str(caught.value).endswith(end)
    assert {*Record(tmp_path / "kept.json", tmp_path).runs} == {"a"}


def test_suites_that_write_into_one_file_at_the_same_moment_lose_no_run(tmp_path, monkeypatch):
    def slow(path, value):
        time.sleep(0.2)
        write_json(path, value)

    for id in "ab":
        (tmp_path / id).mkdir()
        write_json(tmp_path / id / "suite.json", {"jobs": [{"id": id, "settings": {}}]})
    monkeypatch.setattr(record_module, "write_json", slow)
    records = {id: Record(tmp_path / "kept.json", tmp_path / id) for id in "ab"}
    threads = [threading.Thread(target=record.add, args=([State(id, "ok")],)) for id, record in records.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {*read_json(tmp_path / "kept.json")["runs"]} == {"a", "b"}
