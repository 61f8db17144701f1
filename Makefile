# The two commands of README.md, and the checks CI runs. Everything they need goes into .venv.
PYTHON ?= python3.11
BIN = .venv/bin

sync: .venv/ready  ## The main job on real upstream code: replay, verify, export
	$(BIN)/forkman sync megatron megatron-bridge sglang

test: .venv/ready  ## All tests
	$(BIN)/pytest --numprocesses auto

lint: .venv/ready  ## Style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: .venv/ready  ## Replay against git, recipes against reading the same files
	$(BIN)/python benchmarks/bench_replay.py
	$(BIN)/python benchmarks/bench_recipe.py

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test,lint]'
	touch $@

.PHONY: sync test lint bench
