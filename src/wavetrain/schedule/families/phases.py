"""Action lists written as phases: ``"Fa Fz" * 3`` and the like, with micro-batches counted along."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from wavetrain.schedule.actions import KINDS, Action


def expand(program: str, stages: Mapping[str, int], num_micro_batches: int) -> list[Action]:
    """The actions of one rank.

    Args:
        program: words separated by spaces: a kind and the letter of one of the rank's stages, such as ``Fa`` or ``Iz``. Every
            word stands for the next micro-batch of its kind and stage; B counts as an I and a W. A lone ``W`` is the oldest W
            whose I is done.
        stages: the stage that each letter stands for.
        num_micro_batches: actions of micro-batches beyond these are dropped.
    """
    actions: list[Action] = []
    done: dict[str, int] = {}
    owed: deque[tuple[str, int]] = deque()
    for word in program.split():
        if word == "W":
            if not owed:
                continue
            letter, m = owed.popleft()
            kind = "W"
        else:
            kind, letter = word[0], word[1]
            counter = ("I" if kind == "B" else kind) + letter
            m = done.get(counter, 0)
            done[counter] = m + 1
            if kind == "I":
                owed.append((letter, m))
            elif kind == "W":
                owed.remove((letter, m))
        if m < num_micro_batches:
            actions.append(Action(next(k for k in KINDS if k == kind), stages[letter], m))
    return actions
