# Needs Python 3.11 to 3.14 with pip, and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
ARGS ?=
OLDEST_PYTHON ?= python3.11
NEWEST_PYTHON ?= python3.14
SIDE_BY_SIDE := --numprocesses=auto --maxprocesses=4 # tests that need no Ray do not disturb each other

.DEFAULT_GOAL := help
.PHONY: help install train test unit chaos s3 gpu hosts loggers compat compat-with lint format docs bench soak clean

help: ## list what there is to make
	@grep -hE '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9]+):.*## (.*)/  make \1	\2/' | expand -t 18

install: $(VENV)/.installed ## make .venv and install elastic_ddp into it

train: $(VENV)/.installed ## run the main job; its arguments go into ARGS="..."
	$(VENV)/bin/python examples/train.py $(ARGS)

test: lint docs ## lint, build the docs, then run the tests without those of `make chaos`
	$(VENV)/bin/python -m pytest tests/unit tests/s3 $(SIDE_BY_SIDE) $(ARGS)
	$(VENV)/bin/python -m pytest tests/integration tests/chaos tests/gpu $(ARGS)

unit: $(VENV)/.installed-dev ## the tests that need no Ray, in minutes
	$(VENV)/bin/python -m pytest tests/unit $(SIDE_BY_SIDE) $(ARGS)

chaos: $(VENV)/.installed-dev ## more faults, sizes and examples than `make test` has
	$(VENV)/bin/python -m pytest -m chaos $(ARGS)

s3: $(VENV)/.installed-dev ## commits on a real S3 server, Ceph's from Debian's packages, which it starts and ends
	$(VENV)/bin/python -m pytest tests/s3 -m s3 $(ARGS)

gpu: $(VENV)/.installed-dev ## what needs a GPU, in 14 minutes; ARGS=--dry-run checks its commands without one
	$(VENV)/bin/python benchmarks/gpu_session.py $(ARGS)

hosts: .venv-hosts/.installed ## the guides to clusters over ssh and to Slurm, on machines made of namespaces
	.venv-hosts/bin/python -m pytest tests/chaos/test_own_machines.py tests/chaos/test_slurm.py \
		-m "chaos or not chaos" --durations=0 --durations-min=1 -rP $(ARGS)

loggers: .venv-loggers/.installed ## loggers, metrics and jobs with real W&B, MLflow, Prometheus and Ray's job server
	.venv-loggers/bin/python -m pytest -m "chaos or not chaos" tests/unit/loggers/test_trackers.py \
		tests/unit/benchmarks/test_scaling_benchmark.py tests/chaos/test_loggers.py tests/chaos/test_prometheus.py \
		tests/chaos/test_submit.py $(ARGS)

compat: ## the unit tests and a short elastic run with the oldest and the newest versions, 6 GB each in .venv-compat-*
	$(MAKE) compat-with PYTHON=$(OLDEST_PYTHON) VENV=.venv-compat-oldest VERSIONS="--resolution lowest-direct"
	$(MAKE) compat-with PYTHON=$(NEWEST_PYTHON) VENV=.venv-compat-newest VERSIONS="--upgrade"

compat-with: $(VENV)/.made
	$(VENV)/bin/python -m pip install --quiet uv
	$(VENV)/bin/uv pip install --quiet --python $(VENV)/bin/python $(VERSIONS) --editable '.[docs,test]'
	$(VENV)/bin/python -m pytest tests/unit $(SIDE_BY_SIDE) $(ARGS)
	$(VENV)/bin/python -m pytest tests/integration/test_run.py -m chaos -k a_replacement_joins $(ARGS)

lint: $(VENV)/.installed-dev ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/.installed-dev ## let ruff fix what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(VENV)/.installed-dev ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet

bench: $(VENV)/.installed-dev ## measure what data, steps, commits and changes of membership cost here
	$(VENV)/bin/python benchmarks/main_job.py
	$(VENV)/bin/python benchmarks/data.py
	$(VENV)/bin/python benchmarks/steps.py
	$(VENV)/bin/python benchmarks/elasticity.py
	$(VENV)/bin/python benchmarks/rendezvous.py
	$(VENV)/bin/python benchmarks/checkpoint.py
	$(VENV)/bin/python benchmarks/interval.py

soak: $(VENV)/.installed-dev ## train for twenty minutes while something happens every twenty seconds
	$(VENV)/bin/python benchmarks/soak.py $(ARGS)

clean: ## remove .venv, every cache and what was built
	rm -rf $(VENV) .venv-compat-* .venv-hosts .venv-loggers .mypy_cache .pytest_cache .ruff_cache .hypothesis dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps say what .venv holds; they are older than pyproject.toml or constraints.txt once either has changed.
$(VENV)/.installed: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing elastic_ddp into $(VENV); the first time this takes a minute or two"
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[report]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing elastic_ddp and its tests' tools into $(VENV); the first time this takes a minute or two"
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(VENV)/.installed $@

# The packages of $(VENV), and those that only nodes of a cluster need: with them, each Ray starts a dashboard.
.venv-hosts/.installed: $(VENV)/.installed-dev
	rm -rf .venv-hosts
	$(VENV)/bin/python -c 'from pathlib import Path; from tests.chaos.machines import make_venv; make_venv(Path(".venv-hosts"))'
	.venv-hosts/bin/pip install --quiet --constraint constraints.txt boto3 editables hatchling 'ray[default]'
	@touch $@

# Without constraints.txt: MLflow needs an older pyarrow.
.venv-loggers/.installed: $(VENV)/.installed-dev
	rm -rf .venv-loggers
	$(VENV)/bin/python -c 'from pathlib import Path; from tests.chaos.machines import make_venv; make_venv(Path(".venv-loggers"))'
	.venv-loggers/bin/pip install --quiet grafana-foundation-sdk matplotlib mlflow --editable '.[cluster,loggers]'
	@touch $@

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON); install Python 3.11 to 3.14, or name one: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 14) else "$(PYTHON) is Python %d.%d, and elastic_ddp needs 3.11 to 3.14; name one: make PYTHON=python3.12 ..." % v)'
	@# Debian has Python without ensurepip, and pip beside it.
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(VENV); \
	else $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(VENV)/bin/python install --quiet pip; fi
	@touch $@
