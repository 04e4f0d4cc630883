.DEFAULT_GOAL := help
.PHONY: help demo bench test test-all test-newest test-oldest check style digests wheel clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# what the environment was built from: a change to any of them builds it again
READY := $(VENV)/.ready
# environments with other versions: the newest that setup.cfg allows, and the oldest transformers
NEWEST := .venv-newest
OLDEST := .venv-oldest
FAST := not slow and not gpu and not browser
# the tests that use the libraries most
LIBRARY_TESTS := $(addprefix tests/test_,$(addsuffix .py,configuration_vanilla_transformer \
	conversion engine_vanilla_transformer export generation_vanilla_transformer hub \
	modeling_vanilla_transformer mutants pipeline private_names tokenization_vanilla_transformer \
	train_trainer))

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

demo: $(READY)  ## train, evaluate and translate on the embedded corpus, in minutes
	$(BIN)/vanilla-transformer demo

bench: $(READY)  ## this package beside its peers, in ten minutes or more
	$(BIN)/python -m vanilla_transformer.benchmarks

test: $(READY)  ## the tests that need no GPU, browser or many minutes
	$(BIN)/python -m pytest -m "$(FAST)"

test-newest: $(NEWEST)/.ready  ## tests of the libraries, with the newest versions that setup.cfg allows
	$(NEWEST)/bin/python -m pytest -m "$(FAST)" $(LIBRARY_TESTS)

test-oldest: $(OLDEST)/.ready  ## the same, with the oldest transformers that setup.cfg allows
	$(OLDEST)/bin/python -m pytest -m "$(FAST)" $(LIBRARY_TESTS)

test-all: $(READY)  ## every test this machine can run
	$(BIN)/python -m pytest

# without TRF057: the docstrings that the library would generate are complete for its own models only
check: $(READY)  ## formatting, lint, and the library's own lint of model files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	sed '/^\[rules.TRF057\]/,/^default_enabled/s/^default_enabled = true/default_enabled = false/' \
		$$($(BIN)/python -c 'import mlinter; print(*mlinter.__path__)')/rules.toml > $(VENV)/rules.toml
	$(BIN)/mlinter --no-cache --no-progress --rules-toml $(VENV)/rules.toml \
		configuration_vanilla_transformer.py generation_vanilla_transformer.py \
		modeling_vanilla_transformer.py \
		tokenization/tokenization_vanilla_transformer.py \
		tests/test_tokenization_vanilla_transformer.py

style: $(READY)  ## format, and mend what lint can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

digests: $(READY)  ## after a change of the model: note the code that the search engine computes
	$(BIN)/python tests/digests.py
	$(BIN)/ruff format .

wheel: $(READY)  ## a wheel for a release, in dist/
	rm -rf build dist
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

clean:  ## remove the environment and what builds leave behind
	rm -rf $(VENV) $(NEWEST) $(OLDEST) build dist *.egg-info .pytest_cache .ruff_cache

$(READY): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed, got $$($(PYTHON) --version); name one with PYTHON=." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt setuptools wheel
	$(BIN)/python -m pip install --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

# torch stays pinned: the newest may come with gigabytes for a GPU
$(NEWEST)/.ready: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install setuptools wheel
	$(NEWEST)/bin/python -m pip install --no-build-isolation --editable '.[dev]' \
		"$$(grep '^torch==' constraints.txt)"
	touch $@

$(OLDEST)/.ready: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST)
	sed '/^transformers==/d' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install setuptools wheel
	$(OLDEST)/bin/python -m pip install --constraint $(OLDEST)/constraints.txt --no-build-isolation \
		--editable '.[dev]' "$$(sed -n 's/^ *transformers>=\([0-9.]*\),.*/transformers==\1.*/p' setup.cfg)"
	touch $@
