"""Suites: what a file may say, which runs it means, and how large they are."""

import json
from pathlib import Path

import pytest
from elman_bench.jobs.job import State, write_state
from elman_bench.jobs.outcome import next_command
from elman_bench.size import parse_parameters
from elman_bench.suite import spec as suite_module
from elman_bench.suite.folder import Folder, known_jobs, recipe
from elman_bench.suite.plan import LONGEST, Overrides, plan, split_names
from elman_bench.suite.spec import find_suite, read_suite, shipped

from elman_core.registry import CheckpointError, ConfigError, PluginError
from elman_core.training.recipes import folders
from elman_core.training.run.protocol import protocol, protocol_hash
from elman_core.training.settings import from_dict, read_recipe

TINY = """
summary = "tiny"
models = ["e42@16x1", { model = "gru@16x1", label = "g" }]
seeds = 2
[protocol.train]
batch_size = 2
chunk_size = 16
steps = 4
"""
TEXT = Overrides(data="/text")


def write(tmp_path: Path, text: str, name: str = "tiny") -> Path:
    path = tmp_path / f"{name}.toml"
    path.write_text(text)
    return path


def suite(tmp_path, text=TINY):
    return read_suite(write(tmp_path, text))


def ids(planned) -> list[str]:
    return [job.id for job in planned.jobs]


def test_all_models_of_a_seed_come_before_the_next_seed(tmp_path):
    planned = plan(suite(tmp_path), TEXT)
    assert ids(planned) == ["e42-16x1-s42", "g-16x1-s42", "e42-16x1-s43", "g-16x1-s43"]
    first = planned.jobs[0]
    assert (first.model, first.what, first.seed, first.target) == ("e42", "e42@16x1", 42, None)
    assert first.settings.train.seed == 42
    assert first.settings.data.path == "/text"
    assert first.tokens == 4 * 2 * 16
    # Embedding, in, W and out with their bias, two norms.
    assert first.parameters == 256 * 16 + 3 * 16 * 16 + 16 + 2 * 16


def test_the_suite_in_the_guide_has_a_plan(tmp_path):
    guide = (Path(__file__).parents[3] / "docs/how-to/experiments.md").read_text(encoding="utf-8")
    text = guide.split("```toml\n")[1].partition("```")[0]
    assert len(plan(suite(tmp_path, text), TEXT).jobs) == 5 * 2 * 3  # models with a size, values, seeds


def test_tuned_values_are_an_axis_and_stay_outside_the_protocol(tmp_path):
    text = TINY + '[tuned]\n"train.lr" = [1e-3, 3e-3]\ntrain.weight_decay = [0.0, 0.1]\n'
    planned = plan(suite(tmp_path, text), Overrides("/text", models=("e42",), seeds=1))
    assert ids(planned) == [f"e42-16x1-lr{lr}-weight_decay{wd}-s42" for lr in ("0.001", "0.003") for wd in ("0", "0.1")]
    assert [job.lr for job in planned.jobs] == [1e-3, 1e-3, 3e-3, 3e-3]
    assert dict(planned.jobs[1].tuned) == {"train.lr": 1e-3, "train.weight_decay": 0.1}
    assert planned.jobs[1].settings.train.tuned == ["train.weight_decay"]
    hashes = {protocol_hash(protocol(job.settings, {"size": 1}, 16)) for job in planned.jobs}
    assert len(hashes) == 1
    plain = plan(suite(tmp_path), Overrides("/text", sets=("train.weight_decay=0.1",))).jobs[0]
    other = plan(suite(tmp_path), Overrides("/text", sets=("train.weight_decay=0.2",))).jobs[0]
    assert len({protocol_hash(protocol(job.settings, {"size": 1}, 16)) for job in (plain, other)}) == 2


def test_a_model_tunes_for_itself_and_all_share_the_protocol(tmp_path):
    text = TINY.replace('label = "g"', 'label = "g", tuned = { train.beta2 = [0.9, 0.99] }')
    planned = plan(suite(tmp_path, text), Overrides("/text", seeds=1))
    assert ids(planned) == ["e42-16x1-s42", "g-16x1-beta20.9-s42", "g-16x1-beta20.99-s42"]
    assert len({protocol_hash(protocol(job.settings, {"size": 1}, 16)) for job in planned.jobs}) == 1


