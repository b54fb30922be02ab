"""transformers' models under context parallelism equal the same models on one process with stock attention."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testkit import ROOT
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    Gemma2Config,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    NemotronConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
)

from engine.attention import ContextParallel, Mask
from engine.attention.context import HeadShape
from engine.attention.hugging_face import enable_context_parallel, model_heads, shift_labels
from engine.config.errors import ConfigError

HEADS, KV_HEADS, HEAD_DIM, VOCAB, SEQ_LEN = 4, 2, 8, 61, 37
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "initializer_range": 0.3,  # attention far from uniform
    "pad_token_id": None,
}
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama, multi-head": LlamaConfig(**SHAPE | {"num_key_value_heads": HEADS}),
    "mistral, window": MistralConfig(**SHAPE, sliding_window=7),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "qwen2, window in layer 1": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": Qwen3Config(**SHAPE, head_dim=HEAD_DIM),
    "granite, own scale": GraniteConfig(**SHAPE, attention_multiplier=0.7),
}
# fp32: sums in another order, through two layers and a loss. float64: transformers computes norms and loss in fp32.
FP32 = {"rtol": 1e-5, "atol": 1e-5}
FP64 = {"rtol": 1e-10, "atol": 1e-10}


def local_parallel(**settings: Any) -> ContextParallel:
    defaults = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": torch.float32}
    return ContextParallel(**(defaults | settings))


def build(name: str, dtype: torch.dtype, attn_implementation: str = "sdpa") -> Any:
    """The model with the same random weights in every process."""
    torch.manual_seed(1)
    config = copy.deepcopy(MODELS[name])  # which enabling changes
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation).to(dtype).train()


def make_tokens(batch: int = 2) -> Tensor:
    return torch.randint(VOCAB, (batch, SEQ_LEN), generator=torch.Generator().manual_seed(2))


def make_labels(tokens: Tensor) -> Tensor:
    """Labels of which some do not count."""
    return tokens.masked_fill(tokens % 7 == 0, -100)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def mean_loss(logits: Tensor, shifted: Tensor, count: int) -> Tensor:
    """Cross entropy in the logits' own dtype: transformers' is fp32 at most."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="sum") / count


def stock(name: str, dtype: torch.dtype, documents: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """Logits, loss and gradients of one process; every document is a call of its own."""
    model, tokens = build(name, dtype), make_tokens()
    labels = make_labels(tokens)
    count = int((shift_labels(labels, documents) != -100).sum())
    logits, loss = [], torch.zeros((), dtype=torch.float64)
    for start, stop in zip(documents, [*documents[1:], SEQ_LEN], strict=True):
        out = model(input_ids=tokens[:, start:stop], use_cache=False)
        shifted = shift_labels(labels[:, start:stop])
        loss = loss + mean_loss(out.logits if dtype == torch.float64 else out.logits.float(), shifted, count)
        logits.append(out.logits.detach())
    loss.backward()
    return {"logits": torch.cat(logits, 1), "loss": loss.item(), "gradients": gradients(model)}


def divided(
    name: str, dtype: torch.dtype, settings: dict[str, Any], documents: tuple[int, ...] = (), checkpoint: bool = False
) -> dict[str, Any]:
    """The same on the ranks of this process group; in fp32 the loss is the model's own."""
    model, tokens = build(name, dtype), make_tokens()
    if checkpoint:
        model.activation_checkpointing_enable()
    parallel = local_parallel(num_kv_heads=model.config.num_key_value_heads, dtype=dtype, **settings)
    sharder = enable_context_parallel(model, parallel)
    inputs = sharder.shard_inputs(tokens, make_labels(tokens), documents=documents)
    out = model(**inputs)
    exact = mean_loss(out.logits, inputs["shift_labels"], inputs["num_items_in_batch"])
    loss = exact if dtype == torch.float64 else out.loss
    loss.backward()
    parallel.sum_gradients(model.parameters())
    logits = sharder.context(SEQ_LEN, documents).gather(out.logits)
    return {"logits": logits, "loss": loss.item(), "gradients": gradients(model)}


def compare(got: list[dict[str, Any]], want: dict[str, Any], tolerance: dict[str, float]) -> None:
    assert sum(rank["loss"] for rank in got) == pytest.approx(want["loss"], rel=tolerance["rtol"])
    for rank in got:
        torch.testing.assert_close(rank["logits"], want["logits"], **tolerance)
        assert rank["gradients"].keys() == want["gradients"].keys()
        for name, gradient in want["gradients"].items():
            torch.testing.assert_close(
                rank["gradients"][name], gradient, **tolerance, msg=lambda text, n=name: n + text
            )


SETTINGS: list[tuple[int, dict[str, Any]]] = [
    (2, {"preset": "striped"}),
    (4, {"preset": "burst", "nodes": 2, "backward_circulates": "q"}),
    (4, {"preset": "ulysses"}),  # more ranks than kv heads
]


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.thorough), torch.float64], ids=str)
@pytest.mark.parametrize(("size", "settings"), SETTINGS, ids=str)
def test_llama_equals_stock_attention(ranks: Any, size: int, settings: dict[str, Any], dtype: torch.dtype) -> None:
    tolerance = FP32 if dtype == torch.float32 else FP64
    compare(ranks(size).run(divided, "llama", dtype, settings), stock("llama", dtype), tolerance)


