"""`elman data pack`: what it reads, that nothing is lost or changed, that kills do no harm, and that training reads it."""

import contextlib
import gc
import gzip
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
from elman_data import packing
from elman_data.encode import Encoder, How
from elman_data.inputs import Unit, documents, find, units
from train_helpers import losses, train_words

from elman_core.cli import main
from elman_core.data import ByteFile, PackedFile, open_file
from elman_core.registry import DataError

TEXTS = [f"{'word ' * (i % 40)}é {i}" for i in range(600)]


def write_lines(path: Path, records) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def packed_texts(path: Path) -> list[str]:
    file = open_file(path)
    whole = file.windows(np.zeros(1, np.int64), file.size)[0].tobytes()
    assert [*file.ends()] == [i + 1 for i, byte in enumerate(whole) if byte == 0x1E]
    return [text.decode() for text in whole.split(b"\x1e")[:-1]]


@pytest.fixture
def small_units(monkeypatch):
    """Units of 3 kB, so that small inputs have many, done in this process."""
    monkeypatch.setattr("elman_data.inputs.UNIT", 3000)
    monkeypatch.setattr(packing, "UNIT", 3000)
    monkeypatch.setattr(packing, "BUCKET", 64)
    monkeypatch.setattr(packing.os, "sched_getaffinity", lambda _: {0})


def test_every_form_gives_its_texts_once_and_in_an_order_of_the_seed(tmp_path, small_units, capsys):
    parts = [TEXTS[i::7] for i in range(7)]
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for i, text in enumerate(parts[0]):
        (folder / "deep" / f"{i}.md").write_text(text)
    (folder / "raw.txt").write_text("\x1e".join(parts[1]) + "\x1e")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    write_lines(folder / "a.jsonl", ({"id": i, "text": t} for i, t in enumerate(parts[2])))
    (folder / "b.ndjson").write_text("\n\n".join(json.dumps({"text": t}) for t in parts[3]))
    (folder / "c.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in parts[4]).encode())
    )
    forms = [("d.jsonl.zst", "zstandard"), ("e.parquet", "pyarrow"), ("f.arrow", "pyarrow")]
    left = list(parts[5] + parts[6])
    for name, library in forms:
        with contextlib.suppress(ImportError):
            module = __import__(library)
            some, left = left[:50], left[50:]
            lines = "".join(json.dumps({"text": t}) + "\n" for t in some).encode()
            if library == "zstandard":
                (folder / name).write_bytes(module.ZstdCompressor().compress(lines))
                continue
            table = module.table({"text": some, "n": list(range(50))})
            if name.endswith("parquet"):
                __import__("pyarrow.parquet").parquet.write_table(table, folder / name, row_group_size=20)
            else:
                with module.ipc.new_stream(folder / name, table.schema) as out:
                    out.write_table(table)
    write_lines(folder / "rest.jsonl", ({"text": t} for t in [*left, ""]))
    said = []
    for i, (seed, words) in enumerate(((0, [folder]), (0, [folder]), (1, [tmp_path / "*"]))):
        out = tmp_path / f"out{i}" / "corpus.bin"
        assert main(["data", "pack", *map(str, words), "--out", str(out), "--seed", str(seed)]) == 0
        said.append(capsys.readouterr().out)
    orders = [packed_texts(tmp_path / f"out{i}" / "corpus.bin") for i in range(3)]
    assert all(sorted(order) == sorted(TEXTS) for order in orders)
    assert orders[0] == orders[1] != orders[2]
    assert np.corrcoef([TEXTS.index(t) for t in orders[0]], range(600))[0, 1] < 0.15
    assert "600 documents" in said[0]
    assert "1 empty" in said[0]
    assert "; 1 other file passed over" in said[0]
    assert [p.name for p in (tmp_path / "out0").iterdir()] == ["corpus.bin", "corpus.bin.json"]
    sources = PackedFile(tmp_path / "out0" / "corpus.bin").manifest["sources"]
    assert {"path", "size", "sha256"} == sources[0].keys()