def test_sizes_are_solved_for_each_model_to_two_per_cent(tmp_path):
    text = (
        'models = ["e1", "e42", "gru", {model = "e88:demo", depth = 3}]\nsizes = ["600k", "1M"]\ndepth = 2\nseeds = 1\n'
    )
    planned = plan(suite(tmp_path, text), TEXT)
    assert len(planned.jobs) == 8
    for job in planned.jobs:
        wanted = {"600k": 600_000, "1M": 1_000_000}[job.target]
        assert abs(job.parameters / wanted - 1) <= 0.02
        assert f"-{job.target}-" in job.id
    assert {job.settings.model.num_hidden_layers for job in planned.jobs if job.model == "e88:demo"} == {3}


def test_the_command_line_changes_length_seeds_models_and_settings(tmp_path):
    text = TINY + '[tuned]\n"train.lr" = [1e-3, 3e-3]\n'
    overrides = Overrides("/text", ("e42", "lstm@8x1"), 3, tokens=100, sets=("train.lr=0.5", "train.clip=2.0"))
    planned = plan(suite(tmp_path, text), overrides)
    assert ids(planned)[:2] == ["e42-16x1-lr0.5-s42", "lstm-8x1-lr0.5-s42"]
    assert len(planned.jobs) == 6
    train = planned.jobs[0].settings.train
    assert (train.steps, train.minutes, train.clip, train.lr) == (4, None, 2.0, 0.5)
    minutes = plan(suite(tmp_path), Overrides("/text", minutes=2)).jobs[0]
    assert (minutes.settings.train.steps, minutes.settings.train.minutes, minutes.tokens) == (None, 2.0, None)


@pytest.mark.parametrize("label", ["<b>wide</b>", "-z", "_z", "模型"])
def test_a_label_may_begin_with_any_character(label, tmp_path):
    given = suite(tmp_path, TINY.replace('label = "g"', f'label = "{label}"'))
    folder = Folder(tmp_path / "out")
    assert len(folder.suite(given, plan(given, TEXT), None, {})) == 4
    folder.close()


def test_labels_that_differ_only_outside_ascii_are_different_runs(tmp_path):
    models = ", ".join(f'{{model = "e42@16x1", label = "{label}"}}' for label in ("模型", "型号", "größe", "gräße"))
    ids = [job.id for job in plan(suite(tmp_path, f"seeds = 1\nmodels = [{models}]"), TEXT).jobs]
    assert len(set(ids)) == 4
    assert all(id.isascii() for id in ids)


def test_names_choose_by_label_by_model_and_by_variant(tmp_path):
    text = 'models = ["e1@8x1", {model = "e1:e2@8x1", label = "wide"}, "e42@8x1"]\n'
    for names, expected in (
        (("e1",), ["e1"]),
        (("wide",), ["wide"]),
        (("e1:e2@8x1",), ["wide"]),
        (("e42", "e1"), ["e42", "e1"]),
    ):
        assert [job.model for job in plan(suite(tmp_path, text), Overrides("/t", names, 1)).jobs] == expected
    both = 'models = [{model = "e1@8x1", label = "a"}, {model = "e1:e2@8x1", label = "b"}]\n'
    assert [job.model for job in plan(suite(tmp_path, both), Overrides("/t", ("e1",), 1)).jobs] == ["a", "b"]


def test_a_label_with_commas_is_named_as_a_whole(tmp_path):
    text = 'models = [{model = "e42@8x1", label = "a,b"}, {model = "e1@8x1", label = "b"}, "gru@8x1"]\n'
    for given, names in (
        ("a,b", ("a,b",)),
        ("b, a,b ,gru", ("b", "a,b", "gru")),
        ("a,gru,,b,", ("a", "gru", "b")),
        ("", ()),
    ):
        assert split_names(suite(tmp_path, text), given) == names


