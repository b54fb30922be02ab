"""AdamW with 8-bit moments on a CPU: the state of torchao's AdamW8bit and its bits, faster and without copies.

torchao compiles its update, so that on a GPU nothing is ever written in fp32 but weights. Not compiled it writes some
twenty tensors as large as the weight, 2.1 GB each for an embedding of 128K x 4096 numbers, and looks every number's
code up by eight steps of a search. Here a weight is updated a part at a time, which stays in cache (a number depends on
its own moments alone, and those on the others of their block of 256), and a code is read off a number's upper bits.

Importing this module needs torchao.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torchao.optim import AdamW8bit
from torchao.optim.quant_utils import quantize_8bit_with_qmap
from torchao.optim.subclass_8bit import get_qmap_signed, get_qmap_unsigned

from engine.device.row_blocks import spans
from engine.optim.adamw import local_part

# Numbers per part, whole blocks: what a part needs fits into the caches of the cores that share it.
PART_NUMBERS = 2**18
_UPPER_BITS = _LOWER_BITS = 16  # of a number: sign, exponent and 7 bits of the mantissa; the other 16 bits of it


class HostAdamW8bit(AdamW8bit):  # type: ignore[misc]
    """torchao's AdamW8bit for weights on a CPU: the same state, and the same bits as its own uncompiled update."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Updates every weight that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = self._new_buffer(parameter, True)
            state["exp_avg_sq"] = self._new_buffer(parameter, False)
        state["step"] += 1
        assert parameter.grad is not None
        tensors = (parameter.detach(), parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        numbers = local_part(parameter.detach()).numel()
        for span in spans(numbers, PART_NUMBERS, leave_nothing=True):
            weight, gradient, mean, square = (part_of(tensor, span) for tensor in tensors)
            update(weight, gradient, mean, square, state["step"], group)


def part_of(tensor: Tensor, span: slice) -> Tensor:
    """A view of some of this rank's numbers of `tensor`, flat; of quantized ones whole blocks."""
    local = local_part(tensor)
    if not hasattr(local, "codes"):
        flat: Tensor = local.view(-1)[span]
        return flat
    blocks = slice(span.start // local.block_size, -(-span.stop // local.block_size))
    part: Tensor = type(local)(local.codes.view(-1)[span], local.scale[blocks], local.qmap, local.signed, local.dtype)
    return part


def update(weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: Tensor, group: dict[str, Any]) -> None:
    """One AdamW step of fp32 `weight` [n] in place, in the order of torchao's arithmetic, which rounds the same way.

    mean, square   moments: fp32, or OptimState8bit
    step           fp32 scalar, from 1
    """
    rate, (beta1, beta2) = group["lr"], group["betas"]
    correction1, correction2 = 1 - beta1**step, (1 - beta2**step).sqrt()
    new_mean = widened(mean).lerp_(gradient, 1 - beta1)
    new_square = widened(square).lerp_(gradient.square(), 1 - beta2)
    narrow(new_mean, mean)
    narrow(new_square, square)
    weight.sub_((rate * group["weight_decay"]) * weight)
    weight.sub_((new_mean.div_(correction1).mul_(rate)).div_(new_square.sqrt_().div_(correction2).add_(group["eps"])))


def widened(moment: Any) -> Tensor:
    """fp32 copy of a moment."""
    if not hasattr(moment, "codes"):
        copy: Tensor = moment.clone()
        return copy
    values = moment.qmap.index_select(0, moment.codes.int()).view(len(moment.scale), -1)
    wide: Tensor = values.mul_(moment.scale.view(-1, 1)).view(-1)
    return wide


def narrow(values: Tensor, moment: Any) -> None:
    """Writes fp32 `values` [n] into `moment`."""
    if not hasattr(moment, "codes"):
        moment.copy_(values)
        return
    blocks = values.view(len(moment.scale), -1)
    torch.amax(blocks.abs(), dim=-1, out=moment.scale).clip_(1e-12)
    moment.codes.copy_(nearest_codes((blocks / moment.scale.view(-1, 1)).view(-1), moment.signed))


def nearest_codes(values: Tensor, signed: bool) -> Tensor:
    """int32 codes of fp32 `values` [n] within [-1, 1]: those of torchao's quantize_8bit_with_qmap."""
    lowest, next_from = code_tables(signed)
    codes = lowest.index_select(0, (values.view(torch.int32) >> _LOWER_BITS) + 2 ** (_UPPER_BITS - 1))
    return codes.add_(values >= next_from.index_select(0, codes))


@lru_cache(maxsize=2)
def code_tables(signed: bool) -> tuple[Tensor, Tensor]:
    """(the code of the smallest of all numbers with the same upper bits [2**16] int32, the number from which a code's
    next one begins [256] fp32, infinite for the last).

    Numbers with the same upper bits lie closer together than the limits between codes, so have two codes at most.
    """
    qmap = torch.tensor(get_qmap_signed() if signed else get_qmap_unsigned())
    # Torchao's search takes the nearer neighbour; where it changes over is found by asking it around the middle.
    near = [(qmap[:-1] + qmap[1:]) / 2]
    for _ in range(2):
        near = [near[0].nextafter(qmap[:-1]), *near, near[-1].nextafter(qmap[1:])]
    is_above = torch.stack([quantize_8bit_with_qmap(numbers, qmap).int() > torch.arange(255) for numbers in near])
    assert is_above[-1].all()
    assert not is_above[0].any()
    limits = torch.stack(near).gather(0, is_above.int().argmax(0, keepdim=True))[0]
    upper = torch.arange(-(2 ** (_UPPER_BITS - 1)), 2 ** (_UPPER_BITS - 1), dtype=torch.int32) << _LOWER_BITS
    smallest = torch.where(upper < 0, upper + (2**_LOWER_BITS - 1), upper).view(torch.float32)
    lowest = torch.bucketize(smallest.nan_to_num(0.0).clamp(-1.0, 1.0), limits, out_int32=True, right=True)
    return lowest, torch.cat([limits, torch.full((1,), torch.inf)])
