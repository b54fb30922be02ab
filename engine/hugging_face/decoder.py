"""A decoder of transformers with the interface of `engine.model.decoder.Decoder`.

    hf_config -> transformers' model on the meta device -> checks -> its decoder, layers and embedding; our LM head

The model's own code runs from the embedding to the final norm; attention comes back to us through
`transformers.AttentionInterface`, and the LM head and loss are ours (`engine.loss`). Parameters have transformers'
names. What the code of a family does that cannot be divided over ranks or is not known here is refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from engine.attention.hugging_face import IMPLEMENTATION, ShardMask, use_attention
from engine.attention.linear.hugging_face import LinearLayers, find_linear_layers
from engine.attention.model_config import layer_windows, model_problems
from engine.config.errors import ConfigError
from engine.config.model_parts import LoraConfig
from engine.config.settings import AttentionConfig, LossConfig, ModelConfig
from engine.hugging_face.adapters import add_adapters, base_name, derive_magnitudes
from engine.hugging_face.experts import Routers, RouterStatistics, find_routers
from engine.hugging_face.head import logits_scale
from engine.hugging_face.initial import UNINITIALISED, fill_buffers, initial_values
from engine.hugging_face.probe import probe_problems
from engine.hugging_face.sequence import LayerSequence
from engine.hugging_face.weights import load_weights
from engine.loss.head import LMHead
from engine.model.decoder import AttentionFn, Decoder, Initial, Routing, persistent_buffers
from engine.model.dropout import Dropout


class HuggingFaceDecoder(Decoder):
    """A decoder of transformers. Build it on the meta device, then call `to_empty`, `fill_buffers` and `init_weights`.

    Args:
        config: Shape, with `hf_config`.
        loss: Of the LM head.

    Raises:
        ConfigError: transformers is missing, does not know the model, or its code does what cannot be divided or is
            not known here; every such thing is named.
    """

    restarts_positions = True

    base: Any
    transformers_model: list[Any]  # in a list, so that it is no submodule

    def __init__(self, config: ModelConfig, loss: LossConfig | None = None) -> None:
        super().__init__()
        self.config = config
        model = build_transformers_model(config)
        parts = _checked(model, config)
        self.windows, self._scale, self.routers = parts.windows, parts.scale, parts.routers
        self.linear_layers = parts.linear_layers
        self._initial = initial_values(model)
        with torch.device("meta"):
            head = LMHead(config.hidden_size, config.vocab_size, loss or LossConfig())
        if config.lora.rank is not None:
            self._add_adapters(model, config.lora)
            head.requires_grad_(False)
        # Not registered a second time: these modules belong to `base`, or are the model around it.
        base = getattr(model, parts.base_name)
        named = {"base": base, "layers": parts.layers, "embedding": base.get_input_embeddings(), "head": head}
        for name, value in (named | {"transformers_model": [model]}).items():
            object.__setattr__(self, name, value)
        self.add_module(parts.base_name, base)
        self.add_module(parts.head_name, head)
        self.tie_weights()

    def _add_adapters(self, model: Any, config: LoraConfig) -> None:
        adapters = add_adapters(model, config)
        named = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
        self._initial = {name: adapters[name] if name in adapters else self._initial[base_name(name)] for name in named}

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: AttentionFn | Sequence[AttentionFn],
        dropout: Dropout | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """See `Decoder`; positions begin anew in every packed document."""
        assert dropout is None, "refused by engine.resolve.rules"
        functions = attention if isinstance(attention, Sequence) else [attention] * len(self.layers)
        position_ids = positions[None]
        assert routing is None or isinstance(routing, RouterStatistics)
        sequence = LayerSequence(functions, self.windows, position_ids, routing)
        rows = position_ids.expand(tokens.shape[0], -1)
        outputs = self.base(
            input_ids=tokens,
            attention_mask=_shard_mask(rows),
            position_ids=rows,
            use_cache=False,
            sequence=sequence,
        )
        hidden: Tensor = outputs.last_hidden_state
        return hidden if self._scale == 1.0 else hidden * self._scale

    def routing(self, real: Tensor | None) -> Routing | None:
        """See `Decoder`."""
        return None if self.routers is None or real is None else RouterStatistics(self.routers, real)

    def routers_of(self, layer: int) -> tuple[tuple[nn.Module, ...], int]:
        """See `Decoder`."""
        return ((), 0) if self.routers is None else (self.routers.by_layer[layer], self.routers.logits_at)

    def initial(self, name: str) -> Initial:
        """See `Decoder`: what transformers' `_init_weights` does."""
        found = self._initial[name]
        lost = [each for each in persistent_buffers(self) if self._initial[each] == UNINITIALISED]
        if isinstance(found, str) or lost:
            what, why = (name, found) if isinstance(found, str) else (lost[0], UNINITIALISED)
            raise ConfigError(f"model.init_from: null, but {what} cannot be drawn here: {why}; give a folder")
        return found

    def load(self, folder: Path) -> frozenset[str]:
        """See `Decoder`."""
        return load_weights(self, self.transformers_model[0], folder)

    def derive_weights(self) -> None:
        """See `Decoder`."""
        derive_magnitudes(self)

    def fill_buffers(self, device: torch.device) -> None:
        """See `Decoder`."""
        fill_buffers(self.base, device)


