"""Before: where the last round began, so that it can be taken back when it turns out to have led astray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from wavetrain.optim.fork import Fork

SHORTER: Final = 0.25
MOST_TRIES: Final = 6
"""So often a round is taken back; then what comes of it is believed."""


@dataclass
class Before:
    """The beginning of a round that is over."""

    start: Tensor
    """The parameters (d,)."""
    fork: Fork
    """The inner optimizer's state."""
    row: int
    """Of the history: the point where it began, and the gradient there."""
    num_moves: int
    """Steps that were made from there; one more if the round settled."""
    num_tries: int = 0
    """How often it was taken back."""

    @property
    def shorter(self) -> float:
        """What the gradient is multiplied by for the one step that is made instead: less with every try."""
        return SHORTER ** (self.num_tries - (self.num_moves > 1))

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        counts = [self.row, self.num_moves, self.num_tries]
        return {"start": self.start.clone(), "fork": self.fork.state_dict(), "counts": counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What :meth:`state_dict` gave, of the same parameters."""
        self.start.copy_(state["start"])
        self.fork.load_state_dict(state["fork"])
        self.row, self.num_moves, self.num_tries = state["counts"]
