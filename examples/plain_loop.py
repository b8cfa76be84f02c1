"""Your own PyTorch loop over a model of elman: any optimizer, any schedule, and a folder that `from_pretrained` loads.

    python examples/plain_loop.py FILE [--variant e42] [--steps 200] [--out model]

FILE is any file of bytes. The batches are those of `elman train` with the same seed. Needs no GPU and uses one if it is there.
"""

import argparse
import math
from pathlib import Path

import torch

from elman_core import LadderForCausalLM, LadderLM, byte_tokenizer
from elman_core.data import ByteFile, TrainingWindows, heldout_offsets, split

ROWS, LENGTH = 16, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--variant", default="e42")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("model"))
    given = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LadderLM(given.variant, dim=256, depth=3).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=max(2, given.steps))

    file = ByteFile(given.file)
    parts = split(file.size, 0.01)
    windows = TrainingWindows(file, parts, LENGTH, ROWS, seed=0)
    for step in range(given.steps):
        tokens_BT = torch.from_numpy(windows.batch(step).tokens).long().to(device)  # (ROWS, LENGTH + 1)
        loss = model(tokens_BT, return_loss=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0 or step == given.steps - 1:
            print(f"step {step}: {loss.item() / math.log(2):.3f} bits per byte")

    offsets, length = heldout_offsets(parts, LENGTH, 2**14)
    with torch.no_grad():
        heldout_BT = torch.from_numpy(file.windows(offsets, length + 1)).long().to(device)
        print(f"held out: {model.eval()(heldout_BT, return_loss=True).item() / math.log(2):.3f} bits per byte")
    model.save_pretrained(given.out)

    tokenizer, loaded = byte_tokenizer(), LadderForCausalLM.from_pretrained(given.out)
    written = loaded.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=80, do_sample=True)
    print(tokenizer.decode(written[0]))


if __name__ == "__main__":
    main()
