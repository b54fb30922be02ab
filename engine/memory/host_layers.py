"""How many layers keep in host memory what backward needs, the others on the device. No torch.

Every layer there costs copies there and back, and host memory; every layer on the device costs device memory.
"""

from __future__ import annotations

from dataclasses import replace

from engine.memory.candidate import MemoryCandidate, Scope


def with_fewest_on_host(candidate: MemoryCandidate, scope: Scope) -> MemoryCandidate:
    """The candidate with as few layers on the host as leave the others room on the device.

    As it is where nothing lies on the host, where not even all layers there are enough, where it is settled, and where
    none need be there: that is a candidate of its own.
    """
    if not _is_free(candidate) or candidate.memory.host_layers is not None or not candidate.fit.device:
        return candidate
    if scope.estimated(replace(candidate.memory, activation_store="device")).fit.device:
        return candidate
    best, too_few, enough = candidate, 0, scope.config.model.num_layers
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        tried = scope.estimated(replace(candidate.memory, host_layers=middle))
        if tried.fit.device:
            best, enough = tried, middle
        else:
            too_few = middle
    return best


def other_host_layers(candidate: MemoryCandidate, scope: Scope) -> int | None:
    """How many layers on the host would mend a candidate that was predicted not to fit; None: no number would.

    Where one memory is too full and the other is not, layers are moved to that, as many as it takes.
    """
    prediction, capacity, settled = candidate.prediction, scope.capacity, scope.config.memory.host_layers
    host_capacity = capacity.host_bytes_per_rank
    if prediction is None or host_capacity is None or settled is not None or not _is_free(candidate):
        return None
    layers = scope.config.model.num_layers
    now = layers if candidate.memory.host_layers is None else candidate.memory.host_layers
    room_on_device = capacity.device_bytes - prediction.needed_bytes
    room_on_host = host_capacity - prediction.host_peak_bytes
    of_layer = max(1, max(layer.kept_bytes for layer in candidate.cost.layers))
    if room_on_host < 0 <= room_on_device:
        moved = -(room_on_host // of_layer)
        return now - moved if moved * of_layer <= room_on_device and now > moved else None
    if room_on_device < 0 <= room_on_host:
        moved = -(room_on_device // of_layer)
        return now + moved if moved * of_layer <= room_on_host and now + moved <= layers else None
    return None


def _is_free(candidate: MemoryCandidate) -> bool:
    """Whether layers may lie here or there."""
    return candidate.memory.activation_store == "host" and candidate.method.chunk_store != "host"
