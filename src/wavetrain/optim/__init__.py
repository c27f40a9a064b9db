"""OptEx, an optimizer that takes several steps at once; see :mod:`wavetrain.optim.optex`."""

from wavetrain.optim.optex import OptEx as OptEx
