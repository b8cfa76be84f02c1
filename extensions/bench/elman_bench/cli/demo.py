"""`elman demo`: everything in about three minutes, on text that is already on this machine."""

from __future__ import annotations

import shlex
from pathlib import Path

import typer

from elman_core import list_variants
from elman_core.extension import PluginError, print, resolve

from ._schedule import free_folder

PRESET = "demo"
PROMPTS = ("import ", "def ", "class ")
# Nothing is cut off the distribution: where a space follows a space at 95 %, top-p would make it certain, and a line endless.
SAMPLING = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "no_repeat_ngram_size": 32}


def demo(
    variant: str | None = typer.Argument(None, help="NAME or NAME:preset; by default one that learns fast on a CPU."),
    seconds: float = typer.Option(100.0, min=1, help="Seconds of training."),
    steps: int | None = typer.Option(None, min=1, help="Steps of training, instead of seconds."),
    out: Path | None = typer.Option(None, help="Folder of the run; runs/demo by default."),
) -> None:
    """Train a small model, save it, load it, and write text. The text is the source of Python's standard library.

    Needs no GPU and no download.
    """
    from elman_bench.corpus import standard_library_corpus

    corpus = standard_library_corpus()
    print("corpus      the source text of this Python's standard library")

    import torch

    from elman_core import byte_tokenizer
    from elman_core.extension import leave, load_checkpoint, read_settings, start

    name = choose_variant(variant)
    print(f"variant     {name}")
    torch.set_num_threads(1)  # a step is many small products: threads that wait for each other rarely pay
    minutes = seconds / 60 if steps is None else None
    settings = read_settings("demo", corpus, steps=steps, minutes=minutes, sets=[f"model.variant={name}"])
    result = start(settings, out or free_folder("demo")).fit()
    leave(result)
    assert result.checkpoint is not None  # a run that ended well has saved

    print(f"\nloading {result.checkpoint}; it writes:")
    model, tokenizer = load_checkpoint(result.checkpoint), byte_tokenizer()
    torch.manual_seed(0)
    for prompt in PROMPTS:
        inputs = tokenizer("\x1e" + prompt, return_tensors="pt")
        written = model.generate(**inputs, max_new_tokens=280, do_sample=True, **SAMPLING)
        print(f"{'-' * 72}\n{tokenizer.decode(written[0, 1:], skip_special_tokens=True)}")
    print("-" * 72)
    print(f"""
The same in Python:

    import elman_core
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("{result.checkpoint}")
    tokenizer = AutoTokenizer.from_pretrained("{result.checkpoint}")
    inputs = tokenizer("def ", return_tensors="pt")
    print(tokenizer.decode(model.generate(**inputs, max_new_tokens=200, do_sample=True)[0]))

More text:  elman generate {shlex.quote(str(result.checkpoint))} -p "class "
Train more: elman train demo --set model.variant={name} --data {shlex.quote(str(corpus))} --minutes 10""")


def choose_variant(asked: str | None = None) -> str:
    """Return the variant to train: the requested one; or the first by name, of those with a preset `demo` if there are any.

    A plugin ships a preset `demo` to say that its variant learns quickly on a CPU, and with which options.

    Raises:
        PluginError: none is installed, or not the requested one.
    """
    if asked is not None:
        entry = resolve(asked)
        return asked if ":" in asked or PRESET not in entry.variant.presets else f"{entry.variant.name}:{PRESET}"
    usable = {name: entry.variant for name, entry in list_variants().items() if not entry.needs}
    if not usable:
        raise PluginError("no variant is installed that can be trained here: pip install a plugin")
    return next((f"{n}:{PRESET}" for n, variant in usable.items() if PRESET in variant.presets), next(iter(usable)))
