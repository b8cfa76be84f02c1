"""`elman generate` and `elman export` as a user types them."""

import io
import json
import os
import shutil
import sys

import pytest
import torch
import toy_mixers
from safetensors.torch import load_file
from train_helpers import closed_pipe, files_of_at_most

from elman_core.cli import main
from elman_core.model import LadderForCausalLM, LadderLM
from elman_core.registry.errors import printable

toys = toy_mixers.toys  # for every test here


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def run(tmp_path):
    model = LadderLM("toy", dim=16, depth=1)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(20)
    folder = tmp_path / "run" / "checkpoints" / "step-00000010"
    model.save_pretrained(folder)
    return tmp_path / "run"


def elman(capsysbinary, *words):
    code = main([str(w) for w in words])
    return code, *(said.decode("utf-8", "replace") for said in capsysbinary.readouterr())


def test_generate_writes_text_and_repeats_with_a_seed(run, capsysbinary):
    first, second, other = (
        elman(capsysbinary, "generate", run, "-p", "hello", "-n", 40, "--seed", s) for s in (1, 1, 2)
    )
    assert first == second != other
    assert (first[0], other[0], first[2]) == (0, 0, "")
    assert len(first[1]) > 10


@pytest.mark.parametrize("words", [["generate", "-n", "40", "--stop", "none"], ["list"]])
def test_a_reader_who_has_gone_is_no_error(words, run, capsysbinary, monkeypatch, tmp_path):
    if words == ["list"]:  # which keeps what it found, here with the toys of this process
        monkeypatch.setenv("ELMAN_CACHE", str(tmp_path))
    words = [words[0], str(run), *words[1:]] if words[0] == "generate" else words
    with closed_pipe() as file:
        monkeypatch.setattr("sys.stdout", file)
        assert main(words) == 0
    assert capsysbinary.readouterr().err == b""


def test_a_closed_standard_output_is_no_error(run, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    assert main(["generate", str(run), "-n", "4"]) == 0


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_seed_has_64_bits(seed, run, capsysbinary):
    code, out, err = elman(capsysbinary, "generate", run, "--seed", seed)
    assert (code, out, err) == (2, "", f"elman: the seed must fit in 64 bits, not {seed}\n")


def test_prompts_come_from_an_option_a_file_or_standard_input(run, capsysbinary, tmp_path, monkeypatch):
    greedy = ("-n", 20, "-t", 0, "--stop", "none")
    expected = elman(capsysbinary, "generate", run, "-p", "hé\x1e", *greedy)
    file = tmp_path / "prompt"
    file.write_bytes("hé\x1e".encode())
    assert elman(capsysbinary, "generate", run, "-f", file, *greedy) == expected
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert elman(capsysbinary, "generate", run, "-", *greedy) == expected
    assert elman(capsysbinary, "generate", run, "-p", "other", *greedy) != expected
    os.mkfifo(pipe := tmp_path / "pipe")  # nobody writes into it
    said = f"elman: {pipe} cannot be read: it is not a regular file (- reads standard input)\n"
    assert elman(capsysbinary, "generate", run, "-f", pipe, *greedy) == (2, "", said)
    monkeypatch.setattr("sys.stdin", None)
    assert elman(capsysbinary, "generate", run, "-", *greedy) == elman(capsysbinary, "generate", run, *greedy)


def test_weights_are_as_saved_on_a_cpu_in_bf16_on_a_gpu_or_as_asked(run, capsysbinary, monkeypatch):
    from elman_core.cli import generate as command
    from elman_core.model import checkpoint

    asked, real = [], checkpoint.load_checkpoint
    monkeypatch.setattr(
        checkpoint, "load_checkpoint", lambda *a, dtype, **k: asked.append(dtype) or real(*a, dtype=dtype, **k)
    )
    for words in ((), ("--dtype", "bf16"), ("--dtype", "fp32")):
        assert elman(capsysbinary, "generate", run, "-p", "x", "-n", 3, *words)[0] == 0
    assert asked == [None, "bfloat16", "float32"]
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    assert command._storage(None, torch.device("cuda:1")) == "bfloat16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert command._storage(None, torch.device("cuda")) is None


def test_several_samples_are_numbered(run, capsysbinary):
    code, out, _ = elman(capsysbinary, "generate", run, "-n", 15, "--num", 3, "--seed", 1)
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("--- ")] == ["--- 1 of 3", "--- 2 of 3", "--- 3 of 3"]


def test_a_stop_byte_ends_the_text(run, capsysbinary):
    _, whole, _ = elman(capsysbinary, "generate", run, "-p", "x", "-n", 60, "-t", 0, "--stop", "none")
    model = LadderForCausalLM.from_pretrained(run / "checkpoints" / "step-00000010").eval()
    ids = model.generate(torch.tensor([[120]]), max_new_tokens=60, do_sample=False, eos_token_id=None)[0, 1:].tolist()
    assert whole == bytes(ids).decode("utf-8", "replace")
    stop = ids[7]
    _, cut, said = elman(capsysbinary, "generate", run, "-p", "x", "-n", 60, "-t", 0, "--stop", hex(stop))
    assert cut == bytes(ids[: ids.index(stop)]).decode("utf-8", "replace")
    assert f"ended after {ids.index(stop)} of 60 bytes, at the stop byte 0x{stop:02x}; --stop none continues" in said
    model.generation_config.eos_token_id = [30, stop]
    model.save_pretrained(run / "ends")
    assert elman(capsysbinary, "generate", run / "ends", "-p", "x", "-n", 60, "-t", 0)[1] == cut