def test_one_rank_without_a_process_group_equals_stock_attention() -> None:
    compare([divided("granite, own scale", torch.float32, {})], stock("granite, own scale", torch.float32), FP32)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama"])
def test_other_models_equal_stock_attention(ranks: Any, name: str) -> None:
    got = ranks(2).run(divided, name, torch.float64, {"preset": "burst"})
    compare(got, stock(name, torch.float64), FP64)


def test_a_window_is_felt() -> None:
    """Else the tests above would pass without one."""
    windowed, plain = stock("mistral, window", torch.float64), stock("mistral", torch.float64)
    assert (windowed["logits"] - plain["logits"]).abs().max() > 0.01


def test_documents_equal_separate_calls_under_gradient_checkpointing(ranks: Any) -> None:
    documents = (0, 5, 6, 29)
    got = ranks(2).run(divided, "llama", torch.float64, {"preset": "ring"}, documents, checkpoint=True)
    compare(got, stock("llama", torch.float64, documents), FP64)


def wrapped(wrapper: str) -> dict[str, Any]:
    """Loss and gradients when DDP or FSDP reduces them over the ranks that share the sequence."""
    model, tokens, size = build("llama", torch.float32), make_tokens(), dist.get_world_size()
    inputs = enable_context_parallel(model, local_parallel()).shard_inputs(tokens, make_labels(tokens))
    if wrapper == "ddp":
        replica = DistributedDataParallel(model)  # reduces as long as it lives
        loss = replica(**inputs).loss
    else:
        mesh = init_device_mesh("cpu", (size,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        loss = fully_shard(model, mesh=mesh)(**inputs).loss
    (loss * size).backward()  # both take the mean over ranks, where the sum is wanted
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in gradients(model).items()}
    return {"loss": loss.item(), "gradients": whole, "logits": torch.zeros(0)}


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_wrapped_models_reduce_their_gradients(ranks: Any, wrapper: str) -> None:
    compare(ranks(2).run(wrapped, wrapper), stock("llama", torch.float32) | {"logits": torch.zeros(0)}, FP32)


def run_autocast() -> float:
    model, tokens = build("llama", torch.float32), make_tokens()
    parallel = local_parallel(dtype=torch.bfloat16)
    inputs = enable_context_parallel(model, parallel).shard_inputs(tokens, make_labels(tokens))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**inputs).loss
    loss.backward()
    return loss.item()


def test_autocast_gives_the_loss_of_stock_attention_to_its_precision(ranks: Any) -> None:
    found = sum(ranks(2).run(run_autocast))
    assert found == pytest.approx(stock("llama", torch.float32)["loss"], rel=0.02)  # 8 bits of mantissa


def test_another_mask_is_used_by_every_layer() -> None:
    """A window by mask= equals the same window asked for by a model's config."""
    tokens, plain, windowed = make_tokens(), build("mistral", torch.float64), build("mistral, window", torch.float64)
    sharder = enable_context_parallel(plain, local_parallel(dtype=torch.float64), Mask(SEQ_LEN, window=7))
    got = plain(**sharder.shard_inputs(tokens)).logits
    torch.testing.assert_close(got, windowed(input_ids=tokens).logits, **FP64)


