"""Group host against a real container engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from host_sections import DOCKER, GROUP
from testkit.check_fakes import ask_here, only
from testkit.image_rig import LauncherEngine, launcher_engine, tar_of

from cluster.checks.finding import Verdict
from cluster.checks.groups.engine import read_engine, read_image
from cluster.image.engine import engine_here
from cluster.survey.facts import NodeFacts


def ask(engine: LauncherEngine, folder: Path) -> tuple[NodeFacts, list[Verdict]]:
    """What a node with that engine tells, and of engine and image whether all is well."""
    config = replace(DOCKER, container=replace(DOCKER.container, command=f"docker -H {engine.host}"))
    questions = [one for one in GROUP.questions if one.name in ("host.docker", "host.image")]
    probe = ask_here(questions, folder, settings=GROUP.settings(config))
    found = GROUP.check(probe, config)
    return NodeFacts(probe, config), [only(found, f"host.{name}").severity for name in ("docker", "image")]


def test_engine_and_image_of_a_real_daemon(tmp_path: Path) -> None:
    with launcher_engine() as engine:
        facts, verdicts = ask(engine, tmp_path)
        assert read_engine(facts).version == engine("version", "-f", "{{.Server.Version}}")
        assert (read_engine(facts).room is not None, verdicts) == (True, [Verdict.OK, Verdict.WARN])
        engine("import", "-", "burst:cuda", stdin=tar_of({"file": b"x" * 100_000}))
        facts, verdicts = ask(engine, tmp_path)
        pushed = engine_here(("docker", "-H", engine.host)).find("burst:cuda")
        assert (read_image(facts), verdicts) == (pushed, [Verdict.OK] * 2)
    assert ask(engine, tmp_path)[1] == [Verdict.FAIL, Verdict.UNKNOWN]
