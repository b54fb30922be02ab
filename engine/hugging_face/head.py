"""What a causal language model of transformers does between its decoder and its loss, found by values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine.config.errors import ConfigError

_TOLERANCE = 1e-5  # fp32: a few operations on numbers of one magnitude
_LOGITS = 40.0  # of that magnitude, so that a cap on logits shows


def logits_scale(model: Any, base_name: str, head_name: str) -> float:
    """Return c such that the model's logits are head(c * hidden) for hidden states of its decoder.

    The model's own forward runs with stubs in place of decoder and head: random hidden states, random logits. What it
    does to them must be a multiplication by a constant, before or after the head.

    Raises:
        ConfigError: It does anything else, such as a cap on logits.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 2, int(model.config.hidden_size), generator=generator)
    logits = _LOGITS * torch.randn(1, 2, int(model.config.vocab_size), generator=generator)
    base, head = _Base(hidden), _Head(logits)
    modules = {base_name: getattr(model, base_name), head_name: getattr(model, head_name)}
    model.add_module(base_name, base)
    model.add_module(head_name, head)
    try:
        with torch.no_grad():
            changed = model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False).logits
    except Exception as error:
        raise ConfigError(f"its forward pass cannot be followed from decoder to logits: {error!r}") from error
    finally:
        for name, module in modules.items():
            model.add_module(name, module)
    if head.seen is None:
        raise ConfigError(f"its forward pass does not call {head_name}")
    before, after = _factor(head.seen, hidden), _factor(changed, logits)
    if before is None or after is None:
        where = f"hidden states before {head_name}" if before is None else f"logits after {head_name}"
        raise ConfigError(
            f"it changes {where} by more than a constant factor (a cap on logits, a norm), which the fused loss does "
            "not have"
        )
    return before * after


def _factor(changed: Tensor, given: Tensor) -> float | None:
    """Return c where changed = c * given; None where that is not so."""
    if changed.shape != given.shape:
        return None
    factor = float((changed.double() * given.double()).sum() / given.double().square().sum())
    close = torch.allclose(changed, factor * given, rtol=_TOLERANCE, atol=_TOLERANCE * float(given.abs().max()))
    if not close:
        return None
    return round(factor, 12) if abs(factor - 1.0) > _TOLERANCE else 1.0


class _Output(tuple[Tensor]):
    """Output of a decoder, of any family: hidden states first; all else is None."""

    __slots__ = ()

    def __new__(cls, hidden: Tensor) -> _Output:
        """Hold hidden states."""
        return super().__new__(cls, (hidden,))

    @property
    def last_hidden_state(self) -> Tensor:
        """Hidden states after the final norm."""
        return self[0]

    def __getattr__(self, name: str) -> None:
        """Return None: no other output was asked for."""
        return


class _Base(nn.Module):
    """Stands in for the decoder."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the given hidden states."""
        return _Output(self._hidden)


class _Head(nn.Module):
    """Stands in for the LM head; seen: its last input."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self._logits = logits
        self.seen: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the given logits."""
        self.seen = hidden
        return self._logits
