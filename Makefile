# Every target makes the Python environment in .venv by itself when it needs one.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
# Two processes with one thread each are faster than one process whose threads wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2
# What is installed is compiled at the end, on all cores: pip uses one, and leaves it to every process
# to do it again where it does not (PYTHONDONTWRITEBYTECODE, as most containers have it).
PIP := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP)  ## train a small GPT with unlimited and with little memory, and compare (10 minutes)
	@$(BIN)/python -m bench.demo

test: $(STAMP)  ## the quick tests; needs no GPU (about 3 minutes)
	@$(PYTEST) --durations=10 -m "not slow and not gpu and not exhaustive"

test-all: $(STAMP)  ## every test that this machine can run
	@$(PYTEST)

check: check-style check-mypy check-pyright  ## format, lint, direction of imports, types

check-style: $(STAMP)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports --no-logo

check-mypy: $(STAMP)
	@$(BIN)/mypy

check-pyright: $(STAMP)
	@$(BIN)/pyright --warnings

bench: $(STAMP)  ## every benchmark, with results under bench/results
	@$(BIN)/python -m bench

clean:  ## remove the environment and everything that was made
	@rm -rf $(VENV) build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an interrupted installation is finished by the next call.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"teraplan needs Python 3.11 or newer, this is " + sys.version.split()[0] + \
		"; choose one with: make PYTHON=python3.11")'
	@echo "[1/5] making a Python environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/5] installing torch (up to a few minutes)"
	@$(PIP) torch==2.13.0
	@echo "[3/5] installing tools"
	@$(PIP) hatchling editables
	@echo "[4/5] installing teraplan and what it needs"
	@$(PIP) --no-build-isolation -e '.[plot,dev]'
	@echo "[5/5] compiling what was installed"
	@$(BIN)/python -m compileall -qq -j 0 -x '/tests/|/_internal/|transformers/models' $(VENV)/lib || true
	@touch $@

.PHONY: help demo test test-all check check-style check-mypy check-pyright bench clean
