# What a newcomer, a developer and CI run. Each target sets up what it needs in .venv; repeats are quick, because a
# stamp remembers what was installed. Another interpreter: make demo PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
PYTEST_ARGS ?=
BENCH_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-kubernetes lint bench bench-autoscaler bench-load bench-resume clean

help:
	@echo "make demo    a function from zero to tokens and back, with a kill in between (no GPU, no account)"
	@echo "make test    install, lint, types, import rules and the tests (PYTEST_ARGS='-k name' selects)"
	@echo "make test-kubernetes  its tests on Kubernetes alone (STOKER_TEST_KUBECONFIG=... against a real API server)"
	@echo "make lint    ruff, mypy --strict, import rules"
	@echo "make bench   the measured figures, peers side by side (BENCH_ARGS='--help' tells more)"
	@echo "make bench-resume  a request taken up again: its KV loaded, recomputed, and what the plan chooses"
	@echo "make bench-autoscaler  what Stoker and other autoscalers would cost on recorded traffic (up to an hour)"
	@echo "make bench-load    checkpoints from page cache, disk and object store, beside other loaders; first token while loading; the whole cold path"
	@echo "make clean   remove .venv, caches and builds"

demo: $(VENV)/.runtime
	@$(BIN)/stoker demo

test: lint
	$(BIN)/python -m tests.support.hearing -n 3 --dist loadfile --no-loadscope-reorder --durations=25 --durations-min=3 $(PYTEST_ARGS)

# The whole of Kubernetes: against the tests' own API server, or any real one with a scheduler and a controller manager and
# no kubelets: make test-kubernetes STOKER_TEST_KUBECONFIG=path/of/config
test-kubernetes: $(VENV)/.development
	$(BIN)/python -m pytest tests/kubernetes $(PYTEST_ARGS)

lint: $(VENV)/.development
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.development
	$(BIN)/python -m tests.benchmarks $(BENCH_ARGS)

bench-resume: $(VENV)/.development
	$(BIN)/python -m tests.benchmarks resume $(BENCH_ARGS)

bench-load: $(VENV)/.development
	$(BIN)/python -m tests.benchmarks load_checkpoint cold_path $(BENCH_ARGS)

bench-autoscaler: $(VENV)/.development
	$(BIN)/python -m tests.benchmarks autoscaler $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11: name a newer one, make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) cannot make a venv: install its venv package (Debian: apt install python3-venv)"; rm -rf $(VENV); exit 1; }

$(VENV)/.runtime: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (the first time this takes a few minutes, most of it torch)"
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.development: $(VENV)/.runtime
	$(PIP) -e '.[test]'
	@touch $@
