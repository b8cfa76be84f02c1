"""The model card (README.md) written beside every checkpoint that has none."""

from __future__ import annotations

import itertools
import math
import os
import re
from pathlib import Path
from typing import Any

from elman_core.nn.layers import branches, resolve_layers
from elman_core.registry import ConfigError, Resolved, how_to_install

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
license: {licence}
tags: [custom_code, {rnn}elman{tag}]
---

# {title}

A {recurrent}language model over {tokens}.{cost}

{equations}

| | |
|---|---|
| parameters | {parameters:,} |
| width, layers | {width}, {depth} |
| state of one text | {state} |
| made with | {made_with} |
{facts}
## Use

```sh
{install}
```

```python
import elman_core  # or, without this line: from_pretrained(..., trust_remote_code=True)
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path or hub id of this folder")
tokenizer = AutoTokenizer.from_pretrained("path or hub id of this folder")
inputs = tokenizer("def ", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=200, do_sample=True)[0]))
```

If `checksums.json` is here, loading compares the files with it (`ELMAN_CHECKSUMS=0` turns that off). To check by hand, compare
what `sha256sum model*.safetensors config.json` prints with its entries `sha256`.
"""


UNDECIDED = "other  # yours to choose"


def model_card(model: Any, licence: str | None = None) -> str:
    """The card of a model as Markdown with the Hub's metadata: equation, sizes, facts about its training, how to load.

    Args:
        model: `model.training_facts`, if it has them, are further rows of the table: `{label: text}`.
        licence: an identifier such as `apache-2.0`; None leaves the choice to the publisher.
    """
    config = model.config
    layers = resolve_layers(config)
    names = [layer.variant.name for layer in layers]
    period = next(n for n in range(1, len(names) + 1) if names[:n] * (len(names) // n) == names)
    runs = [(name, len(list(run))) for name, run in itertools.groupby(names[:period])]
    requirements = list(dict.fromkeys((config.made_with or {}).values()))
    title = "+".join(name if n == 1 else f"{name}*{n}" for name, n in runs)
    state = _state_size(model)
    is_bytes = config.vocab_size == 256
    unit = "byte" if is_bytes else "token"
    return _CARD.format(
        rnn="rnn, " if state else "",
        recurrent="recurrent " if state else "",
        title=f"{title}, {config.hidden_size}x{config.num_hidden_layers}",
        equations="\n\n".join(dict.fromkeys(map(_about, layers))),
        parameters=sum(p.numel() for p in model.parameters()),
        width=config.hidden_size,
        depth=config.num_hidden_layers,
        licence=licence or UNDECIDED,
        tag=", byte-level" if is_bytes else "",
        state=state or "grows with the text",
        tokens="bytes" if is_bytes else f"{config.vocab_size:,} tokens",
        cost=f" Its state has a constant size: each new {unit} costs the same after any prompt." if state else "",
        facts="".join(f"| {label} | {text} |\n" for label, text in getattr(model, "training_facts", {}).items()),
        made_with=", ".join(requirements) or "unknown",
        install=how_to_install("elman-core", "elman-csrc", *(r.partition("==")[0] for r in requirements), mark=" # "),
    )


def _about(layer: Resolved) -> str:
    equation = layer.variant.equation_of(layer.config).strip().replace("\n", "\n    ")
    return f"`{layer.variant.name}`: {layer.variant.summary}" + (f"\n\n    {equation}" if equation else "")


def _state_size(model: Any) -> str:
    """Bytes of the recurrent state of one row, from what the mixers declare; "" if it grows with the text."""
    total = 0
    for mixer, options, _ in branches(model.config):
        for shape, dtype in mixer.state_spec(model.config.hidden_size, options).values():
            if -1 in shape:
                return ""
            total += math.prod(shape) * dtype.itemsize
    return f"{total:,} bytes"


def set_licence(folder: str | os.PathLike, licence: str) -> None:
    """Write `licence`, one word (else ConfigError), into the metadata of the card in `folder`, if it has a line for one."""
    path = Path(folder) / "README.md"
    if not re.fullmatch(r"[\w.+-]+", licence):
        raise ConfigError(f"a licence is one word, such as apache-2.0, not {licence!r}")
    text = re.sub(r"^license: .*$", f"license: {licence}", path.read_text(encoding="utf-8"), count=1, flags=re.M)
    path.write_text(text, encoding="utf-8")
