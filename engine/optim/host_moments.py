"""AdamW with 8-bit moments on a CPU: the state of torchao's AdamW8bit, bit by bit, faster and without copies.

torchao compiles its update. Uncompiled it writes about twenty tensors as large as the weight, 2.1 GB each for an
embedding of 128K x 4096, and finds every code by a binary search of eight steps. Here a weight is updated in parts that
stay in cache (an element depends only on its moments, and those only on their block of 256 elements), and codes are
looked up by the upper bits of a number.

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

# Elements per part, a multiple of the block size: a part and its temporaries fit into the caches of the cores.
PART_NUMBERS = 2**18
_UPPER_BITS = _LOWER_BITS = 16  # of an fp32: sign, exponent and 7 bits of the mantissa; the other 16 of the mantissa


class HostAdamW8bit(AdamW8bit):  # type: ignore[misc]
    """torchao's AdamW8bit for weights on a CPU: same state, bitwise equal to its uncompiled update."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every weight that has a gradient."""
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
    """Return a flat view of a span of this rank's shard; of a quantized moment the span must be whole blocks."""
    local = local_part(tensor)
    if not hasattr(local, "codes"):
        flat: Tensor = local.view(-1)[span]
        return flat
    blocks = slice(span.start // local.block_size, -(-span.stop // local.block_size))
    part: Tensor = type(local)(local.codes.view(-1)[span], local.scale[blocks], local.qmap, local.signed, local.dtype)
    return part


def update(weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: Tensor, group: dict[str, Any]) -> None:
    """Update fp32 `weight` in place by one AdamW step (Loshchilov and Hutter 2019).

    Operations come in torchao's order, so that results round alike.

    Args:
        weight, gradient: [n] fp32.
        mean, square: First and second moment, [n] fp32 or OptimState8bit; written in place.
        step: fp32 scalar, from 1.
        group: lr, betas, eps, weight_decay.
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
    """Return an fp32 copy of a moment, dequantized if it has 8 bits."""
    if not hasattr(moment, "codes"):
        copy: Tensor = moment.clone()
        return copy
    values = moment.qmap.index_select(0, moment.codes.int()).view(len(moment.scale), -1)
    wide: Tensor = values.mul_(moment.scale.view(-1, 1)).view(-1)
    return wide


def narrow(values: Tensor, moment: Any) -> None:
    """Write fp32 `values` [n] into `moment`, quantized per block if it has 8 bits."""
    if not hasattr(moment, "codes"):
        moment.copy_(values)
        return
    blocks = values.view(len(moment.scale), -1)
    torch.amax(blocks.abs(), dim=-1, out=moment.scale).clip_(1e-12)
    moment.codes.copy_(nearest_codes((blocks / moment.scale.view(-1, 1)).view(-1), moment.signed))


def nearest_codes(values: Tensor, signed: bool) -> Tensor:
    """Return the int32 codes of fp32 `values` [n] within [-1, 1], equal to torchao's quantize_8bit_with_qmap."""
    lowest, next_from = code_tables(signed)
    codes = lowest.index_select(0, (values.view(torch.int32) >> _LOWER_BITS) + 2 ** (_UPPER_BITS - 1))
    return codes.add_(values >= next_from.index_select(0, codes))


@lru_cache(maxsize=2)
def code_tables(signed: bool) -> tuple[Tensor, Tensor]:
    """Return the tables of `nearest_codes`.

    Numbers with the same upper bits differ by less than the distance between code limits, so they have at most two
    codes: the first table's, and the next one from the second table's limit on.

    Returns:
        The code of the smallest number with given upper bits, [2**16] int32, and the limit above which the next code
        begins, [256] fp32, infinite for the last.
    """
    qmap = torch.tensor(get_qmap_signed() if signed else get_qmap_unsigned())
    # torchao's search takes the nearer neighbour; find its exact limit by probing the floats around the middle.
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
