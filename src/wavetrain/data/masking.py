"""Masked-language modelling: hide some tokens, and ask for them.

Of the tokens, a share ``rate`` is chosen; of these 80 % become the mask token, 10 % a random token, and 10 % stay (Devlin et al.,
arXiv 1810.04805, section 3.1). What is chosen in a row depends on the seed and the row's number only, so a replica that holds
some rows of a batch masks them as one that holds all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wavetrain.data.shuffle import keys, uniform
from wavetrain.errors import InputError

IGNORED: Final = -100
"""The target of a token that is not asked for: what ``cross_entropy`` ignores by default."""


def mask_tokens(
    tokens: Tensor,
    *,
    mask_token: int,
    vocab: int,
    seed: int,
    rate: float = 0.15,
    real: Tensor | None = None,
    samples: NDArray[np.uint64] | None = None,
) -> tuple[Tensor, Tensor]:
    """Hide tokens (batch, seq) int64; returns (inputs, targets) of that shape, targets :data:`IGNORED` where nothing is hidden.

    Every row with a real token has at least one target, so that no micro-batch is without a loss.

    Args:
        tokens: what is to be hidden.
        mask_token: stands for a hidden token; the model's vocabulary must include it.
        vocab: random replacements are drawn from 0 … vocab-1, the ordinary tokens.
        seed: of the choice.
        rate: share of the tokens that is chosen, above 0 and at most 1.
        real: (batch, seq) bool, false for padding, which is never chosen.
        samples: (batch,) a number for each row, which with the seed decides its choice; None: 0, 1, ….
    """
    if not 0 < rate <= 1:
        raise InputError(f"rate is {rate}; give the share of tokens to hide, above 0 and at most 1, e.g. 0.15")
    if mask_token < 0 or vocab < 1:
        raise InputError(f"mask_token is {mask_token} and vocab {vocab}; give 0 or more, and at least 1")
    if tokens.dim() != 2:
        raise InputError(f"tokens of shape {tuple(tokens.shape)} were to be masked; give (batch, seq)")
    num_rows, seq = tokens.shape
    key = keys(seed, np.arange(num_rows, dtype=np.uint64) if samples is None else samples)
    draws = [torch.from_numpy(uniform(key, seq, stream)).to(tokens.device) for stream in (1, 2, 3)]
    score = draws[0] if real is None else draws[0].masked_fill(~real, 2.0)
    chosen = score < rate
    if seq:
        chosen |= (score == score.amin(1, keepdim=True)) & (score < 1)
    become_mask = chosen & (draws[1] < 0.8)
    become_random = chosen & (draws[1] >= 0.9)
    inputs = tokens.masked_fill(become_mask, mask_token)
    inputs = torch.where(become_random, (draws[2] * vocab).to(tokens.dtype), inputs)
    return inputs, tokens.masked_fill(~chosen, IGNORED)


@dataclass(frozen=True, kw_only=True)
class MaskedLM:
    """The objective of masked-language models, for :class:`wavetrain.data.Batches`.

    For byte tokens: ``MaskedLM(mask_token=256, vocab=256)`` and a model with a vocabulary of 257.
    """

    mask_token: int
    """Stands for a hidden token."""
    vocab: int
    """Ordinary tokens."""
    rate: float = 0.15
    """Share of the tokens that is chosen."""

    def __call__(self, windows: Tensor, samples: NDArray[np.uint64], seed: int) -> tuple[Tensor, Tensor]:
        """Hide tokens of windows (rows, seq + 1), whose last column is not used."""
        tokens = windows[:, :-1].contiguous()
        return mask_tokens(tokens, mask_token=self.mask_token, vocab=self.vocab, seed=seed, rate=self.rate, samples=samples)


def collate_masked(
    sequences: Sequence[Tensor | Sequence[int]],
    *,
    pad_token: int,
    mask_token: int,
    vocab: int,
    seed: int,
    rate: float = 0.15,
    first_sample: int = 0,
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Pad sequences of unequal length to the longest and hide tokens: ((inputs, mask), targets), (batch, longest) each.

    ``mask`` is bool and true for real tokens: the pair is what a BERT takes.

    Args:
        sequences: token numbers, one sequence a row; none empty.
        pad_token: fills up the rows.
        mask_token: stands for a hidden token.
        vocab: ordinary tokens.
        seed: of the choice.
        rate: share of the tokens that is chosen.
        first_sample: number of the first row in the whole stream; give each batch its own, or all hide alike.
    """
    rows = [torch.as_tensor(sequence, dtype=torch.int64) for sequence in sequences]
    if not rows or any(row.dim() != 1 or not len(row) for row in rows):
        raise InputError("collate_masked takes at least one sequence, each a flat row of at least one token")
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_token)
    lengths = torch.tensor([len(row) for row in rows])
    real = torch.arange(tokens.shape[1]) < lengths[:, None]
    samples = np.arange(first_sample, first_sample + len(rows), dtype=np.uint64)
    inputs, targets = mask_tokens(tokens, mask_token=mask_token, vocab=vocab, seed=seed, rate=rate, real=real, samples=samples)
    return (inputs, real), targets
