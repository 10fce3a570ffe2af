# `make demo` and `make test` need only python3 (with venv) and make: they set up everything else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PLAIN := $(VENV)/.installed
STAMP := $(VENV)/.installed-dev
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -e
GPU_WORKERS ?= 12

.PHONY: demo test test-gpu gpu browser format bench bench-gpu clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(PLAIN): pyproject.toml | $(BIN)/python
	$(INSTALL) .
	touch $@

$(STAMP): pyproject.toml | $(BIN)/python
	$(INSTALL) ".[dev]"
	touch $@ $(PLAIN)

demo: $(PLAIN)
	$(BIN)/compactattn demo --out demo

test: $(STAMP) browser
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

# needs a GPU: random shapes of every kernel against float64, repeats, CUDA graphs, memory, compilation
test-gpu: gpu $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest gpu_tests -n $(GPU_WORKERS) --dist worksteal

gpu:
	@command -v nvidia-smi >/dev/null || { echo "this needs an NVIDIA GPU, and there is no nvidia-smi here; run it where one is" >&2; exit 1; }

# a test opens the report in a real browser; where none can be installed here, it says what to do
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || true

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(STAMP)
	$(BIN)/python -m benchmarks.weights
	$(BIN)/python -m benchmarks.attention
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.mixers
	$(BIN)/python -m benchmarks.preparation
	$(BIN)/python -m benchmarks.report

# times the fused kernels beside their peers; each bench stops by itself after its --minutes, 35 in all
bench-gpu: gpu $(STAMP)
	$(INSTALL) ".[gpu]"
	$(BIN)/compactattn bench attention
	$(BIN)/compactattn bench training
	$(BIN)/compactattn bench decode
	$(BIN)/python -m benchmarks.small_models
	$(BIN)/python -m benchmarks.report

clean:
	rm -rf $(VENV) demo .pytest_cache .mypy_cache .ruff_cache
