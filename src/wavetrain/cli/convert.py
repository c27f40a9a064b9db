"""``wavetrain convert``: a GPT becomes a Kraken, or a checkpoint a folder that other tools read."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from wavetrain.cli.common import Count, Names, Output, print_json
from wavetrain.errors import InputError, UnknownNameError

KINDS = ("kraken", "wavetrain", "gpt2", "llama")


@dataclass(frozen=True, kw_only=True)
class Convert(Output):
    """Make a Kraken of a standard GPT by distillation, or write a model as a folder of config.json and safetensors.

    wavetrain convert runs/first --to kraken --degree 2 --steps 500 --out models/kraken

    wavetrain convert runs/first --to gpt2 --out models/gpt2        # for transformers, vLLM and others

    A Kraken begins with the GPT's weights and learns, from the GPT and from the data, to do with less communication.
    """

    model: Annotated[Path, tyro.conf.Positional]
    """A run's directory, a checkpoint, or a folder with config.json and safetensors."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """The folder that is written; it must not hold a model yet."""
    to: Annotated[str, tyro.conf.arg(metavar="KIND")] = "kraken"
    """kraken, or a folder's kind: wavetrain, gpt2, llama."""
    degree: Annotated[int, tyro.conf.arg(metavar="N")] = 2
    """Of the Kraken: sub-layers a block."""
    data: Names = None
    """Text or token files to learn from. Default: the sources of Python's standard library."""
    steps: Annotated[int, tyro.conf.arg(metavar="N")] = 500
    """Steps of distillation; 0: none, only the first guess."""
    batch: Annotated[int, tyro.conf.arg(metavar="N")] = 16
    """Sequences a step."""
    seq: Count = None
    """Tokens a sequence. Default: the model's longest, at most 256."""
    lr: Annotated[float, tyro.conf.arg(metavar="X")] = 1e-3
    """The highest learning rate."""
    teacher_share: Annotated[float, tyro.conf.arg(metavar="X")] = 0.9
    """Of the loss: how much is the divergence from the GPT; the rest is the data's next token."""
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Of the order of the data."""

    def run(self) -> int:
        """Convert, and say what came of it."""
        if self.to not in KINDS:
            raise UnknownNameError("kind", self.to, KINDS)
        if (self.out / "config.json").exists():
            raise InputError(f"{self.out} holds a model already; give another --out")
        import torch

        from wavetrain.models.folders import save_folder
        from wavetrain.models.sharding import build_part, share
        from wavetrain.serve.checkpoints import open_source

        source = open_source(self.model)
        whole = share(source.config, 1)
        model: Any = build_part(source.config, whole, 0, source.read, device=torch.device("cpu"), dtype=torch.float32)
        beside = source.folder / "tokenizer.json"
        found: dict[str, Any] = {}
        if self.to == "kraken":
            model, found = self._kraken(model, beside if beside.is_file() else None)
        folder = save_folder(model, self.out, kind=self.to if self.to != "kraken" else "wavetrain", **_ends(source.eos))
        if beside.is_file():
            shutil.copyfile(beside, folder / "tokenizer.json")
        found |= {"parameters": model.num_parameters, "folder": str(folder)}
        if self.json:
            print_json(found)
        else:
            for key, value in found.items():
                print(
                    f"{key.replace('_', ' ')}: {value:,.4f}" if isinstance(value, float) else f"{key.replace('_', ' ')}: {value}"
                )
        return 0

    def _kraken(self, teacher: Any, tokenizer: Path | None) -> tuple[Any, dict[str, Any]]:
        """The Kraken, and what was measured."""
        import math

        import torch

        from wavetrain.data.batches import Batches
        from wavetrain.data.tokens import TokenData, open_data
        from wavetrain.models.conversion import kraken_from
        from wavetrain.runtime.train.distill import Distillation, distill, mean_loss

        torch.manual_seed(self.seed)
        seq = self.seq or min(256, teacher.config.max_length)
        data = open_data(self.data, vocab=teacher.config.vocab)
        if tokenizer is not None and not isinstance(data, TokenData):
            data = _tokenized(data, tokenizer)
        kept, held_out = data.split(0.05)
        if len(held_out) <= seq:
            raise InputError(f"the data is too short to hold out a sequence of {seq} tokens; give more, or a smaller --seq")
        training = Batches(kept, batch=self.batch, seq=seq, seed=self.seed)
        validation = Batches(held_out, batch=self.batch, seq=seq, shuffle=False)
        student = kraken_from(teacher, self.degree)
        for parameter in student.parameters():
            parameter.requires_grad_(True)
        num = max(1, min(16, len(held_out) // (seq * self.batch)))
        bits = 1 / math.log(2)
        found: dict[str, Any] = {
            "teacher_bits_a_token": bits * mean_loss(teacher, validation, num),
            "first_guess_bits_a_token": bits * mean_loss(student, validation, num),
        }
        if self.steps:
            show = not self.json and sys.stderr.isatty()

            def progress(step: int, loss: float) -> None:
                if show:
                    print(f"\rstep {step} of {self.steps}, loss {loss:.4f}", end="", file=sys.stderr, flush=True)

            how = Distillation(steps=self.steps, lr=self.lr, warmup=min(50, self.steps), teacher_share=self.teacher_share)
            distill(student, teacher, training, how, on_step=progress)
            if show:
                print(file=sys.stderr)
            found["kraken_bits_a_token"] = bits * mean_loss(student, validation, num)
        return student, found


def _ends(eos: tuple[int, ...]) -> dict[str, Any]:
    """The entry of config.json that says which tokens end a text."""
    return {"eos_token_id": eos[0] if len(eos) == 1 else list(eos)} if eos else {}


def _tokenized(text: Any, tokenizer: Path) -> Any:
    """Bytes of text as the tokens of a tokenizer."""
    import numpy as np

    from wavetrain.data.tokens import Tokens
    from wavetrain.serve.tokenizers import JSON

    own = JSON(tokenizer)
    raw = text.window(0, len(text)).astype(np.uint8).tobytes()
    return Tokens(np.array(own.encode(raw.decode("utf-8", errors="replace")), dtype=np.int64), vocab=own.vocab)
