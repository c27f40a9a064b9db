"""One rank's part of a served model, read from its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # documented, but not in its __all__

from wavetrain.errors import InputError
from wavetrain.models.sharding import build_part, share
from wavetrain.serve.checkpoints import Source, open_source
from wavetrain.serve.ranks import Solo, Team, meet
from wavetrain.serve.runner import Runner


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be served, the same on every rank; plain data."""

    path: str
    max_rows: int
    """Sequences that run at once."""
    max_length: int | None
    """The longest sequence; None: the model's."""
    shares: tuple[int, ...] | list[int] | None = None
    """Of a Kraken: sub-layers that each rank holds; None: all alike."""
    deterministic: bool = False
    """Sums in a fixed order."""
    timeout_seconds: float = 600.0
    """How long a sum may take."""
    device: str = "cpu"


@dataclass(frozen=True)
class Part:
    """A rank, ready to run."""

    source: Source
    team: Solo | Team
    runner: Runner
    max_length: int

    @classmethod
    def load(
        cls,
        request: Request,
        store: Store | None,
        *,
        rank: int,
        size: int,
        local: bool,
        watch: Callable[[], None] | None = None,
    ) -> Part:
        """Read this rank's weights and meet the others.

        Args:
            request: what is served.
            store: where the ranks meet; None if there is but one.
            rank: this one.
            size: how many.
            local: whether all are on this machine.
            watch: called while the others load, and while they are waited for; raises if one of them is gone.
        """
        source = open_source(request.path)
        config = source.config
        counts = None if request.shares is None else tuple(request.shares)
        if request.deterministic and size > 1 and config.name != "kraken":
            raise InputError(f"deterministic is for Kraken: ranks that share a {config.name} cannot add up as one alone does")
        sharing = replace(share(config, size, counts), whole_head=request.deterministic)
        max_length = request.max_length or config.max_length
        if max_length > config.max_length and config.positions == "learned":
            raise InputError(f"max_model_len is {max_length}, but the model has learned {config.max_length} positions")
        device = torch.device(request.device)
        model = build_part(config, sharing, rank, source.read, device=device, dtype=torch.float32)
        team: Solo | Team = Solo()
        if size > 1:
            assert store is not None
            team = Team(
                meet(store, rank, size, request.timeout_seconds, watch),
                rank=rank,
                size=size,
                parts=sharing.counts,
                max_rows=request.max_rows,
                deterministic=request.deterministic,
                timeout_seconds=request.timeout_seconds,
                local=local,
                device=device,
                watch=watch,
            )
        runner = Runner(
            model,
            sharing,
            team,
            max_rows=request.max_rows,
            max_length=max_length,
            threads=1 if request.deterministic else max(1, torch.get_num_threads() // (size if local and rank == 0 else 1)),
            deterministic=request.deterministic,
        )
        return cls(source, team, runner, max_length)
