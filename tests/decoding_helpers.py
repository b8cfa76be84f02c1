"""Small models whose next byte is far from uniform, so that a wrong state shows in what is drawn."""

import torch

from elman_core.model import LadderLM


def ladder(variant="e42", **options):
    """Two layers of width 16, in evaluation mode; `generate()` ends by length alone."""
    torch.manual_seed(0)
    made = LadderLM(variant, dim=16, depth=2, **options).eval()
    made.generation_config.eos_token_id = None
    with torch.no_grad():
        made.model.embed_tokens.weight.mul_(20)
    return made


def compiled_greedily(model, cache, logits, steps=5):
    """(graphs that torch.compile made of the step, greedy tokens (B, steps + 1)), after a prompt with its cache and logits."""
    torch._dynamo.reset()
    graphs = []

    def count(graph, _example_inputs):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(model.forward, fullgraph=True, dynamic=False, backend=count)
    tokens = [logits[:, -1:].argmax(-1)]
    for _ in range(steps):
        logits = step(input_ids=tokens[-1], past_key_values=cache, use_cache=True).logits
        tokens.append(logits[:, -1:].argmax(-1))
    return graphs, torch.cat(tokens, 1)
