"""Small plugins, most of them broken in one way, each installed into a folder of its own."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

METADATA = "Metadata-Version: 2.1\nName: elman-{name}\nVersion: 1.2.3\nRequires-Dist: elman-core{core}\n"

GOOD = """
from dataclasses import dataclass
from typing import Literal
from elman_core.registry import ConfigError, Variant, hookimpl, option

@dataclass(frozen=True)
class Config:
    width: int = option(8, "a size", ge=4, le=64, multiple_of=4)
    rate: float = option(0.5, "a rate", gt=0, lt=1)
    gate: Literal["none", "silu"] = option("none", "a gate")
    bias: bool = option(True, "a switch")

class Mixer:
    @classmethod
    def validate(cls, dim, config):
        if dim % config.width:
            nearest = dim // config.width * config.width
            raise ConfigError(f"width {{dim}} is no multiple of {{config.width}}; nearest: {{nearest}}")

@hookimpl
def elman_variants():
    yield Variant(name="{variant}", summary="a test", equation="h = x", config=Config, mixer=Mixer,
                  presets={{"wide": {{"width": 64}}}}, aliases={{"Level7": "wide"}}, requires=({requires}))
"""

SOURCES = {
    "good": GOOD.format(variant="good", requires=""),
    "twin": GOOD.format(variant="good", requires=""),
    "needy": GOOD.format(variant="needy", requires="'no_such_library', 'no_such_package.part',"),
    "newer": GOOD.format(variant="newer", requires=""),
    "baddefault": GOOD.format(variant="baddefault", requires="").replace("option(8,", "option('8',"),
    "undecorated": GOOD.format(variant="undecorated", requires="")
    .replace("class Mixer:", "class More(Config):\n    more: int = option(1, 'more')\n\nclass Mixer:")
    .replace("config=Config", "config=More"),
    "nospecs": GOOD.format(variant="nospecs", requires="").replace("config=Config", "config=Config, kernels=(len,)"),
    "importerror": "raise RuntimeError('first line\\nsecond line')\n",
    "exits": "raise SystemExit(3)\n",
    "halts": "class Halt(BaseException):\n    pass\nraise Halt('no more')\n",
    "mute": "class Mute(Exception):\n    def __str__(self):\n        raise self\nraise Mute\n",
    "divides": GOOD.format(variant="good", requires="").replace("if dim %", "if 1 / 0 and dim %"),
    "badpoint": GOOD.format(variant="badpoint", requires=""),
    "garbled": GOOD.format(variant="garbled", requires=""),
    "noname": "raise RuntimeError('first line')\n",
    "wrongtype": GOOD.format(variant="wrongtype", requires="").replace('{"Level7": "wide"}', "[('Level7', 3)]"),
    "parses": GOOD.format(variant="parses", requires="'elman_halts.part',").replace(
        "aliases=", "parse_alias=lambda name: 1 / 0, aliases="
    ),
    "misspelt": GOOD.format(variant="misspelt", requires="").replace("def elman_variants", "def elman_variant"),
    "argument": GOOD.format(variant="argument", requires="")
    + "\n@hookimpl\ndef elman_step_end(run, step, metric):\n    pass\n",
    "unmarked": GOOD.format(variant="unmarked", requires="") + "\ndef elman_step_end(run, step, metrics):\n    pass\n",
    "nohook": "x = 1\n",
    "again": "x = 1\n",
    "shares": "import torch\ntorch.set_default_dtype(torch.float64)\ntorch.set_grad_enabled(False)\n"
    + GOOD.format(variant="shares", requires=""),
    "returns": "from elman_core.registry import hookimpl\n@hookimpl\ndef elman_variants():\n    return None\n",
    "wrongthing": "from elman_core.registry import hookimpl\n@hookimpl\ndef elman_variants():\n    yield 'wrongthing'\n",
    "badchoice": GOOD.format(variant="badchoice", requires="").replace('"h = x"', '"h = x", recommended="wider"'),
    "badpreset": GOOD.format(variant="badpreset", requires="").replace('{"width": 64}', '{"width": 65}'),
}


@dataclass(frozen=True)
class Shelf:
    """Installed plugins, each in `root/NAME`; a process sees those that its PYTHONPATH names."""

    root: Path

    def run(
        self, code: str, *names: str, only: str | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run Python code, or a command of elman where `code` starts with "elman ", with the named plugins installed.

        Args:
            only: ELMAN_PLUGINS; by default the named ones, so that nothing else is loaded.
        """
        env = {k: v for k, v in os.environ.items() if not k.startswith(("ELMAN_", "TORCH_DEVICE_"))}
        env |= {"PYTHONPATH": os.pathsep.join(str(self.root / n) for n in names), **environment}
        env["ELMAN_PLUGINS"] = ",".join(names) if only is None else only
        if code.startswith("elman "):
            command = [sys.executable, "-m", "elman_core", *code.split()[1:]]
        else:
            command = [sys.executable, "-c", code]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)


def install_all(folder: Path) -> Shelf:
    """Every plugin as an installer leaves it: a package, and its metadata with the entry point."""
    for name, source in SOURCES.items():
        package, facts = folder / name / f"elman_{name}", folder / name / f"elman_{name}-1.2.3.dist-info"
        for made in (package, facts):
            made.mkdir(parents=True)
        (package / "__init__.py").write_text(source)
        metadata = METADATA.format(name=name, core=">=9,<10" if name == "newer" else ">=0.1")
        (facts / "METADATA").write_text(metadata.replace("Name: elman-noname\n", ""))
        point = {"badpoint": "= not a module!!", "garbled": "", "again": "= elman_good"}.get(name, f"= elman_{name}")
        (facts / "entry_points.txt").write_text(f"[elman]\n{name} {point}\n")
    return Shelf(folder)


def leave_installed(folder: Path) -> None:
    """Puts its metadata beside a plugin's package, as an installer does: with its folder on PYTHONPATH it is installed."""
    facts = folder / f"elman_{folder.name}-1.2.3.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(METADATA.format(name=folder.name, core=">=0.1"))
    (facts / "entry_points.txt").write_text(f"[elman]\n{folder.name} = elman_{folder.name}\n")


def run_contracts(folders: list[Path], which: str) -> None:
    """The named tests of plugins, in one process in which they are installed."""
    for folder in folders:
        leave_installed(folder)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "ELMAN_STRICT": "1"}
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-k", which]
    tests += [str(f / "tests") for f in folders]
    done = subprocess.run(tests, cwd=folders[0].parent, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
