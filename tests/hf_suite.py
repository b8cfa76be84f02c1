"""transformers' own tests, run on every variant. Once a release, with the tests of a source tree of the installed version:

    git clone --depth 1 --branch v5.17.0 https://github.com/huggingface/transformers TREE
    pip install parameterized datasets
    python tests/hf_suite.py TREE [VARIANT ...]

The result is `tests/hf_suite.json`: for each version the commit of ours, which tests there were, and for each variant how many
passed, failed and were skipped, and the names of the failed. A source distribution has the common tests alone; of those
`--few` runs ten on one variant of each kind of state, and writes nothing.
"""

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import transformers
from hf_helpers import OF_EACH_KIND, VARIANTS, width

RESULT = Path(__file__).with_suffix(".json")
FEW = [
    "test_save_load", "test_keep_in_fp32_modules", "test_can_init_all_missing_weights", "test_batching_equivalence",
    "test_training_gradient_checkpointing", "test_causal_lm_loss_honors_shift_labels", "test_problem_types",
    "test_resize_tokens_embeddings", "test_inputs_embeds_matches_input_ids", "test_model_outputs_equivalence",
]  # fmt: skip

HEAD = """
import sys
import types
import unittest

import elman_core.model as model
from elman_core.model.pretrained import LadderPreTrainedModel

SIZES = {{"num_hidden_layers": 2, "vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}}
CLASSES = {{
    "config_class": model.LadderConfig,
    "base_model_class": model.LadderModel,
    "causal_lm_class": model.LadderForCausalLM,
    "sequence_classification_class": model.LadderForSequenceClassification,
    "token_classification_class": model.LadderForTokenClassification,
}}


def compiles(variant, width):
    \"\"\"The tests ask the class what an instance knows.\"\"\"
    config = model.LadderConfig(variant=variant, hidden_size=width, num_hidden_layers=2)
    LadderPreTrainedModel._can_compile_fullgraph = model.LadderModel(config)._can_compile_fullgraph
"""
ALL = """
from tests.causal_lm_tester import CausalLMModelTest as Tests, CausalLMModelTester
from tests.test_configuration_common import ConfigTester


class Ladder(CausalLMModelTester):
    vars().update(CLASSES)

    def __init__(self, parent):
        super().__init__(parent, variant=parent.variant, hidden_size=parent.width, num_hidden_layers=2)


class Ours:
    has_attentions = False
    model_tester_class = Ladder

    def setUp(self):
        super().setUp()
        compiles(self.variant, self.width)
        sizes = ["hidden_size", "num_hidden_layers"]  # there are no heads
        self.config_tester = ConfigTester(self, config_class=model.LadderConfig, common_properties=sizes)

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        for state in past_key_values.states:  # not keys and values
            self.assertTrue(all(len(tensor) == batch_size for tensor in state.values()))
"""
COMMON = """
for name, mixin in (("exporters.test_export", "ExportTesterMixin"), ("generation.test_utils", "GenerationTesterMixin")):
    for part in (name.partition(".")[0], name):  # what a source distribution leaves out
        sys.modules["tests." + part] = types.ModuleType("tests." + part)
    setattr(sys.modules["tests." + name], mixin, type(mixin, (), {{}}))

from tests.test_modeling_common import ModelTesterMixin as Tests, ids_tensor, torch


class Ladder:
    is_training, batch_size, seq_length, num_hidden_layers = True, 13, 7, 2
    vars().update(CLASSES)

    def __init__(self, parent):
        self.hidden_size, self.vocab_size = parent.width, 99
        self.config = {{"variant": parent.variant, "hidden_size": parent.width, **SIZES}}

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.config_class(**self.config), {{"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}}


class Ours:
    has_attentions = False
    all_model_classes = tuple(CLASSES.values())[1:]
    all_generative_model_classes = (model.LadderForCausalLM,)

    def setUp(self):
        compiles(self.variant, self.width)
        self.model_tester = Ladder(self)

    def test_generation_tester_mixin_inheritance(self):
        self.skipTest("the generation tester is not there")
"""
TAIL = """
for variant, width in {sizes!r}.items():
    vars()[variant] = type(variant, (Ours, Tests, unittest.TestCase), {{"variant": variant, "width": width}})
del Tests
"""


def run(tree: Path, variants: list[str], tests: list[str]) -> dict[str, dict[str, object]]:
    """Counts of each variant; the tests run in a process of their own. No `tests`: all."""
    sizes = {variant: max(64, width(variant)) for variant in variants}
    kind = ALL if (tree / "tests/causal_lm_tester.py").exists() else COMMON
    with tempfile.TemporaryDirectory() as folder:
        module, report = Path(folder, "test_ladder.py"), Path(folder, "report.xml")
        module.write_text((HEAD + kind + TAIL).format(sizes=sizes), encoding="utf-8")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        words = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", folder, f"--junitxml={report}"]
        chosen = [f"{module}::{variant}::{test}" for variant in variants for test in tests] or [str(module)]
        done = subprocess.run(
            [*words, *chosen], env=environment, cwd=folder, capture_output=True, text=True, check=False
        )
        if not report.is_file():
            raise SystemExit(done.stdout + done.stderr)
        cases = ElementTree.parse(report).getroot().findall(".//testcase")
    ran = {case.attrib["classname"].rpartition(".")[2] for case in cases}
    if ran != set(variants) or (tests and len(cases) != len(chosen)):  # one that could not be collected has none
        raise SystemExit(done.stdout + done.stderr)
    found = {}
    for variant in variants:
        own = [c for c in cases if c.attrib["classname"].rpartition(".")[2] == variant]
        how = Counter(
            next((tag for tag in ("failure", "error", "skipped") if c.find(tag) is not None), "passed") for c in own
        )
        bad = sorted(c.attrib["name"] for c in own if c.find("failure") is not None or c.find("error") is not None)
        counts = {"passed": how["passed"], "failed": len(bad), "skipped": how["skipped"], "failures": bad}
        found[variant] = counts
        sys.stdout.write(f"{variant} {counts}\n")
        sys.stdout.flush()
        if bad and tests:
            sys.stdout.write(done.stdout)
    return found


def main(words: list[str]) -> int:
    few = words[:1] == ["--few"]
    tree, *asked = words[few:]
    if few:
        found = run(Path(tree).resolve(), asked or OF_EACH_KIND, FEW)
        return int(any(counts["failed"] for counts in found.values()))
    known = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {}
    git = ["git", "-C", str(RESULT.parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    version = known.setdefault(transformers.__version__, {"variants": {}})
    version["commit"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    version["tests"] = "all" if Path(tree, "tests/causal_lm_tester.py").exists() else "common"
    for variant in asked or VARIANTS:
        version["variants"] |= run(Path(tree).resolve(), [variant], [])
        RESULT.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return int(any(counts["failed"] for counts in version["variants"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
