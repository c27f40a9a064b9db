# Every target sets up what it needs: a .venv with the versions that were tested (constraints.txt).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help setup test lint demo bench clean

help:            ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

setup: $(VENV)/.ready   ## make .venv and install wavetrain with all it needs

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,solve,hf]'
	touch $@

lint: setup      ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint       ## lint, then all tests
	$(BIN)/python -m pytest -n 2

demo: setup      ## plan for this machine, train a small GPT for a minute in two ranks with zero-bubble waves, draw its timeline
	rm -rf out/demo out/profile
	$(BIN)/wavetrain profile --model examples/demo.toml --micro-batches 1 2 4 8 --out out/profile
	$(BIN)/wavetrain plan --model examples/demo.toml --cluster "1 x 2 x CPU-core" --global-batch 16 --profiles out/profile \
		--pp 2 --schedules zb-wave --out out/plan.toml
	$(BIN)/wavetrain train out/plan.toml --minutes 1 --lr 0.003 --out out/demo
	@echo "open out/demo/timeline.html: the step as measured, and as predicted from its actions, on one axis"
	@echo "go on with it: $(BIN)/wavetrain train --resume --out out/demo --minutes 2"

bench: setup     ## run every benchmark and write benchmarks/RESULTS.md
	$(BIN)/python benchmarks/run.py

clean:           ## remove what the other targets made
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis
