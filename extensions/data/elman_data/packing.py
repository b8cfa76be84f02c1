"""Packing: units of input become runs of documents sorted by a random key, and the runs are merged into one file.

    .FILE.packing/STEM.0.tokens, .mask, .index     a run: tokens of its documents, where they count, and a row for each document
    .FILE.packing/STEM.json                        a unit is done: its runs
    .FILE.packing/packed, FILE.json                the file and its manifest, until they have their names

The key of a document is a hash of the seed with its number, or, where duplicates are dropped, with its content; so the order
depends on neither the number of processes nor their speed. Since every run is sorted, merging reads each from its beginning to
its end, and memory holds BUCKET_BYTES, or 2 UNIT in each process, however many documents there are.
A unit that is done is not done again, after a kill at any moment.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from elman_core.extension import (
    PACKED_FORMAT,
    PACKED_HEADER,
    ByteFile,
    ConfigError,
    DataError,
    Lock,
    OutOfMemoryError,
    PackedFile,
    hash_u64,
    open_regular,
    packed_manifest,
    packed_sections,
    read_json,
    storage_errors,
    sync,
    write_json,
)

from .encode import Encoded, Encoder, How
from .inputs import SEPARATOR, UNIT, Long, Unit, documents, parts_of

BUCKET, BUCKET_BYTES = 1 << 16, 64 << 20
"""Documents and bytes that are merged at a time, about."""

RUN = 1 << 18
"""Documents of a run at most: short ones take more memory than their bytes."""

KINDS = ("tokens", "mask", "index")
"""The files of a run."""

Step = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Job:
    """A unit in the order of the inputs. `stem`: of its files, a digest of all that its runs depend on."""

    number: int
    unit: Unit
    how: How
    seed: int
    unique: bool
    folder: str
    stem: str


def pack(
    found: Sequence[Unit],
    how: How,
    out: Path,
    seed: int,
    unique: bool,
    facts: dict[str, Any],
    step: Step = lambda _: None,
) -> dict[str, Any]:
    """Pack units of input into the file `out`, and write its manifest, which is returned.

    Args:
        unique: drop all but one of documents with the same tokens. facts: for the manifest.
        step: called with the bytes of input that are done.

    Raises:
        ConfigError: `out` exists, or another process packs it. DataError: of an input, or one changed. StorageError.
    """
    manifest = packed_manifest(out)
    folder = out.with_name(f".{out.name}.packing")
    with storage_errors(f"cannot write {out}"):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = Lock(folder / "lock")
        except BlockingIOError as error:
            raise ConfigError(f"another process is packing {out}") from error
        try:
            if out.exists():  # a kill came between the last two lines of this block
                made = PackedFile(out).manifest
                _discard(folder)
                return made
            stamps = {path: _stamps(path) for path in dict.fromkeys(p for unit in found for p in unit.sources)}
            jobs = [_job(i, unit, how, seed, unique, folder, stamps) for i, unit in enumerate(found)]
            digests = _run(jobs, list(stamps), step)
            for path, before in stamps.items():
                if _stamps(path) != before:
                    raise DataError(f"{path} changed while it was packed: the same command packs it again")
            made = _merge(jobs, how, folder / "packed", unique, facts | {"seed": seed, "sources": digests})
            write_json(folder / manifest.name, made)
            os.replace(folder / manifest.name, manifest)  # first: a packed file always has its manifest
            os.replace(folder / "packed", out)
            sync(out.parent)
            _discard(folder)
        finally:
            lock.close()
    return made


def _discard(folder: Path) -> None:
    """Remove the units, and before them what says that they are done: after a kill none may be taken for whole."""
    for done in folder.glob("*.json"):
        done.unlink()
    shutil.rmtree(folder)


def _stamps(path: str) -> list[tuple[int, int]]:
    """Size and time of a file, or of all in a folder."""
    files = sorted(Path(path).rglob("*")) if os.path.isdir(path) else [path]
    return [(s.st_size, s.st_mtime_ns) for s in map(os.stat, files)]


def _job(
    number: int, unit: Unit, how: How, seed: int, unique: bool, folder: Path, stamps: dict[str, list[tuple[int, int]]]
) -> Job:
    own = [*(stamps[path] for path in unit.sources), _stamps(how.tokenizer) if how.tokenizer else None]
    known = json.dumps([number, dataclasses.asdict(unit), own, dataclasses.asdict(how), seed, unique])
    return Job(
        number, unit, how, seed, unique, str(folder), hashlib.blake2b(known.encode(), digest_size=12).hexdigest()
    )


def _run(jobs: Sequence[Job], files: Sequence[str], step: Step) -> list[dict[str, Any]]:
    """Do the units that are not yet done, in processes; size and SHA-256 of all `files`, in order."""
    step(sum(job.unit.size for job in jobs if _done(job).exists()))
    left = [job for job in jobs if not _done(job).exists()]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(cores, len(left))
    if workers < 2:
        for job in left:
            _keep(job, do(job))
            step(job.unit.size)
        return [digest(path) for path in files]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _begin) as pool:
        try:
            running = {pool.submit(do, job): job for job in left}
            ended: SimpleQueue[Future[dict[str, int]]] = SimpleQueue()
            for future in running:
                future.add_done_callback(ended.put)

            def take(all_of_them: bool = False) -> None:
                while running if all_of_them else not ended.empty():
                    future = ended.get()
                    job = running.pop(future)
                    _keep(job, future.result())  # here, so that no process waits for the disk
                    step(job.unit.size)

            digests = [digest(path, take) for path in files]  # while the processes start
            take(all_of_them=True)
            return digests
        except BaseException as error:
            pool.shutdown(wait=True, cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise OutOfMemoryError(
                    "a packing process was killed, perhaps for lack of memory: the same command continues"
                ) from error
            raise


def _begin() -> None:
    """In each process: the parent ends it, by its own end too, which a kill does not announce."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def digest(path: str, often: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Name, size and SHA-256 of a file; of a folder over the digests of its files. often: called after each MiB."""
    if os.path.isdir(path):
        inside = [digest(str(p), often) for p in sorted(Path(path).rglob("*")) if p.is_file()]
        whole = hashlib.sha256(json.dumps([one["sha256"] for one in inside]).encode()).hexdigest()
        return {"path": path, "size": sum(one["size"] for one in inside), "sha256": whole}
    hashed, size = hashlib.sha256(), 0
    with open(open_regular(path), "rb") as file:
        while part := file.read(1 << 20):
            hashed.update(part)
            size += len(part)
            often()
    return {"path": path, "sha256": hashed.hexdigest(), "size": size}


