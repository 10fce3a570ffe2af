# `make demo` and `make test` need only python3 (with venv) and make: they set up everything else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test format bench clean

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

demo: $(STAMP)
	$(BIN)/compactattn demo --out demo

test: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(STAMP)
	$(BIN)/python -m benchmarks.weights
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.report

clean:
	rm -rf $(VENV) demo .pytest_cache .mypy_cache .ruff_cache
