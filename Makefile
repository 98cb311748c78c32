# `make demo` and `make test` do everything on a machine with Python, pip, make and a C compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint clean

# The demo installs what a user needs; the tests add the developer's tools.
$(VENV)/demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo]'
	touch $@

$(VENV)/dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/demo
	$(BIN)/tutti world --ranks 2 --device cpu
	$(BIN)/tutti train --recipe lenet --ranks 2 --device cpu

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: lint
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) .venv-mxnet build .mypy_cache .ruff_cache .pytest_cache .hypothesis
