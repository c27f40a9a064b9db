"""Train a small GPT with up to four optimizer steps a round, on the sources of Python's standard library.

python examples/optex.py 40                             40 rounds; this process evaluates all four minibatches of a round
torchrun --nproc-per-node 2 examples/optex.py 40        40 rounds of two minibatches; every rank evaluates one
"""

from __future__ import annotations

import os
import sys
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

import wavetrain as wt

NUM_ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 20


def main() -> None:
    """One process, or one rank of several."""
    torch.manual_seed(0)  # every rank makes the same model
    group = None
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    model = wt.models.GPT(num_layers=2, hidden=64, num_heads=4, vocab=256)
    base = torch.optim.AdamW(model.parameters(), lr=1e-3)
    opt = wt.OptEx(base, process_group=group) if group is not None else wt.OptEx(base, parallel=4)
    batches = iter(wt.data.Batches(wt.data.stdlib_corpus(), batch=8, seq=64))
    for number in range(1, NUM_ROUNDS + 1):
        round_of = list(islice(batches, opt.parallel))

        def loss_of(i: int, round_of: list[tuple[Tensor, Tensor]] = round_of) -> Tensor:
            inputs, targets = round_of[i]
            return torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

        opt.step(loss_of)
        told = opt.stats.last
        if (number % 10 == 0 or number == NUM_ROUNDS) and (group is None or dist.get_rank() == 0):
            steps = f"{told.num_accepted} of {opt.parallel} steps"
            print(f"round {number:>4}  loss {told.loss:.4f}  {steps}, by {told.estimator}", flush=True)
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
