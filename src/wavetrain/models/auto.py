"""Our models under transformers' own names: ``AutoModelForCausalLM.from_pretrained`` takes a folder of ``save_folder`` as it is.

    import wavetrain.models.auto          # registers model_type "wavetrain"; extra ``hf``
    model = AutoModelForCausalLM.from_pretrained("models/kraken")

So tools that are built on transformers (lm-evaluation-harness, for one) can measure them. Generation there has no cache: for
text, use :class:`wavetrain.LLM`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from wavetrain.errors import InputError
from wavetrain.models.config import DECODERS, ModelConfig
from wavetrain.models.layers import Layer
from wavetrain.models.registry import build_model


class WavetrainConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """A :class:`~wavetrain.models.config.ModelConfig` as transformers keeps it; ``model`` is its plain data."""

    model_type = "wavetrain"

    def __init__(self, model: dict[str, Any] | None = None, **more: Any) -> None:
        self.model = model or ModelConfig(num_layers=2, hidden=64, num_heads=2, vocab=256).to_dict()
        shape = ModelConfig.from_dict(self.model)
        self.vocab_size, self.hidden_size = shape.vocab, shape.hidden
        self.num_hidden_layers, self.num_attention_heads = shape.num_layers, shape.num_heads
        self.max_position_embeddings = shape.max_length
        more["tie_word_embeddings"] = bool(shape.tied)
        more["use_cache"] = False
        super().__init__(**more)


class WavetrainForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """A decoder of ours; its layers are its children, under our names."""

    config_class = WavetrainConfig
    _tied_weights_keys = {"head.projection.weight": "embed.token.weight"}  # noqa: RUF012
    _supports_sdpa = True
    main_input_name = "input_ids"

    def __init__(self, config: WavetrainConfig) -> None:
        super().__init__(config)
        shape = ModelConfig.from_dict(config.model)
        if shape.name not in DECODERS:
            raise InputError(f"a model of kind {shape.name!r} is no causal language model")
        self._names = []
        for name, layer in build_model(shape).named_children():
            self.add_module(name, layer)
            self._names.append(name)
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: Any) -> None:
        """Draw the weights of a layer that a checkpoint lacks."""
        if isinstance(module, Layer):
            module.reset_parameters()

    def get_input_embeddings(self) -> Any:
        return self.get_submodule("embed.token")

    def set_input_embeddings(self, value: Any) -> None:
        self.get_submodule("embed").token = value

    def get_output_embeddings(self) -> Any:
        return self.get_submodule("head.projection")

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **_: Any
    ) -> CausalLMOutput:
        """Tokens (batch, seq) → logits; padding, if any, stands at the end."""
        if attention_mask is not None and not bool((attention_mask[:, 0] != 0).all()):
            raise InputError("sequences are padded at their beginning; pad at the end (padding_side='right')")
        x: Any = input_ids
        for name in self._names:
            x = getattr(self, name)(x)
        loss: Any = None
        if labels is not None:
            loss = cross_entropy(x[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=x)

    def prepare_inputs_for_generation(self, input_ids: Any, *_: Any, **more: Any) -> dict[str, Any]:
        """All tokens, every time: there is no cache."""
        return {"input_ids": input_ids}


def register() -> None:
    """Make the names known to transformers; importing this module has done it."""
    AutoConfig.register(WavetrainConfig.model_type, WavetrainConfig, exist_ok=True)
    AutoModelForCausalLM.register(WavetrainConfig, WavetrainForCausalLM, exist_ok=True)


register()
