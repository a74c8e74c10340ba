# One target per check. `make demo` and `make test` do all their set-up by themselves, once.
PYTHON ?= python3
VENV ?= .venv
# Installed first, so that the set-up takes this tested release (as a CPU build where pip finds one) and not the newest.
TORCH ?= torch==2.13.0
COMPAT_VENV ?= .venv-compat
# Apart from the virtual environment, so that the tests show what a server without it does.
MOONCAKE ?= mooncake-transfer-engine-non-cuda==0.3.13.post1
MOONCAKE_SITE ?= .mooncake
# The release that belongs to TORCH. Apart too: the server must not depend on it.
TORCHVISION ?= torchvision==0.28.0
TORCHVISION_SITE ?= .torchvision
# Test files that run at the same time. Most wait for processes of their own; a world has up to 16 of these. Three keep
# two cores busy. Files begin in the order of their folders: those with worlds, the long ones, are not left for the end.
JOBS ?= 3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: setup demo test check pytest lint format format-check types imports readme protos sweep fuzz compat mooncake torchvision clean

setup: $(VENV)/.dev

demo: $(VENV)/.demo
	$(BIN)/python launch/demo.py

test: $(VENV)/.dev check pytest

check: lint format-check types imports

# With bytecode, also where the environment says otherwise: hundreds of processes import the same modules.
pytest: $(VENV)/.dev
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

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

# Writes the generated parts of the documents: tables of flags, and the tree.
readme: $(VENV)/.dev
	$(BIN)/python -m tests.harness.readme

# Writes the gRPC messages in Python anew from their .proto files.
protos: $(VENV)/.dev
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. spmd_encoder/frontends/grpc/protos/*.proto

# Every size and length through every family, and every family through a world, some minutes. `make pytest` does a part.
sweep: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m sweep --dist loadfile tests/property tests/distributed

# New examples for the tests of properties, ten times as many, a quarter of an hour. `make pytest`
# takes the same ones each time.
fuzz: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m 'hypothesis and not sweep' --hypothesis-profile fuzz \
	    --timeout 3600 tests/unit tests/property tests/contracts tests/faults

# SGLang's own receiver against this server: some 2.3 GB, some minutes. Not part of `make test`.
compat: $(VENV)/.dev $(COMPAT_VENV)/.ready $(MOONCAKE_SITE)/.ready
	OMP_NUM_THREADS=1 SGLANG_PYTHON=$(abspath $(COMPAT_VENV))/bin/python MOONCAKE_SITE=$(abspath $(MOONCAKE_SITE)) \
	    $(BIN)/python -m pytest tests/compat

# Mooncake itself between processes, some 140 MB, which `make test` does with a stand-in.
mooncake: $(VENV)/.dev $(MOONCAKE_SITE)/.ready
	OMP_NUM_THREADS=1 MOONCAKE_SITE=$(abspath $(MOONCAKE_SITE)) $(BIN)/python -m pytest tests/distributed/test_mooncake.py

# Films and pictures beside transformers' own processors, and films by these alone, which need torchvision: 8 MB.
torchvision: $(VENV)/.dev $(TORCHVISION_SITE)/.ready
	OMP_NUM_THREADS=1 TORCHVISION_SITE=$(abspath $(TORCHVISION_SITE)) $(BIN)/python -m pytest -p tests.compat.torchvision_site \
	    tests/compat/test_video_processors.py tests/compat/test_film_settings.py tests/compat/test_image_processors.py \
	    tests/compat/test_fallback_films.py

clean:
	rm -rf $(VENV) $(COMPAT_VENV) $(MOONCAKE_SITE) $(TORCHVISION_SITE) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# The stamps say how far the set-up has come.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ...")'
	@echo "setting up $(VENV), which takes some minutes: first $(TORCH)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "installing spmd_encoder with what the demo needs"
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@echo "installing spmd_encoder with what the tests and checks need"
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.demo

# Without its dependencies, most of which are for GPUs: what its receiver imports is listed.
$(COMPAT_VENV)/.ready: tests/compat/requirements.txt
	$(PYTHON) -m venv $(COMPAT_VENV)
	$(COMPAT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23
	$(COMPAT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH) -r tests/compat/requirements.txt
	@touch $@

$(MOONCAKE_SITE)/.ready: $(VENV)/.torch
	$(PIP) --no-deps --target $(MOONCAKE_SITE) $(MOONCAKE)
	@PYTHONPATH=$(MOONCAKE_SITE) $(BIN)/python -c 'import mooncake.engine' || \
	    { echo "Mooncake needs a library of the system: apt-get install libibverbs1 (Debian, Ubuntu)"; exit 1; }
	@touch $@

# Without its dependencies, which are here: its own PyTorch would be a build for GPUs.
$(TORCHVISION_SITE)/.ready: $(VENV)/.torch
	$(PIP) --no-deps --target $(TORCHVISION_SITE) $(TORCHVISION)
	@touch $@