def test_duplicates_are_dropped_if_asked(tmp_path, small_units):
    path = write_lines(tmp_path / "a.jsonl", ({"text": t} for t in TEXTS + TEXTS[::3]))
    assert main(["data", "pack", str(path), "--out", str(tmp_path / "all")]) == 0
    assert main(["data", "pack", str(path), "--out", str(tmp_path / "once"), "--drop-duplicates"]) == 0
    assert sorted(packed_texts(tmp_path / "all")) == sorted(TEXTS + TEXTS[::3])
    assert sorted(packed_texts(tmp_path / "once")) == sorted(TEXTS)
    assert PackedFile(tmp_path / "once").manifest["duplicates"] == 200


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_only_answers_count(tmp_path):
    chat = [
        {"role": r, "content": c} for r, c in (("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2"))
    ]
    write_lines(tmp_path / "a.jsonl", [{"prompt": "2+2=", "completion": "4"}, {"messages": chat}, {"text": "plain"}])
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    out = tmp_path / "out"
    assert (
        main(["data", "pack", str(tmp_path / "a.jsonl"), "--out", str(out), "--template", str(tmp_path / "t.jinja")])
        == 0
    )
    file = open_file(out)
    whole = file.windows(np.zeros(1, np.int64), file.size)[0]
    counts = file.counts(np.zeros(1, np.int64), file.size)[0]
    shown = "".join(chr(t) if c else "_" for t, c in zip(whole, counts, strict=True)).split("\x1e")
    asked = "<user>q1</><assistant>", "<user>q2</><assistant>"
    assert sorted(shown) == sorted(
        ["", "____4", "plain", "_" * len(asked[0]) + "a1</>" + "_" * len(asked[1]) + "a2</>"]
    )
    for first in range(file.size - 20):  # any window has the mask of its tokens
        assert np.array_equal(file.counts(np.array([first]), 20)[0], counts[first : first + 20])


