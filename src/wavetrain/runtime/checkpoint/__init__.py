"""Checkpoints: atomic, verified, independent of the plan. What a user calls is here; :mod:`.save_load` has the whole way.

save_load   save and load, step by step
folders     names of checkpoints in a directory, the newest, how many are kept
files       the manifest and the safetensors files of one checkpoint
storage     the same as torch.distributed.checkpoint wants to read and write it
state       optimizer, scheduler and random numbers as plain data
team        all ranks go on, or all stop
"""

from __future__ import annotations

from wavetrain.runtime.checkpoint.save_load import export_safetensors, latest, load, read_extra, read_model, save, verify

__all__ = ["export_safetensors", "latest", "load", "read_extra", "read_model", "save", "verify"]