def test_a_pipe_gets_every_byte_and_a_terminal_the_prompt_and_text_that_controls_nothing(
    run, capsysbinary, monkeypatch
):
    written = [*range(256), *"é".encode(), *"\u202e".encode()]
    monkeypatch.setattr(
        "elman_core.generation.generate_tokens", lambda *_, num, **__: ([byte] * num for byte in written)
    )
    words = ["generate", str(run), "-p", "\x1b[2J", "-n", "9", "--stop", "none"]
    assert main(words) == 0
    assert capsysbinary.readouterr().out == bytes(written)
    assert main([*words, "--num", "2"]) == 0
    assert capsysbinary.readouterr().out == b"--- 1 of 2\n%b\n--- 2 of 2\n%b\n" % (bytes(written), bytes(written))
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    shown = printable("\x1b[2J" + bytes(written).decode(errors="replace"), "\n\t") + "\n"
    assert elman(capsysbinary, *words)[1] == shown
    assert r"\x1b[2J\x00" in shown
    assert r"é\u202e" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("none-such",), "there is no folder 'none-such'"),
        (("e88-small",), "there is no folder 'e88-small'. Did you mean 'pretrained/e88-small'?"),
        ((__file__,), "is neither a checkpoint (no config.json) nor a run with one (none saved)"),
        (("RUN", "-t", "-1"), "temperature must be 0 or more"),
        (("RUN", "--top-p", "0"), "top-p must be above 0"),
        (("RUN", "--stop", "0x1ff"), "--stop takes a byte"),
        (("RUN", "extra"), "unexpected 'extra'"),
        (("RUN", "-", "-p", "x"), "give one prompt"),
        (("RUN", "-f", "none-such"), "none-such cannot be read"),
        (("RUN", "--device", "tpu9"), "the device must be auto, cpu, cuda or cuda:N, not 'tpu9'"),
        (("RUN", "--num", "0"), "num"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, message, run, capsysbinary):
    code, out, err = elman(capsysbinary, "generate", *(run if w == "RUN" else w for w in words))
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_slip_in_the_name_of_a_run_is_not_asked_of_the_hub(capsysbinary, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = "elman: there is no folder 'runs/mine'. Check the path\n"
    assert elman(capsysbinary, "generate", "runs/mine", "-p", "x") == (2, "", said)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "manifest.json").write_text("{}")
    for command in (("generate", "runs/mime", "-p", "x"), ("resume", "runs/mime")):
        said = "elman: there is no folder 'runs/mime'. Did you mean 'runs/mine'?\n"
        assert elman(capsysbinary, *command) == (2, "", said)
    code, _, said = elman(capsysbinary, "generate", "someone/model", "-p", "x")
    assert (code, "someone/model cannot be loaded" in said) == (2, True), "that is, or may be, a name on the hub"


def test_export_writes_a_model_that_loads(run, capsysbinary, tmp_path):
    code, out, err = elman(capsysbinary, "export", run, tmp_path / "out", "--dtype", "bf16")
    assert (code, err) == (0, "")
    assert "in bfloat16" in out
    model = LadderForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.model.layers[0].mixer.rec.dtype == torch.float32  # its mixer says so
    assert {p.name for p in (tmp_path / "out").iterdir()} >= {"tokenizer.json", "README.md", "modeling_ladder_hub.py"}
    assert not [p for p in tmp_path.iterdir() if "partial" in p.name]


def test_export_keeps_the_weights_bit_for_bit_and_an_edited_card(run, capsysbinary, tmp_path):
    checkpoint = run / "checkpoints" / "step-00000010"
    (checkpoint / "README.md").write_text("my card")
    assert elman(capsysbinary, "export", run, tmp_path / "out")[0] == 0
    before, after = (load_file(f / "model.safetensors") for f in (checkpoint, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert (tmp_path / "out" / "README.md").read_text() == "my card"
    configs = [json.loads((f / "config.json").read_text()) for f in (checkpoint, tmp_path / "out")]
    assert configs[0] == configs[1]


def test_export_to_a_full_disk_is_one_line_and_leaves_nothing(run, capsysbinary, tmp_path):
    with files_of_at_most(8000):
        code, _, err = elman(capsysbinary, "export", run, tmp_path / "out")
    assert (code, len(err.splitlines())) == (1, 1)
    assert "cannot write" in err
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_export_overwrites_nothing_and_leaves_nothing_behind(run, capsysbinary, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    code, _, err = elman(capsysbinary, "export", run, tmp_path / "out")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "nothing is overwritten" in err
    shutil.rmtree(run / "checkpoints" / "step-00000010" / "state", ignore_errors=True)
    (run / "checkpoints" / "step-00000010" / "config.json").unlink()
    assert elman(capsysbinary, "export", run, tmp_path / "other")[0] == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]
