"""Private names of torch that the runtime needs, and why. No other file uses one."""

from __future__ import annotations

from torch import Tensor


def version_of(tensor: Tensor) -> int:
    """How often the memory of ``tensor`` was changed in place.

    Autograd compares it to refuse a backward pass over changed tensors, but not for tensors that saved-tensor hooks handle
    (:mod:`wavetrain.runtime.saved`): those have to do it themselves. There is no public name for it.
    """
    return tensor._version
