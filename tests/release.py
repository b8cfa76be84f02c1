"""Build the release and use it where nothing of this repository can be seen: `python tests/release.py [FOLDER]`.

Makes a source distribution of every package from the files that git knows, a wheel from each of them, and has twine check all.
Then it installs the core alone into an empty environment, adds one plugin with no compiler on PATH, the other plugins, and the
extensions for authors and with suites. Variants train a step, save, load and generate; a trained model writes text, once from
wheels and once from source distributions. If all of that works, the files are in FOLDER, which must not exist before. Takes
about three minutes, most of it pip.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")

USE = """
import sys, torch
from pathlib import Path
from elman_core import LadderLM, LadderForCausalLM, list_variants
name, folder = sys.argv[1], sys.argv[2]
assert name in list_variants(), list_variants()
torch.manual_seed(0)
model = LadderLM(name, dim=32, depth=2)
tokens = torch.randint(0, 256, (2, 17))
loss = model(tokens, return_loss=True)
loss.backward()
assert torch.isfinite(loss)
model.eval().save_pretrained(folder)
from transformers import AutoModelForCausalLM
again = AutoModelForCausalLM.from_pretrained(folder)
with torch.no_grad():
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    print(name, again.generate(tokens[:, :4], max_new_tokens=4, do_sample=False).shape)
import elman_core
assert not Path(elman_core.__file__).is_relative_to(sys.argv[3]), "this is the repository, not the wheel"
"""


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("ELMAN_", "PYTHON"))} | env
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=settings, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(str(c) for c in command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def compilerless_path(python: Path, folder: Path) -> str:
    """A PATH with Python and the basic tools, but no compiler of any kind."""
    folder.mkdir()
    for tool in ("sh", "env", "uname", "ls", "cat", "rm", "mkdir"):
        if found := shutil.which(tool):
            (folder / tool).symlink_to(found)
    path = f"{python.parent}{os.pathsep}{folder}"
    for compiler in ("cc", "gcc", "g++", "c++", "clang", "clang++", "nvcc"):
        assert shutil.which(compiler, path=path) is None, f"{compiler} is on {path}"
    return path


def build(work: Path) -> Path:
    """Source distributions and wheels of every package, in a folder of `work`."""
    tree, dist = work / "tree", work / "dist"
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in (n for n in listed if (ROOT / n).is_file()):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    packages = [
        tree,
        *(file.parent for where in ("*", "plugins/*", "extensions/*") for file in tree.glob(f"{where}/pyproject.toml")),
    ]
    for package in packages:
        if package != tree:
            shutil.copy2(tree / "LICENSE", package)  # Apache-2.0 asks for a copy in each
        run(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", dist, cwd=package)
    sources = sorted(dist.glob("*.tar.gz"))
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", dist, *sources, cwd=work)
    wheels = sorted(dist.glob("*.whl"))
    assert len(wheels) == len(sources) == len(packages), sorted(dist.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *sources, *wheels, cwd=work)
    held = set()
    for source, wheel in zip(sources, wheels, strict=True):
        names = zipfile.ZipFile(wheel).namelist()
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names), f"no licence in {wheel.name}"
        size, source_size = (file.stat().st_size // 1024 for file in (wheel, source))
        print(f"{wheel.name}: {len(names)} files, {size} KiB; its source: {source_size} KiB")
        held.update(names)
    wanted = {p.relative_to(f).as_posix() for f in packages for p in f.glob("elman_*/**/*") if p.is_file()}
    assert wanted <= held, f"files that no wheel holds: {sorted(wanted - held)}"
    return dist


def main(out: Path | None) -> None:
    if out and out.exists():
        sys.exit(f"{out} exists: choose another folder, or remove it")
    with tempfile.TemporaryDirectory(prefix="elman-release-") as name:
        work = Path(name)
        dist = build(work)
        wheels = sorted(dist.glob("*.whl"))

        venv.create(work / "env", with_pip=True)
        python = work / "env" / "bin" / "python"
        into = (python, *PIP[1:], "install")
        core = next(w for w in wheels if w.name.startswith("elman_core-"))
        run(*into, "-c", ROOT / "constraints.txt", core, cwd=work)
        assert "no plugin is installed" in run(python, "-m", "elman_core", "list", cwd=work)
        print("the core alone: installed, lists nothing")

        clean = {
            "PATH": compilerless_path(python, work / "bin"),
            "HOME": str(work),
            "CC": "",
            "CXX": "",
            "CUDA_HOME": "",
        }
        plugin = next(w for w in wheels if w.name.startswith("elman_e42-"))
        offline = (*into, "--find-links", dist, "--no-index")
        run(*offline, plugin, cwd=work, **clean)
        listed = run(python, "-m", "elman_core", "list", cwd=work, **clean)
        assert listed.count("\n") == 2, listed
        print(
            run(python, "-c", USE, "e42", work / "model", ROOT, cwd=work, **clean).strip(),
            "from one wheel, no compiler",
        )

        extensions = {f.name for f in (ROOT / "extensions").iterdir()}
        authors, bench = (next(w for w in wheels if w.name.startswith(f"elman_{n}-")) for n in ("authors", "bench"))
        others = [w for w in wheels if w.name.split("-")[0].removeprefix("elman_") not in extensions]
        run(*offline, *(w for w in others if w not in (core, plugin)), cwd=work, **clean)
        said = run(python, "-m", "elman_core", "--help", cwd=work)
        assert "bench" not in said, said
        run(*into, "-c", ROOT / "constraints.txt", authors, bench, cwd=work)
        print(run(python, "-m", "elman_core", "bench", cwd=work).strip(), "from the wheel of an extension")
        strict = {**clean, "ELMAN_STRICT": "1"}
        for variant in ("e1", "e88", "gru", "lstm"):
            print(run(python, "-c", USE, variant, work / variant, ROOT, cwd=work, **strict).strip(), "from its wheel")
        run(python, "-m", "elman_core", "doctor", cwd=work, **strict)
        run(python, "-m", "elman_core", "new", "e99", "--dir", work, cwd=work, **strict)
        words = ("generate", "pretrained/e42-small", "-p", "def ", "-n", "20", "--seed", "1")
        text = run(python, "-m", "elman_core", *words, cwd=work, HF_HUB_OFFLINE="1", **strict)
        print(text, "from wheels")
        # With an environment of its own for each build, as pip does for a user.
        sources = [next(dist.glob(f"elman_{n}-*.tar.gz")) for n in ("core", "csrc", "e42", "checkpoints")]
        run(*into, "--force-reinstall", "--no-deps", *sources, cwd=work)
        assert run(python, "-m", "elman_core", *words, cwd=work, HF_HUB_OFFLINE="1", **strict) == text
        print("the same text from source distributions")
        if out:
            shutil.copytree(dist, out)
    print("the release works outside the repository")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None)
