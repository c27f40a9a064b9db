"""``wavetrain profile``: what layers and links take on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from wavetrain.cli.common import Count, Flag, Name, Output, print_json
from wavetrain.cli.planning import progress_line
from wavetrain.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

MAX_LAYERS = 4096


@dataclass(frozen=True, kw_only=True)
class ProfileVerb(Output):
    """Measure the layers of a model, and a link, on this machine; the folder that comes of it feeds wavetrain plan --profiles.

    wavetrain profile --model gpt2 --seq 256 --out profile

    wavetrain profile --layers-from my_model:build --name my-model --out profile

    my_model.py has a function build() that returns (layers, inputs): an nn.Sequential or a list of layers, and a tensor (1, …).
    """

    model: Name = None
    """A GPT-2 like preset or .toml; its precision is fp32 on CPUs."""
    layers_from: Name = None
    """A function of your own, as module:function."""
    name: Name = None
    """What profiles and plans call the model. Default: the preset's name, or the function's module."""
    seq: Count = None
    """Tokens of a sequence. Default: the model's own."""
    micro_batches: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N ...")] = (1, 2, 4)
    """Sizes to measure."""
    repeats: Annotated[int, tyro.conf.arg(metavar="N")] = 5
    """Runs of every layer; the median counts."""
    no_link: Flag = False
    """Do not measure messages between two processes."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR")] = "profile"
    """The folder."""

    def run(self) -> int:
        """Measure and write."""
        if (self.model is None) == (self.layers_from is None):
            raise InputError("give either --model or --layers-from")
        if self.repeats < 1 or not self.micro_batches or min(self.micro_batches) < 1:
            raise InputError(f"--repeats {self.repeats} --micro-batches {self.micro_batches}: each must be at least 1")
        from wavetrain.cluster import detect
        from wavetrain.profile import write_profiles
        from wavetrain.runtime.profiling import measure_layers, measure_link

        name, layers, sample = self._layers()
        device = detect().groups[0].device.name
        rows: dict[int, list[Any]] = {}
        with progress_line() as progress:
            for size in sorted(set(self.micro_batches)):
                inputs = sample.expand(size, *sample.shape[1:]).contiguous()
                rows[size] = measure_layers(layers, inputs, repeats=self.repeats, progress=progress)
            link = None if self.no_link else measure_link()
        write_profiles(self.out, name, device, rows, link)
        first = rows[min(rows)]
        result = {
            "model": name,
            "device": device,
            "layers": len(layers),
            "forward_seconds": {str(m): sum(r.forward_seconds for r in found) for m, found in rows.items()},
            "backward_seconds": {str(m): sum(r.backward_seconds for r in found) for m, found in rows.items()},
            "parameter_bytes": sum(r.parameter_bytes for r in first),
            "link_bytes_per_second": link,
            "written": self.out,
        }
        if self.json:
            print_json(result)
            return 0
        for size, found in rows.items():
            forward, backward = (sum(getattr(r, f"{k}_seconds") for r in found) for k in ("forward", "backward"))
            print(
                f"micro-batch {size}: forward {1e3 * forward:.1f} ms, backward {1e3 * backward:.1f} ms over {len(found)} layers"
            )
        if link is not None:
            print(f"link between two processes: {link / 1e9:.2f} GB/s")
        print(f"written to {self.out}; use it with wavetrain plan --profiles {self.out} --model … --cluster detect")
        return 0

    def _layers(self) -> tuple[str, list[nn.Module], Tensor]:
        import torch

        from wavetrain.models.gpt import GPT
        from wavetrain.runtime.profiling import layers_from
        from wavetrain.workload import load_workload

        if self.layers_from is not None:
            layers, sample = layers_from(self.layers_from)
            return self.name or self.layers_from.partition(":")[0], layers, sample
        assert self.model is not None, "one of them was given"
        workload = load_workload(self.model, seq=self.seq, precision="fp32")
        shape = workload.shape
        if shape is None or not shape.is_gpt2:
            raise InputError(f"{self.model} is no GPT-2 like model; give your own layers with --layers-from")
        model = GPT(
            num_layers=shape.layers,
            hidden=shape.hidden,
            num_heads=shape.heads,
            vocab=shape.vocab,
            max_length=shape.seq,
            tied=shape.tied,
        )
        tokens: Tensor = torch.randint(0, shape.vocab, (1, shape.seq), generator=torch.Generator().manual_seed(0))
        return self.name or workload.name, list(model), tokens
