"""The training state as named tensors: this rank's shards of weights and moments.

    model.<name>               fp32 master weights
    optimizer.<name>.exp_avg   and .exp_avg_sq: moments; 8-bit ones dequantized to fp32, which quantizes back to the
                               same 8 bits

Names are those of the model, the same for every mesh, method and policy. The number of updates, equal for all
parameters, is an integer in the manifest instead of a tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.distributed.collectives import sum_over_ranks
from engine.model.decoder import has_frozen_weights, persistent_buffers
from engine.optim.adamw import local_part, set_learning_rate
from engine.parallel.fsdp import release_gathered_weights
from engine.runs.checkpoints import CheckpointError, Manifest, TensorFacts

MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHTS = "model."
_SHOWN = 4
_MODULUS = 2**48  # sums over ranks stay below 2**63


@dataclass
class TrainingTensors:
    """Named tensors of a model and of its optimizer, if any.

    Attributes:
        model, optimizer: Their owners.
        tensors: Live tensors by name, read and written in place; of 8-bit moments fp32 copies.
        packed: 8-bit moments by name.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    tensors: dict[str, Tensor]
    packed: dict[str, Tensor] = field(default_factory=dict)

    @property
    def updates(self) -> int:
        """Optimizer steps so far."""
        counts = {int(state["step"]) for state in self._states()}
        if len(counts) > 1:
            raise CheckpointError(f"parameters were updated {sorted(counts)} times, expected equally often")
        return counts.pop() if counts else 0

    def check(self, manifest: Manifest, where: str) -> None:
        """Raise CheckpointError if names, shapes or dtypes differ; without an optimizer only weights are compared."""
        weights_only, here = self.optimizer is None, {name: _described(value) for name, value in self.tensors.items()}
        there = {
            name: _text(facts)
            for name, facts in manifest.tensors.items()
            if name.startswith(WEIGHTS) or not weights_only
        }
        problems = []
        for name in sorted(here.keys() | there.keys()):
            if name not in there:
                problems.append(f"{name} is missing there")
            elif name not in here:
                problems.append(f"{name} is not known here")
            elif here[name] != there[name]:
                problems.append(f"{name} is {there[name]} there, {here[name]} here")
        if problems:
            more = f", and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise CheckpointError(
                f"{where} is of another model or optimizer: {'; '.join(problems[:_SHOWN])}{more}. "
                "Continue with the settings of model and optimizer that it was saved with"
            )

    def loaded(self, updates: int) -> None:
        """Finish a restore after `tensors` were filled: quantize moments, set step counts, drop gathered weights."""
        for name, moment in self.packed.items():
            moment.copy_(self.tensors[name])
        for state in self._states():
            state["step"].fill_(updates)
        release_gathered_weights(self.model)

    def _states(self) -> Iterable[Mapping[str, Tensor]]:
        return () if self.optimizer is None else self.optimizer.state.values()


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingTensors:
    """Return the state of `model` and `optimizer`; creates missing moments as zeros."""
    if not optimizer.state:
        _make_moments(optimizer)
    result = TrainingTensors(model, optimizer, weight_tensors(model).tensors)
    for name, parameter in model.named_parameters():
        for moment in MOMENTS if parameter.requires_grad else ():
            key, value = f"optimizer.{name}.{moment}", optimizer.state[parameter][moment]
            result.tensors[key] = value
            if hasattr(local_part(value), "codes"):
                result.packed[key], result.tensors[key] = value, _unpacked(value)
    return result


def weight_tensors(model: nn.Module) -> TrainingTensors:
    """Return the trained weights of a model, and its buffers that are no function of its config.

    `check` then ignores the rest of a checkpoint.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    # Adapters on frozen weights go with the buffers of the model that these come from.
    named = trained if has_frozen_weights(model) else {**trained, **persistent_buffers(model)}
    return TrainingTensors(model, None, {f"{WEIGHTS}{name}": tensor.detach() for name, tensor in named.items()})


@torch.no_grad()
def frozen_digest(model: nn.Module) -> str:
    """Return a digest of the parameters that are not trained, equal for every sharding. Collective over all ranks.

    The bits of all elements are added up as integers, which has no rounding and no order, times a number that belongs
    to the parameter's name.
    """
    total = 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not _counts_here(parameter):
            continue
        factor = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") | 1
        bits = int(local_part(parameter.detach()).view(torch.int32).sum(dtype=torch.int64))
        total = (total + factor * bits) % _MODULUS
    parts = torch.tensor([total], dtype=torch.int64, device=next(model.buffers(), torch.empty(0)).device)
    return f"{int(sum_over_ranks(parts)) % _MODULUS:016x}"


def _counts_here(parameter: Tensor) -> bool:
    """Whether this rank is the first of those that hold the same shard."""
    if not isinstance(parameter, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    coordinates: Sequence[int] = parameter.device_mesh.get_coordinate() or ()
    return all(at == 0 for at, place in zip(coordinates, parameter.placements, strict=True) if place.is_replicate())


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _text(facts: TensorFacts) -> str:
    return f"{facts.dtype} {list(facts.shape)}"


def _make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer create its moments, by a step with zero gradients and learning rate 0 that is not counted.

    It changes no weight. The learning rate stays 0: every later step sets its own.
    """
    set_learning_rate(optimizer, 0.0)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        state["step"].zero_()


def _unpacked(moment: Tensor) -> Tensor:
    """Return an 8-bit moment dequantized to fp32, with the same sharding."""
    local: Tensor = local_part(moment).dequantize()
    if not isinstance(moment, DTensor):
        return local
    mesh, placements = moment.device_mesh, moment.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=moment.shape, stride=moment.stride())
