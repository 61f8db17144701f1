# The two commands of README.md, and the checks CI runs. Everything they need goes into .venv, and
# into .venv-npu for what needs torch.
PYTHON ?= python3.11
BIN = .venv/bin

sync: .venv/ready  ## The main job on real upstream code: replay, verify, export
	$(BIN)/forkman sync megatron megatron-bridge sglang

test: test-forkman test-npu  ## All tests

test-forkman: .venv/ready  ## The tool's tests
	$(BIN)/pytest --numprocesses auto --ignore tests/npu

test-npu: .venv-npu/ready  ## The runtime's and the examples', on simulated NPUs
	.venv-npu/bin/pytest --numprocesses auto --dist loadfile tests/npu

lint: .venv/ready  ## Style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: .venv/ready .venv-npu/ready  ## Replay against git, recipes against reading, the simulator
	$(BIN)/python benchmarks/bench_replay.py
	$(BIN)/python benchmarks/bench_recipe.py
	.venv-npu/bin/python -W ignore benchmarks/bench_simulator.py --check

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test,lint]'
	touch $@

.venv-npu/ready: pyproject.toml tests/npu/requirements.txt
	$(PYTHON) -m venv .venv-npu
	.venv-npu/bin/pip install --quiet --disable-pip-version-check --no-deps -r tests/npu/requirements.txt
	.venv-npu/bin/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

.PHONY: sync test test-forkman test-npu lint bench
