# Every target sets up what it needs: .venv with the versions of constraints.txt, made at first use.
#
#   make demo PYTHON=python3.12    start .venv from this interpreter
#   make gpu PY=python3            use this interpreter and its packages as they are; no .venv, no network
#   make gpu GPU_ARGUMENTS='--only tiles,steps:1048576'   what benchmarks.bench_gpu takes

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: help setup demo test thorough check lint format-check types imports format bench gpu clean

VENV := .venv
JOBS := 2
TEST_JOBS := 3 # on two cores: tests of processes mostly wait
ifneq ($(origin PY), command line)
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif
export PYTHON
unexport PYTHONDONTWRITEBYTECODE # or every process that a test starts compiles what it imports

SOURCES := burst_cli cluster docker engine tests benchmarks scripts

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: $(READY)  ## Make .venv, or bring it up to date
	@echo "ready: $(PY)"

$(VENV)/.ready: pyproject.toml constraints.txt scripts/setup_venv.sh
	@sh scripts/setup_venv.sh $(VENV)

demo: $(READY)  ## Prepare real text, train the tiny model on four local ranks, report
	$(PY) -m burst_cli data prepare exp=tiny
	$(PY) -m burst_cli launch exp=tiny
	$(PY) -m burst_cli report tiny --latest

test: $(READY)  ## Run every test that needs no special machine
	$(PY) -m pytest --durations 15 -m "not thorough" -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder tests

thorough: $(READY)  ## Run the variations that `make test` leaves out
	$(PY) -m pytest --durations 15 -m thorough

check: lint format-check types imports test  ## Lint, format, types, import rules, tests: what CI runs

lint: $(READY)
	$(PY) -m ruff check $(SOURCES)
	$(PY) scripts/lint_names.py

format-check: $(READY)
	$(PY) -m ruff format --check $(SOURCES)

types: $(READY)
	$(PY) -m mypy

imports: $(READY)
	$(PY) -c 'import sys, importlinter.cli as cli; sys.exit(cli.lint_imports(no_logo=True))'

format: $(READY)  ## Rewrite the sources as the linter and the formatter want them
	$(PY) -m ruff check --fix $(SOURCES)
	$(PY) -m ruff format $(SOURCES)

bench: $(READY)  ## Run the benchmarks with their default sizes
	$(PY) -m burst_cli bench attention
	$(PY) -m benchmarks.bench_step
	$(PY) -m benchmarks.bench_memory
	$(PY) -m benchmarks.bench_checkpoint
	$(PY) -m benchmarks.bench_fleet
	$(PY) -m benchmarks.bench_image
	$(PY) -m benchmarks.bench_logs

gpu: $(READY)  ## Run the tests and benchmarks that need a CUDA device, within 9 minutes
	@$(PY) scripts/require_gpu.py
	@sh scripts/gpu.sh $(PY) $(GPU_ARGUMENTS)

clean:  ## Delete caches; .venv and runs/ stay
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find burst_cli cluster engine tests -name __pycache__ -type d -prune -exec rm -rf {} +
