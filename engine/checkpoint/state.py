"""The training state as named tensors: weights and moments as they lie on this rank's shards, and back.

    model.<name>               fp32 master weights
    optimizer.<name>.exp_avg   and .exp_avg_sq: moments; those of 8 bits as the fp32 numbers that they stand for, from
                               which the same 8 bits come back

Names are those of the model, the same under every mesh, method and policy. The number of updates, equal for all
parameters, is no tensor here but a whole number in the manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.checkpoint.manifest import CheckpointError, Manifest
from engine.optim import set_learning_rate
from engine.parallel.fsdp import release_gathered_weights

MOMENTS = ("exp_avg", "exp_avg_sq")
_SHOWN = 4


class Restorable(Protocol):
    """What a checkpoint is read into."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Live tensors by name, filled in place."""

    def check(self, manifest: Manifest, where: str) -> None:
        """Raises CheckpointError where the checkpoint holds something else than this."""

    def loaded(self, updates: int) -> None:
        """Take in what was read into `tensors`: call once after it."""


@dataclass
class TrainingTensors:
    """Named tensors of a model and its optimizer; `tensors` are the live ones, written and read in place.

    updates: optimizer steps so far. unpacked: moments of 8 bits by name; `tensors` holds fp32 copies of them.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    tensors: dict[str, Tensor]
    unpacked: dict[str, Tensor] = field(default_factory=dict)

    @property
    def updates(self) -> int:
        """Optimizer steps so far."""
        counts = {int(state["step"]) for state in self.optimizer.state.values()}
        if len(counts) > 1:
            raise CheckpointError(f"parameters have been updated {sorted(counts)} times: they must agree")
        return counts.pop() if counts else 0

    def check(self, manifest: Manifest, where: str) -> None:
        """See `Restorable`: all tensors must be the same."""
        check_fits(self.tensors, manifest, where)

    def loaded(self, updates: int) -> None:
        """Take in what was read into `tensors`: call once after it."""
        for name, moment in self.unpacked.items():
            moment.copy_(self.tensors[name])
        for state in self.optimizer.state.values():
            state["step"].fill_(updates)
        release_gathered_weights(self.model)


@dataclass(frozen=True)
class Weights:
    """The weights of a model alone: a `Restorable` without an optimizer."""

    model: nn.Module

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By the names of a checkpoint."""
        return model_tensors(self.model)

    def check(self, manifest: Manifest, where: str) -> None:
        """See `Restorable`: whatever else the checkpoint holds does not matter."""
        weights = {name: facts for name, facts in manifest.tensors.items() if name.startswith("model.")}
        check_fits(self.tensors, replace(manifest, tensors=weights), where)

    def loaded(self, updates: int) -> None:
        """See `Restorable`."""
        release_gathered_weights(self.model)


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingTensors:
    """The state of `model` and `optimizer`; moments that do not exist yet are made, as zeros."""
    if not optimizer.state:
        _make_moments(optimizer)
    found = TrainingTensors(model, optimizer, {})
    for name, parameter in _parameters(model):
        found.tensors[f"model.{name}"] = parameter.detach()
        for moment in MOMENTS:
            key, value = f"optimizer.{name}.{moment}", optimizer.state[parameter][moment]
            found.tensors[key] = value
            if _is_packed(value):
                found.unpacked[key], found.tensors[key] = value, _unpack(value)
    return found


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The weights alone, by the names of a checkpoint."""
    return {f"model.{name}": parameter.detach() for name, parameter in _parameters(model)}


def check_fits(tensors: Mapping[str, Tensor], manifest: Manifest, where: str) -> None:
    """Raises CheckpointError when `tensors` and those of the manifest differ in names, shapes or dtypes."""
    problems = []
    for name in sorted(tensors.keys() | manifest.tensors.keys()):
        if name not in manifest.tensors:
            problems.append(f"{name} is missing there")
        elif name not in tensors:
            problems.append(f"{name} is not known here")
        else:
            saved, here = manifest.tensors[name], tensors[name]
            own = (str(here.dtype).removeprefix("torch."), tuple(here.shape))
            if (saved.dtype, saved.shape) != own:
                text = f"{name} is {saved.dtype} {list(saved.shape)} there, {own[0]} {list(own[1])} here"
                problems.append(text)
    if problems:
        more = f", and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(
            f"{where} is of another model or optimizer: {'; '.join(problems[:_SHOWN])}{more}. "
            "Continue with the settings of model and optimizer that it was saved with"
        )


def state_hash(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, shapes and whole tensors: the same however they are sharded. All ranks must call."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(f"{name} {whole.dtype} {tuple(whole.shape)}\n".encode())
        digest.update(whole.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter


def _make_moments(optimizer: torch.optim.Optimizer) -> None:
    """A step without gradient and rate, which does not count: it changes no weight, and makes every moment."""
    rates = [
        group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"] for group in optimizer.param_groups
    ]
    set_learning_rate(optimizer, 0.0)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        state["step"].zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _is_packed(moment: Tensor) -> bool:
    local = moment.to_local() if isinstance(moment, DTensor) else moment
    return hasattr(local, "dequantize") and type(local) is not Tensor


def _unpack(moment: Tensor) -> Tensor:
    """The fp32 numbers that 8 bits stand for, sharded alike."""
    if not isinstance(moment, DTensor):
        return moment.dequantize()
    local = moment.to_local().dequantize()
    return DTensor.from_local(
        local, moment.device_mesh, moment.placements, run_check=False, shape=moment.shape, stride=moment.stride()
    )
