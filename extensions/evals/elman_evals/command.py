"""`elman evals`: make a task of a text, call the harness."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import typer

from elman_core.extension import ConfigError, DataError

TASK = "text_bits_per_byte"
SEPARATOR = "\x1e"


def evals(
    model: str = typer.Argument(help="A run, a checkpoint folder, pretrained/NAME or a hub id."),
    options: list[str] = typer.Argument(None, metavar="[-- OPTIONS]", help="Further options of the harness."),
    tasks: str | None = typer.Option(None, help="Tasks of the harness, separated by commas."),
    data: Path | None = typer.Option(None, help="Score this UTF-8 text as one document, in bits per byte."),
) -> None:
    """Run tasks of lm-evaluation-harness on MODEL. The state is carried through each document."""
    if (tasks is None) == (data is None):
        raise ConfigError("give --tasks NAME,… or --data FILE")
    if "," in model:
        raise ConfigError(f"the harness reads no path with a comma: rename {model}")
    # The harness would read a folder called 123, or true, as a number or a truth value.
    source = os.path.join(".", model) if os.path.exists(model) else model
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model_args", nargs="?", action="append", default=[f"pretrained={source}"])
    given, rest = parser.parse_known_args(options or [])
    arguments = ",".join(filter(None, given.model_args))
    with tempfile.TemporaryDirectory() as folder:
        if data is not None:
            write_task(Path(folder), data)
        chosen = ["--tasks", tasks] if tasks is not None else ["--tasks", TASK, "--include_path", folder]
        _call(["run", "--model", "elman", "--model_args", arguments, *chosen, *rest])


def write_task(folder: Path, text: Path) -> None:
    """Write a task of the harness that scores `text` as one document: its file is JSON, which is also YAML.

    A separator byte at the start is left out: the harness scores a document as what follows one.

    Raises:
        DataError: the text cannot be read, is not UTF-8, or is empty.
    """
    try:
        document = text.read_bytes().decode("utf-8").removeprefix(SEPARATOR)
    except OSError as error:
        raise DataError(f"{text} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{text} is not UTF-8, which the harness needs: use elman eval, which scores bytes") from error
    if not document:
        raise DataError(f"{text} is empty")
    (folder / "document.jsonl").write_text(json.dumps({"text": document}) + "\n", encoding="utf-8")
    task = {
        "task": TASK,
        "dataset_path": "json",
        # Beside the task, which is removed: in its own cache, datasets would keep a copy of the text for good.
        "dataset_kwargs": {"data_files": {"test": str(folder / "document.jsonl")}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",  # the field itself: "{{text}}" would make a list of a text such as [1]
        "metric_list": [{"metric": "bits_per_byte"}],
        "metadata": {"version": 1},
    }
    (folder / f"{TASK}.yaml").write_text(json.dumps(task), encoding="utf-8")


def _call(arguments: list[str]) -> None:
    """Run the harness's own command line."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise ConfigError("lm-evaluation-harness is not installed: pip install 'lm-eval[hf]'") from error
    from . import harness  # noqa: F401 (registers the model type)

    before = sys.argv
    sys.argv = ["elman evals", *arguments]
    try:
        cli_evaluate()
    except ValueError as error:
        if not str(error).startswith("Tasks not found"):
            raise
        raise ConfigError(f"{error} (`lm-eval ls tasks` lists them)") from error
    except SystemExit as left:  # once it has printed what is wrong
        raise typer.Exit(left.code if isinstance(left.code, int) else int(left.code is not None)) from left
    finally:
        sys.argv = before
