"""transformers' own common, generation and causal-LM tests, run on every variant. Once a release:

    git clone --depth 1 --branch v5.17.0 https://github.com/huggingface/transformers TREE
    pip install parameterized
    python tests/hf_suite.py TREE [VARIANT ...]

The installed transformers is tested, with the tests of TREE, which should be of the same version. The result is
`tests/hf_suite.json`: passed, failed and skipped for each variant, and the names of the failed.
"""

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import transformers
from hf_helpers import VARIANTS, width

RESULT = Path(__file__).with_suffix(".json")
MODULE = """
import unittest

from tests.causal_lm_tester import CausalLMModelTest, CausalLMModelTester
from tests.test_configuration_common import ConfigTester
from transformers.models.auto import modeling_auto as auto

import elman_core.model as model
from elman_core.model.pretrained import LadderPreTrainedModel

CONFIG = model.LadderConfig(variant={variant!r}, hidden_size={width}, num_hidden_layers=2)
LadderPreTrainedModel._can_compile_fullgraph = model.LadderModel(CONFIG)._can_compile_fullgraph  # asked of the class
for mapping, name in (("MODEL", "Model"), ("MODEL_FOR_CAUSAL_LM", "ForCausalLM"),
                      ("MODEL_FOR_SEQUENCE_CLASSIFICATION", "ForSequenceClassification"),
                      ("MODEL_FOR_TOKEN_CLASSIFICATION", "ForTokenClassification")):
    getattr(auto, mapping + "_MAPPING_NAMES")["elman_ladder"] = "Ladder" + name  # by these the tests know what has a loss


class Tester(CausalLMModelTester):
    config_class = model.LadderConfig
    base_model_class = model.LadderModel
    causal_lm_class = model.LadderForCausalLM
    sequence_classification_class = model.LadderForSequenceClassification
    token_classification_class = model.LadderForTokenClassification

    def __init__(self, parent):
        super().__init__(parent, variant={variant!r}, hidden_size={width}, num_hidden_layers=2)


class LadderTest(CausalLMModelTest, unittest.TestCase):
    model_tester_class = Tester
    has_attentions = False

    def setUp(self):
        super().setUp()
        sizes = ["hidden_size", "num_hidden_layers"]  # there are no heads
        self.config_tester = ConfigTester(self, config_class=model.LadderConfig, common_properties=sizes)

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        for state in past_key_values.states:  # not keys and values
            self.assertTrue(all(len(tensor) == batch_size for tensor in state.values()))
"""


def run(tree: Path, variant: str) -> dict[str, object]:
    """Counts of one variant; its tests run in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        module, report = Path(folder, "test_ladder.py"), Path(folder, "report.xml")
        module.write_text(MODULE.format(variant=variant, width=max(64, width(variant))), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        words = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", folder, f"--junitxml={report}"]
        subprocess.run([*words, str(module)], env=environment, cwd=folder, stdout=subprocess.DEVNULL, check=False)
        cases = ElementTree.parse(report).getroot().findall(".//testcase")
    bad = sorted(c.attrib["name"] for c in cases if c.find("failure") is not None or c.find("error") is not None)
    skipped = sum(c.find("skipped") is not None for c in cases)
    return {"passed": len(cases) - len(bad) - skipped, "failed": len(bad), "skipped": skipped, "failures": bad}


def main(tree: Path, variants: list[str]) -> int:
    known = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {}
    version = known.setdefault(transformers.__version__, {})
    for variant in variants:
        version[variant] = run(tree.resolve(), variant)
        sys.stdout.write(f"{variant} {version[variant]}\n")
        sys.stdout.flush()
        RESULT.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return int(any(version[variant]["failed"] for variant in variants))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or VARIANTS))
