"""A step on this rank's part of the model: from tokens to what is likeliest next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wavetrain.models.config import DecoderShape
from wavetrain.models.context import Context
from wavetrain.models.layers import LayeredModel
from wavetrain.models.sharding import Sharing
from wavetrain.models.stacked import make_exact
from wavetrain.serve.cache import KVCache
from wavetrain.serve.ranks import Solo, Team
from wavetrain.serve.sampling import Candidates, candidates
from wavetrain.serve.steps import Step


class Runner:
    """Runs steps.

    Args:
        model: this rank's part of a decoder.
        sharing: of the ranks.
        team: the ranks.
        max_rows: sequences that run at once.
        max_length: the longest sequence.
        threads: of torch while a step runs; None: as many as there are.
        deterministic: the same bits however many sub-layers this rank holds.
    """

    def __init__(
        self,
        model: LayeredModel,
        sharing: Sharing,
        team: Solo | Team,
        *,
        max_rows: int,
        max_length: int,
        threads: int | None = None,
        deterministic: bool = False,
    ) -> None:
        if deterministic:
            make_exact(model)
        self._model, self._team, self._threads = model, team, threads
        self._blocks: list[Any] = list(model)[1:-1]
        shape = DecoderShape(model.config)
        weight = next(model.parameters())
        self._device = weight.device
        kv_heads = model.config.kv_heads or 0
        own = sharing.cut(kv_heads, team.rank)
        self._vocabulary = sharing.vocabulary(model.config.vocab, team.rank)
        self.cache = KVCache(
            num_blocks=len(self._blocks),
            num_rows=max_rows,
            kv_heads=own.stop - own.start,
            head_dim=shape.head_dim,
            max_length=max_length,
            dtype=weight.dtype,
            device=weight.device,
            one_by_one=deterministic,
        )

    @torch.inference_mode()
    def run(self, step: Step) -> Candidates:
        """The likeliest tokens after the last token of every row; of all ranks on rank 0."""
        before = torch.get_num_threads()
        if self._threads is not None and self._threads != before:
            torch.set_num_threads(self._threads)
            try:
                return self._run(step)
            finally:
                torch.set_num_threads(before)
        return self._run(step)

    def _run(self, step: Step) -> Candidates:
        return self._team.gather(candidates(self.logits(step), step.candidates, self._vocabulary.start), step.candidates)

    @torch.inference_mode()
    def logits(self, step: Step) -> Tensor:
        """Logits of this rank after the last token of every row, (rows, vocab here); its part of the cache is written."""
        self._team.begin_step()
        attention = self.cache.prepare(step)
        context = Context(positions=attention.positions, attend=attention, ranks=self._team)
        tokens = torch.tensor(step.tokens, dtype=torch.int64, device=self._device)
        x: Any = self._model.embed.run(tokens, context)
        for number, block in enumerate(self._blocks):
            attention.block = number
            x = block.run(x, context)
        last = torch.tensor([row.count for row in step.rows], device=self._device).cumsum(0) - 1
        return self._model.head.run(x, context, last)

    def follow(self) -> None:
        """Ranks other than the first: run what rank 0 says until it says no more."""
        assert isinstance(self._team, Team)
        while (step := self._team.receive_step()) is not None:
            self.run(step)