def _shard_mask(rows: Tensor) -> Tensor:
    """Return a `ShardMask` of the shape of `rows`, real under a FakeTensorMode too, which has no subclasses."""
    with unset_fake_temporarily():
        return torch.ones(1, 1, dtype=torch.bool, device=rows.device).expand(rows.shape).as_subclass(ShardMask)


def build_transformers_model(config: ModelConfig) -> Any:
    """Return transformers' causal language model of `config.hf_config` on the meta device, with fp32 weights."""
    transformers = import_transformers()
    document = dict(config.hf_config or {})
    family = document.pop("model_type", None)
    if family is None:
        raise ConfigError("model.hf_config: has no model_type, which names the family in transformers")
    for name in ("dtype", "torch_dtype"):  # master weights are fp32, gathered in train.compute_dtype
        document.pop(name, None)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        stated = transformers.AutoConfig.for_model(family, **document)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(
                stated, dtype=torch.float32, attn_implementation="eager"
            )
    except Exception as error:  # whatever the code of a family raises for a config that it does not like
        raise ConfigError(
            f"model.hf_config: transformers {transformers.__version__} cannot build {family}: {error}"
        ) from error


def import_transformers() -> Any:
    """Return the module transformers. Raises ConfigError if it is missing."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "model.implementation=hf needs the transformers library on every rank: pip install 'transformers>=5'"
        ) from error
    return transformers


def find_layers(base: Any, count: int) -> nn.ModuleList:
    """Return the list of decoder layers. Raises ConfigError if there is not exactly one of `count` layers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found = [
        module
        for module in base.modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    ]
    if len(found) != 1:
        raise ConfigError(f"it has {len(found)} lists of {count} decoder layers, expected one")
    return found[0]


def mask_problems(decoder: HuggingFaceDecoder, attention: AttentionConfig, seq_len: int) -> Iterator[str]:
    """Yield where the masks of a run differ from the sliding windows and linear layers of the model."""
    kinds = attention.mask_layers or (attention.mask,)
    for layer, window in enumerate(decoder.windows):
        kind = kinds[layer % len(kinds)]
        if (kind == "no_attention") != (layer in decoder.linear_layers):
            has = "no attention" if layer in decoder.linear_layers else "attention"
            yield (
                f"attention.mask_layers: layer {layer} has {kind}, but by model.hf_config {has}; set "
                "attention.mask_layers to no_attention for all linear layers, and only these"
            )
            return
        given = attention.window_tokens if kind == "window" else None
        if window is None or (kind == "window" and given == window) or (kind == "causal" and window >= seq_len):
            continue
        yield (
            f"attention.mask_layers: layer {layer} has {kind}{'' if given is None else f' of {given} tokens'}, but "
            f"by model.hf_config a sliding window of {window} tokens; set attention.mask_layers and "
            f"attention.window_tokens={window} as the model has them"
        )
        return


