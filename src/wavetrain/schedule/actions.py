"""Actions: the unit of work a rank is told to do.

An action is F, B, I or W of one stage and one micro-batch:

    F   forward
    B   whole backward (I and W in one)
    I   gradient of the stage's input, on the critical path
    W   gradient of the stage's weights, free to wait

The data dependencies, with s a stage and m a micro-batch, are

    F(s, m)       needs F(s-1, m)
    B or I(s, m)  needs F(s, m) and B or I(s+1, m)
    W(s, m)       needs I(s, m)

Sends and receives are derived from these where two stages sit on different ranks; they are never written by hand.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["F", "B", "I", "W"]

KINDS: Final[tuple[Kind, ...]] = ("F", "B", "I", "W")

KIND_NAMES: Final[dict[Kind, str]] = {
    "F": "forward",
    "B": "backward",
    "I": "backward-input",
    "W": "backward-weight",
}


class Action(NamedTuple):
    """One action. ``str(Action("F", 2, 5))`` is ``2F5``, torch.distributed.pipelining's spelling."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    def describe(self) -> str:
        """The action in words, as error messages spell it."""
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}"
