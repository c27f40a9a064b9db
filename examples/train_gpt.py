"""Train a small GPT in zero-bubble waves, on the sources of Python's standard library.

python examples/train_gpt.py 200                            200 steps in two ranks of this machine
torchrun --nproc-per-node 2 examples/train_gpt.py 200       the same, started by torchrun
"""

from __future__ import annotations

import sys
from itertools import islice

import torch
from torch import Tensor

import wavetrain as wt

NUM_STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 30


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over logits (batch, seq, vocab) and targets (batch, seq)."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> float:
    """What every rank runs."""
    torch.manual_seed(0)  # every rank makes the same model, and keeps its own layers
    model = wt.models.GPT(num_layers=8, hidden=64, num_heads=4, vocab=256, tied=True)  # or your own nn.Sequential
    pipe = wt.Pipeline(model, schedule="zb-wave", waves=2, num_micro_batches=4, loss_fn=loss_fn)
    opt = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    batches = wt.data.Batches(wt.data.stdlib_corpus(), batch=8, seq=64)
    loss = torch.tensor(0.0)
    for step, (inputs, targets) in enumerate(islice(batches, NUM_STEPS), 1):
        loss = pipe.step(inputs, targets)  # forward and backward of all micro-batches
        pipe.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad()
        if pipe.mesh.rank == 0 and (step % 10 == 0 or step == NUM_STEPS):
            print(f"step {step:>4}  loss {loss:.4f}", flush=True)
    return float(loss)


if __name__ == "__main__":
    wt.launch(main, ranks=2)
