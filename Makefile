# Two commands do all the set-up on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

.PHONY: setup setup-dev demo test test-all test-gpu check clean

setup: $(STAMP)
setup-dev: $(DEV_STAMP)

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) here; install Python 3.11 or newer, or say make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $$($(PYTHON) --version) is too old; install Python 3.11 or newer, or say make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "make: this Python lacks its venv module; install it (Debian: apt-get install python3-venv)"; exit 1; }
	@echo "setting up $(VENV), once"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# torch first and alone: asked for by another package, pip may take a build with gigabytes of CUDA.
$(STAMP): $(BIN)/python pyproject.toml
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'torch>=2.11,<2.14'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(DEV_STAMP): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -m foretell demo

test: $(DEV_STAMP)
	@$(BIN)/python -m pytest

test-all: $(DEV_STAMP)
	@$(BIN)/python -m pytest -m 'not gpu'

test-gpu: $(DEV_STAMP)
	@$(BIN)/python -m pytest -m 'gpu or not slow' tests/gpu tests/kernels_triton

check: $(DEV_STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m tests.docs_check

clean:
	rm -rf $(VENV) build dist *.egg-info