def position_problems(decoder: HuggingFaceDecoder, seq_len: int) -> Iterator[str]:
    """Yield the tables of learned positions that are shorter than the sequences."""
    for name, module in decoder.base.named_modules():
        is_table = isinstance(module, nn.Embedding) and ("position" in name or name.endswith("wpe"))
        if is_table and module.num_embeddings < seq_len:
            yield f"train.seq_len={seq_len} exceeds the {module.num_embeddings} learned positions of the model ({name})"


class _Parts(NamedTuple):
    """What a checked model consists of.

    Attributes:
        base_name, head_name: Of decoder and LM head in the model.
        layers: Decoder layers.
        windows: Sliding window of every layer in tokens; None: none.
        scale: Factor of the hidden states before the LM head.
        routers: Of its mixtures of experts; None: it has none.
        linear_layers: Indexes of layers that have linear attention or a convolution in the place of attention.
    """

    base_name: str
    head_name: str
    layers: nn.ModuleList
    windows: tuple[int | None, ...]
    scale: float
    routers: Routers | None
    linear_layers: frozenset[int]


def _checked(model: Any, config: ModelConfig) -> _Parts:
    """Return the parts of a model on the meta device, whose attention is ours from then on.

    Raises:
        ConfigError: Names all that would be computed wrongly.
    """
    kind = type(model).__name__
    try:
        linear = find_linear_layers(model)
        if problems := list(_problems(model, config, linear)):
            raise ConfigError(problems)
        base_name, head_name = model.base_model_prefix, _head_name(model)
        base, windows = getattr(model, base_name), layer_windows(model.config)
        layers = find_layers(base, config.num_layers)
        parts = _Parts(
            base_name,
            head_name,
            layers,
            windows,
            logits_scale(model, base_name, head_name),
            find_routers(model, layers),
            frozenset() if linear is None else frozenset(linear.layers),
        )
        use_attention(model)
        if linear is not None:
            linear.replace_functions(ShardMask)
            linear.add_checks(IMPLEMENTATION)
        model.train()
        model.config.output_router_logits = False  # the trainer adds the loss of `parts.routers`
        if problems := list(probe_problems(base, windows, config, parts.linear_layers)):
            raise ConfigError(problems)
    except ConfigError as error:
        raise ConfigError([f"{kind}: {problem}" for problem in error.problems]) from error
    except Exception as error:  # whatever the code of a family raises for what it is asked
        raise ConfigError(f"{kind}: is built in a way that is not known here: {error!r}") from error
    return parts


def _head_name(model: Any) -> str:
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_children() if module is head), "")


def _problems(model: Any, config: ModelConfig, linear: LinearLayers | None) -> Iterator[str]:
    """One sentence per property of the model that would be computed wrongly."""
    if linear is not None:
        yield from linear.problems("zigzag")  # layouts are checked by engine.resolve.legality
    for problem in model_problems(model, linear):
        if not problem.startswith("config.output_router_logits"):  # its loss is the trainer's own
            yield problem
    children, base_name, head_name = dict(model.named_children()), model.base_model_prefix, _head_name(model)
    if base_name not in children or not head_name:
        yield "it has no decoder and LM head side by side"
        return
    head = children[head_name]
    if not isinstance(head, nn.Linear) or head.bias is not None:
        yield f"its LM head {head_name} is no linear layer without bias"
    others = [name for name, child in children.items() if name not in (base_name, head_name) and [*child.parameters()]]
    if others:
        yield f"it has {', '.join(others)} beside decoder and LM head"
    vocabulary, width = model.get_input_embeddings().weight.shape
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_layers": int(model.config.num_hidden_layers),
        "tie_embeddings": head.weight is model.get_input_embeddings().weight,
    }
    for name, value in sizes.items():
        if getattr(config, name) != value:
            yield f"model.{name} is {getattr(config, name)}, but by model.hf_config {value}"
    persistent = persistent_buffers(model)
    initial = initial_values(model)
    lost = [name for name, _ in model.named_buffers() if initial[name] == UNINITIALISED and name not in persistent]
    if lost:
        yield f"its code does not compute {', '.join(lost)} anew after it was built"
