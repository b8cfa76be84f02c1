"""The errors that a type checker finds in a script of a user. The libraries are left out, which only makes it quick."""

import subprocess
import sys
from pathlib import Path

from elman_core.model import LadderConfig, lm

SCRIPT = """
from elman_core.extension import ConfigError, Program
from elman_core.kernels import MatrixKernel
from elman_core import LadderForCausalLM, LadderLM, Variant, byte_tokenizer, find_checkpoint
model = LadderLM("e42", dim=128, depth=2, options={"use_conv": True})
models: list[LadderForCausalLM] = [
    model, LadderLM("e42"), LadderLM("e42", 128, 2, 300, norm_eps=1e-6), LadderLM(level=3, dim=128, options={"rho": 0.9}),
    LadderLM("e42", dim=128, mlp_ratio=1.5, options={"use_conv": True}), LadderLM(["e1", "e42"], depth=2),
    LadderLM(variant=model.config),
]
tokenizer = byte_tokenizer()
print(find_checkpoint("runs/a").name, model.config)
"""
WRONG = {
    'LadderLM("e42", dim="128")': 'Argument "dim" to "LadderLM" has incompatible type "str"; expected "int"',
    'LadderLM("e42", dims=128)': 'Unexpected keyword argument "dims" for "LadderLM"',
    "LadderLM(level=3, dim=128, depth=2, norm_ep=1e-6)": 'Unexpected keyword argument "norm_ep" for "LadderLM"',
    'LadderLM("e42", use_conv=True)': 'Unexpected keyword argument "use_conv" for "LadderLM"',
    'LadderLM(varient="e42", dim=128, depth=2)': 'Unexpected keyword argument "varient" for "LadderLM"',
    "LadderForCausalLM(model.config, dims=128)": 'Unexpected keyword argument "dims" for "LadderForCausalLM"',
    'Variant(nam="e99")': 'Unexpected keyword argument "nam" for "Variant"',
    'find_checkpoint(run="runs/a")': 'Unexpected keyword argument "run" for "find_checkpoint"',
    "from elman_core import LadderML": 'Module "elman_core" has no attribute "LadderML"',
}
SETTINGS = """
[mypy]
implicit_reexport = False
[mypy-torch.*,transformers.*,huggingface_hub.*,safetensors.*,tokenizers.*,numpy.*,pluggy.*,packaging.*]
follow_imports = skip
ignore_missing_imports = True
"""


def test_mypy_finds_a_wrong_keyword_in_a_users_script(tmp_path: Path) -> None:
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    lines = SCRIPT.strip().splitlines()
    (tmp_path / "script.py").write_text("\n".join([*lines, *WRONG]) + "\n")
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    for number, message in enumerate(WRONG.values(), len(lines) + 1):
        assert any(line.startswith(f"script.py:{number}: error: {message}") for line in done.stdout.splitlines()), (
            message
        )
    found = {line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line}
    assert found == {str(len(lines) + 1 + i) for i in range(len(WRONG))}, "the lines that are right pass"


def test_a_type_checker_knows_every_field_of_the_config() -> None:
    sizes = {"hidden_size", "num_hidden_layers", "vocab_size"}  # dim, depth and vocab_size
    assert lm._Backbone.__annotations__.keys() == LadderConfig.__annotations__.keys() - {
        "variant",
        "options",
        "made_with",
        *sizes,
    }
