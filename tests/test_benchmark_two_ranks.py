"""The staircase of stages on two ranks, on CPUs: what hangs is reported with its stack, and the stages after it are run."""

import pytest
import two_ranks
from ranks import Ended, Launcher
from stacks import innermost, where

from elman_core.cli.train import read_settings


def test_a_stage_that_hangs_is_reported_with_its_stack_and_the_next_is_run(tmp_path, capsys, monkeypatch):
    class Patient(Launcher):
        """A busy machine's, for all but what hangs."""

        def run(self, ranks, words, prelude="", limit=90, **environment):
            return super().run(ranks, words, prelude, limit if "sleep(3600)" in prelude else 90, **environment)

    monkeypatch.setattr(two_ranks, "Launcher", Patient)
    code = two_ranks.main(["--device", "cpu", "--out", str(tmp_path), "--limit", "6", "--stages", "one,wait,sum,auto"])
    lines = {line.split()[2]: line for line in capsys.readouterr().out.splitlines()}
    assert code == 1
    assert "not done in time: rank 0: an object exchanged after" in lines["wait"]
    assert "in all_reduce (distributed_c10d.py:" in lines["wait"]
    assert "; in <module> (<string>:" in lines["wait"], "the other sleeps"
    assert "in all_reduce" in (tmp_path / "wait.log").read_text()
    assert [lines[stage].split()[-1] for stage in ("one", "sum", "auto")] == ["ok"] * 3
    said = (tmp_path / "auto.log").read_text()
    for rank in (0, 1):
        for phase in ("libraries", "ranks", "model", "first step", "trained", "parting", "parted"):
            assert f"elman: rank {rank}: {phase} after" in said


@pytest.mark.parametrize("stage", two_ranks.TRAINED)
def test_every_stage_that_trains_has_settings_that_exist(stage, tmp_path):
    line, prelude = two_ranks.words(stage, "cuda", 2, tmp_path / "text", tmp_path / "run")
    train = read_settings("e42", sets=line[line.index("--set") + 1 :: 2]).train
    assert train.parallel == {"one": "auto", "fsdp": "fsdp"}.get(stage, "ddp")
    assert train.launch == ("eager" if stage == "eager" else "auto")
    assert prelude == ""


@pytest.mark.parametrize("stage", two_ranks.BARE)
def test_every_other_stage_is_python(stage, tmp_path):
    line, prelude = two_ranks.words(stage, "cuda", 2, tmp_path / "text", tmp_path / "run")
    compile(prelude, stage, "exec")
    assert line == ["list"]
    assert ("recording.release()" in prelude) == (stage == "graph"), "the other is to hang"


def test_a_rank_that_fails_is_quoted(tmp_path):
    ended = Ended([0, 1], ["", ""], ["elman: rank 0: model after 1.0 s", "Traceback\nValueError: no good\n"])
    assert two_ranks.judged("sum", ended, tmp_path) == "exit codes [0, 1]: ValueError: no good"
    assert two_ranks.main(["--list"]) == 0
    with pytest.raises(SystemExit, match="no stage 'summ'"):
        two_ranks.main(["--stages", "summ"])


STACKS = """elman: rank 1: ranks after 3.1 s
Fatal Python error: Aborted

Thread 0x00007f1 (most recent call first):
  File "/x/threading.py", line 355 in wait

Current thread 0x00007f2 (most recent call first):
  File "/x/distributed_c10d.py", line 2407 in destroy_process_group
  File "/y/distributed.py", line 250 in leave
  File "/y/distributed.py", line 270 in session
  File "/y/train.py", line 48 in train

Extension modules: numpy
"""


def test_of_a_stack_the_innermost_calls_of_the_main_thread_are_shown():
    assert innermost(STACKS) == ["in destroy_process_group (distributed_c10d.py:2407) < leave < session"]
    assert where(STACKS * 2) == f"rank 1: ranks after 3.1 s; {innermost(STACKS)[0]}"
    assert where("nothing") == ""
