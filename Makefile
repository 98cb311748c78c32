# `make demo` and `make test` do everything on a machine with Python, pip, make and a C compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint docs clean

SHM := src/tutti/comm/shm
SOURCES := setup.py pyproject.toml constraints.txt $(wildcard $(SHM)/core/*) $(wildcard $(SHM)/front/*)
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

# torch comes first, and the build sees it: so the package's compiled parts fit this very torch.
$(VENV)/torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) 'setuptools>=77' numpy torch
	touch $@

# The demo installs what a user needs; the tests add the developer's tools.
$(VENV)/demo: $(VENV)/torch $(SOURCES)
	$(INSTALL) --no-build-isolation --editable '.[demo]'
	touch $@

# timm needs torchvision. An index may have torch for the CPU but torchvision only for CUDA, and
# transformers and Lightning cannot be imported where such a torchvision is installed. So both
# packages get a directory of their own, which only the tests of timm read.
$(VENV)/dev: $(VENV)/torch $(SOURCES)
	$(INSTALL) --no-build-isolation --editable '.[dev]'
	$(INSTALL) --upgrade --no-deps --target $(VENV)/timm timm torchvision
	touch $@

demo: $(VENV)/demo
	$(BIN)/tutti world --ranks 2 --device cpu
	$(BIN)/tutti train --recipe lenet --ranks 2 --device cpu
	rm -rf runs/demo-scale
	$(BIN)/tutti scale --ranks 1,2 --recipe gpt --device cpu --layers 2 --seq-len 64 --batch 8 --steps 10 --repeats 2 --out runs/demo-scale
	$(BIN)/tutti report runs/demo-scale

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: $(VENV)/dev
	$(BIN)/mkdocs build --strict

test: lint
	$(BIN)/python -m compileall -q src  # once, not in each of the hundreds of ranks
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --durations=40

clean:
	rm -rf $(VENV) .venv-mxnet build .mypy_cache .ruff_cache .pytest_cache .hypothesis