def test_training_reads_a_packed_file_beside_a_raw_one(tmp_path, text):
    write_lines(tmp_path / "a.jsonl", ({"prompt": "x" * 20, "completion": t} for t in TEXTS))
    out = tmp_path / "out"
    assert main(["data", "pack", str(tmp_path / "a.jsonl"), "--out", str(out)]) == 0
    words = train_words(f"{out}:2", tmp_path / "run", "train.steps=4")
    assert main([*words, "--data", f"{text}:1"]) == 0
    assert len(losses(tmp_path / "run")) == 4
    for name in ("run", "run/checkpoints/step-00000004"):
        assert main(["eval", str(tmp_path / name)]) == 0
    assert main(["data", "info", str(out)]) == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"text": "a"}\n{"text": "\xff"}\n', "a.jsonl, line 2: invalid UTF-8"),
        (b'{"text": "a"}\n' * 300 + b'{"text": \n', "a.jsonl, line 301: "),
        (b'{"text": "a"}\n[1]\n', "a.jsonl, line 2: it is no JSON object"),
        (
            b'{"body": "a"}\n',
            "a record has no 'text', no 'completion' and no 'messages': name what it has with --field, one of body",
        ),
        (b'{"text": "a"}\n{"text": 3}\n', "'text' is int in a record, not a text; the record is {'text': 3}"),
        (b'{"messages": []}\n', "give --template FILE"),
        (b'{"text": ""}\n', "there is no text in these inputs"),
        (b"", "there is no text in these inputs"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_under_the_name(content, says, tmp_path, small_units, capsys):
    (tmp_path / "a.jsonl").write_bytes(content)
    assert main(["data", "pack", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("out")]


def test_inputs_that_are_missing_or_packed_otherwise_are_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.json").write_text("[]")
    (tmp_path / "b.jsonl.gz").write_bytes(b"no gzip")
    (tmp_path / "c.txt").write_text("text")
    assert main(["data", "pack", str(tmp_path / "c.txt"), "--out", str(tmp_path / "packed.txt")]) == 0
    for words, says in (
        (["none"], "there is no such file"),
        ([str(tmp_path / "a.json")], "is not read: rename it"),
        ([str(tmp_path / "b.jsonl.gz")], "b.jsonl.gz cannot be read: BadGzipFile"),
        ([str(tmp_path / "packed.txt")], "packed.txt is a packed file, not a text"),
    ):
        assert main(["data", "pack", *words, "--out", str(tmp_path / "out")]) == 2
        assert says in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    for folder in (".", "..", str(tmp_path)):
        assert main(["data", "pack", str(tmp_path), "--out", folder]) == 2
        assert capsys.readouterr().err.startswith(f"elman: {folder} is a folder: --out is a file")
    (tmp_path / "out").write_text("mine")
    assert main(["data", "pack", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "exists: nothing is overwritten" in capsys.readouterr().err


def test_a_byte_that_changed_in_a_parquet_with_checksums_is_said(tmp_path, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    table, path = __import__("pyarrow").table({"text": TEXTS}), tmp_path / "a.parquet"
    parquet.write_table(table, path, write_page_checksum=True, compression="none", use_dictionary=False)
    stored = bytearray(path.read_bytes())
    stored[stored.index(TEXTS[300].encode())] ^= 1
    path.write_bytes(stored)
    assert main(["data", "pack", str(path), "--out", str(tmp_path / "out")]) == 2
    assert "checksum verification failed" in capsys.readouterr().err


def test_a_zst_file_is_read_to_its_end_and_one_that_is_cut_short_is_said(tmp_path, capsys):
    compress = pytest.importorskip("zstandard").ZstdCompressor().compress
    texts = [f"{i} " + "".join(map(chr, np.random.default_rng(i).integers(97, 123, 999))) for i in range(300)]
    frames = [compress(f"{text}\x1e".encode()) for text in texts[:200]] + [compress("\x1e".join(texts[200:]).encode())]
    path, whole = tmp_path / "a.txt.zst", b"".join(frames)
    path.write_bytes(whole)
    assert main(["data", "pack", str(path), "--out", str(tmp_path / "out")]) == 0
    assert sorted(packed_texts(tmp_path / "out")) == sorted(texts)
    capsys.readouterr()
    for size in (0, 3, len(frames[0]) - 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert main(["data", "pack", str(path), "--out", str(tmp_path / "cut")]) == 2
        assert "a.txt.zst cannot be read: EOFError: Compressed file ended before" in capsys.readouterr().err


def test_a_compressed_file_is_closed_once_it_is_read(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a text"))
    (unit,) = units([tmp_path / "a.txt.gz"])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert list(documents(unit)) == [b"a text"]
        gc.collect()
    assert not said, "an open file was thrown away"


def test_a_run_that_is_cut_short_before_the_merge_is_said(tmp_path, small_units, monkeypatch, capsys):
    path, out = write_lines(tmp_path / "a.jsonl", ({"text": t} for t in TEXTS)), tmp_path / "out"
    merge = packing._merge

    def cut(*args):
        run = next((tmp_path / ".out.packing").glob("*.tokens"))
        os.truncate(run, run.stat().st_size - 1)
        return merge(*args)

    with monkeypatch.context() as patched:
        patched.setattr(packing, "_merge", cut)
        assert main(["data", "pack", str(path), "--out", str(out)]) == 2
    assert ".tokens is cut short: remove its folder" in capsys.readouterr().err
    assert not out.exists()


def test_a_text_that_changes_while_it_is_packed_is_said_and_packed_again(tmp_path, small_units, monkeypatch, capsys):
    path, out = write_lines(tmp_path / "a.jsonl", ({"text": t} for t in TEXTS)), tmp_path / "out"
    digest = packing.digest

    def changed(*args):
        write_lines(path, ({"text": f"new {t}"} for t in TEXTS))
        return digest(*args)

    with monkeypatch.context() as patched:
        patched.setattr(packing, "digest", changed)
        assert main(["data", "pack", str(path), "--out", str(out)]) == 2
    assert f"{path} changed while it was packed: the same command packs it again" in capsys.readouterr().err
    assert not out.exists()
    assert main(["data", "pack", str(path), "--out", str(out)]) == 0
    assert sorted(packed_texts(out)) == sorted(f"new {t}" for t in TEXTS)


def test_what_is_wrong_with_a_packed_file_is_one_line(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ({"text": t} for t in TEXTS))
    out, manifest = tmp_path / "out", tmp_path / "out.json"
    assert main(["data", "pack", str(path), "--out", str(out)]) == 0
    good, facts = out.read_bytes(), manifest.read_text()

    def wrong(content=good, about=facts):
        out.write_bytes(content)
        manifest.write_text(about) if about else manifest.unlink()
        with pytest.raises(DataError) as raised:
            open_file(out)
        return str(raised.value)

    assert "instead of" in wrong(good[:-9])
    assert "does not match" in wrong(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    assert "does not match: pack it again" in wrong(good[:-8] + bytes(8))
    out.write_bytes(good[:-16] + good[-8:] + good[-8:])
    digest = ByteFile(out, packed=True).fingerprint()["blake2b"]
    damaged = {**json.loads(facts), "blake2b": digest}
    damaged.pop("digest")
    assert "damaged where it says how its documents end" in wrong(out.read_bytes(), json.dumps(damaged))
    assert "was changed after it was written" in wrong(about=facts.replace('"uint8"', '"uint16"'))
    assert "not JSON" in wrong(about=facts[:50])
    assert "copy out.json beside it" in wrong(about="")


def test_a_large_line_across_units_and_a_last_one_without_newline(tmp_path, small_units):
    long = ["x" * 10_000, "y", "z" * 4000, "last"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in long))
    found = list(units(find([str(tmp_path / "a.jsonl")])[0]))
    assert len(found) == 5
    assert [d["text"] for unit in found for d in documents(unit)] == long
    assert [*documents(Unit("lines", found[0].paths, 0, 9000, 9001))] == []


def test_a_large_text_is_read_a_part_at_a_time(tmp_path, small_units):
    longer, path = [*TEXTS[:100], "", "long " * 3000, "", *TEXTS[100:]], tmp_path / "a.txt"
    for ends in ("", "\x1e", "\x1e\x1e"):
        path.write_text("\x1e".join(longer) + ends)
        read = [*map(bytes, documents(Unit("text", (str(path),), 0)))]
        assert read == path.read_bytes().removesuffix(b"\x1e").split(b"\x1e")
    path.write_text("\x1e".join(TEXTS * 10))
    tracemalloc.start()
    for _ in documents(Unit("text", (str(path),), 0)):
        pass
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < path.stat().st_size / 3


def test_many_small_files_take_time_in_proportion_to_their_number(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    began = time.process_time()
    (unit,) = units([tmp_path / "a.txt"] * 60_000)
    assert time.process_time() - began < 10, "one sum over the others for each took minutes"
    assert (len(unit.paths), unit.size) == (60_000, 180_000)


def test_a_file_under_several_names_is_read_once_and_one_that_leads_nowhere_is_said(tmp_path, monkeypatch):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    for words in (["texts/a.txt", "texts"], ["texts", str(folder)], ["texts/../texts/*", "texts/a.txt"]):
        assert [path.name for path in find(words)[0]] == ["a.txt"]
    (folder / "b.txt").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"texts/b\.txt cannot be read: No such file"):
        list(units(find(["texts"])[0]))


def test_a_folder_behind_a_link_is_read_and_one_that_cannot_be_is_said(tmp_path, monkeypatch):
    for place in ("elsewhere", "texts/deep"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "a.txt").write_text(place)
    (tmp_path / "texts/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "texts/deep/circle").symlink_to(tmp_path / "texts")
    found = [str(path.relative_to(tmp_path)) for path in find([str(tmp_path / "texts")])[0]]
    assert found == ["texts/deep/a.txt", "texts/linked/a.txt"]
    listed = os.scandir

    def denied(place):
        if str(place).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(place))
        return listed(place)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(DataError, match="texts/deep cannot be read: Permission denied"):
        find([str(tmp_path / "texts")])


def test_many_duplicates_take_no_memory_in_the_merge(tmp_path, small_units, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", ({"text": "the same"} for _ in range(3000)))
    rooms, room = [], packing._room
    monkeypatch.setattr(packing, "_room", lambda size: rooms.append(size) or room(size))
    assert main(["data", "pack", str(path), "--out", str(tmp_path / "out"), "--drop-duplicates"]) == 0
    assert packed_texts(tmp_path / "out") == ["the same"]
    assert PackedFile(tmp_path / "out").manifest["duplicates"] == 2999
    assert max(rooms) == 2 * packing.UNIT, "that of a unit, not of what is merged"


def test_a_template_that_changes_an_earlier_answer_is_refused():
    template = (
        "{% for m in messages %}<{{ m.role }}>"
        "{{ m.content if loop.last or m.role == 'user' else '' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    said = [{"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "an answer"), ("user", "thanks"))]
    encoder = Encoder(How(template=template))
    assert encoder.pieces({"messages": said[:2]}, "a")[1] == ("an answer", True)
    with pytest.raises(DataError, match="what it writes for a turn changes what it wrote before"):
        encoder.pieces({"messages": said}, "a")


def test_many_short_documents_become_several_runs_and_the_same_file(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", ({"text": text} for text in TEXTS))
    held, write = [], packing._write_run
    monkeypatch.setattr(packing, "_write_run", lambda *given: held.append(len(given[2])) or write(*given))
    for name, most in (("one", packing.RUN), ("many", 100)):
        monkeypatch.setattr(packing, "RUN", most)
        assert main(["data", "pack", str(path), "--out", str(tmp_path / name)]) == 0
    assert held == [600, *[100] * 6], "memory has no more documents than a run"
    assert (tmp_path / "many").read_bytes() == (tmp_path / "one").read_bytes()


def test_a_document_larger_than_a_run_and_more_units_than_open_files(tmp_path, small_units):
    long = "word " * 2000
    (tmp_path / "a.md").write_text(long)
    for i, text in enumerate(TEXTS[:100]):
        (tmp_path / f"{i}.jsonl").write_text(json.dumps({"text": text}))
    os.close(free := os.dup(0))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 50, limits[1]))
    try:
        assert main(["data", "pack", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert sorted(packed_texts(tmp_path / "out")) == sorted([long, *TEXTS[:100]])


def test_a_raw_text_without_an_end_of_a_document_takes_no_memory(tmp_path, small_units, monkeypatch):
    monkeypatch.setattr(packing, "BUCKET_BYTES", 3000)
    monkeypatch.setattr("elman_core.storage.MOST_READ", 1 << 20)  # asked for, but not used, when a manifest is read
    size = 32 << 20
    whole = np.random.default_rng(0).integers(97, 123, size, dtype=np.uint8)
    whole.tofile(tmp_path / "a.txt")
    words = ["data", "pack", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]
    tracemalloc.start()
    try:
        assert main(words) == 0
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < size / 2
    file = PackedFile(tmp_path / "out")
    made = file.windows(np.zeros(1, np.int64), file.size)[0]
    assert (made[:-1] == whole).all()
    assert (made[-1], [*file.ends()]) == (0x1E, [size + 1])


def test_long_texts_between_short_ones_are_packed_as_others_are(tmp_path, small_units, monkeypatch):
    longer = [f"{i} " + "long " * 700 * i for i in range(1, 5)]
    (tmp_path / "a.txt").write_text("\x1e".join([*TEXTS[:20], longer[0], longer[1], *TEXTS[20:40], longer[2]]))
    for name in ("b.txt", "c.txt"):
        (tmp_path / name).write_text(longer[3] + "\x1e")
    write_lines(tmp_path / "d.jsonl", [{"prompt": "what? ", "completion": "this"}])
    inputs = [str(tmp_path / name) for name in ("a.txt", "b.txt", "c.txt", "d.jsonl")]
    for out, bucket in (("whole", packing.BUCKET_BYTES), ("parts", 100)):
        monkeypatch.setattr(packing, "BUCKET_BYTES", bucket)
        assert main(["data", "pack", *inputs, "--drop-duplicates", "--out", str(tmp_path / out)]) == 0
        file = PackedFile(tmp_path / out)
        assert sorted(packed_texts(tmp_path / out)) == sorted([*TEXTS[:40], *longer, "what? this"])
        assert file.manifest["duplicates"] == 1
        (counts,) = file.counts(np.zeros(1, np.int64), file.size)
        uncounted = file.windows(np.zeros(1, np.int64), file.size)[0][~counts].tobytes()
        assert uncounted == b"what? "
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "parts").read_bytes()


def test_a_packing_process_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from elman_data import packing; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_kill_at_any_moment_loses_and_changes_nothing(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ({"text": t * 20} for t in TEXTS))
    code = (
        "import sys; from elman_data import packing, inputs; inputs.UNIT = packing.UNIT = 40_000\n"
        "from elman_core.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", code, "data", "pack", str(path), "--out"]
    subprocess.run([*words, str(tmp_path / "good")], check=True)
    killed = 0
    for files in (1, 4, 8):  # that the packing has written
        process = subprocess.Popen([*words, str(tmp_path / "out")], start_new_session=True)
        while process.poll() is None and len([*tmp_path.glob(".out*/*")]) < files:
            time.sleep(0.001)
        killed += process.poll() is None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if (tmp_path / "out").exists():
            break
    else:
        subprocess.run([*words, str(tmp_path / "out")], check=True)
    assert killed
    assert (tmp_path / "out").read_bytes() == (tmp_path / "good").read_bytes()
    assert not list(tmp_path.glob(".out*"))


def test_a_kill_while_anything_is_written_leaves_nothing_beside_the_file(tmp_path, monkeypatch):
    path, sync = write_lines(tmp_path / "a.jsonl", ({"text": t} for t in TEXTS)), os.fsync
    for last in (*range(1, 5), *range(1, 6), 0):  # the call that it does not survive; the second time no unit is left
        calls = itertools.count(1)
        monkeypatch.setattr(os, "fsync", lambda f, c=calls, n=last: os._exit(9) if next(c) == n else sync(f))
        if not (process := os.fork()):
            os._exit(main(["data", "pack", str(path), "--out", str(tmp_path / "out")]))
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if code == 0:
            break
        assert code == 9
    assert last == 5, "the second time it ends after four: the file, its manifest and two folders"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out", "out.json"]


def test_a_file_that_is_removed_is_packed_again_where_a_kill_left_a_part_of_the_units(
    tmp_path, monkeypatch, small_units
):
    path, out = write_lines(tmp_path / "a.jsonl", ({"text": t} for t in TEXTS)), tmp_path / "out"

    def killed(folder):
        for tokens in folder.glob("*.tokens"):
            tokens.unlink()
        os._exit(9)

    if not (process := os.fork()):
        monkeypatch.setattr(packing.shutil, "rmtree", killed)
        os._exit(main(["data", "pack", str(path), "--out", str(out)]))
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9
    good = out.read_bytes()
    out.unlink()
    assert main(["data", "pack", str(path), "--out", str(out)]) == 0
    assert out.read_bytes() == good
    assert not list(tmp_path.glob(".out*"))


def test_a_data_set_that_was_mended_in_its_place_is_packed_again_after_a_kill(tmp_path, monkeypatch):
    file, out = tmp_path / "set" / "data.arrow", tmp_path / "out"
    file.parent.mkdir()
    file.write_text("old")
    unit = Unit("dataset", (str(file.parent), ""), 3, 0, 1)
    monkeypatch.setattr(packing, "documents", lambda _: [{"text": file.read_text()}])

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(packing, "_merge", killed)
        with pytest.raises(KeyboardInterrupt):
            packing.pack([unit], How(), out, 0, False, {})
    file.write_text("new")  # the size, and the time of the folder, are what they were
    os.utime(file, ns=(0, 1))
    packing.pack([unit], How(), out, 0, False, {})
    assert packed_texts(out) == ["new"]


def test_a_tokenizer_gives_ids_that_decode_to_the_texts(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=letters, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(tmp_path / "tok")
    texts = [*TEXTS, "a text may say <end> and goes on"]
    path = write_lines(tmp_path / "a.jsonl", ({"text": t} for t in texts))
    out = tmp_path / "packed" / "out"
    assert main(["data", "pack", str(path), "--out", str(out), "--tokenizer", str(tmp_path / "tok")]) == 0
    file = open_file(out)
    assert (file.dtype, Path(file.tokenizer["path"]), file.separator) == (np.uint16, out.with_name("tokenizer.json"), 0)
    ids = file.windows(np.zeros(1, np.int64), file.size)[0]
    ends = file.ends()
    found = [made.decode(ids[a : b - 1].tolist()) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    assert sorted(found) == sorted(texts)
    assert (ids == file.separator).sum() == len(texts)
    assert file.manifest["bytes"] == sum(len(t.encode()) + 1 for t in texts)
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}<end>{% endfor %}")
    chats = [
        {"text": "say <end>"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ]
    words = [
        "--out",
        str(tmp_path / "chat"),
        "--template",
        str(tmp_path / "t.jinja"),
        "--tokenizer",
        str(tmp_path / "tok"),
    ]
    assert main(["data", "pack", str(write_lines(tmp_path / "c.jsonl", chats)), *words]) == 0
    packed = open_file(tmp_path / "chat")
    ids = packed.windows(np.zeros(1, np.int64), packed.size)[0]
    assert (ids == 0).sum() == 2 + 2, "the ends that the template writes, and those of documents"
    assert How(tokenizer="t", vocab_size=2**16 + 1).dtype == "uint32"
    assert main([*train_words(out, tmp_path / "run", "train.steps=2")]) == 0


@pytest.mark.parametrize("last", [900, 70_000])
def test_a_vocabulary_with_numbers_that_no_token_has_is_as_large_as_its_last(last, tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1, "<end>": 2, "z": last}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(tmp_path / "tok")
    out = tmp_path / "packed" / "out"
    words = ["--out", str(out), "--tokenizer", str(tmp_path / "tok")]
    assert main(["data", "pack", str(write_lines(tmp_path / "a.jsonl", [{"text": "z"}])), *words]) == 0
    file = open_file(out)
    assert file.vocab_size == last + 1
    assert file.windows(np.zeros(1, np.int64), 2).tolist() == [[last, 2]]


def test_data_info_prints_json(tmp_path, capsys):
    def write(content: bytes) -> Path:
        (tmp_path / "text").write_bytes(content)
        return tmp_path / "text"

    path = write(b"document one\x1edocument two\x1e" * 4000)
    assert main(["data", "info", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["size"] == path.stat().st_size
    assert facts["training_bytes"] + facts["heldout_bytes"] == facts["size"]
    assert facts["documents_in_first_16_MiB"] == 8000
    for text, count in ((b"x" * 20_000, 1), (b"\x1e" * 20_000, 0), (b"\x1ea\x1e\x1eb" * 4000, 8000)):
        assert main(["data", "info", str(write(text)), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["documents_in_first_16_MiB"] == count
