"""What `python -m elman_core.evals` does with its words: find the model, make a task of a text, call the harness."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from elman_core.registry import ConfigError, DataError, ElmanError

USAGE = """usage: python -m elman_core.evals MODEL (--tasks NAME,… | --data FILE) [options of lm-evaluation-harness]

MODEL is a run, a checkpoint folder or a hub id. --data scores a UTF-8 text as one document and reports its bits per byte."""
TASK = "text_bits_per_byte"
SEPARATOR = "\x1e"


def main(words: Sequence[str]) -> int:
    """Run the harness; returns the exit code: 0, or 2 with one line on standard error for a wrong argument."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            arguments = harness_arguments(list(words), Path(folder))
            if arguments is None:
                sys.stdout.write(USAGE + "\n")
                return 0
            _call(arguments)
    except ElmanError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def harness_arguments(words: list[str], folder: Path) -> list[str] | None:
    """The words for the harness's own command line; None where its usage is asked for. A task for `--data` goes to `folder`.

    Raises:
        ConfigError: no model, or an option without its value. DataError: a text that cannot be read.
    """
    if not words or words[0] in ("-h", "--help"):
        return None
    model, *rest = words
    if model.startswith("-"):
        raise ConfigError(f"the first argument must be a run, a checkpoint folder or a hub id, not {model!r}")
    if "--data" in rest:
        at = rest.index("--data")
        if at + 1 >= len(rest):
            raise ConfigError("--data needs a file")
        write_task(folder, Path(rest[at + 1]))
        rest[at : at + 2] = ["--tasks", TASK, "--include_path", str(folder)]
    arguments = f"pretrained={model}"
    if "--model_args" in rest:
        at = rest.index("--model_args")
        arguments += "," + rest[at + 1]
        del rest[at : at + 2]
    return ["run", "--model", "elman", "--model_args", arguments, *rest]


def write_task(folder: Path, text: Path) -> None:
    """Write a task of the harness that scores `text` as one document: its file is JSON, which is also YAML.

    A separator byte at the start is left out: the harness scores a document as what follows one.
    """
    try:
        document = text.read_bytes().decode("utf-8").removeprefix(SEPARATOR)
    except OSError as error:
        raise DataError(f"{text} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{text} is not UTF-8, which the harness needs: use elman eval, which scores bytes") from error
    (folder / "document.jsonl").write_text(json.dumps({"text": document}) + "\n", encoding="utf-8")
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "document.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
        "metadata": {"version": 1},
    }
    (folder / f"{TASK}.yaml").write_text(json.dumps(task), encoding="utf-8")


def _call(arguments: list[str]) -> None:
    try:
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise ConfigError("lm-evaluation-harness is not installed: pip install 'lm-eval[hf]'") from error
    from . import harness  # noqa: F401 (registers the model type)

    before = sys.argv
    sys.argv = ["python -m elman_core.evals", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
