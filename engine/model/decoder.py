"""What the trainer needs of a decoder: `LlamaModel`, or one of transformers (`engine.hugging_face`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from engine.config.settings import ModelConfig
from engine.loss.head import LMHead
from engine.model.dropout import Dropout

# q [B, T, H, D], k and v [B, T, K, D] -> out [B, T, H, D]; softmax scale 1 / sqrt(D); differentiable. The function
# knows the mask and, with context parallelism, exchanges rows with other ranks.
AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]


class Initial(NamedTuple):
    """Distribution of a tensor's initial values: with this mean and `std`, or all `mean` where std is 0.

    Attributes:
        mean, std: Mean and standard deviation.
        zero_rows: Rows that are 0, such as the embedding of a padding token.
        kind: log_uniform: the logarithm of values that are uniform with this mean and standard deviation.
    """

    mean: float
    std: float
    zero_rows: tuple[int, ...] = ()
    kind: Literal["normal", "uniform", "log_uniform"] = "normal"


class Routing(Protocol):
    """Collects what the routers of one forward pass chose (`engine.hugging_face.experts`)."""

    def auxiliary_loss(self) -> Tensor | None:
        """Return this rank's share of the weighted auxiliary loss, a differentiable scalar; None: the model has none.

        The shares of all ranks add up to the loss. Collective over all ranks.
        """

    @property
    def counts(self) -> Tensor:
        """Rows of this rank assigned to every expert, [layers, E] int64."""


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to a model's weights though nothing trains them, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def has_frozen_weights(model: nn.Module) -> bool:
    """Return whether only some of a model's parameters are trained."""
    return not all(parameter.requires_grad for parameter in model.parameters())


class Decoder(nn.Module):
    """A decoder on one device: tokens -> hidden states after the final norm; `head` makes the loss of them.

    Attributes:
        config: Shape.
        embedding: Of tokens.
        layers: Decoder layers, each gathered on its own by FSDP2.
        head: Projection to the vocabulary and loss.
        activation_store: Where its layers save activations; `apply_policies` sets it.
        restarts_positions: Whether positions must begin anew in every packed document. A model with rotary embeddings
            alone sees differences of positions only.
    """

    config: ModelConfig
    embedding: nn.Embedding
    layers: nn.ModuleList
    head: LMHead
    activation_store: object = None
    restarts_positions = False

    def tie_weights(self) -> None:
        """Make head and embedding one parameter if the config ties them."""
        if self.config.tie_embeddings:
            self.head.weight = self.embedding.weight  # type: ignore[assignment]

    def initial(self, name: str) -> Initial:
        """Return the initial distribution of a parameter. Raises ConfigError if it is none that can be drawn."""
        raise NotImplementedError

    def load(self, folder: Path) -> frozenset[str]:
        """Fill the weights from a Hugging Face folder; return the names of the parameters that it has.

        Raises:
            ConfigError: The folder holds another model.
        """
        raise NotImplementedError

    def derive_weights(self) -> None:
        """Compute the parameters whose initial values depend on others, after these were set."""

    def fill_buffers(self, device: torch.device) -> None:
        """Compute the buffers, on `device`; call it after `to_empty`."""

    def routing(self, real: Tensor | None) -> Routing | None:
        """Return the collector to pass to a forward pass; None: the model has no routers.

        Args:
            real: Which of the local rows are no padding, [T] bool; None: all.
        """
        return None

    def routers_of(self, layer: int) -> tuple[tuple[nn.Module, ...], int]:
        """Return the router modules of a layer, and the index of the logits in what they return."""
        return (), 0

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: AttentionFn | Sequence[AttentionFn],
        dropout: Dropout | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Return the hidden states after the final norm, [B, T, d].

        Args:
            tokens: Token ids of the local rows, [B, T] int64.
            positions: Global position of every row, [T] int64, in the order in which the layout put the rows.
            attention: One function for all layers, or one per layer.
            dropout: Dropout of the rows that hidden has on this rank (with tensor parallelism T / tp_size of them).
            routing: What `routing` returned, filled by the call.
        """
        raise NotImplementedError

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Decoder:
        """Apply `fn` to all parameters (`to`, `to_empty`, ...), then tie the weights again."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # replaces a shared parameter by two
        self.tie_weights()
        return self