def test_an_option_of_one_variant_is_set_from_the_command_line(tmp_path):
    sets = ("model.options.gru.expansion=[1.0,2.0]",)
    planned = plan(suite(tmp_path), Overrides("/t", ("e42+gru@16x2",), 1, sets=sets)).jobs
    assert [job.settings.model.options for job in planned] == [{"gru": {"expansion": e}} for e in (1.0, 2.0)]


def test_a_name_too_long_for_a_file_is_refused_with_the_plan(tmp_path):
    text = TINY.replace('"g"', f'"{"g" * LONGEST}"')
    with pytest.raises(ConfigError, match="give the model a shorter label"):
        plan(suite(tmp_path, text), TEXT)


def test_a_model_that_is_not_installed_is_listed_with_the_reason(tmp_path):
    text = TINY.replace('"e42@16x1"', '"e42@16x1", "e77@16x1"')
    planned = plan(suite(tmp_path, text), TEXT)
    assert [(s.model, s.reason) for s in planned.skipped] == [("e77", "no variant 'e77' is installed")]
    assert len(planned.jobs) == 4
    with pytest.raises(PluginError, match="no variant 'e77' is installed"):
        plan(suite(tmp_path, text), Overrides("/text", strict=True))
    with pytest.raises(PluginError, match="no variant 'e78' is installed"):
        plan(suite(tmp_path), Overrides("/text", models=("e78@8x1",)))
    with pytest.raises(PluginError, match="no model of suite tiny is installed: e77"):
        plan(suite(tmp_path, 'models = ["e77@8x1"]'), TEXT)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modells = []", "there is no key 'modells'. Did you mean 'models'"),
        ("models = []", "names no models"),
        ("models = 3", "models is a list"),
        ("models = [3]", "a model is 'NAME' or"),
        ('models = [{model = "e1", dept = 3}]', "model e1: there is no key 'dept'. Did you mean 'depth'"),
        ('models = ["e1@8x1", "e1@9x1"]', "two models are called 'e1'"),
        ('models = [{model = "e1@8x1", depth = 2}]', "its size is in its name"),
        ('models = ["e1"]\nseeds = 0', "seeds is at least 1"),
        ('models = ["e1"]\nseeds = "x"', "seeds is a number"),
        ('models = ["e1"]\nsizes = ["many"]', "write a number of parameters as"),
        ('models = ["e1"]\ndepth = 0', "depth is a number of layers"),
        ('models = ["e1"]\ngpus = "two"', "gpus is a number of GPUs of each run"),
        ('models = ["e1"]\n[tuned]\n"train.batch_size" = [8]', "train.batch_size is part of the protocol, the same for all"),
        ('models = ["e1"]\n[tuned]\n"train.lrr" = [8]', "train.lrr is not a setting. Did you mean 'train.lr'"),
        ('models = ["e1"]\n[tuned]\n"train.lr" = []', "train.lr has no values"),
        ('models = ["e1"]\n[tuned]\n"train.lr" = [1.0]\n[tuning]\nbytes = 3', "tuning: there is no key 'bytes'"),
        ('models = ["e1"]\n[tuned]\n"train.lr" = [1.0]\n[tuning]', "tuning needs tokens"),
        ('models = ["e1"]\n[tuned]\n"train.lr" = [1.0]\n[tuning]\ntokens = [3, "x"]', "tokens is the bytes of each trial, not"),
        ('models = ["e1"]\n[tuning]\ntokens = 3', "tuning needs a table tuned"),
        ('models = ["e1"]\n[protocol.train]\nbatchsize = 3', "protocol: there is no setting 'train.batchsize'"),
        ('models = ["e1"]\n[protocol.model]\nhidden_size = 3', "model.hidden_size belongs to a model"),
        ('models = ["e1"', "is not valid TOML"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_suite_is_one_line_that_names_it(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        suite(tmp_path, text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ('models = ["e1"]', {}, "model e1 of suite tiny has no size"),
        ('models = ["e1"]\nsizes = ["1M"]', {}, "has no size"),
        (TINY, {"sets": ("model.hidden_size=8",)}, "the suite sets it; a model's size is in its name"),
        (TINY, {"sets": ("train.batch=8",)}, "there is no setting 'train.batch'"),
        (TINY, {"tuning": 3}, "tiny has no table tuning"),
        (TINY, {"steps": 3, "minutes": 1.0}, "give one of --steps, --tokens and --minutes"),
        (TINY, {"sets": ("train.schedule='cosine'",), "minutes": 1.0}, "under train.minutes"),
        (TINY, {"sets": ("model.options.n_heads=3",)}, "has no option 'n_heads'"),
        (TINY, {"sets": ("train.lr=[1e-3, 0.001]",)}, "called .*-lr0.001-s42: .* has a size or a tuned value twice"),
        ('models = [{model = "e1@8x1", label = "a b"}, {model = "e1@8x1", label = "a-b"}]', {}, "different labels"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_before_anything_runs(tmp_path, text, overrides, words):
    with pytest.raises(ConfigError, match=words):
        plan(suite(tmp_path, text), Overrides("/text", **overrides))


def test_a_recipe_says_the_settings_and_nothing_less(tmp_path):
    text = TINY.replace('"e42@16x1"', '{model = "e42@16x1", options = {expansion = 2.0}, label = "a \'b\' \\"ü\\""}')
    for job in plan(suite(tmp_path, text), TEXT).jobs:
        path = tmp_path / "recipe.toml"
        path.write_text(recipe(job.settings), encoding="utf-8")
        assert from_dict(read_recipe(path)) == job.settings


def test_a_plugin_ships_suites_in_its_own_folder(tmp_path, monkeypatch):
    (tmp_path / "suites").mkdir()
    write(tmp_path / "suites", TINY, "mine")
    monkeypatch.setattr(suite_module, "folders", lambda: [*folders(), tmp_path, tmp_path / "nowhere"])
    assert {"mine", "quick"} <= set(shipped())
    assert read_suite(find_suite("mine")).name == "mine"


def test_shipped_suites_say_what_they_are_and_have_models_of_equal_size():
    for name in shipped():  # in one test, so that each model is counted once
        one = read_suite(find_suite(name))
        assert one.summary, name
        assert f"# elman bench {name}" in find_suite(name).read_text(), "its first lines say how to run it"
        planned = plan(one, Overrides("/text", seeds=1))
        assert planned.jobs, name
        finals = [job for job in planned.jobs if not job.id.endswith("-trial")]
        assert len(finals) + len(planned.skipped) == len(one.models)
        assert all("is installed" in skipped.reason for skipped in planned.skipped)
        assert all(abs(job.parameters / parse_parameters(job.target) - 1) <= 0.02 for job in planned.jobs)


def test_a_mistyped_suite_is_named(tmp_path, monkeypatch):
    write(tmp_path, TINY)
    monkeypatch.chdir(tmp_path)
    for wrong, right in (("tiny", "tiny.toml"), (f"{tmp_path}/tinny.toml", f"{tmp_path}/tiny.toml")):
        with pytest.raises(ConfigError, match=rf"there is no suite '{wrong}'\. Did you mean '{right}'\?"):
            find_suite(wrong)


def test_a_suite_that_is_not_there_is_an_error_with_those_that_are():
    with pytest.raises(ConfigError, match=r"there is no suite 'quik'\. Did you mean 'quick'"):
        find_suite("quik")
    with pytest.raises(ConfigError, match=r"Shipped: .*quick"):
        find_suite("nowhere.toml")


# the folder


def opened(tmp_path, text=TINY, **overrides):
    one = suite(tmp_path, text)
    made = Folder(tmp_path / "out")
    try:
        return made.suite(one, plan(one, Overrides("/text", **overrides)), 60.0, {"A": "b"})
    finally:
        made.close()


def test_the_folder_holds_what_was_asked_for(tmp_path):
    jobs = opened(tmp_path, seeds=1)
    out = tmp_path / "out"
    facts = json.loads((out / "suite.json").read_text())
    assert (facts["format"], facts["name"]) == (1, "tiny")
    keys = {"id", "model", "what", "seed", "lr", "tuned", "settings", "parameters", "target"}
    assert all(set(job) >= keys for job in facts["jobs"])
    assert (out / "suite.toml").read_text() == TINY
    job = jobs[0]
    assert job.command[1:] == (
        "-P",
        "-m",
        "elman_core",
        "train",
        str(out / "jobs/e42-16x1-s42.toml"),
        "--out",
        str(job.run),
    )
    assert (job.timeout, dict(job.env)) == (60.0, {"A": "b"})
    assert from_dict(read_recipe(out / "jobs/e42-16x1-s42.toml")).train.steps == 4
    assert [j.id for j in known_jobs(out)] == [j.id for j in jobs]


def test_runs_of_several_gpus_are_started_and_resumed_as_one_process_for_each(tmp_path):
    job = opened(tmp_path, "gpus = 2\n" + TINY, seeds=1)[0]
    assert job.gpus == 2
    python, *several = job.command[:10]
    assert several[:5] == ["-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert several[5:] == ["--no-python", python, "-P", "-m"], "no rank runs code of the current folder"
    (job.run / "checkpoints/step-00000001").mkdir(parents=True)
    assert next_command(job, 2) == (*job.command[:10], "elman_core", "resume", str(job.run))


def test_seeds_and_models_are_added_to_a_folder_and_none_is_forgotten(tmp_path):
    opened(tmp_path, seeds=1)
    created = json.loads((tmp_path / "out/suite.json").read_text())["created"]
    assert len(opened(tmp_path, models=("g",), seeds=3)) == 3
    facts = json.loads((tmp_path / "out/suite.json").read_text())
    assert [job["id"] for job in facts["jobs"]] == ["e42-16x1-s42", "g-16x1-s42", "g-16x1-s43", "g-16x1-s44"]
    assert facts["created"] == created


def test_other_settings_in_the_same_folder_are_an_error_that_names_them(tmp_path):
    opened(tmp_path)
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path, sets=("train.clip=0.5",))
    assert "holds this suite with other settings (train.clip was 1.0 and is 0.5)" in str(caught.value)
    assert "\n" not in str(caught.value)
    opened(tmp_path)


def test_what_changes_only_memory_may_change_for_runs_that_are_not_done(tmp_path):
    first, second, *_ = opened(tmp_path)
    write_state(first.state, State(first.id, "ok"))
    write_state(second.state, State(second.id, "oom"))
    opened(tmp_path, sets=("train.accumulate=2",))
    facts = json.loads((tmp_path / "out/suite.json").read_text())
    kept = {job["id"]: job["settings"]["train"]["accumulate"] for job in facts["jobs"]}
    assert (kept[first.id], kept[second.id]) == (1, 2)
    recipes = [read_recipe(tmp_path / f"out/jobs/{job.id}.toml")["train"]["accumulate"] for job in (first, second)]
    assert recipes == [1, 2]


def test_a_folder_of_something_else_or_damaged_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no jobs: it has no suite\.json and no jobs\.json"):
        known_jobs(tmp_path)
    (tmp_path / "suite.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"suite\.json is damaged"):
        known_jobs(tmp_path)
    for name, job in (("suite", {"id": "a"}), ("jobs", {"id": "a"}), ("jobs", {"id": "a", "command": []})):
        (tmp_path / "suite.json").unlink(missing_ok=True)
        (tmp_path / f"{name}.json").write_text(json.dumps({"jobs": [job]}))
        with pytest.raises(CheckpointError, match=rf"{name}\.json is not a list of jobs: remove it"):
            known_jobs(tmp_path)


def test_a_folder_holds_a_suite_or_commands(tmp_path):
    opened(tmp_path)
    folder, one = Folder(tmp_path / "out"), suite(tmp_path)
    with pytest.raises(ConfigError, match=r"is the folder of a suite.* choose another --out"):
        folder.commands({"1": ["true"]}, None, 1)
    (folder.path / "suite.json").rename(folder.path / "jobs.json")
    with pytest.raises(ConfigError, match=r"is the folder of commands.* choose another --out"):
        folder.suite(one, plan(one, TEXT), None, {})
    folder.close()
