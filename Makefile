# Each command makes the environment it needs, once: .venv/.ready is newer than pyproject.toml or it is made again.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
# Processes that share the tests; each computes with one thread (tests/conftest.py).
WORKERS ?= 2

.PHONY: help serve chat test test-gpu test-clients check format bench eval docs wheel clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 16

serve: $(VENV)/.installed  ## serve the built-in model on http://127.0.0.1:8000 (ARGS="--port 9000" passes flags on)
	$(BIN)/deltaserve serve $(ARGS)

chat: $(VENV)/.installed  ## talk to the built-in model in the terminal
	$(BIN)/deltaserve chat $(ARGS)

test: $(VENV)/.ready  ## every test that needs neither a GPU nor an outside client
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n $(WORKERS) tests/ops/interpreted
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

test-gpu: $(VENV)/.ready  ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu $(ARGS)

test-clients: $(VENV)/.ready-clients .clients/.ready  ## install and run the outside clients against a running server
	$(BIN)/python -m pytest -m clients tests/clients $(ARGS)

check: $(VENV)/.ready  ## format, lint, types, architecture
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

format: $(VENV)/.ready  ## format the code and mend what the linter can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(VENV)/.ready  ## ratios to transformers on this machine's CPU
	$(BIN)/python -m benchmarks.cpu_ratio $(ARGS)

eval: $(VENV)/.ready-clients  ## the built-in model's held-out sums by lm_eval, beside transformers
	$(BIN)/python -m training.eval.run $(ARGS)

docs: $(VENV)/.ready  ## write docs/flags.md from the configs
	$(BIN)/python -m tests.flags_page

wheel: $(VENV)/.ready  ## a wheel in dist/, the built-in model in it
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

clean:  ## remove everything that the commands made
	rm -rf $(VENV) .clients dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --disable-pip-version-check -e .
	$(BIN)/python -c 'from deltaserve.ops.cpu import prepare; prepare()'
	touch $@

$(VENV)/.ready: $(VENV)/.installed
	$(BIN)/python -m pip install --disable-pip-version-check -e ".[dev]"
	touch $@

$(VENV)/.ready-clients: pyproject.toml $(VENV)/.ready
	$(BIN)/python -m pip install --disable-pip-version-check -e ".[dev,clients]"
	touch $@

.clients/.ready: tests/clients/package.json
	mkdir -p .clients
	cp tests/clients/package.json .clients/
	npm install --prefix .clients --no-audit --no-fund
	touch $@
