# Two commands do all the set-up on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
AUDIT := build/audit

.PHONY: setup setup-dev demo test test-all test-gpu sanitize check wheel lock audit clean

setup: $(STAMP)
setup-dev: $(DEV_STAMP)

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) here; install Python 3.11 or newer, or say make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $$($(PYTHON) --version) is too old; install Python 3.11 or newer, or say make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "make: this Python lacks its venv module; install it (Debian: apt-get install python3-venv)"; exit 1; }
	@echo "setting up $(VENV), once"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Locked versions with hashes on Python 3.11, Linux x86_64; elsewhere the newest that pyproject allows.
$(STAMP): $(BIN)/python pyproject.toml requirements/runtime.txt requirements/torch.txt
	@$(BIN)/python requirements/install.py runtime
	@touch $@

$(DEV_STAMP): $(STAMP) requirements/dev.txt
	@$(BIN)/python requirements/install.py dev
	@touch $@

# The source package and the wheel with the native library, in dist/.
wheel: $(DEV_STAMP)
	@$(BIN)/python -m build

# Resolve pyproject.toml again and write requirements/*.txt.
lock: $(BIN)/python
	@$(BIN)/python requirements/lock.py

# Look the locked versions up in the databases of known vulnerabilities; one that cannot be looked up is an error.
audit: $(BIN)/python
	@$(BIN)/python -m venv $(AUDIT)
	@$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check 'pip-audit>=2.9,<3'
	@$(AUDIT)/bin/pip-audit --strict --disable-pip --require-hashes --requirement requirements/dev.txt
	@$(AUDIT)/bin/pip-audit --strict --disable-pip --no-deps --requirement requirements/torch.txt

demo: $(STAMP)
	@$(BIN)/python -m foretell demo

test: $(DEV_STAMP)
	@$(BIN)/python -m tests.run

test-all: $(DEV_STAMP)
	@$(BIN)/python -m tests.run -m 'not gpu'

test-gpu: $(DEV_STAMP)
	@$(BIN)/python -m pytest -m 'gpu or not slow' tests/gpu tests/kernels_triton

# The native library under the address, undefined-behaviour and thread sanitizers of g++.
sanitize: $(DEV_STAMP)
	@$(BIN)/python -m tests.sanitize

check: $(DEV_STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m tests.docs_check
	@$(BIN)/python docs/generate.py --check
	@$(BIN)/zensical build --strict

clean:
	rm -rf $(VENV) build dist site .cache *.egg-info