@pytest.mark.parametrize(
    ("config", "settings", "text"),
    [
        (LlamaConfig(**SHAPE, attention_dropout=0.1), {}, "attention_dropout is 0.1; .* has no dropout"),
        (
            LlamaConfig(**SHAPE),
            {"num_heads": 8},
            r"has HeadShape\(num_heads=4, num_kv_heads=2, head_dim=8, v_dim=8\), but ContextParallel was made for Head",
        ),
        (
            LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            {},
            "rope_type dynamic depends on the longest position",
        ),
        (Gemma2Config(**SHAPE, head_dim=HEAD_DIM), {}, "attn_logit_softcapping is 50.0"),
        (
            Llama4TextConfig(**SHAPE, head_dim=HEAD_DIM, intermediate_size_mlp=48, num_local_experts=2),
            {},
            "layers of type chunked_attention",
        ),
        (
            RobertaConfig(**SHAPE | {"pad_token_id": 1}, is_decoder=True, attention_probs_dropout_prob=0.0),
            {"num_kv_heads": HEADS},
            "position table roberta.embeddings.position_embeddings has a padding_idx: .* would not begin at 2",
        ),
        (
            PhimoeConfig(**SHAPE, sliding_window=6),
            {},
            r"attention of layer 0, 1 asks for sliding_window=None, but by the model's config it is 6",
        ),
        (
            NemotronConfig(**SHAPE, head_dim=HEAD_DIM),
            {},
            "a forward pass of two tokens failed: .*NemotronAttention .* does not hand `sequence` on",
        ),
        (
            BartConfig(vocab_size=VOCAB, d_model=32, decoder_attention_heads=HEADS, is_decoder=True),
            {"num_kv_heads": HEADS},
            "takes no position_ids",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_models_that_would_be_computed_wrongly_are_refused(
    config: PreTrainedConfig, settings: dict[str, Any], text: str
) -> None:
    model = AutoModelForCausalLM.from_config(config)
    before = model.config._attn_implementation
    with pytest.raises(ConfigError, match=text):
        enable_context_parallel(model, local_parallel(**settings))
    assert model.config._attn_implementation == before
    with pytest.raises(ConfigError, match=r"asks for sliding windows \[7\] of its own"):
        enable_context_parallel(build("mistral, window", torch.float32), local_parallel(), "full")
    with pytest.raises(ConfigError, match=r"got Linear, expected a transformers\.PreTrainedModel"):
        enable_context_parallel(nn.Linear(2, 2), local_parallel())


def test_enabling_changes_no_weight_buffer_or_random_number() -> None:
    """Although the model makes a forward pass."""
    model = build("llama", torch.float32)
    before, drawn = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    enable_context_parallel(model, local_parallel())
    assert torch.equal(torch.random.get_rng_state(), drawn)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["llama", "granite, own scale"])
def test_a_model_on_the_meta_device_can_be_enabled(name: str) -> None:
    """Before its weights are made or loaded."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name]))
    enable_context_parallel(model, local_parallel())
    enable_context_parallel(model, local_parallel())  # and again
    assert model_heads(model) == (HeadShape(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM),)


def test_a_model_whose_config_hides_its_window_from_attention_is_refused() -> None:
    model = build("mistral, window", torch.float32)
    sharder = enable_context_parallel(model, local_parallel())
    model.config.sliding_window = 9  # changed after the plans were agreed on
    with pytest.raises(ValueError, match="sliding_window=9, but by the model's config it is 7"):
        model(**sharder.shard_inputs(make_tokens()))


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"attention_mask": torch.ones(2, SEQ_LEN).tril()}, "attention_mask hides tokens; pad on the right"),
        ({"attention_mask": torch.zeros(2, 1, SEQ_LEN, SEQ_LEN)}, "was given an attention_mask"),
        ({"use_cache": True}, "asks for use_cache"),
        ({"output_attentions": True}, "asks for output_attentions"),
        ({"is_causal": False}, "is not causal"),
        ({"cu_seq_lens_q": torch.tensor([0, 4])}, "asks for cu_seq_lens_q"),
        ({"softcap": 30.0}, "asks for softcap"),
        ({"dropout": 0.1}, "multiple values for keyword argument 'dropout'"),
        ({"sequence": None}, "called without the arguments that InputSharder.shard_inputs returns"),
        ({"input_ids": torch.zeros(2, 5, dtype=torch.int64), "position_ids": torch.zeros(2, 5)}, "other position_ids"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_calls_with_what_is_not_supported_are_refused(extra: dict[str, Any], text: str) -> None:
    model = build("llama", torch.float32)
    sharder = enable_context_parallel(model, local_parallel())
    inputs = sharder.shard_inputs(make_tokens()) | extra
    with pytest.raises((ValueError, TypeError), match=text):
        model(**inputs)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("is_switched_back", [False, True], ids=["never enabled", "switched back"])
def test_a_model_without_context_parallelism_refuses_the_rows_of_a_rank(
    implementation: str, is_switched_back: bool
) -> None:
    """Stock attention over one rank's rows would give a wrong loss without an error."""
    enabled, other = build("llama", torch.float32), build("llama", torch.float32, implementation)
    sharder = enable_context_parallel(enabled, local_parallel())
    inputs = sharder.shard_inputs(make_tokens(), make_tokens())
    if is_switched_back:
        other = enabled
        other.set_attn_implementation(implementation)
    with pytest.raises(ValueError, match="went into a model without context parallelism"):
        other(**inputs)
    whole = other(input_ids=make_tokens(), labels=make_tokens()).loss.item()
    assert whole == pytest.approx(
        build("llama", torch.float32)(input_ids=make_tokens(), labels=make_tokens()).loss.item()
    )


@pytest.mark.parametrize("lost", ["position_ids", "shift_labels", "num_items_in_batch"])
def test_a_lost_argument_is_named(lost: str) -> None:
    model = build("llama", torch.float32)
    inputs = enable_context_parallel(model, local_parallel()).shard_inputs(make_tokens(), make_tokens())
    with pytest.raises(ValueError, match=rf"(no|without) {lost}.* must pass them on"):
        model(**inputs | {lost: None})


def test_position_ids_of_other_rows_are_refused() -> None:
    model = build("llama", torch.float32)
    inputs = enable_context_parallel(model, local_parallel()).shard_inputs(make_tokens())
    with pytest.raises(ValueError, match="LlamaModel: got other position_ids"):
        model(**inputs | {"position_ids": inputs["position_ids"] + 1})


def test_a_custom_loss_needs_no_labels() -> None:
    """What takes the logits alone may drop all that belongs to the loss."""
    model = build("llama", torch.float32)
    inputs = enable_context_parallel(model, local_parallel()).shard_inputs(make_tokens(), make_tokens())
    for name in ("labels", "shift_labels", "num_items_in_batch"):
        del inputs[name]
    torch.testing.assert_close(
        model(**inputs).logits, build("llama", torch.float32)(input_ids=make_tokens()).logits, **FP32
    )


def test_generation_is_refused() -> None:
    model = build("llama", torch.float32)
    enable_context_parallel(model, local_parallel())
    with pytest.raises(ValueError, match="Generation needs a model without context parallelism"):
        model.generate(make_tokens(1), max_new_tokens=2)


def test_inputs_that_do_not_fit_are_refused() -> None:
    sharder = enable_context_parallel(build("llama", torch.float32), local_parallel())
    tokens = make_tokens()
    with pytest.raises(ValueError, match=r"labels \(2, 36\); expected \[batch, seq_len\]"):
        sharder.shard_inputs(tokens, tokens[:, 1:])
    with pytest.raises(ValueError, match="no token of this batch has a label"):
        sharder.shard_inputs(tokens, torch.full_like(tokens, -100))


def test_labels_are_shifted_within_documents() -> None:
    labels = torch.arange(6)[None]
    assert shift_labels(labels).tolist() == [[1, 2, 3, 4, 5, -100]]
    assert shift_labels(labels, (0, 1, 4)).tolist() == [[-100, 2, 3, -100, 5, -100]]


def test_without_transformers_the_error_names_the_package() -> None:
    program = (
        "import sys; sys.modules['transformers'] = None\n"
        "import torch, engine.attention.hugging_face, engine.config.errors\n"
        "try: engine.attention.hugging_face.enable_context_parallel(torch.nn.Linear(1, 1), None)\n"
        "except engine.config.errors.ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "pip install transformers" in done.stdout


@pytest.mark.thorough
def test_the_example_trains_on_two_ranks() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(ROOT / "examples/hugging_face.py")], capture_output=True, text=True, cwd=ROOT, timeout=200
    )
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d{4})", done.stdout)]
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=100, num_hidden_layers=2, **shape))
    tokens = torch.randint(100, (1, 999))
    assert losses[:2] == pytest.approx([model(input_ids=tokens, labels=tokens).loss.item()] * 2, abs=2e-4)
    assert losses[-1] < losses[0]
