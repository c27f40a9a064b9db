"""How the next token is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wavetrain.errors import InputError, RuntimeFailure

MAX_CANDIDATES = 256
"""The most tokens that ranks send for a draw; who wants to draw from more is sent all logits."""
MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one prompt is continued; names and defaults as vLLM's."""

    max_tokens: int = 16
    """Tokens that are generated at most."""
    temperature: float = 1.0
    """0 takes the likeliest token, 1 draws as the model says."""
    top_k: int = 0
    """Draw from the k likeliest only; 0 (or −1): from all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens that have this probability together."""
    seed: int | None = None
    """Of the draws; None: of the engine's seed and the prompt's number."""
    stop: tuple[str, ...] | list[str] | str | None = ()
    """Texts at which generation ends; they are not part of the result."""
    stop_token_ids: tuple[int, ...] | list[int] | None = ()
    """Tokens at which generation ends."""
    ignore_eos: bool = False
    """Go on after the model's own end-of-text token."""
    logprobs: int | None = None
    """Keep the log-probability of every token, and of so many likeliest ones, at most 20."""

    def __post_init__(self) -> None:
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise InputError(f"max_tokens is {self.max_tokens!r}; give a whole number of at least 1")
        if (
            isinstance(self.temperature, bool)
            or not isinstance(self.temperature, (int, float))
            or not 0 <= self.temperature < math.inf
        ):
            raise InputError(f"temperature is {self.temperature!r}; give a number, 0 or more")
        if not isinstance(self.top_k, int) or self.top_k < -1:
            raise InputError(f"top_k is {self.top_k!r}; give a number of tokens, or 0 for all")
        if not isinstance(self.top_p, (int, float)) or not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p!r}; give a probability above 0, at most 1")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise InputError(f"seed is {self.seed!r}; give a whole number")
        if self.logprobs is not None and (type(self.logprobs) is not int or not 0 <= self.logprobs <= MAX_LOGPROBS):
            raise InputError(f"logprobs is {self.logprobs!r}; give a number from 0 to {MAX_LOGPROBS}")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        if not isinstance(stop, list | tuple) or any(not isinstance(text, str) or not text for text in stop):
            raise InputError(f"stop is {self.stop!r}; give a text or several, none of them empty")
        tokens = self.stop_token_ids or ()
        if not isinstance(tokens, list | tuple) or any(type(token) is not int for token in tokens):
            raise InputError(f"stop_token_ids is {self.stop_token_ids!r}; give a list of token numbers")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(tokens))

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop texts."""
        return tuple(self.stop or ())

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Stop tokens."""
        return frozenset(self.stop_token_ids or ())

    @property
    def num_candidates(self) -> int:
        """How many of the likeliest tokens a draw needs to see; 0: all."""
        if self.temperature == 0:
            needed = 1
        elif self.top_k > 0:
            needed = self.top_k
        else:
            return 0
        needed = max(needed, self.logprobs or 0)
        return needed if needed <= MAX_CANDIDATES else 0


@dataclass(frozen=True)
class Candidates:
    """What the model says of the next token of some sequences, likeliest first."""

    values: Tensor
    """Logits, (rows, k) float32."""
    tokens: Tensor
    """(rows, k) int64."""
    total: Tensor
    """Log of the sum of the exponentials of all logits, (rows,): a logit less it is a log-probability."""


def candidates(logits: Tensor, num: int, first: int) -> Candidates:
    """The ``num`` likeliest (0: all) of logits (rows, vocab here) whose first column is token ``first``."""
    logits = logits.float()
    if num == 1:  # a maximum is found faster than the top one of a sort
        values, tokens = logits.max(-1, keepdim=True)
    elif num:
        values, tokens = logits.topk(min(num, logits.shape[-1]))
    else:
        values, tokens = torch.sort(logits, dim=-1, descending=True, stable=True)
    return Candidates(values, tokens + first, logits.logsumexp(-1))


def merge(parts: Sequence[Candidates], num: int) -> Candidates:
    """The likeliest of what several ranks sent, each of its own tokens; of equal logits the lower token first."""
    if len(parts) == 1:
        return parts[0]
    values, tokens = torch.cat([p.values for p in parts], -1), torch.cat([p.tokens for p in parts], -1)
    values, order = torch.sort(values, dim=-1, descending=True, stable=True)
    keep = num or values.shape[-1]
    total = torch.stack([p.total for p in parts]).logsumexp(0)
    return Candidates(values[:, :keep], tokens.gather(-1, order)[:, :keep], total)


def draw(found: Candidates, row: int, params: SamplingParams, generator: torch.Generator | None) -> int:
    """The column of ``found`` whose token comes next in a sequence."""
    if not math.isfinite(float(found.total[row])):
        raise RuntimeFailure("the model's logits are no numbers; its weights may hold NaN, or be too large")
    if params.temperature == 0:
        return 0
    values = found.values[row] - found.values[row, 0]  # so that no temperature is too small
    if params.top_k > 0:
        values = values[: params.top_k]
    chances = (values / params.temperature).softmax(-1)
    if params.top_p < 1:
        before = chances.cumsum(-1) - chances  # what those before it have together
        chances = torch.where(before < params.top_p, chances, 0.0)
    return int(torch.multinomial(chances, 1, generator=generator))
