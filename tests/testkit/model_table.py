"""THE table of transformers' causal language models under context parallelism; docs/models.md shows these very rows:

PYTHONPATH=.:tests python -m testkit.model_table > docs/models.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.attention import ContextParallel
from engine.attention.context import HeadShape
from engine.attention.hugging_face import enable_context_parallel, model_heads
from engine.config.errors import ConfigError
from testkit.ranks import Pools, RankFailedError
from testkit.tiny_models import DOCUMENTS, build, differences, train_alone_thrice, train_divided

PRESETS = {"burst": 2, "ulysses": 4, "megatron_allgather": 4}  # and on how many ranks
LINEAR = ("linear_attention", "mamba", "conv", "hybrid", "moe")

HEADER = f"""# Models of transformers

`enable_context_parallel` ([library](library.md#transformers)) on every causal language model of transformers that can
be built tiny: four layers, four heads, every norm weight, bias and sink drawn anew. *equal*: the loss and every
gradient on several ranks equal those of one process with eager attention, for whole sequences and for packed documents
(compared with separate calls), to 1e-5 or to three times what fp32 alone does to a gradient.

Written by `python -m testkit.model_table` with transformers {transformers.__version__}. *sinks* are learnable attention
sinks, one logit per head (GPT-OSS); *latent* is latent attention, whose heads of v have another width; *linear* means
layers of linear attention, state spaces or convolutions.
"""


class Row(NamedTuple):
    """A family: what its layers have, and per preset `equal`, `not equal: ...` or why it is refused."""

    family: str
    features: tuple[str, ...]
    results: tuple[str, ...]


def features(model: Any) -> Iterator[str]:
    """What a reader looks for."""
    config = model.config
    layer_types = getattr(config, "layer_types", None) or ()
    if "sliding_attention" in layer_types or (not layer_types and _setting(config, "sliding_window")):
        yield "windows"
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        yield "sinks"
    if any("expert" in name.lower() or "moe" in name.lower() for name, _ in model.named_modules()):
        yield "experts"
    if _setting(config, "kv_lora_rank"):
        yield "latent"
    if any(word in kind for kind in layer_types for word in LINEAR):
        yield "linear"


def _setting(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # differs by layer
        return None


def refusal(family: str) -> str | None:
    """Why the model is refused when it is enabled; None if it is not."""
    model = build(family)
    try:
        enable_context_parallel(model, ContextParallel(**vars(heads_of(model)), dtype=torch.float32))
    except ConfigError as error:
        return "; ".join(problem.split(": ", 1)[-1] for problem in error.problems)
    return None


def heads_of(model: Any) -> HeadShape:
    """Those of its first layer, or any if that cannot be found out."""
    try:
        return model_heads(model)[0]
    except (ConfigError, IndexError):
        return HeadShape(4, 2, 8, 8)


def row(family: str, ranks: Pools) -> Row:
    """One family under every preset, plain and packed."""
    has, why = tuple(features(build(family))), refusal(family)
    if why is not None:
        return Row(family, has, (f"refused: {why}",))
    batches = ((0,), DOCUMENTS)
    alone = {documents: train_alone_thrice(family, documents) for documents in batches}
    results = []
    for preset, size in PRESETS.items():
        try:
            found = [
                difference
                for documents in batches
                for difference in differences(
                    ranks(size).run(train_divided, family, preset, documents), alone[documents]
                )
            ]
        except RankFailedError as error:
            found = [str(error).strip().splitlines()[-1]]
        results.append(f"not equal: {'; '.join(found[:2])}" if found else "equal")
    return Row(family, has, tuple(results))


def families() -> list[str]:
    """Families of causal language models that can be built tiny."""
    return [family for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if _is_buildable(family)]


def _is_buildable(family: str) -> bool:
    try:
        build(family)
    except Exception:  # its config has other names, or needs more packages
        return False
    return True


def page(rows: list[Row]) -> Iterator[str]:
    """Lines of docs/models.md."""
    yield HEADER
    yield f"| family | layers have | {' | '.join(f'{preset}, {size} ranks' for preset, size in PRESETS.items())} |"
    yield f"|---|---|{'---|' * len(PRESETS)}"
    for family, has, results in rows:
        if len(results) > 1:
            yield f"| {family} | {', '.join(has)} | {' | '.join(results)} |"
    yield "\nRefused when it is enabled, before any sequence is divided:\n"
    yield "| family | layers have | why |\n|---|---|---|"
    for family, has, results in rows:
        if len(results) == 1:
            yield f"| {family} | {', '.join(has)} | {results[0].removeprefix('refused: ')} |"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    pools = Pools()
    made = []
    for name in sys.argv[1:] or families():
        made.append(row(name, pools))
        print(*made[-1], file=sys.stderr, flush=True)
    pools.close()
    print("\n".join(page(made)))
