"""Look at a state: a notebook of three cells, which editors run one by one (Jupyter, VS Code), and Python as a whole.

python examples/state.py
"""

# %% A trained model reads a text in two pieces; the second starts from the state of the first.
import torch

from elman_core import LadderForCausalLM, byte_tokenizer

model, tokenizer = LadderForCausalLM.from_pretrained("pretrained/e88-small", dtype="float32").eval(), byte_tokenizer()
first, second = (
    tokenizer("def read(path):\n    with open(", return_tensors="pt"),
    tokenizer("path", return_tensors="pt"),
)
with torch.no_grad():
    before = model(**first, use_cache=True)
    after = model(second["input_ids"], past_key_values=before.past_key_values, use_cache=True)
    whole = model(torch.cat([first["input_ids"], second["input_ids"]], dim=1))
print(
    "largest difference to the whole text:",
    (after.logits - whole.logits[:, -after.logits.shape[1] :]).abs().max().item(),
)

# %% What comes next: the model's five likeliest bytes.
chances, bytes_ = after.logits[0, -1].softmax(-1).topk(5)
print({bytes([b]): round(p, 3) for b, p in zip(bytes_.tolist(), chances.tolist(), strict=True)})

# %% What each layer keeps of a text of any length: the tensors of its state.
for index, layer in enumerate(after.past_key_values.layers):
    print(index, {name: tuple(tensor.shape) for name, tensor in layer.state.items()})
