"""The tree keeps its promises: links and paths exist, tables match the code, pins are exact, files stay short."""

from __future__ import annotations

import ast
import collections
import functools
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from burst_cli import __version__
from burst_cli.app import VERBS
from burst_cli.overrides import builtin_conf_dir, list_options
from engine.planning.methods.presets import PRESETS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PACKAGES = ("burst_cli", "cluster", "engine")
CODE = sorted(path for name in (*PACKAGES, "tests", "benchmarks", "scripts") for path in (ROOT / name).rglob("*.py"))
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_FILES = 12  # directly in a folder of the command line
TOP_FOLDERS = (*PACKAGES, "benchmarks", "conf", "docker", "docs", "scripts", "tests")


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Every node of the syntax tree of a file."""
    return list(ast.walk(ast.parse(path.read_text())))


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def prose(document: Path) -> str:
    """The text without fenced code."""
    return re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", prose(document), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table_column(document: str, first_heading: str) -> set[str]:
    """First backquoted word of every row of the table whose first heading is given."""
    lines = iter((ROOT / document).read_text().splitlines())
    next(line for line in lines if line.startswith(f"| {first_heading} |"))
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(re.findall(r"`([^`]+)`", line)[0])
    return set(rows)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_resolve(document: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_paths_in_backquotes_exist(document: Path) -> None:
    quoted = re.findall(r"`([A-Za-z_.][\w./-]*)`", prose(document))
    paths = [text for text in quoted if text.partition("/")[0] in TOP_FOLDERS and "/" in text]
    missing = [path for path in paths if "NAME" not in path and "GROUP" not in path and not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    text = document.read_text()
    named = re.findall(r"`(?:[A-Z_]+=\S+ )*make ([a-z-]+)", text) + re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)
    assert set(named) <= targets


def test_pages_name_every_verb_and_preset() -> None:
    verbs = {words.split()[1] for words in table_column("README.md", "verb")}
    assert verbs == {verb.name for verb in VERBS}
    assert table_column("docs/attention.md", "preset") == {*PRESETS, "auto"}


def test_documents_name_every_option_of_every_group() -> None:
    groups = list_options([builtin_conf_dir()])
    assert table_column("README.md", "experiment") == {f"exp={name}" for name in groups["exp"]}
    rows = {
        line.split("`")[1]: set(re.findall(r"`([^`]+)`", line.split("|")[2]))
        for line in (ROOT / "docs/configuration.md").read_text().splitlines()
        if re.match(r"\| `\w+` \|", line) and line.count("|") == 4
    }
    assert rows == {group: set(options) for group, options in groups.items()}


def test_readme_library_example_runs_on_two_ranks(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    script = tmp_path / "attention.py"
    script.write_text(code)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # as torchrun says it
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    for number, rank in enumerate(ranks):
        said, errors = rank.communicate(timeout=200)
        assert (rank.returncode, said.partition(" of ")[0]) == (0, f"rank {number}: 500 rows"), errors


def test_folders_of_the_command_line_stay_small() -> None:
    files = collections.Counter(name_of(path.parent) for path in (ROOT / "burst_cli").rglob("*.py"))
    assert not {folder: count for folder, count in files.items() if count > MAX_FILES}


def test_files_stay_short() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in CODE}
    assert not {name: length for name, length in lengths.items() if length > MAX_FILE_LINES}


def test_names_of_test_files_are_unique() -> None:
    """pytest takes two of one name for the same module."""
    names = collections.Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_tests_patch_nothing_of_the_product() -> None:
    """What a test wants otherwise is an argument; the environment and the working folder may be set."""
    patching = [
        f"{name_of(path)}:{node.lineno}"
        for path in (ROOT / "tests").rglob("*.py")
        for node in nodes_of(path)
        if (isinstance(node, ast.ImportFrom | ast.Import) and "mock" in ast.unparse(node))
        or (isinstance(node, ast.Attribute) and node.attr in ("setattr", "delattr", "setitem", "delitem"))
    ]
    assert not patching


def test_functions_stay_short() -> None:
    functions = [
        (node, f"{name_of(path)}:{node.lineno} {node.name}")
        for path in CODE
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef)
    ]
    long = [name for node, name in functions if (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES]
    assert not long


def requirement_name(text: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", text)[0]).lower()  # type: ignore[index]


def test_every_direct_dependency_is_pinned_exactly() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)  # no ranges, no local versions such as +cpu
    pinned = [requirement_name(line) for line in lines]
    assert len(pinned) == len(set(pinned))
    table = project()["project"]
    direct = {*table["dependencies"], *table["optional-dependencies"]["dev"]}
    assert {requirement_name(text) for text in direct} <= set(pinned)


def test_optional_packages_are_tested() -> None:
    extras = project()["project"]["optional-dependencies"]
    dev = {requirement_name(text) for text in extras["dev"]}
    assert {requirement_name(text) for name in ("parquet", "tensorboard") for text in extras[name]} <= dev


def test_changelog_has_a_place_for_what_comes_next() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in text
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys, importlinter.cli as cli; sys.exit(cli.lint_imports(no_cache=True))"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, text=True, capture_output=True, timeout=200)


VIOLATIONS = {
    "engine/model/llama.py": "from engine.parallel import fsdp",
    "cluster/ssh/hosts.py": "import cluster.plan",
    "engine/planning/visibility/mask.py": "import torch",
    "engine/optim/adamw.py": "import typer",
    "engine/config/settings.py": "from engine.runs import files",
    "engine/predict/plan_costs.py": "from engine.resolve import legality",
    "engine/runs/record.py": "import cluster.plan",
    "engine/runs/folder.py": "import burst_cli.render",
    "cluster/plan.py": "from engine.training.trainer import Trainer",
    "burst_cli/render.py": "import hydra",
    "burst_cli/runs/view.py": "from engine.training.metrics import StepMeter",
}
BROKEN_RULES = 7  # all but "ranks run without SSH"


def test_import_rules_hold_and_would_notice(tmp_path: Path) -> None:
    assert (result := lint_imports(ROOT)).returncode == 0, result.stdout
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, line in VIOLATIONS.items():
        with (tmp_path / name).open("a") as file:
            file.write(f"\n{line}\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1
    assert f"{BROKEN_RULES} broken" in result.stdout, result.stdout


def entrypoint(home: Path, *command: str) -> str:
    script = ["sh", str(ROOT / "docker/entrypoint.sh"), *command]
    environment = {"PATH": os.environ["PATH"], "HOME": str(home)}
    return subprocess.run(script, env=environment, text=True, capture_output=True, check=True).stdout.strip()


def test_image_gives_an_unknown_user_a_home(tmp_path: Path) -> None:
    assert entrypoint(tmp_path, "sh", "-c", "echo $HOME") == str(tmp_path)
    made = Path(entrypoint(tmp_path / "missing", "sh", "-c", "echo $HOME"))
    assert made.is_dir()
    made.rmdir()


@pytest.mark.parametrize("script", sorted(ROOT.glob("[sd]*/*.sh")), ids=name_of)
def test_shell_scripts_parse_and_may_be_executed(script: Path) -> None:
    subprocess.run(["sh", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)
