# Two commands do everything on a fresh machine: `make demo` and `make test`. Each installs into .venv, once.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
BENCH  := .venv-bench
TORCH  := torch==2.13.0
PIP    := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all check lint types imports format bench docs clean

help:  ## What each target does
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## */\t/' | expand -t 12

# The stamp is newer than what it was made from: installed once, again when the requirements change.
# torch goes first by its exact version, so that its build is chosen by that alone.
install: $(VENV)/.installed  ## Install meshwright and the development tools into .venv
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "no venv module: using virtualenv"; \
	  $(PYTHON) -m pip install --quiet --user --break-system-packages virtualenv && $(PYTHON) -m virtualenv --quiet $(VENV); }
	$(PIP) install --quiet $(TORCH)
	$(PIP) install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

demo: install  ## Train the quick-start job on 4 CPU ranks and print its ledger
	$(BIN)/meshwright train examples/quickstart.toml --out runs/demo-$$(date +%Y%m%d-%H%M%S)

test: install  ## The suite: a sample of every matrix, at most 12 minutes on 2 cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test-all: install  ## Everything: full matrices and campaigns
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "all or not all"

check: lint types imports  ## What does not run the program: style, types, import rules

lint: install  ## Style and spelling
	$(BIN)/ruff check .
	$(BIN)/codespell

types: install  ## mypy --strict over src and bench
	$(BIN)/mypy

imports: install  ## Which room may import which
	$(BIN)/lint-imports

format: install  ## Mend what ruff can mend by itself
	$(BIN)/ruff check --fix .

bench: $(BENCH)/.installed  ## Side by side with DDP, FSDP2, DTensor, pipelining, Accelerate, Fabric, DeepSpeed
	$(BENCH)/bin/python -m bench.peers

$(BENCH)/.installed: pyproject.toml constraints.txt
	@test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet $(TORCH)
	$(BENCH)/bin/python -m pip install --quiet -c constraints.txt -e ".[bench]"
	@touch $@

docs: install  ## Write the generated pages and pictures of docs/ anew
	$(BIN)/python -m docs.generate

clean:  ## Remove environments and caches; runs/ stays
	rm -rf $(VENV) $(BENCH) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .cache
