"""The fixture `corpus`: what whole runs train on."""

from __future__ import annotations

import pytest
from testkit.whole_runs import small_corpus

from engine.config.settings import DataConfig
from engine.data.prepare import prepare


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """A small corpus, prepared once."""
    data = small_corpus(tmp_path_factory.mktemp("corpus"))
    prepare(data)
    return data
