.DEFAULT_GOAL := help
.PHONY: help demo model bench test test-all test-newest test-oldest check docs explainer style digests wheel clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# built after the environment; rebuilt if a file with the dependencies changes
READY := $(VENV)/.ready
# environments with other versions: the newest that setup.cfg allows, and the oldest transformers
NEWEST := .venv-newest
OLDEST := .venv-oldest
# torch of `make test-newest`: it stays pinned, because a newer one may bring gigabytes of GPU libraries
TORCH ?= $(shell grep '^torch==' constraints.txt)
FAST := not slow and not gpu and not browser and not node
# four processes, or fewer on fewer cores; a file runs in one of them; a test may take 15 minutes
PARALLEL := -n logical --maxprocesses 4 --dist loadfile --timeout 900
# tests that use the libraries most
LIBRARY_TESTS := tests/conversion tests/export tests/tokenization tests/train/test_trainer.py \
	$(addprefix tests/test_,$(addsuffix .py,configuration_vanilla_transformer \
	engine_vanilla_transformer generation_vanilla_transformer hub modeling_vanilla_transformer \
	mutants pipeline private_names))

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

demo: $(READY)  ## train, evaluate and translate on the embedded corpus (minutes)
	$(BIN)/vanilla-transformer demo

model: $(READY)  ## train the model of everyday sentences from DATASET with the configuration NAME (an hour)
	@test -n "$(DATASET)" -a -n "$(NAME)" || { echo "DATASET and NAME must be a corpus with English and German and its configuration, got none." >&2; exit 1; }
	$(BIN)/python results/everyday/select_pairs.py $(DATASET) $(NAME) data/everyday
	$(BIN)/vanilla-transformer train everyday
	$(BIN)/vanilla-transformer evaluate runs/everyday
	$(BIN)/python results/everyday/release.py runs/everyday runs/everyday-fp16 \
		--near data/everyday en-de $(if $(FAR),--far $(FAR)) $(if $(SOURCES),--sources $(SOURCES))

bench: $(READY)  ## measure this package and other toolkits (10 minutes or more)
	$(BIN)/python -m vanilla_transformer.benchmarks

test: $(READY)  ## run the fast tests: no GPU, no browser, no Node.js, no slow test
	$(BIN)/python -m pytest $(PARALLEL) -m "$(FAST)"

test-newest: $(NEWEST)/.ready  ## test the newest library versions that setup.cfg allows
	$(NEWEST)/bin/python -m pytest $(PARALLEL) -m "$(FAST)" $(LIBRARY_TESTS)

test-oldest: $(OLDEST)/.ready  ## test the oldest transformers that setup.cfg allows
	$(OLDEST)/bin/python -m pytest $(PARALLEL) -m "$(FAST)" $(LIBRARY_TESTS)

test-all: $(READY)  ## run every test that this machine can run
	$(BIN)/python -m pytest

# without TRF057: the docstrings that the library would generate are complete for its own models only
check: $(READY)  ## check formatting, lint, types, and transformers' lint of model files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	mkdir -p $(VENV)/package
	ln -sfn ../.. $(VENV)/package/vanilla_transformer
	$(BIN)/mypy
	sed '/^\[rules.TRF057\]/,/^default_enabled/s/^default_enabled = true/default_enabled = false/' \
		$$($(BIN)/python -c 'import mlinter; print(*mlinter.__path__)')/rules.toml > $(VENV)/rules.toml
	$(BIN)/mlinter --no-cache --no-progress --rules-toml $(VENV)/rules.toml \
		configuration_vanilla_transformer.py generation_vanilla_transformer.py \
		modeling_vanilla_transformer.py \
		tokenization/tokenization_vanilla_transformer.py \
		tests/tokenization/test_tokenization_vanilla_transformer.py

docs: $(READY)  ## build the documentation in site/; a broken link is an error
	$(BIN)/python -m mkdocs build --strict

explainer:  ## build the page that `vanilla-transformer explain` serves; needs Node.js
	@command -v npm > /dev/null || { echo "Node.js with npm is needed to build the page, got none." >&2; exit 1; }
	cd explainer/web && npm ci --ignore-scripts --no-audit --no-fund && npm run build

style: $(READY)  ## format, and apply the lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

digests: $(READY)  ## record the model code for the inference engine, after a change of the model
	$(BIN)/python tests/digests.py
	$(BIN)/ruff format .

wheel: $(READY)  ## build a wheel in dist/
	rm -rf build dist
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

clean:  ## remove environments and build files
	rm -rf $(VENV) $(NEWEST) $(OLDEST) build dist site explainer/web/dist explainer/web/node_modules *.egg-info .mypy_cache .pytest_cache .ruff_cache

$(READY): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed, got $$($(PYTHON) --version); name one with PYTHON=." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt setuptools wheel
	$(BIN)/python -m pip install --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

$(NEWEST)/.ready: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install setuptools wheel
	$(NEWEST)/bin/python -m pip install --no-build-isolation --editable '.[dev]' '$(TORCH)'
	touch $@

$(OLDEST)/.ready: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST)
	sed '/^transformers==/d' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install setuptools wheel
	$(OLDEST)/bin/python -m pip install --constraint $(OLDEST)/constraints.txt --no-build-isolation \
		--editable '.[dev]' "$$(sed -n 's/^ *transformers>=\([0-9.]*\),.*/transformers==\1.*/p' setup.cfg)"
	touch $@
