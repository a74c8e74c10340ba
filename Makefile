# One target per check. `make demo` and `make test` do all their set-up by themselves.
PYTHON ?= python3
VENV ?= .venv
# Installed first, so that the set-up takes this tested release and not whatever is newest.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin

.PHONY: demo test check pytest lint format format-check types imports readme clean

demo: $(VENV)/.demo
	$(BIN)/python launch/demo.py

test: $(VENV)/.dev check pytest

check: lint format-check types imports

pytest: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

format-check: $(VENV)/.dev
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports

readme: $(VENV)/.dev
	$(BIN)/python -m tests.harness.readme

clean:
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/.torch: 
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[demo]"
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@ $(VENV)/.demo
