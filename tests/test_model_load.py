"""Saving and loading: bit-exact on the meta device, in another process, through the Auto classes and through the shim."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import toy_mixers
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from elman_core.model import LadderForCausalLM, LadderForSequenceClassification, LadderLM
from elman_core.registry import ConfigError, PluginError

VARIANTS = ("toy", "toysum", "toypair")
TOKENS = torch.arange(22).view(2, 11) * 23 % 256

toys = toy_mixers.toys  # for every test here


def python(code: str, *args: str, path: Path | None = None, env: dict | None = None) -> str:
    """Run code in another process, with the toys importable; returns its standard output. It looks for no garbage, at its end
    neither, which would be a third of what it does: importing."""
    code = f"import atexit, gc; gc.disable(); atexit.register(gc.freeze)\n{code}"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "HF_HUB_OFFLINE": "1", **(env or {})}
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, cwd=path, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@torch.no_grad()
def logits(model):
    return model.eval()(TOKENS).logits


def _drop(folder: Path, *names: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name in names:
        del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_missing_derived_buffer_is_derived_from_the_loaded_weight(tmp_path):
    model = LadderLM("toy", dim=16, depth=1)
    rec = model.model.layers[0].mixer.rec
    with torch.no_grad():
        rec.mul_(3)
    model.save_pretrained(tmp_path)
    _drop(tmp_path, "model.layers.0.mixer.sigma")
    mixer = LadderForCausalLM.from_pretrained(tmp_path).model.layers[0].mixer
    torch.testing.assert_close(mixer.sigma, torch.linalg.matrix_norm(rec.detach(), 2))


def test_mixers_of_linear_layers_alone_are_initialised_by_themselves():
    weight = LadderLM("toysum", dim=64, depth=1).model.layers[0].mixer.qkv.weight
    assert 0.28 < weight.std() < 0.32  # 0.3 is the mixer's own, 0.02 would be transformers'


def test_heads_load_from_a_language_model(tmp_path):
    lm = LadderLM("toy", dim=16, depth=2)
    lm.save_pretrained(tmp_path)
    head = LadderForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert torch.equal(head.model.layers[1].mixer.rec, lm.model.layers[1].mixer.rec)
    assert head(TOKENS, attention_mask=torch.ones_like(TOKENS)).logits.shape == (2, 3)
    assert torch.equal(AutoModel.from_pretrained(tmp_path).embed_tokens.weight, lm.model.embed_tokens.weight)


# checkpoints ----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_complete(tmp_path):
    LadderLM("toy:tight", dim=16, depth=2).save_pretrained(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} >= {
        "config.json", "generation_config.json", "model.safetensors", "modeling_ladder_hub.py", "tokenizer.json",
        "tokenizer_config.json", "README.md",
    }  # fmt: skip
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LadderForCausalLM"]
    assert config["variant"] == "toy"
    assert config["options"] == {"rho": 0.5, "width": 3}
    assert config["made_with"] == {"toy": "toy-package==1.2.3"}
    assert "max_new_tokens" not in json.loads((tmp_path / "generation_config.json").read_text())
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    card = (tmp_path / "README.md").read_text()
    assert "h' = tanh(W h + x)" in card
    assert "pip install . ./csrc_common toy-package  # in a checkout of elman" in card


def test_weights_are_readable_by_whom_the_config_is(tmp_path):
    LadderLM("toy", dim=16, depth=2).save_pretrained(tmp_path, max_shard_size="8KB")
    modes = {p.name: p.stat().st_mode for p in tmp_path.iterdir()}
    assert len(set(modes.values())) == 1, modes


def test_an_attention_implementation_is_ignored_and_said(tmp_path, caplog):
    LadderLM("toy", dim=16, depth=1).save_pretrained(tmp_path)
    LadderForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert "has no effect" in caplog.text


def test_a_card_and_a_tokenizer_that_are_there_are_kept(tmp_path):
    model = LadderLM("toy", dim=16, depth=1)
    for name in ("README.md", "tokenizer_config.json"):
        (tmp_path / name).write_text("mine")
    model.save_pretrained(tmp_path)
    assert [(tmp_path / n).read_text() for n in ("README.md", "tokenizer_config.json")] == ["mine", "mine"]


def test_a_missing_plugin_is_named_with_what_to_install(tmp_path):
    LadderLM("toy", dim=16, depth=1).save_pretrained(tmp_path)
    toy_mixers.uninstall()
    with pytest.raises(PluginError, match=r"made with toy-package==1\.2\.3: pip install toy-package") as caught:
        LadderForCausalLM.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_another_version_loads_if_its_options_are_accepted(tmp_path, caplog):
    LadderLM("toy", dim=16, depth=1).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("toy-package==1.2.3", "toy-package==1.0.0"))
    model = LadderForCausalLM.from_pretrained(tmp_path)
    assert "made with toy-package==1.0.0; toy-package==1.2.3 accepts its options" in caplog.text
    assert model.config.made_with == {"toy": "toy-package==1.2.3"}
    path.write_text(path.read_text().replace('"rho"', '"rhoo"'))
    with pytest.raises(ConfigError, match=r"no option 'rhoo'.*made with toy-package==1\.0\.0"):
        LadderForCausalLM.from_pretrained(tmp_path)


def test_an_option_that_is_new_since_a_checkpoint_takes_its_default(tmp_path):
    LadderLM("toy", dim=16, depth=1).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["options"]["width"]
    path.write_text(json.dumps(config))
    assert LadderForCausalLM.from_pretrained(tmp_path).config.options == {"rho": 0.9, "width": 3}


# who registers the classes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "imports",
    [
        "from transformers import AutoModelForCausalLM; import elman_core",
        "import elman_core; from transformers import LlamaForCausalLM",  # reaches the Auto classes half way
    ],
)
def test_auto_classes_know_ladders_in_any_order_of_imports(imports, tmp_path):
    LadderLM("toy", dim=16, depth=1).save_pretrained(tmp_path)
    code = f"""
{imports}
import sys
from transformers import AutoConfig
config = AutoConfig.from_pretrained(sys.argv[1])
import toy_mixers
from transformers import AutoModelForCausalLM
toy_mixers.install()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(type(config).__module__, type(model).__name__)
print(*[f for f in sys.meta_path if type(f).__module__.startswith("elman_core")])
"""
    assert python(code, str(tmp_path)).split() == ["elman_core.model.config", "LadderForCausalLM"]


TRUST = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
assert "elman_core" not in sys.modules
import importlib, importlib.abc
class Late(importlib.abc.MetaPathFinder):  # the toys are "installed" when the package is first imported, as a plugin is
    def find_spec(self, name, path, target=None):
        if name == "elman_core.nn.layers":
            sys.meta_path.remove(self)
            import toy_mixers
            toy_mixers.install()
sys.meta_path.insert(0, Late())
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__module__ == "elman_core.model.modeling", type(model)
model.save_pretrained(sys.argv[2])
"""


def test_the_shim_survives_load_and_save_with_and_without_the_package_imported(tmp_path):
    model = LadderLM("toy", dim=16, depth=1)
    model.save_pretrained(tmp_path / "a")
    env = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    python(TRUST, str(tmp_path / "a"), str(tmp_path / "b"), env=env)  # not imported: through the shim
    here = AutoModelForCausalLM.from_pretrained(tmp_path / "b", trust_remote_code=True)  # imported
    here.save_pretrained(tmp_path / "c")
    assert torch.equal(logits(here), logits(model))
    files = [{p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in "abc"]
    assert files[0] == files[1] == files[2]


def test_a_missing_package_is_named_by_transformers(tmp_path):
    LadderLM("toy", dim=16, depth=1).save_pretrained(tmp_path)
    code = """
import sys
sys.meta_path = [f for f in sys.meta_path if "editable" not in repr(f).lower()]
sys.path = [p for p in sys.path if not __import__("os").path.isdir(p + "/elman_core")]
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "elman_core":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Gone())
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
except ImportError as error:
    print(error)
"""
    said = python(code, str(tmp_path), env={"HF_MODULES_CACHE": str(tmp_path / "modules")})
    assert said == "this model needs the package elman-core: pip install . in a checkout of elman\n"
