"""`elman train` and `elman resume`."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elman_core.registry import ConfigError, parse_size

from ._text import print

if TYPE_CHECKING:
    from elman_core.training import Result, Settings
    from elman_core.training.text import Text


Gpus = Annotated[int | None, typer.Option(min=1, help="GPUs of this machine to train on together.")]


def train(
    what: str | None = typer.Argument(
        None,
        metavar="[RECIPE|VARIANT]",
        help="A TOML recipe, or NAME[:preset][@WIDTHxDEPTH]; none is needed with --init.",
    ),
    data: list[str] = typer.Option(
        [], metavar="FILE[:WEIGHT]", help="The training text: raw bytes, or a packed file. Several times: a mixture."
    ),
    heldout: Path | None = typer.Option(None, help="A text to evaluate on, instead of a part of the training text."),
    init: str | None = typer.Option(
        None, metavar="MODEL", help="Begin with a model: a run, a checkpoint folder, pretrained/NAME or a hub id."
    ),
    out: Path | None = typer.Option(None, help="Folder of the run; a new one under runs/ by default."),
    steps: int | None = typer.Option(None, help="Optimizer steps."),
    tokens: int | None = typer.Option(
        None, min=1, help="Tokens (bytes, without a tokenizer) to train on, or places of packed rows, instead of steps."
    ),
    minutes: float | None = typer.Option(None, help="Minutes of training, instead of steps."),
    gpus: Gpus = None,
    sets: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Any setting, such as train.lr=1e-3."),
) -> None:
    """Train a model. The run is a folder whose checkpoints `from_pretrained` loads.

    Settings come from the recipe, then the flags, then --set.
    """
    from elman_core.training.ranks.launch import hush, several
    from elman_core.training.text import open_text

    def read() -> tuple[Settings, Text]:
        settings = read_settings(what, data, steps, tokens, minutes, sets, init, heldout)
        return settings, open_text(settings)

    asked = None if several() else read()  # before torch is imported, so that a wrong path fails at once
    hush()
    on_gpus(gpus)

    from elman_core.training.ranks.group import session
    from elman_core.training.start import start

    with session() as ranks:
        settings, text = asked or ranks.together(read)
        leave(start(settings, out, text=text).fit())


def resume(
    run: Path = typer.Argument(help="Folder of a run."),
    steps: str | None = typer.Option(None, help="A new total of steps, or +N for N more."),
    minutes: str | None = typer.Option(None, help="A new total of minutes, or +N for N more."),
    data: list[str] = typer.Option(
        [], metavar="FILE[:WEIGHT]", help="Where the training text is now, if it was moved; all of a mixture."
    ),
    gpus: Gpus = None,
    sets: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Change a setting, as train.accumulate=2."),
) -> None:
    """Continue a run from its last good checkpoint. It reads the same batches; on one device the losses are the same bits."""
    from elman_core.training.ranks.launch import hush

    hush()
    on_gpus(gpus)

    from elman_core.training.ranks.group import session
    from elman_core.training.run.folder import read_manifest
    from elman_core.training.start import resume as go_on

    with session() as ranks:
        trainer = go_on(run, steps, minutes, data, sets=sets)
        if trainer is not None:
            leave(trainer.fit())
        elif ranks.main:
            done = read_manifest(run).get("steps_done", 0)
            print(f"{run} is finished: {done} steps. To continue: elman resume {shlex.quote(str(run))} --steps +1000")


def on_gpus(count: int | None) -> None:
    """With a count, become `torchrun`, which starts this same command once on each of so many GPUs.
    Raises `ConfigError` if this machine has fewer."""
    if count is None or "RANK" in os.environ:
        return
    import torch

    if count > torch.cuda.device_count():
        raise ConfigError(f"--gpus {count}: this machine has {torch.cuda.device_count()} GPUs; see elman doctor")
    launcher = ["torch.distributed.run", "--standalone", "--local-addr", "localhost", "--nproc-per-node", str(count)]
    python = [sys.executable, "-uP", "-m"]  # runs no code of the current folder
    os.execv(sys.executable, [*python, *launcher, "--no-python", *python, "elman_core", *sys.argv[1:]])


def read_settings(
    what: str | None,
    data: Path | str | Sequence[str] | None = None,
    steps: int | None = None,
    tokens: int | None = None,
    minutes: float | None = None,
    sets: Sequence[str] = (),
    init: str | None = None,
    heldout: Path | None = None,
) -> Settings:
    """The settings that a command line asks for. `data`: a value of `data.path`, or several. Raises `ConfigError` for unknown
    or contradicting settings, and a recipe that cannot be read."""
    from elman_core.training.recipes import find_recipe
    from elman_core.training.settings import apply_sets, from_dict, put, read_recipe, steps_for_tokens

    if sum(given is not None for given in (steps, tokens, minutes)) > 1:
        raise ConfigError("give one of --steps, --tokens and --minutes")
    if what is None and init is None and not sets:
        raise ConfigError("name a recipe or a variant, such as NAME@512x6, or begin with a model: --init MODEL")
    tree: dict[str, Any] = {}
    recipe = find_recipe(what) if what else None
    if recipe is not None:
        tree = read_recipe(recipe)
        from_dict(tree, f"recipe {recipe}: ")  # its mistakes name it
    elif what:
        name, width, depth = parse_size(what)
        put(tree, "model.variant", name)
        if width is not None:
            put(tree, "model.hidden_size", width)
            put(tree, "model.num_hidden_layers", depth)
    if init is not None:
        put(tree, "model.init", init)
    if data:
        values = [str(data)] if isinstance(data, (str, Path)) else list(data)
        put(tree, "data.path", values if len(values) > 1 else values[0])
    if heldout is not None:
        put(tree, "data.heldout_file", str(heldout))
    if steps is not None or tokens is not None or minutes is not None:
        for length in ("steps", "minutes"):
            tree.get("train", {}).pop(length, None)
    if steps is not None:
        put(tree, "train.steps", steps)
    if minutes is not None:
        put(tree, "train.minutes", float(minutes))
    tree = apply_sets(tree, sets)
    if tokens is not None:
        put(tree, "train.steps", steps_for_tokens(tokens, from_dict(tree)))
    return from_dict(tree)


def leave(result: Result) -> None:
    """Exit 130 or 143 if a signal ended the training."""
    if result.signal:
        raise typer.Exit(128 + signal.Signals(result.signal))
