# Dragoman: `make demo` to see it work, `make test` to check it. Everything is installed into .venv only.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test lint format

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@echo "setting up .venv (a minute or two the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/dragoman demo

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
