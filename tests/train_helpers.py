"""A tiny training for the tests: a text with short documents, and settings that take milliseconds a step."""

import json
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from elman_core.data import ByteFile
from elman_core.data.packed import PACKED_FORMAT, PACKED_HEADER, packed_manifest, packed_sections
from elman_core.storage import write_json
from elman_core.training.settings import Settings, apply_sets, from_dict

TINY: dict[str, dict[str, object]] = {
    "model": {"variant": "e42", "hidden_size": 16, "num_hidden_layers": 2},
    "data": {"eval_bytes": 640},
    "train": {
        "batch_size": 4,
        "chunk_size": 16,
        "steps": 40,
        "warmup": 4,
        "save_every": 0,
        "eval_every": 0,
        "device": "cpu",
    },
}


def write_text(path: Path, size: int = 200_000, document: int = 60) -> Path:
    """Letters in documents of random length around `document` bytes."""
    draw = np.random.default_rng(0)
    text = draw.integers(97, 107, size, dtype=np.uint8)
    text[np.cumsum(draw.integers(document // 2, 2 * document, size // document // 2))] = 0x1E
    text.tofile(path)
    return path


def write_packed(path: Path, tokens: np.ndarray, counts: np.ndarray | None = None, **facts: object) -> Path:
    """A packed file of one document. `counts`: the loss mask. `facts`: of its manifest."""
    masked = counts is not None
    ends, _, size = packed_sections(len(tokens), tokens.dtype, 1, masked)
    mask = np.packbits(counts, bitorder="little").tobytes() if masked else b""
    content = (PACKED_HEADER + tokens.tobytes()).ljust(ends, b"\0") + np.int64(len(tokens)).tobytes() + mask
    assert len(content) == size
    path.write_bytes(content)
    about = {
        "format": PACKED_FORMAT,
        "dtype": tokens.dtype.name,
        "tokens": len(tokens),
        "documents": 1,
        "masked": masked,
    }
    about |= {"bytes": len(tokens), "vocab_size": 256, "separator": 0x1E, "tokenizer": None, **facts}
    write_json(packed_manifest(path), about | ByteFile(path, packed=True).fingerprint())
    return path


def three_texts(text: Path) -> str:
    """`data.path` of three weighted texts, one of them packed with a loss mask, made beside `text`."""
    letters = np.fromfile(text, np.uint8)
    letters[::-1].tofile(f"{text}.2")
    counts = np.random.default_rng(1).random(len(letters)) < np.linspace(0, 1, len(letters))
    write_packed(Path(f"{text}.3"), letters, counts)
    return f"data.path=['{text}:3', '{text}.2', '{text}.3:2']"


def settings(text: Path, *sets: str) -> Settings:
    tree = {table: dict(values) for table, values in TINY.items()}
    tree["data"]["path"] = str(text)
    return from_dict(apply_sets(tree, sets))


def train_words(text: Path, out: Path, *sets: str) -> list[str]:
    """The command line of `elman train` for the tiny training."""
    flat = [f"{table}.{k}={json.dumps(v)}" for table, values in TINY.items() for k, v in values.items()]
    return ["train", "e42", "--data", str(text), "--out", str(out), *(w for s in [*flat, *sets] for w in ("--set", s))]


def manifest(run: Path) -> dict:
    return json.loads((run / "manifest.json").read_text())


def metrics(run: Path, kind: str = "step") -> list[dict]:
    """The lines of one kind, without their CRC, which differs from run to run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "crc32"} for line in lines if line["kind"] == kind]


def wait_for(what: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "what was waited for did not happen"
        time.sleep(0.01)


def wait_for_step(run: Path, step: int, seconds: float = 120) -> None:
    """Wait until another process that trains in `run` has written the line of a step. Its last line may be half written."""

    def written() -> bool:
        lines = (run / "metrics.jsonl").read_text().split("\n")[:-1] if (run / "metrics.jsonl").exists() else []
        return any(json.loads(line)["step"] >= step for line in lines)

    wait_for(written, seconds)


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(run)}


def tensors(checkpoint: Path) -> dict:
    """Every tensor of a checkpoint: weights, buffers, optimizer, carried state."""
    return {f"{f.name}:{n}": t for f in sorted(checkpoint.rglob("*.safetensors")) for n, t in load_file(f).items()}


def checkpoint(run: Path) -> Path:
    """The newest."""
    return sorted((run / "checkpoints").iterdir())[-1]


def assert_same_bits(one: Path, two: Path) -> None:
    first, second = tensors(one), tensors(two)
    assert first.keys() == second.keys()
    assert len(first) > 10
    for name, tensor in first.items():
        assert tensor.numpy().tobytes() == second[name].numpy().tobytes(), name


@contextmanager
def files_of_at_most(size):
    """Writing beyond `size` bytes of a file fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def closed_pipe():
    """A file to a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")
