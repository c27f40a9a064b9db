"""What a run is made of before its first step: a checked config, its schedule, batches, a loss, an optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from wavetrain.data.batches import Batches, Objective, next_token
from wavetrain.data.masking import MaskedLM
from wavetrain.data.tokens import open_data
from wavetrain.errors import InputError
from wavetrain.models.registry import build_model
from wavetrain.runtime import checkpoint
from wavetrain.runtime.partition import cut_layers
from wavetrain.runtime.pipeline import Pipeline
from wavetrain.runtime.train.config import TrainConfig
from wavetrain.runtime.train.metrics import check_loggers
from wavetrain.schedule.families import FAMILIES, NAMES, build
from wavetrain.schedule.files import load
from wavetrain.schedule.proof import prove
from wavetrain.schedule.schedule import Schedule

HELD_OUT: Final = 0.05
"""The share of the data that is kept for validation."""
LEAST_LR: Final = 0.1
"""The learning rate at the end, over the highest."""


def prepare(config: TrainConfig) -> tuple[TrainConfig, Schedule]:
    """Check all of a config that can be checked by one process; the config with every choice made, and its schedule, proven.

    Raises:
        InputError: the first thing that is wrong.
        ProofError: the schedule cannot run.
    """
    check_loggers(config.log)
    shape = config.model_config()
    if config.tp > 1 and shape.name not in ("gpt", "bert", "uneven"):
        raise InputError(f"tp={config.tp}: in training only the blocks of gpt, bert and uneven are shared by ranks; take tp=1")
    for heads in (shape.num_heads, shape.wide_heads or shape.num_heads):
        if heads % config.tp:
            raise InputError(f"{heads} heads cannot be split over tp={config.tp} ranks; take a tp that divides {heads}")
    with torch.device("meta"):
        layers = list(build_model(shape))
    given = load(config.schedule) if config.schedule not in NAMES and _is_path(config.schedule) else None
    takes_waves = config.schedule in FAMILIES and FAMILIES[config.schedule].takes_waves
    config = config.resolved(
        num_layers=len(layers), takes_waves=takes_waves, num_micro_batches=given.num_micro_batches if given else None
    )
    assert config.micro_batches is not None
    if given is None:
        given = build(
            config.schedule,
            num_ranks=config.pipeline_ranks,
            num_micro_batches=config.micro_batches,
            waves=config.waves,
            stages_per_rank=config.stages_per_rank,
            growth=config.growth,
        )
    elif (given.num_ranks, given.num_micro_batches) != (config.pipeline_ranks, config.micro_batches):
        raise InputError(
            f"{config.schedule} is for {given.num_ranks} pipeline ranks and {given.num_micro_batches} micro-batches, "
            f"not for {config.pipeline_ranks} and {config.micro_batches}"
        )
    prove(given).require()
    cut_layers(layers, given, config.cut or None)
    open_batches(config)
    found = checkpoint.latest(config.checkpoints)
    if config.resume and found is None:
        raise InputError(
            f"there is no checkpoint in {config.checkpoints} to resume from; leave --resume out, or name another --out"
        )
    if not config.resume and found is not None:
        raise InputError(f"{config.out} holds a run already ({found.name}); --resume goes on with it, another --out starts anew")
    if config.resume and config.steps is not None and found is not None and int(found.name[5:13]) >= config.steps:
        raise InputError(f"the run in {config.out} has done {int(found.name[5:13])} of {config.steps} steps; give more --steps")
    return config, given


def open_batches(config: TrainConfig, replica: int = 0) -> tuple[list[Batches], Batches | None]:
    """What is trained on, a stream for every minibatch of a step that a replica computes, and what is held out.

    Nothing is held out (None) if the data is too short for a sequence of it.
    """
    vocab = config.model_config().vocab
    masked = config.model == "bert"
    data = open_data(config.data or None, dtype=config.data_dtype, vocab=vocab - 1 if masked else vocab)
    if data.vocab is not None and data.vocab > vocab - masked:
        raise InputError(f"vocab is {vocab}, but the data has tokens up to {data.vocab - 1}; take vocab={data.vocab + masked}")
    objective: Objective = MaskedLM(mask_token=vocab - 1, vocab=vocab - 1) if masked else next_token
    kept, held_out = data.split(HELD_OUT)
    enough = len(held_out) > config.seq
    assert config.batch is not None
    common: dict[str, Any] = {"batch": config.batch, "seq": config.seq, "objective": objective}
    of_step = range(config.num_minibatches) if config.dp == 1 else [replica]
    training = [
        Batches(kept if enough else data, seed=config.seed, replica=i, num_replicas=config.num_minibatches, **common)
        for i in of_step
    ]
    held = Batches(held_out, shuffle=False, replica=replica, num_replicas=config.dp, **common) if enough else None
    return training, held


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits (batch, seq, vocab) and targets (batch, seq) int64; targets of −100 do not count."""
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def lr_factor(step: int, warmup: int, done: float) -> float:
    """The learning rate over its highest: linear in the first ``warmup`` steps, times a cosine over the share that is done."""
    cosine = LEAST_LR + (1 - LEAST_LR) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return min(1.0, (step + 1) / max(1, warmup)) * cosine


def make_optimizer(pipe: Pipeline, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay of matrices only. Fused, where no weight is divided over ranks: that it cannot do."""
    matrices = [p for p in pipe.parameters() if p.dim() > 1]
    vectors = [p for p in pipe.parameters() if p.dim() <= 1]
    groups: list[Mapping[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([dict(g) for g in groups if g["params"]], lr=config.lr, betas=(0.9, 0.95), fused=config.tp == 1)


def _is_path(name: str) -> bool:
    return name.lower().endswith((".csv", ".json")) or "/" in name
