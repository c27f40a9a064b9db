"""A prompt and what was generated for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from wavetrain.serve.sampling import Candidates, SamplingParams
from wavetrain.serve.tokenizers import Tokenizer

LONGEST_CHARACTER = 4
"""Bytes of a character, and so tokens that may stand for one; what is none after so many will not become one."""


LOOK_BACK = 5
"""Tokens of a prompt that the first new one is read with."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What was generated for one prompt."""

    text: str
    """Without the stop text that ended it."""
    token_ids: list[int]
    finish_reason: str
    """``stop``: a stop text or token, or the model's end of text. ``length``: max_tokens, or the longest the model takes."""
    cumulative_logprob: float | None = None
    """Of all tokens together; None unless logprobs were asked for."""
    logprobs: list[dict[int, float]] | None = None
    """Of every token: the likeliest tokens and the one that was drawn, with their log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A prompt with its completion; ``outputs`` has one entry, as in vLLM's lists."""

    prompt: str | None
    """None if it was given as tokens."""
    prompt_token_ids: list[int]
    outputs: list[Completion]


class Text:
    """Tokens as text, as they come: what may still change, or be cut off by a stop text, is held back.

    A token's text is what it adds to the text of the few tokens before it: what a token means may depend on them (a leading
    space, the second half of a character).
    """

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...], prompt: list[int] | None = None) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._tokens: list[int] = (prompt or [])[-LOOK_BACK:]
        self._before, self._read = (
            0,
            len(self._tokens),
        )  # tokens[before:read] are the few before, tokens[read:] not yet in the text
        self._text = ""
        self.stopped = False

    def push(self, token: int) -> None:
        """Add a token."""
        self._tokens.append(token)
        if self._unread().endswith("\ufffd"):  # in the middle of a character, or bytes that are none
            if len(self._tokens) - self._read < LONGEST_CHARACTER:
                return
            end = self._read + 1  # the first of them can no longer become one with those that follow
        else:
            end = len(self._tokens)
        before = len(self._text)
        self._text += self._unread(end)
        self._before, self._read = self._read, end
        found = [at for stop in self._stops if (at := self._text.find(stop, max(0, before - len(stop) + 1))) >= 0]
        if found:
            self._text, self.stopped = self._text[: min(found)], True

    def whole(self) -> str:
        """All of the text."""
        return self._text if self.stopped else self._text + self._unread()

    def safe(self) -> str:
        """The part of it that will not change, whatever comes."""
        held = 0
        if not self.stopped:
            ends = (n for stop in self._stops for n in range(1, len(stop)) if self._text.endswith(stop[:n]))
            held = max(ends, default=0)
        return self._text[: len(self._text) - held]

    def _unread(self, end: int | None = None) -> str:
        known = self._tokenizer.decode(self._tokens[self._before : self._read])
        return self._tokenizer.decode(self._tokens[self._before : end])[len(known) :]


@dataclass
class Sequence:
    """One prompt while it is continued."""

    number: int
    prompt: list[int]
    params: SamplingParams
    text: Text
    eos: frozenset[int] = frozenset()
    generator: torch.Generator | None = None
    prompt_text: str | None = None
    slot: int | None = None
    """The cache's row; None while it waits."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    log_probability: float = 0.0
    finish_reason: str | None = None

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self.prompt) + len(self.tokens)

    def accept(self, found: Candidates, row: int, column: int, max_length: int) -> None:
        """Take the token of a column, and see whether it is the last."""
        token = int(found.tokens[row, column])
        self.tokens.append(token)
        if self.params.logprobs is not None:
            own = float(found.values[row, column] - found.total[row])
            top = min(self.params.logprobs, found.tokens.shape[1])
            kept = {int(found.tokens[row, i]): float(found.values[row, i] - found.total[row]) for i in range(top)}
            self.logprobs.append({**kept, token: own})
            self.log_probability += own
        ends = token in self.params.stop_tokens or (token in self.eos and not self.params.ignore_eos)
        if ends:
            self.finish_reason = "stop"
            return
        self.text.push(token)
        if self.text.stopped:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.params.max_tokens or self.length >= max_length:
            self.finish_reason = "length"

    def output(self) -> RequestOutput:
        """What a user gets."""
        wanted = self.params.logprobs is not None
        completion = Completion(
            text=self.text.whole(),
            token_ids=list(self.tokens),
            finish_reason=self.finish_reason or "length",
            cumulative_logprob=self.log_probability if wanted else None,
            logprobs=list(self.logprobs) if wanted else None,
        )
        return RequestOutput(prompt=self.prompt_text, prompt_token_ids=list(self.prompt), outputs=[completion])
