"""Small models whose next byte is far from uniform, so that a wrong state shows in what is drawn."""

import torch

from elman_core.model import LadderLM


def ladder(variant="e42", dim=16, **options):
    """Two layers, in evaluation mode; `generate()` ends by length alone."""
    torch.manual_seed(0)
    made = LadderLM(variant, dim=dim, depth=2, **options).eval()
    made.generation_config.eos_token_id = None
    with torch.no_grad():
        made.model.embed_tokens.weight.mul_(20)
    return made
