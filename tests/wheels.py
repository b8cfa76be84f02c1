"""Build the wheels of every package and use them where nothing of this repository can be seen: `python tests/wheels.py`.

An environment with the core alone; then one plugin's wheel is added to it, with no compiler on PATH, and its variant trains a
step, saves, loads and generates. Then the other plugins, and the extension with suites. Run by .ci/run; takes about two
minutes, most of it pip.
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


def main() -> None:
    packages = [
        ROOT,
        *(file.parent for where in ("*", "plugins/*", "extensions/*") for file in ROOT.glob(f"{where}/pyproject.toml")),
    ]
    with tempfile.TemporaryDirectory(prefix="elman-wheels-") as name:
        work = Path(name)
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
        dist = work / "dist"
        run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", dist, *packages, cwd=ROOT)
        wheels = sorted(dist.glob("*.whl"))
        assert len(wheels) == len(packages), wheels
        for wheel in wheels:
            print(f"{wheel.name}: {len(zipfile.ZipFile(wheel).namelist())} files, {wheel.stat().st_size // 1024} KiB")
        held = {name for wheel in wheels for name in zipfile.ZipFile(wheel).namelist()}
        sources = {p.relative_to(f).as_posix() for f in packages for p in f.glob("elman_*/**/*") if p.is_file()}
        missing = sorted(name for name in sources - held if "__pycache__" not in name)
        assert not missing, f"sources that no wheel holds: {missing}"

        venv.create(work / "env", with_pip=True)
        python = work / "env" / "bin" / "python"
        into = (python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install")
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
        bench = next(w for w in wheels if w.name.startswith("elman_bench-"))
        others = [w for w in wheels if w.name.split("-")[0].removeprefix("elman_") not in extensions]
        run(*offline, *(w for w in others if w not in (core, plugin)), cwd=work, **clean)
        said = run(python, "-m", "elman_core", "--help", cwd=work)
        assert "bench" not in said, said
        run(*into, "-c", ROOT / "constraints.txt", bench, cwd=work)
        print(run(python, "-m", "elman_core", "bench", cwd=work).strip(), "from the wheel of an extension")
        strict = {**clean, "ELMAN_STRICT": "1"}
        for variant in ("e1", "e88", "gru", "lstm"):
            print(run(python, "-c", USE, variant, work / variant, ROOT, cwd=work, **strict).strip(), "from its wheel")
        words = ("generate", "pretrained/e42-small", "-p", "def ", "-n", "20")
        print(run(python, "-m", "elman_core", *words, cwd=work, HF_HUB_OFFLINE="1", **strict))
        run(python, "-m", "elman_core", "doctor", cwd=work, **strict)
        run(python, "-m", "elman_core", "new", "e99", "--dir", work, cwd=work, **strict)
    print("the wheels work outside the repository")


if __name__ == "__main__":
    main()
