# The first two commands of a new user; each is safe to run first.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin

.PHONY: setup train test lint clean

setup: $(VENV)/.installed

# torch goes in first: on its own it resolves to the smallest build that the index offers.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

train: setup
	$(BIN)/unisono run -n 2 examples/train_gpt.py

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist src/*.egg-info