def _done(job: Job) -> Path:
    return Path(job.folder, f"{job.stem}.json")


def _keep(job: Job, done: dict[str, int]) -> None:
    """Make the runs of a unit outlast a failure of power, and then say that it is done."""
    for run in range(done["runs"]):
        for path in filter(os.path.exists, (f"{_place(job, run)}.{kind}" for kind in KINDS)):
            sync(Path(path))
    write_json(_done(job), done)


def _place(job: Job, run: int) -> str:
    return f"{job.folder}/{job.stem}.{run}"


def do(job: Job) -> dict[str, int]:
    """Pack a unit into runs: how many, of how many documents, and how many others were empty."""
    name = job.unit.paths[0]
    if job.unit.kind == "text" and len(job.unit.paths) > 1:
        name += f" … {job.unit.paths[-1]}"
    some: list[Encoded] = []
    size = empty = number = runs = 0
    room = _room(2 * UNIT)
    try:
        for encoded in Encoder(job.how).encode(documents(job.unit), name):
            if encoded is None:
                empty += 1
                continue
            place = slice(size, size + encoded.bytes)
            if isinstance(encoded.tokens, bytes) and place.stop <= len(room):
                room[place] = encoded.tokens
                encoded.tokens = room[place]
            some.append(encoded)
            size += encoded.bytes
            if size >= 2 * UNIT or len(some) >= RUN:
                _write_run(job, runs, some, number)
                number += len(some)
                runs += 1
                some, size = [], 0
    except UnicodeEncodeError as error:
        raise DataError(f"{name}: a text has half of a surrogate pair, which is no character") from error
    if some:
        _write_run(job, runs, some, number)
    return {"runs": runs + bool(some), "documents": number + len(some), "empty": empty}


def _room(size: int) -> memoryview:
    """Memory in one piece, which NumPy asks for in huge pages: to get it in small ones takes as long as to read the input."""
    made: Any = np.empty(size, np.uint8)
    return memoryview(made)


