"""Data of a run whose ranks are on this machine: prepared before anything of the run is there."""

from __future__ import annotations

from rich.console import Console

from burst_cli.data.progress import show_progress
from engine.config.errors import ConfigError
from engine.config.settings import RunConfig
from engine.data.needles import needle_tasks
from engine.data.prepare import open_training_data, prepare


def prepare_data(config: RunConfig, console: Console) -> None:
    """Tokenise what is not tokenised yet; check that the model knows every token and that samples can be drawn.

    Raises ConfigError or DataError before anything was started.
    """
    with show_progress(console) as report:
        prepared = prepare(config.data, progress=report)
    vocab_size = prepared.train.manifest.vocab_size
    if vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is too small: the data has tokens up to "
            f"{vocab_size - 1}. Set model.vocab_size={vocab_size} or more."
        )
    if not config.train.evaluate_only:
        open_training_data(config.data).sampler(config.train.seq_len, config.seed, grad_accum_steps=1)
    needle_tasks(config, prepared)
