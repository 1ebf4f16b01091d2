# The commands of this repository; `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_JOBS ?= 2
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check --progress-bar off -c constraints.txt
ARGS =

# Nothing here calls home: Dagster's telemetry and the update check of `dg` are off.
export DAGSTER_DISABLE_TELEMETRY := yes
export DAGSTER_DG_UPDATE_CHECK_ENABLED := 0

# Two workers on two cores: libraries that start a thread per core each would only fight.
TEST_ENV := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MPLBACKEND=Agg PYTHONFAULTHANDLER=1
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-lm serve ui replay-year test chaos test-fast lint format bench-join bench-serve bench-trainer bench-restart clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## make the environment in .venv from constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@sh scripts/check_python.sh $(PYTHON)
	@echo "installing the pinned environment into $(VENV) (a few minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) pip setuptools wheel
	@$(PIP) 'torch==2.13.0' ninja
	@DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed
	@$(PIP) --build-constraint constraints.txt -e '.[cluster,train,bench,dev]'
	@touch $@

demo: $(STAMP) ## a year of flights to a judged model and an explained prediction, through Dagster
	@$(BIN)/python -m assets.demo $(ARGS)

demo-lm: $(STAMP) ## a language model of the standard library on two nodes, judged against compressors, through Dagster
	@$(BIN)/python -m assets.demo_lm $(ARGS)

serve: $(STAMP) ## answer over HTTP with the promoted model on http://127.0.0.1:8080 (ARGS="--port N")
	@exec $(BIN)/headway serve $(ARGS)

ui: $(STAMP) ## Dagster's UI and daemon on http://127.0.0.1:3000 (ARGS="--port N")
	@exec $(BIN)/headway ui $(ARGS)

replay-year: $(STAMP) ## September to December through the whole loop, and a report (after make demo)
	@$(BIN)/python -m assets.replay_year $(ARGS)

test: lint ## everything: lint, types, layers, then every test
	@sh scripts/ensure_system.sh
	$(PYTEST) --hypothesis-profile=ci $(ARGS)

chaos: $(STAMP) ## kill, stop and starve every process (SEED=n STEPS=200; the seed is printed)
	@sh scripts/ensure_system.sh
	@PYTHONPATH=.:tests $(TEST_ENV) $(BIN)/python -m chaos.run $(if $(SEED),--seed $(SEED)) $(if $(STEPS),--steps $(STEPS))

test-fast: $(STAMP) ## the inner loop: unit tests that are not marked slow
	$(PYTEST) -m "not slow" tests/unit $(ARGS)

lint: $(STAMP) ## ruff, format, pyright, import layers, declarations
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/pyright --warnings
	$(BIN)/lint-imports --no-logo
	$(BIN)/dg check yaml

format: $(STAMP) ## rewrite the sources in the house format
	$(BIN)/ruff check --fix --quiet
	$(BIN)/ruff format --quiet

bench-join: $(STAMP) ## point-in-time join against pandas, polars and DuckDB
	$(BIN)/python -m benchmarks.bench_join $(ARGS)

bench-serve: $(STAMP) ## serving against a bare ASGI echo, latency, online reads (after make demo)
	$(BIN)/python -m benchmarks.bench_serve $(ARGS)

bench-trainer: $(STAMP) ## our loop, saves, scaling and restart against bare torch (ARGS="--quick", "--part scaling")
	$(BIN)/python -m benchmarks.bench_trainer $(ARGS)

bench-restart: $(STAMP) ## a killed node to the first new step by phase, here and on a cluster (after make demo)
	$(BIN)/python -m benchmarks.bench_restart $(ARGS)

clean: ## remove the environment, caches and local state
	rm -rf $(VENV) .headway .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
