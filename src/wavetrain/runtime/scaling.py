"""Loss scaling: float16 gradients that are too small to be told from zero are lifted by a factor on the loss.

scale = LossScale()
loss = pipe.step(inputs, targets, loss_scale=scale.value)
if scale.update(pipe.unscale_(scale.value)):  # False: a gradient was not finite, on whichever rank; leave the step out
    pipe.clip_grad_norm_(1.0)
    optimizer.step()
optimizer.zero_grad()
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """A factor that halves when gradients overflow, and doubles when they have not for a while; the same on every rank."""

    value: float = 2.0**16
    patience: int = 2000
    """Steps without overflow before it is doubled."""
    num_good: int = 0
    """Steps since the last change."""

    def update(self, finite: bool) -> bool:
        """Take note of a step; returns ``finite``."""
        if not finite:
            self.value, self.num_good = max(1.0, self.value / 2), 0
        elif self.num_good + 1 >= self.patience:
            self.value, self.num_good = self.value * 2, 0
        else:
            self.num_good += 1
        return finite
