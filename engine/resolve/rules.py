"""Rules between settings, and between settings and this machine's files; all violated ones are reported together.

Standard library only. The world size may be unknown while a configuration is composed (`cluster.ranks_per_node` null:
one rank per GPU, found at launch); rules that need it are skipped until the launcher has set it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from engine.config.cluster import ClusterConfig, ContainerConfig
from engine.config.errors import ConfigError, legal_sizes
from engine.config.model_parts import LoraConfig
from engine.config.schema import Problem, range_problems, walk_fields
from engine.config.settings import ModelConfig, RunConfig
from engine.planning.checkpoint_policy import POLICIES_OF
from engine.planning.visibility.options import mask_problems
from engine.resolve.data_rules import data_rules, weight_rules

_STEP_RANGE = re.compile(r"(\d+):(\d+)")
_SETTINGS = frozenset(spec.key for spec in walk_fields(RunConfig))


# Shapes that the decoder of this engine does not have.
_HF_SHAPE = (
    *("v_head_dim", "kv_lora_rank", "q_lora_rank", "rope_head_dim", "gated_ffn", "num_moe_layers", "num_experts"),
    *("experts_per_token", "expert_ffn_hidden_size", "shared_expert_ffn_hidden_size", "gated_attention"),
    *("gated_shared_expert", "linear_layers"),
)

Rule = Callable[[RunConfig], Iterator[str | Problem]]


def check_config(config: RunConfig, rules: Sequence[Rule] = ()) -> None:
    """Raise ConfigError with one sentence per violated rule, unless a run may start.

    rules: Additional rules, see `config_problems`.
    """
    if texts := [*(problem.text for problem in config_problems(config, rules)), *_start(config)]:
        raise ConfigError(texts)


def config_problems(config: RunConfig, rules: Sequence[Rule] = ()) -> list[Problem]:
    """Return one problem per violated rule. Rules that read an out-of-range number report nothing.

    `rules` are checked after those of this file, which read settings alone; rules about ranks and methods are in
    `engine.resolve.legality`. A rule yields a sentence that names the settings which the problem concerns, or a
    `Problem` if it concerns more settings than it names.
    """
    if unknown := list(_unknown_homes(config)):  # rules that open such a path would fail
        return unknown
    problems = list(range_problems(config))
    out_of_range = {key for problem in problems for key in problem.keys}
    for rule in (*_RULES, *rules):
        found = (one if isinstance(one, Problem) else _named_in(one) for one in rule(config))
        problems += [problem for problem in found if out_of_range.isdisjoint(problem.keys)]
    return problems


def _unknown_homes(value: Any, key: str = "") -> Iterator[Problem]:
    """Yield a problem for every path in the home folder of an unknown user (~NAME)."""
    if is_dataclass(value):
        for item in fields(value):
            yield from _unknown_homes(getattr(value, item.name), f"{key}.{item.name}".lstrip("."))
    elif isinstance(value, tuple):
        for entry in value:
            yield from _unknown_homes(entry, key)
    elif isinstance(value, str) and value.startswith("~") and os.path.expanduser(value) == value:  # noqa: PTH111
        yield Problem((key,), f"{key}: got {value!r}, but this machine has no such user; give the whole path")


def _named_in(text: str) -> Problem:
    words = re.findall(r"\w+(?:\.\w+)*", text)
    return Problem(tuple(dict.fromkeys(word for word in words if word in _SETTINGS)), text)


def _model(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.num_kv_heads > model.num_heads or model.num_heads % max(1, model.num_kv_heads):
        yield (
            f"model.num_kv_heads: got {model.num_kv_heads}, expected a divisor of model.num_heads={model.num_heads}: "
            f"{legal_sizes(model.num_heads)}"
        )
    if model.head_dim % 2:
        yield f"model.head_dim: got {model.head_dim}, expected an even number: RoPE turns pairs of channels"


def _implementation(config: RunConfig) -> Iterator[str]:
    """What only one of the implementations of a model has."""
    model = config.model
    if model.implementation == "hf":
        yield from _hugging_face(config)
        return
    default = ModelConfig()
    given = [name for name in _HF_SHAPE if getattr(model, name) != getattr(default, name)]
    given += ["lora.rank"] if model.lora.rank is not None else []
    if model.hf_config is not None or given:
        yield (
            f"model.implementation=burst is this engine's Llama-style decoder, which has no "
            f"{', '.join(f'model.{name}' for name in (given or ['hf_config']))}; set model.implementation=hf"
        )


def _hugging_face(config: RunConfig) -> Iterator[str]:
    """What the decoders of transformers have in this trainer, and what their config.json says of the settings."""
    from engine.pretrained.decoder_shape import (
        contradictions,
        unknown_parts,
        window_problems,
    )  # only such models wait for it

    model, given = config.model, "model.implementation=hf"
    if model.hf_config is None:
        yield (
            f"model.hf_config: null, but {given} builds the model from it; start with `burst launch --from FOLDER`, "
            "or save a model for model=NAME with `burst model FOLDER --save NAME`"
        )
        return
    yield from unknown_parts(model.hf_config)
    yield from contradictions(model)
    yield from window_problems(model.hf_config, config.attention, config.train.seq_len)
    if config.parallel.tp_size > 1:
        yield f"parallel.tp_size={config.parallel.tp_size}: {given} has no tensor parallelism; set parallel.tp_size=1"
    if config.train.dropout:
        yield f"train.dropout={config.train.dropout}: {given} has the dropout of its config.json alone; set 0"
    if config.train.compile:
        yield f"train.compile=true: {given} is not compiled; set train.compile=false"
    if model.rope_scaling.kind != "none":
        yield (
            f"model.rope_scaling.kind={model.rope_scaling.kind}: {given} takes RoPE from model.hf_config; set "
            "rope_parameters in it, in a copy of config.json"
        )
    kinds: set[str] = {*config.memory.checkpoint_layers} or {config.memory.activation_checkpoint}
    if unknown := sorted(kinds - POLICIES_OF["hf"] - {"auto"}):
        yield (
            f"memory.activation_checkpoint: got {', '.join(unknown)}, but {given} has "
            f"{', '.join(sorted(POLICIES_OF['hf']))}"
        )


def _lora(config: RunConfig) -> Iterator[str]:
    """Settings of adapters that no adapter has."""
    lora, plain = config.model.lora, LoraConfig()
    if lora.rank is None and lora != plain:
        yield "model.lora: its settings are of adapters, but there are none; set model.lora.rank, such as 16"
    if lora.rank is not None and not (lora.target_modules or lora.target_parameters):
        yield "model.lora.target_modules: empty, and so is model.lora.target_parameters; name what gets an adapter"


def _rope(config: RunConfig) -> Iterator[str]:
    scaling = config.model.rope_scaling
    if scaling.kind in ("yarn", "llama3") and scaling.original_seq_len is None:
        yield f"model.rope_scaling.original_seq_len: kind={scaling.kind} needs the length that the model was trained on"
    if scaling.kind == "none" and scaling.factor != 1.0:
        yield (
            f"model.rope_scaling.factor: got {scaling.factor}, but model.rope_scaling.kind=none ignores it; set "
            "model.rope_scaling.kind to linear, ntk, yarn or llama3"
        )


def _optimizer(config: RunConfig) -> Iterator[str]:
    optimizer, steps = config.optimizer, config.train.steps
    if optimizer.warmup_steps > steps:
        yield (
            f"optimizer.warmup_steps: got {optimizer.warmup_steps}, expected at most train.steps={steps}; "
            "set both, such as optimizer.warmup_steps=0"
        )
    if optimizer.decay_steps is None:
        return
    if optimizer.schedule != "wsd":
        yield (
            f"optimizer.decay_steps: only optimizer.schedule=wsd has a final decay, not {optimizer.schedule}; "
            "leave it null or choose wsd"
        )
    elif optimizer.warmup_steps + optimizer.decay_steps > steps:
        yield (
            f"optimizer.decay_steps: warm-up {optimizer.warmup_steps} + decay {optimizer.decay_steps} steps exceed "
            f"train.steps={steps}; shorten one or train longer"
        )


def _train(config: RunConfig) -> Iterator[str]:
    train = config.train
    if train.profile is None:
        return
    found = _STEP_RANGE.fullmatch(train.profile)
    if found is None or not 1 <= int(found[1]) < int(found[2]) <= train.steps + 1:
        yield (
            f"train.profile: got {train.profile!r}, expected START:STOP with 1 <= START < STOP <= "
            f"{train.steps + 1} (steps count from 1, STOP is left out), such as 5:8 for the steps 5, 6 and 7"
        )


def _memory(config: RunConfig) -> Iterator[str]:
    """Check for policies that exclude each other, and for options that updates inside backward cannot support."""
    memory = config.memory
    if memory.activation_checkpoint == "auto" and memory.checkpoint_layers:
        yield (
            "memory.checkpoint_layers: names the policies of the layers, but memory.activation_checkpoint=auto chooses "
            "them; set memory.checkpoint_layers=[], or another activation_checkpoint"
        )
    if memory.host_layers is not None and memory.activation_store != "host":
        yield (
            f"memory.host_layers={memory.host_layers} is the number of layers with saved tensors in host memory, "
            "which needs memory.activation_store=host; set that, or memory.host_layers=null"
        )
    if memory.optimizer_in_backward:
        yield from update_in_backward_problems(config)
    if memory.moments_dtype == "int8" and importlib.util.find_spec("torchao") is None:
        yield (
            "memory.moments_dtype=int8 needs torchao, which is not installed; run: pip install 'burst-train[int8]', "
            "or set memory.moments_dtype=float32"
        )


def _start(config: RunConfig) -> Iterator[str]:
    """Check requirements of starting a run that `burst plan` and `burst data prepare` do not have."""
    model = config.model
    is_here = not config.cluster.runs_elsewhere
    if model.implementation == "hf" and is_here and importlib.util.find_spec("transformers") is None:
        yield (
            "model.implementation=hf runs transformers' own code, which is not installed; run: "
            "pip install 'burst-train[transformers]'"
        )
    if model.lora.rank is not None and is_here and importlib.util.find_spec("peft") is None:
        yield "model.lora.rank puts adapters on the model by peft, which is not installed; run: pip install peft"
    if model.require_init_from and model.init_from is None and config.train.checkpoint.resume_from is None:
        yield (
            f"model.init_from: null, but exp={config.exp} continues a trained model and would start from random "
            "weights; set model.init_from=FOLDER of a Hugging Face model (`burst model FOLDER` shows its settings), or "
            "model.require_init_from=false to train from scratch"
        )


def update_in_backward_problems(config: RunConfig) -> Iterator[str]:
    """Yield the reasons why weights cannot be updated inside backward; none if they can."""
    clip, micro_steps = config.optimizer.max_grad_norm, config.train.grad_accum_steps
    replicas = config.parallel.dp_replicate_size
    given = "memory.optimizer_in_backward=true"
    if clip is not None:
        yield (
            f"{given} updates layers before the norm of all gradients is known, but "
            f"optimizer.max_grad_norm={clip:g}; set optimizer.max_grad_norm=null"
        )
    if micro_steps > 1:
        yield (
            f"{given} updates a layer after its first backward pass, but "
            f"train.grad_accum_steps={micro_steps} adds up several; set train.grad_accum_steps=1"
        )
    if config.train.guard.may_drop:
        yield (
            f"{given} has updated the weights before a step can be judged, but "
            "train.guard may drop steps; set train.guard.on_nonfinite=stop and train.guard.spike_deviations=null"
        )
    if replicas > 1:
        yield (
            f"{given} saves nothing here: FSDP2 keeps all reduced gradients until the end "
            f"of backward, but parallel.dp_replicate_size={replicas}; set parallel.dp_replicate_size=1"
        )


def _masks(config: RunConfig) -> Iterator[str]:
    """Check the requirements of masks and of document masking."""
    attention = config.attention
    yield from mask_problems(attention, {attention.mask, *attention.mask_layers})
    if attention.mask == "no_attention" or (
        "no_attention" in attention.mask_layers and config.model.implementation == "burst"
    ):
        yield (
            "attention.mask, attention.mask_layers: no_attention is for the linear layers of a model of transformers "
            "(attention.mask_layers with model.implementation=hf); all layers of this model have attention"
        )
    if attention.blocks_file is not None and not Path(attention.blocks_file).expanduser().is_file():
        yield f"attention.blocks_file: no such file: {attention.blocks_file!r} (looked from {Path.cwd()})"
    if attention.documents and config.train.micro_batch_size > 1:
        yield (
            f"attention.documents=true needs train.micro_batch_size=1, got {config.train.micro_batch_size}: the "
            "sequences of a micro-batch share one plan; use train.grad_accum_steps instead"
        )
    if attention.layout in ("per_document", "balanced") and config.parallel.tp_size > 1:
        yield (
            f"attention.layout={attention.layout} gives ranks blocks of unequal length, which tensor parallel ranks "
            "cannot divide; choose another layout or set parallel.tp_size=1"
        )
    if attention.layout == "per_document" and not attention.documents:
        yield "attention.layout=per_document divides every document over the ranks; set attention.documents=true"


# Ranks and their supervisors identify each other by these variables.
_OURS = frozenset({"BURST_RUN_ID", "BURST_NODE", "BURST_RANK_LOGS"})
_TORCHRUN = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([^\x00\r\n]*)", re.DOTALL)
_LOGIN = r"[^\s-]\S*", "a name without dash in front"
_DNS_NAME = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "a name of lower-case letters, digits, - and ."
_LABEL_VALUE = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = rf"([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_LABEL_VALUE}"
_PATH = r"(?!(.*/)?\.\.([/:]|$))%s/[^\x00-\x1f\x7f%s]*"
_EXPECTED_PATH = "an absolute path{}, without `..`, `:` and control characters, such as {}"
_HOMELY = " or one in the home folder (~/...)"
# Settings with a required format, as one text or a list: pattern, and description for the message.
_FORMS: dict[str, tuple[str, str]] = {
    "exp": (
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
        "a name for a run folder; use letters, digits, '.', '_' and '-', at most 100",
    ),
    "cluster.shared_folder": (_PATH % ("", ":"), _EXPECTED_PATH.format("", "/shared")),
    "cluster.node_folder": (_PATH % ("~?", ":"), _EXPECTED_PATH.format(_HOMELY, "/scratch/burst")),
    "cluster.python": (_PATH % ("~?", ""), _EXPECTED_PATH.format(_HOMELY, "/opt/venv/bin/python")),
    "cluster.ssh.user": _LOGIN,
    "cluster.ssh.jump": _LOGIN,
    "cluster.slurm.time_limit": (
        r"(?i:unlimited|infinite)|\d{1,7}(:\d{1,2}){1,2}|\d{1,5}-\d{1,2}(:\d{1,2}){0,2}",
        "[DAYS-]HH:MM:SS, such as 12:00:00 or 2-00:00:00",
    ),
    "cluster.slurm.options": (r"--[^\x00-\x1f\x7f]*", "--NAME=VALUE, one option per item"),
    **{f"cluster.kubernetes.{name}": _DNS_NAME for name in ("claim", "namespace", "queue", "runtime")},
    "cluster.kubernetes.context": _LOGIN,
    "cluster.kubernetes.gpu_resource": (_LABEL_KEY, "DOMAIN/NAME, such as nvidia.com/gpu"),
    "cluster.kubernetes.memory_per_pod": (r"\d{1,15}(\.\d{1,6})?([kMGTPE]i?)?", "a quantity such as 200Gi"),
    "cluster.kubernetes.node_selector": (f"{_LABEL_KEY}=({_LABEL_VALUE})?", "KEY=VALUE, a label of nodes"),
    "cluster.container.image": (r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}", "NAME:TAG"),
    "cluster.container.mounts": (_PATH % ("", ":") + "(:rw)?", "an absolute path of the nodes, or PATH:rw"),
}


def _forms(config: RunConfig) -> Iterator[str]:
    for key, (pattern, expected) in _FORMS.items():
        value = attrgetter(key)(config)
        for index, text in enumerate(value if isinstance(value, tuple) else (value,)):
            if text is not None and re.fullmatch(pattern, text) is None:
                place = f"{key}[{index}]" if isinstance(value, tuple) else key
                yield f"{place}: got {text!r}, expected {expected}"


def machine_problems(config: RunConfig) -> Iterator[str]:
    """Yield one sentence per violated rule of cluster settings."""
    cluster = config.cluster
    for rule in (_launcher, _environment, _kubernetes):
        yield from rule(cluster)
    yield from _container(cluster.container)


def _launcher(cluster: ClusterConfig) -> Iterator[str]:
    if cluster.launcher != "local":
        return
    if cluster.nodes is not None:
        yield (
            f"cluster.launcher=local starts ranks on this machine, but cluster.nodes={cluster.nodes} names others; "
            "leave one of them out, or add cluster=local"
        )
    elif (cluster.num_nodes or 1) > 1:
        yield (
            f"cluster.launcher=local starts ranks on this machine, but cluster.num_nodes={cluster.num_nodes}; "
            "leave it null (cluster.topology_nodes plans for ranks on several nodes)"
        )


def _environment(cluster: ClusterConfig) -> Iterator[str]:
    names: set[str] = set()
    for index, setting in enumerate(cluster.environment):
        key = f"cluster.environment[{index}]"
        found = _ASSIGNMENT.fullmatch(setting)
        # The value may be a secret that was typed here by mistake, so the message shows only the text before it.
        shown = repr(setting.partition("=")[0])
        if found is None:
            yield f"{key}: {shown} is not NAME=VALUE in one line, with a name of letters, digits and _"
        elif found[1] in _OURS | _TORCHRUN:
            who = "burst" if found[1] in _OURS else "torchrun"
            yield f"{key}: {found[1]} is set by {who} for every rank; leave it out"
        elif found[1] in names:
            yield f"{key}: {found[1]} is set twice; leave one of them out"
        else:
            names.add(found[1])


def _kubernetes(cluster: ClusterConfig) -> Iterator[str]:
    needed = {
        "kubernetes.claim": "the PersistentVolumeClaim (ReadWriteMany) that all pods mount, for runs and data",
        "container.image": "the image of the pods, in a registry that the nodes can pull from",
    }
    for name, what in needed.items():
        if cluster.resolved_launcher == "kubernetes" and attrgetter(name)(cluster) is None:
            yield f"cluster.launcher=kubernetes needs cluster.{name}: {what}"


def _container(container: ContainerConfig) -> Iterator[str]:
    if container.runtime == "docker" and not container.image:
        yield (
            "cluster.container.runtime=docker needs an image: set cluster.container.image=NAME:TAG, the one that "
            "`burst image build --tag NAME:TAG` makes"
        )
    if not _is_command(container.command):
        yield f"cluster.container.command: got {container.command!r}, expected a command line such as docker"
    # The value of an option may be a separate item, but the first item must be an option.
    if container.run_options and not container.run_options[0].startswith("-"):
        yield (
            f"cluster.container.run_options: got {container.run_options[0]!r} first, expected options of `docker run`, "
            "such as --gpus=all, one per item"
        )


def _is_command(text: str) -> bool:
    try:
        words = shlex.split(text)
    except ValueError:
        return False
    return bool(words) and not words[0].startswith("-")


_RULES: tuple[Rule, ...] = (
    _forms,
    _model,
    _implementation,
    _lora,
    _rope,
    _optimizer,
    _train,
    data_rules,
    weight_rules,
    _memory,
    machine_problems,
    _masks,
)
