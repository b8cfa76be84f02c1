"""GPU sources with drivers of their own, for the processor: `build.emulated` with other options, and the detector of races."""

import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import elman_csrc
from filelock import FileLock

from elman_core.kernels import build, toolchain
from elman_core.kernels.build import Extension

HERE = Path(__file__).parent
LIBRARY = ("-fPIC", "-shared", "-fvisibility=hidden", "-fsanitize=alignment", "-fno-sanitize-recover=alignment")
KEPT = build.cache_dirs()[0] / "emulated"  # before a test asks for a folder of its own
RACES = HERE / "races.cpp"


def compile_emulated(extension: Extension, source: Path, made: Path, *options: str) -> None:
    """`source`, which is the binding of a CUDA extension or includes it, into `made`; kept in the cache of kernels.

    Args:
        options: of g++; `LIBRARY` for a module.
    """
    includes = (elman_csrc.get_emulated(), *extension.include, extension.binding.parent)
    # Compiling takes longer than running: of all levels -Og is the quickest for both together.
    options = ("-Og", "-Wno-unknown-pragmas", *options, *(f"-D{name}={value}" for name, value in extension.defines))
    digest = hashlib.sha256("\0".join(options).encode())
    for path in replace(extension, binding=source, include=includes).sources():
        digest.update(path.read_bytes())
    kept = KEPT / digest.hexdigest()[:20]
    kept.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(kept.with_suffix(".lock")):
        if not kept.exists():
            cell = [] if extension.header is None else [f'-DELMAN_CELL_HEADER="{extension.header}"']
            _compile(source, made, *options, *(f"-I{folder}" for folder in includes), *cell)
            shutil.copy(made, kept.with_suffix(".new"))
            kept.with_suffix(".new").rename(kept)
    made.unlink(missing_ok=True)  # a module in use keeps its file
    shutil.copy(kept, made)


def compile_detector(folder: Path) -> Path:
    """The detector of races in shared memory (races.cpp), as an object."""
    made = folder / "races.o"
    _compile(RACES, made, "-O2", "-c", "-DEMULATED_RACES", f"-I{elman_csrc.get_emulated()}")
    return made


def compile_to_find_races(extension: Extension, source: Path, made: Path, detector: Path, *options: str) -> None:
    """As `compile_emulated`, a program that ends with code 9 if its threads race (see races.cpp).

    Args:
        detector: what `compile_detector` made.
    """
    hooked = made.with_suffix(".o")
    compile_emulated(
        extension, source, hooked, "-c", "-g1", "-fno-pie", "-fsanitize=thread", "-DEMULATED_RACES", *options
    )
    link = (str(toolchain.find_host_compiler()), "-no-pie", "-Wl,--wrap=memcpy,--wrap=memset")
    _run(*link, str(hooked), str(detector), "-o", str(made))


def find_races(program: Path, *arguments: str, **options: bool) -> tuple[int, str]:
    """Runs it. Its exit code, and what it said, each address as file and line, with what it was inlined into."""
    order = {f"EMULATED_{name.upper()}": "1" for name, chosen in options.items() if chosen}
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, env=os.environ | order)
    said = done.stdout + done.stderr
    if addresses := sorted(set(re.findall(r"0x[0-9a-f]+", said))):
        found = _run("addr2line", "-apsi", "-e", str(program), *addresses).replace("\n (inlined by) ", " < ")
        for address, place in zip(addresses, found.splitlines(), strict=True):
            said = said.replace(address, f"[{place.partition(': ')[2]}]")
    return done.returncode, said


def _compile(source: Path, made: Path, *options: str) -> None:
    _run(str(toolchain.find_host_compiler()), "-x", "c++", "-std=c++17", *options, str(source), "-o", str(made))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