def _write_run(job: Job, run: int, some: Sequence[Encoded], number: int) -> None:
    """A run, sorted by key. `number`: of its first document in the unit."""
    index = np.zeros((4, len(some)), np.uint64)  # key, rest of the key, tokens, bytes
    if job.unique:
        digests = [_content(one, job.seed) for one in some]
        index[:2] = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2).T
    else:
        index[0] = hash_u64(job.seed, job.number, np.arange(number, number + len(some)))
    counts = [one.bytes if isinstance(one.tokens, Long) else len(one.tokens) for one in some]
    index[2] = counts
    index[3] = [one.bytes for one in some]
    order = _by_key(index, job.unique)
    parts: dict[str, Iterable[Any]] = {"tokens": chain.from_iterable(_parts(some[i].tokens) for i in order)}
    if any(one.mask is not None for one in some):
        masks = ((some[i].mask, counts[i]) for i in order)
        parts["mask"] = (b"\1" * count if mask is None else mask for mask, count in masks)
    parts["index"] = [index[:, order].tobytes()]
    for kind, chunks in parts.items():
        place = open_regular(f"{_place(job, run)}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with open(place, "wb", 1 << 20) as file:
            file.writelines(chunks)


def _parts(tokens: Any) -> Iterable[Any]:
    """The tokens of a document, in parts if it is long."""
    return chain(tokens.parts(), [SEPARATOR]) if isinstance(tokens, Long) else (tokens,)


def _content(one: Encoded, seed: int) -> bytes:
    hashed = hashlib.blake2b(digest_size=16, key=(seed % 2**64).to_bytes(8, "little"))
    for part in _parts(one.tokens):
        hashed.update(bytes(part))
    if one.mask is not None:
        hashed.update(one.mask.tobytes())
    return hashed.digest()


class Run:
    """A sorted run, read from its beginning to its end.

    Attributes:
        place: its files without their ends. index: its rows. masked: whether some tokens do not count.
        first, count: tokens before those that `below` gave last, and how many those are.
    """

    def __init__(self, place: str, index: NDArray[np.uint64]) -> None:
        self.place, self.index = place, index
        self.masked = os.path.exists(f"{place}.mask")
        self.read = self.first = self.count = 0

    def below(self, key: int | None) -> NDArray[np.uint64]:
        """The rows of the next documents with smaller keys (None: of all others): (4, n)."""
        keys = self.index[0]
        end = len(keys) if key is None else int(np.searchsorted(keys, np.uint64(key)))
        rows = self.index[:, self.read : end]
        self.read = end
        self.first += self.count
        self.count = int(rows[2].sum())
        return rows

    def parts(self, kind: str, width: int, first: int, count: int) -> Iterator[bytes]:
        """So many tokens, 1 MiB at a time. first: tokens before them among those that `below` gave last."""
        if kind == "mask" and not self.masked:
            return (b"\1" * min(1 << 20, count - i) for i in range(0, count, 1 << 20))
        return parts_of(f"{self.place}.{kind}", (self.first + first) * width, count * width)


def _runs(jobs: Sequence[Job], done: Sequence[dict[str, Any]]) -> list[Run]:
    """The runs of all units. Their indexes become one file: one for each, mapped, would be too many open files."""
    places = [_place(job, i) for job, one in zip(jobs, done, strict=True) for i in range(one["runs"])]
    if not places:
        raise DataError("there is no text in these inputs: every document is empty")
    whole = Path(jobs[0].folder, "index")
    with open(whole, "wb", 1 << 20) as file:
        sizes = [file.write(Path(f"{place}.index").read_bytes()) // 8 for place in places]
    parts = np.split(np.memmap(whole, "<u8", "r"), np.cumsum(sizes)[:-1])
    return [Run(place, part.reshape(4, -1)) for place, part in zip(places, parts, strict=True)]


def _merge(jobs: Sequence[Job], how: How, out: Path, unique: bool, facts: dict[str, Any]) -> dict[str, Any]:
    """Merge the runs of all units into `out`; its manifest."""
    done = [read_json(_done(job)) for job in jobs]
    width = np.dtype(how.dtype).itemsize
    runs = _runs(jobs, done)
    masked = any(run.masked for run in runs)
    tokens = kept = size = 0
    ends_name, mask_name = out.with_name("ends"), out.with_name("mask")
    with open(out, "wb", 1 << 20) as file, open(ends_name, "wb") as ends, open(mask_name, "wb", 1 << 20) as masks:
        file.write(PACKED_HEADER)
        for rows, starts in _in_order(runs, unique):
            lengths = rows[2].astype(np.int64)
            places = list(zip(starts.tolist(), (starts + lengths).tolist(), strict=True))
            file.writelines(_chosen(runs, "tokens", width, places))
            if masked:
                masks.writelines(_chosen(runs, "mask", 1, places))
            ends.write((tokens + lengths.cumsum()).tobytes())
            tokens += int(lengths.sum())
            kept += len(lengths)
            size += int(rows[3].sum())
        file.write(bytes(packed_sections(tokens, how.dtype, kept, masked)[0] - file.tell()))
        ends.flush()
        masks.flush()
        _append(ends_name, file, lambda part: part)
        if masked:
            _append(
                mask_name, file, lambda part: np.packbits(np.frombuffer(part, np.uint8), bitorder="little").tobytes()
            )
        file.flush()
        os.fsync(file.fileno())
    return {
        "format": PACKED_FORMAT, "dtype": how.dtype, "tokens": tokens, "documents": kept, "bytes": size,
        "vocab_size": how.vocab_size, "separator": how.separator, "masked": masked,
        "empty": sum(one["empty"] for one in done), "duplicates": sum(one["documents"] for one in done) - kept,
        **ByteFile(out, packed=True).fingerprint(), **facts,
    }  # fmt: skip


def _in_order(runs: Sequence[Run], unique: bool) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.int64]]]:
    """The rows of documents by rising key, about BUCKET at a time, and where each begins in the parts of the runs."""
    size = sum(os.path.getsize(f"{run.place}.tokens") for run in runs)
    buckets = max(sum(run.index.shape[1] for run in runs) // BUCKET, size // BUCKET_BYTES) + 1
    for bucket in range(1, buckets + 1):
        key = None if bucket == buckets else bucket * 2**64 // buckets
        rows = np.concatenate([run.below(key) for run in runs], axis=1)
        starts = (rows[2].cumsum() - rows[2]).astype(np.int64)
        order = _by_key(rows, unique)
        yield rows[:, order], starts[order]


def _by_key(rows: NDArray[np.uint64], unique: bool) -> NDArray[np.int64]:
    """The order of documents by rising key. `unique`: only the first of those with the same key."""
    order = np.lexsort(rows[1::-1])
    if unique and len(order):
        keys = rows[:2, order]
        order = order[np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0))]
    return order


