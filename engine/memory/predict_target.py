"""What `predict_apart` starts: reads a configuration and a topology on stdin, writes a prediction on stdout as JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import yaml

from engine.config.errors import ConfigError
from engine.config.settings import config_from_dict
from engine.memory.predict import predict_memory
from engine.planning.methods.topology import Topology


def main() -> None:
    """One document: the prediction, or {"problems": [...]} for a configuration that cannot run."""
    # Libraries may print; stdout is for the document alone.
    stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        document = predict(json.load(sys.stdin))
    except ConfigError as error:
        document = {"problems": list(error.problems)}
    with stdout:
        json.dump(document, stdout)


def predict(request: dict[str, Any]) -> dict[str, Any]:
    """The prediction for {"config": YAML text, "nodes": n, "local_ranks": m}."""
    config = config_from_dict(yaml.safe_load(request["config"]))
    world = Topology(request["nodes"], request["local_ranks"])
    return predict_memory(config, world, world.size).to_dict()


if __name__ == "__main__":
    main()
