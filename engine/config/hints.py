"""Hints for the names and number formats of other trainers: used in messages, never as values.

Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

# Setting here: its names elsewhere (Hugging Face, axolotl, torchtune, torchtitan, Megatron, DeepSpeed,
# nanoGPT), in small letters with _. A hint that begins with `burst` is a sentence.
_WORDS = {
    "optimizer.learning_rate": "lr base_lr max_lr peak_lr",
    "optimizer.min_learning_rate_ratio": "min_lr lr_min min_lr_ratio lr_end",
    "optimizer.schedule": "lr_scheduler lr_scheduler_type lr_schedule lr_decay_style",
    "optimizer.warmup_steps": "warmup lr_warmup_iters lr_warmup_steps num_warmup_steps",
    "optimizer.warmup_steps, a number of steps: the ratio times train.steps": (
        "warmup_ratio lr_warmup_fraction warmup_fraction"
    ),
    "optimizer.beta1 and optimizer.beta2": "adam_beta1 betas adam_betas",
    "optimizer.beta2": "adam_beta2",
    "optimizer.epsilon": "adam_eps adam_epsilon eps",
    "optimizer.weight_decay": "wd decay",
    "optimizer.max_grad_norm": "clip_grad grad_clip gradient_clipping gradient_clip_val clip_grad_norm max_norm",
    "train.steps; an epoch is (tokens of the corpus) / (tokens of a step), which `burst data prepare` counts": (
        "epochs epoch num_epochs num_train_epochs max_epochs n_epochs"
    ),
    "train.steps": "iters max_iters train_iters max_steps num_steps n_steps total_steps iterations",
    "train.seq_len": (
        "max_seq_length max_seq_len max_length sequence_len sequence_length seq_length block_size "
        "context_length context_len cutoff_len max_position_embeddings max_tokens ctx_len"
    ),
    "train.micro_batch_size, sequences per data-parallel rank and micro-step": (
        "batch_size per_device_train_batch_size per_gpu_batch_size micro_batch local_batch_size "
        "train_micro_batch_size_per_gpu device_batch_size mbs bs"
    ),
    "train.micro_batch_size times train.grad_accum_steps times the data-parallel ranks": (
        "global_batch_size train_batch_size gbs total_batch_size"
    ),
    "train.grad_accum_steps": (
        "gradient_accumulation_steps gradient_accumulation grad_accum accumulate_grad_batches "
        "accumulation_steps gradient_accumulation_iters"
    ),
    "train.compute_dtype=bfloat16 or float32": "bf16 fp16 fp32 tf32 dtype precision mixed_precision torch_dtype",
    "train.eval_samples": "per_device_eval_batch_size eval_batch_size eval_iters val_batches max_eval_samples",
    "train.eval_interval_steps": "eval_steps eval_interval val_interval eval_strategy evaluation_strategy",
    "train.checkpoint.every_steps": "save_steps save_interval save_strategy checkpoint_interval ckpt_interval",
    "train.checkpoint.keep_last": "save_total_limit keep_latest_k",
    "train.checkpoint.resume_from": "resume_from_checkpoint load resume",
    "--runs-dir FOLDER (or BURST_RUNS_DIR), in which every run has a folder": (
        "output_dir out_dir save_dir log_dir logging_dir"
    ),
    "memory.activation_checkpoint, or memory=NAME": (
        "gradient_checkpointing activation_checkpointing recompute recompute_granularity ac_mode"
    ),
    "memory.optimizer_store=host": "optimizer_offload cpu_offload offload_optimizer optim_offload",
    "memory.activation_store=host": "activation_offloading offload_activations",
    "parallel.tp_size, ranks that split every matrix": (
        "tp tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree tp_degree"
    ),
    "parallel.cp_size, ranks that share one sequence": (
        "cp sp context_parallel_size context_parallel_degree sequence_parallel_degree sequence_parallel_size "
        "sp_size ulysses_size cp_degree sp_degree"
    ),
    "parallel.dp_shard_size, ranks that share parameters and read different sequences (FSDP)": (
        "dp dp_size fsdp zero zero_stage zero_optimization data_parallel_size fsdp_size "
        "data_parallel_shard_degree dp_shard fsdp_config"
    ),
    "parallel.comm_sms": "message_sms comm_num_sms num_comm_sms",
    "parallel.dp_replicate_size": "data_parallel_replicate_degree dp_replicate hsdp",
    "burst does not use DeepSpeed; ZeRO is parallel.dp_shard_size": "deepspeed deepspeed_config",
    "burst has no pipeline parallelism; parallel.cp_size, ranks that share one sequence": (
        "pp pp_size pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree"
    ),
    "burst trains dense models; leave it out": "ep ep_size expert_parallel_size expert_model_parallel_size num_experts",
    "cluster.ranks_per_node, processes per machine (null: one per GPU)": (
        "gpus num_gpus n_gpus nproc_per_node nproc num_processes gpus_per_node devices"
    ),
    "cluster.num_nodes, or cluster.nodes=node[1-4] by name": "nnodes num_machines n_nodes",
    "cluster.ranks_per_node times cluster.num_nodes; `burst plan` takes --ranks": "world_size ranks",
    "burst trains all weights and has no adapters; leave it out": "lora lora_r lora_alpha lora_rank adapter qlora peft",
    "model.init_from=FOLDER of a Hugging Face model; `burst model FOLDER` shows its settings": (
        "model_name_or_path base_model pretrained_model_name_or_path model_name hf_model checkpoint_path"
    ),
    "data.paths=[FILE,FOLDER] with data=text, data=jsonl or data=parquet": (
        "dataset datasets dataset_name train_file data_path train_data dataset_path data_dir"
    ),
    "data.text_field": "dataset_text_field text_column",
    "data.tokenizer=PATH of a tokenizer.json": "tokenizer_path tokenizer_name tokenizer_type",
    "attention.kernel (auto: the fastest that is legal)": (
        "attn_implementation flash_attention use_flash_attn flash_attn sdp_attention"
    ),
    "attention.documents; burst packs documents always": "sample_packing packing pack packed",
    "attention.window_tokens with attention.mask=window": "sliding_window window_size",
    "train.compile=true": "torch_compile compile_model",
    "seed": "random_seed manual_seed data_seed",
    "model.num_layers": "n_layer n_layers num_hidden_layers",
    "model.num_heads": "n_head n_heads num_attention_heads",
    "model.num_kv_heads": "n_kv_heads num_key_value_heads num_query_groups",
    "model.hidden_size": "n_embd d_model dim embed_dim",
    "model.ffn_hidden_size": "intermediate_size ffn_dim d_ff",
    "model.norm_eps": "rms_norm_eps layer_norm_eps",
    "model.tie_embeddings": "tie_word_embeddings untie_embeddings_and_output_weights",
    "model.rope_theta": "rope_base rotary_base",
    "burst finds it from cluster.nodes; leave it out": "master_addr rdzv_endpoint",
    "burst writes a line for every step; leave it out": "logging_steps log_interval log_every",
    "burst writes RUN/metrics.jsonl, a line for every step, and TensorBoard events with train.tensorboard=true": (
        "wandb mlflow report_to wandb_project tracker run_name comet aim"
    ),
}
SYNONYMS = {word: hint for hint, words in _WORDS.items() for word in words.split()}


def synonym(key: str) -> str | None:
    """Return the setting that corresponds to one of another trainer, by its last word or section; None if unknown."""
    words = [word.replace("-", "_").lower() for word in reversed(key.split("."))]
    found = next((SYNONYMS[word] for word in words if word in SYNONYMS), None)
    return found if found is None or found.startswith("burst ") else f"in burst it is {found}"


# Prefixes as they are meant in numbers that count no tokens; with a B behind them they are bytes.
_SCALED = re.compile(r"(\d+(?:\.\d+)?) ?([kKMGTB]?)(i?)(B?)")
_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "B": 3, "T": 4}
_SECONDS = {"seconds": 1, "minutes": 60}


def meant_value(text: str, expected: str, unit: str | None) -> str | None:
    """Return the spelling of a text that may be meant as a number or truth value; None if unknown."""
    if "true or false" in expected:
        return {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(text.lower())
    if "number" not in expected:
        return None
    plain = text.strip().replace(",", "").replace("_", "")
    if re.fullmatch(r"[-+]?0[0-7]+", plain):
        decimal, octal = int(plain), int(plain, 8)
        return str(decimal) if decimal == octal else f"{decimal} (or {octal}, if the 0 was to make it octal)"
    if re.fullmatch(r"[-+]?0\d+(\.\d*)?|[-+]?\d+(\.\d*)?", plain):
        return re.sub(r"^([-+]?)0+(?=\d)", r"\1", plain)
    if re.fullmatch(r"0[xob][0-9a-fA-F]+", plain):
        return _whole(lambda: int(plain, 0))
    if unit in _SECONDS and re.fullmatch(r"\d+(:\d\d){1,2}", text):
        seconds = sum(int(part) * 60**place for place, part in enumerate(reversed(text.split(":"))))
        return f"{seconds / _SECONDS[unit]:g}, in {unit}"
    found = _SCALED.fullmatch(plain)
    if found is None or not (found[2] or found[4]) or (found[2] == "B" and unit == "bytes"):
        return None
    if unit == "tokens":
        return found[1] + found[2] if found[2] in ("k", "K", "M") else None
    base = 1024 if found[3] else 1000
    return _whole(lambda: Fraction(found[1]) * base ** _PREFIXES[found[2].upper()])


def _whole(number: Callable[[], int | Fraction]) -> str | None:
    """Format an integer as it is typed."""
    try:
        value = Fraction(number())
    except ValueError:
        return None
    return str(value.numerator) if value.denominator == 1 else f"{float(value):g}"