def _chosen(runs: Sequence[Run], kind: str, width: int, places: Sequence[tuple[int, int]]) -> Iterator[Any]:
    """What is at these places of all runs' documents that `below` gave last."""
    if sum(run.count for run in runs) * width <= 4 * BUCKET_BYTES:
        part = _part(runs, kind, width)
        yield from (part[a * width : b * width] for a, b in places)
        return
    ends = np.cumsum([run.count for run in runs])  # a long document is copied in parts
    for a, b in places:
        at = int(np.searchsorted(ends, a, side="right"))
        yield from runs[at].parts(kind, width, a - int(ends[at]) + runs[at].count, b - a)


def _part(runs: Sequence[Run], kind: str, width: int) -> memoryview:
    """The bytes, `width` for each token, of the documents that `below` gave last, run after run."""
    room = _room(sum(run.count for run in runs) * width)
    left = room
    for run in runs:
        here, left = left[: run.count * width], left[run.count * width :]
        if kind == "mask" and not run.masked:
            here[:] = b"\1" * len(here)
            continue
        place = f"{run.place}.{kind}"
        with open(place, "rb") as file:
            file.seek(run.first * width)
            if file.readinto(here) < len(here):
                raise DataError(
                    f"{place} is cut short: remove its folder, then the same command packs everything again"
                )
    return room


def _append(name: Path, file: BinaryIO, change: Callable[[bytes], bytes]) -> None:
    with open(name, "rb") as part:
        while content := part.read(1 << 23):
            file.write(change(content))
