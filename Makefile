.DEFAULT_GOAL := help
.PHONY: help demo bench test test-all check style digests wheel clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# what the environment was built from: a change to any of them builds it again
READY := $(VENV)/.ready

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

demo: $(READY)  ## train, evaluate and translate on the embedded corpus, in minutes
	$(BIN)/vanilla-transformer demo

bench: $(READY)  ## this package beside its peers, in ten minutes or more
	$(BIN)/python -m vanilla_transformer.benchmarks

test: $(READY)  ## the tests that need no GPU, browser or many minutes
	$(BIN)/python -m pytest -m "not slow and not gpu and not browser"

test-all: $(READY)  ## every test this machine can run
	$(BIN)/python -m pytest

check: $(READY)  ## formatting, lint, and the library's own lint of model files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mlinter --no-cache --no-progress configuration_vanilla_transformer.py \
		generation_vanilla_transformer.py modeling_vanilla_transformer.py \
		tokenization/tokenization_vanilla_transformer.py \
		tests/test_tokenization_vanilla_transformer.py

style: $(READY)  ## format, and mend what lint can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

digests: $(READY)  ## after a change of the model: note the code that the search engine computes
	$(BIN)/python tests/digests.py

wheel: $(READY)  ## a wheel for a release, in dist/
	rm -rf build dist
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

clean:  ## remove the environment and what builds leave behind
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache

$(READY): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed, got $$($(PYTHON) --version); name one with PYTHON=." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt setuptools wheel
	$(BIN)/python -m pip install --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@
