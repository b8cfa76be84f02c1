"""The examples do what they say."""

import subprocess
import sys
from pathlib import Path

from train_helpers import write_text

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_plain_loop_trains_saves_and_writes(tmp_path):
    assert len((EXAMPLES / "plain_loop.py").read_text().splitlines()) <= 60
    text = write_text(tmp_path / "text", 200_000)
    command = [sys.executable, EXAMPLES / "plain_loop.py", text, "--steps", "3", "--out", tmp_path / "model"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "held out: " in done.stdout
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_the_notebook_shows_that_pieces_equal_the_whole():
    done = subprocess.run([sys.executable, EXAMPLES / "state.py"], capture_output=True, text=True, check=True)
    assert float(done.stdout.splitlines()[0].rpartition(": ")[2]) < 1e-4
    assert done.stdout.count("'S': ") == 4
