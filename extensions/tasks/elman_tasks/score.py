"""The accuracy of a model on a task, by the length of the sequences."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elman_core.extension import CheckpointError, log_line, read_bytes, read_line, write_text

from .catalogue import Task

FILE = "accuracy.jsonl"
ROWS = 512
"""Test sequences of each length."""
TOKENS = 2**15
"""Most tokens of one forward."""


def accuracy(model: Any, task: Task, rows: int = ROWS) -> dict[str, dict[str, Any]]:
    """For each test length: `places`, the share of right answers; `whole`, that of sequences with all answers right;
    `end`, the share of right answers in the last quarter of the places, if any is asked there; `sequences`. The answer is the
    likeliest token.

    Args:
        model: a `LadderForCausalLM` in eval mode. Gradients and autocast are up to the caller.
    """
    result = {}
    for length in task.tests:
        drawn = task.test(length, rows)
        tokens_RT, targets_RT = (torch.from_numpy(array.astype(np.int64)) for array in (drawn.tokens, drawn.targets))
        scored_RT = torch.from_numpy(np.array(drawn.scored))
        width = tokens_RT.shape[1]
        pieces = tokens_RT.split(max(1, TOKENS // width))
        answers_RT = torch.cat([model(input_ids=piece.to(model.device)).logits.argmax(-1).cpu() for piece in pieces])
        right_RT = (answers_RT == targets_RT) & scored_RT
        last_T = torch.arange(width) >= width * 3 // 4
        late = scored_RT & last_T if (scored_RT & last_T).any() else scored_RT
        result[str(length)] = {
            "places": int(right_RT.sum()) / int(scored_RT.sum()),
            "end": int((right_RT & late).sum()) / int(late.sum()),
            "whole": float((right_RT == scored_RT).all(1).double().mean()),
            "sequences": rows,
        }
    return result


def mean(tests: Mapping[str, Mapping[str, Any]], key: str) -> float:
    """The mean over lengths of a figure of `accuracy`."""
    return statistics.fmean(test[key] for test in tests.values())


def read(run: Path) -> list[dict[str, Any]]:
    """The lines of a run, by step: `step` and `tests`, as `accuracy` returns them. Empty if there is none.

    Raises:
        CheckpointError: a line is damaged.
    """
    try:
        texts = read_bytes(run / FILE).splitlines()
        # Lines of older versions have no CRC.
        lines: list[Any] = [read_line(text, "") if b'"crc32"' in text else json.loads(text) for text in texts]
        if not all(map(_is_line, lines)):
            raise ValueError("a line is not a step and its tests, or was changed")
        return lines
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{run / FILE} cannot be read ({error}): remove it, then resume the run") from error


def _is_line(line: Any) -> bool:
    if not isinstance(line, dict) or type(line.get("step")) is not int or not isinstance(line.get("tests"), dict):
        return False
    tests, keys = line["tests"].values(), ("places", "end", "whole")
    return all(isinstance(test, dict) and all(isinstance(test.get(key), float) for key in keys) for test in tests)


def add(run: Path, step: int, tests: Mapping[str, Any]) -> None:
    """Write the line of a step; lines of that step and later ones are replaced."""
    lines = [*(line for line in read(run) if line["step"] < step), {"step": step, "tests": tests}]
    write_text(run / FILE, "".join(log_line({"kind": "accuracy"} | line, "") + "\n" for line in lines))
