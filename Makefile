# Each target sets itself up from nothing. Only Python 3.11 or newer is needed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test slow lint format bench train clean

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable . --group dev
	touch $(READY)

demo: $(READY)  ## show and check everything on the embedded model
	$(BIN)/statecore demo

test: $(READY)  ## run the tests
	$(BIN)/python -m pytest -m 'not slow' -n auto --maxprocesses 4 --dist loadfile

slow: $(READY)  ## run the tests that take minutes
	$(BIN)/python -m pytest -m slow

lint: $(READY)  ## style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## measure; see bench/
	$(BIN)/python -m bench

train: $(READY)  ## train the embedded model anew, about an hour on 2 cores
	$(BIN)/python examples/train_tiny.py --output statecore/models/weights/tiny_hybrid.safetensors

clean:
	rm -rf .venv .cache dist build
