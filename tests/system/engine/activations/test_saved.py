"""What autograd saves lies in the store: the same gradients, parameters left alone, everything once."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from testkit.ranks import Pools
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

from engine.activations.saved import offloaded
from engine.activations.store import ActivationStore, DeviceStore, HostStore, SavedTensors, host_store
from engine.attention.streams import NoStreams
from engine.config.settings import ModelConfig
from engine.device.host_memory import HostPool, host_empty
from engine.device.live_tensors import LiveTensorTracker
from engine.model.llama import TransformerBlock

CPU = torch.device("cpu")
TOKENS, HIDDEN = 24, 32
CONFIG = ModelConfig(
    vocab_size=8, hidden_size=HIDDEN, ffn_hidden_size=56, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8
)


class CountingStore:
    """A host store that notes the sizes of what it is given."""

    def __init__(self, inner: ActivationStore | None = None) -> None:
        self.inner = inner or host_store(CPU)
        self.sizes: list[int] = []

    def save(self, tensors: Sequence[Tensor]) -> SavedTensors:
        self.sizes += [tensor.numel() for tensor in tensors]
        return self.inner.save(tensors)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = (x.transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)))
    return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)


def block_and_inputs() -> tuple[TransformerBlock, tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(0)
    block = TransformerBlock(CONFIG)
    angles = torch.rand(TOKENS, CONFIG.head_dim // 2)
    return block, (torch.randn(2, TOKENS, HIDDEN, requires_grad=True), angles.cos(), angles.sin())


def gradients(run: Callable[..., Tensor], block: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    out = run(*inputs)
    return list(
        torch.autograd.grad(out, [inputs[0], *block.parameters()], torch.linspace(-1, 1, out.numel()).view_as(out))
    )


@pytest.mark.parametrize("overlapped", [False, True])
def test_offloading_a_layer_changes_no_bit_of_its_gradients(overlapped: bool) -> None:
    block, inputs = block_and_inputs()
    want = gradients(lambda *x: block(*x, attend), block, inputs)
    store = HostStore(CPU, NoStreams(), HostPool()) if overlapped else host_store(CPU)
    held: list[int] = []

    def run(*x: Tensor) -> Tensor:
        with offloaded(store):
            out = block(*x, attend)
        held.append(store.in_use_bytes)
        return out

    for _ in range(2):
        got = gradients(run, block, inputs)
        assert len(got) == len(want) == 10
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert held[0] == held[1] >= 2 * TOKENS * (3 * HIDDEN + 2 * CONFIG.ffn_hidden_size) * 4
    assert store.in_use_bytes == 0


@pytest.mark.parametrize("keeps", [False, True])
def test_offloading_leaves_no_activation_on_the_device(keeps: bool) -> None:
    block, inputs = block_and_inputs()
    store = host_store(CPU)
    with LiveTensorTracker() as tracker:
        tracker.watch([*block.parameters(), *inputs])
        with offloaded(store, leave=inputs) if keeps else contextlib.nullcontext():
            out = block(*inputs, attend)
        owned = sum(x.untyped_storage().nbytes() for x in (*block.parameters(), *inputs, out))
        tracker.reset_peak()
        alive = tracker.peak_bytes + tracker.peak_host_bytes - store.in_use_bytes
    assert alive == owned if keeps else alive > 2 * owned


def test_a_tensor_is_saved_once_in_any_shape() -> None:
    store, x = CountingStore(), torch.randn(6, 4, requires_grad=True)
    hidden = x * 2
    with offloaded(store, leave=[x]):
        out = hidden.sin() + hidden.cos() + (hidden.t() @ hidden).sum() + hidden.view(24).sin().view(6, 4)
    assert store.sizes.count(24) == len(store.sizes) == 1
    out.sum().backward()
    want = 2 * hidden.cos() - hidden.sin() + 24 * 2 * hidden.sum(1, keepdim=True)
    torch.testing.assert_close(x.grad, 2 * want)


def test_changed_tensors_are_saved_again() -> None:
    store, x = CountingStore(), torch.randn(8, requires_grad=True)
    with offloaded(store):
        buffer = x.detach().clone()
        first = x * buffer
        buffer.add_(1)
        second = x * buffer
        for _ in range(3):
            third = x * torch.randn(8)  # perhaps where the last one was
            del third
    assert len(store.sizes) >= 2 + 3
    second.sum().backward()
    assert torch.equal(x.grad, buffer)
    assert first is not None


def test_the_store_does_not_keep_saved_tensors_alive() -> None:
    store, x = host_store(CPU), torch.randn(8, requires_grad=True)
    with offloaded(store):
        hidden = x.exp()  # saves its own output
        memory = weakref.ref(hidden.untyped_storage())
        out = hidden.sin()
        del hidden
        assert memory() is None
        assert store.in_use_bytes == 32
    del out
    assert store.in_use_bytes == 0


def test_strides_are_restored_if_elements_fill_their_memory() -> None:
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a.sum() + b.sum()

        @staticmethod
        def backward(ctx, grad):
            seen.extend(tensor.stride() for tensor in ctx.saved_tensors)
            return None, None

    x = torch.randn(2, 3, 4, requires_grad=True)
    hidden = x * 1
    with offloaded(host_store(CPU)):
        out = Look.apply(hidden.permute(2, 0, 1), hidden[:, 1:])
    out.backward()
    assert seen == [(1, 12, 4), (8, 4, 1)]


def test_tensors_that_stay_alive_anyway_are_not_offloaded() -> None:
    store = CountingStore()
    weight, table = nn.Parameter(torch.randn(4, 4)), torch.randn(4)
    frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)
    on_host = host_empty((4,), torch.float32, pinned=False).fill_(2.0)
    x = torch.ones(4, 4, requires_grad=True)
    views = (frozen.view(2, 8).view(4, 4), weight.t()[1], table.view(2, 2).view(4), torch.randn(1).expand(4, 4))
    with offloaded(store, leave=[x, table]):
        for other in (weight, on_host, *views):
            (x * other).sum().backward(retain_graph=True)
    assert store.sizes == []
    store = CountingStore(DeviceStore())  # on an accelerator small tensors, too
    for numbers in (2**18 - 1, 2**18):
        x = torch.ones(numbers, device="meta", requires_grad=True)
        with offloaded(store, leave=[x]):
            (x * torch.ones(numbers, device="meta")).sum()
    assert store.sizes == [2**18]


def fsdp_keeps() -> tuple[list[int], bool]:
    """Sizes that a store is given by a sharded layer with its weights gathered in bf16, and whether gradients agree."""
    mesh = init_device_mesh("cpu", (1,))
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16, bias=False), nn.SiLU(), nn.Linear(16, 4, bias=False))
    fully_shard(layers, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    inner, store, x, grads = layers.forward, CountingStore(), torch.randn(3, 8), []

    def kept(value: Tensor) -> Tensor:
        with offloaded(store):
            return inner(value)

    for forward in (inner, kept):
        layers.forward = forward  # type: ignore[method-assign]
        layers(x).float().square().sum().backward()
        grads.append([p.grad.to_local().clone() for p in layers.parameters()])  # type: ignore[union-attr]
        layers.zero_grad()
    return store.sizes, all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_gathered_weights_of_fsdp_are_left_to_it(ranks: Pools) -> None:
    ((sizes, equal),) = ranks(1).run(fsdp_keeps)
    assert equal
    assert set(sizes) == {3 * 8, 3 * 16}


def dtensor_keeps() -> list[int]:
    mesh = init_device_mesh("cpu", (1,))
    store = CountingStore()
    weight = distribute_tensor(torch.randn(4, 4), mesh).requires_grad_()
    with offloaded(store, leave=[weight]):
        (weight * weight).to_local().sum().backward()
        (weight.to_local() * torch.ones(4, 4)).sum()
    return store.sizes


def test_dtensors_are_not_offloaded(ranks: Pools) -> None:
    assert ranks(1).run(dtensor_keeps) == [[16]]  # the ones
