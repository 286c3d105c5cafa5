# deltapost: `make help` lists the targets. Everything is installed into .venv from the versions in constraints.txt.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
ARGS ?=
SEEDS ?= 1000
FIRST_SEED ?= 0
COMPOSE := docker compose -f docker/compose.yaml

# Tests that share a server with fixed ports are in one xdist group, so that one process runs them all. Many
# wait for leases and time-outs: three processes keep two cores busy.
SPREAD := -n 3 --dist loadgroup

# A stamp is newer than what it was installed from, or the target installs again.
DEV_STAMP := $(VENV)/.installed-dev
DEMO_STAMP := $(VENV)/.installed-demo

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all sim golden-all mutants lint check bench bench-table bench-close bench-limit bench-files \
	bench-mean bench-encode bench-job bench-intake bench-announcement \
	bench-curves bench-billion bench-liars bench-takeover load soak up down \
	learner migrate constraints clean

help: ## Lists the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(DEV_STAMP) ## Makes .venv with everything that tests and checks need.

demo: $(DEMO_STAMP) ## Four learners train a real model through it all. ARGS="--rounds 6" passes options on.
	@$(BIN)/deltapost demo $(ARGS)

test: $(DEV_STAMP) ## The tests, without the long matrices.
	$(BIN)/pytest $(SPREAD) -m "not slow" $(ARGS)

test-all: $(DEV_STAMP) ## All tests, the long matrices too.
	$(BIN)/pytest $(SPREAD) -m "" $(ARGS)

sim: $(DEV_STAMP) ## The simulator: SEEDS=1000 stories from FIRST_SEED=0 on, on all cores.
	@PYTHONPATH=tests $(BIN)/python -m simulator --seeds $(SEEDS) --first-seed $(FIRST_SEED) $(ARGS)

golden-all: $(DEV_STAMP) ## Golden vectors on every compiler, Python and processor to be had. ARGS="--every 13" is a sample.
	@PYTHONPATH=tests $(BIN)/python -m outer_step.golden_all $(ARGS)

mutants: $(DEV_STAMP) ## Takes each mechanism out once; somebody has to notice. Writes docs/mutants.md.
	@PYTHONPATH=tests $(BIN)/python -m mutants $(ARGS)

lint: $(DEV_STAMP) ## Formatting, lint and types.
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

check: lint test ## What a change has to pass before it is committed.

bench: $(DEV_STAMP) ## The benchmarks of README's table, 15 minutes. ARGS="--record" keeps the results.
	@$(BIN)/python benchmarks/every.py $(ARGS)

bench-table: $(DEV_STAMP) ## Writes README's table from the newest records.
	@$(BIN)/python benchmarks/table.py --write

bench-close: $(DEV_STAMP) ## Closing a round beside gradientmail 0.0.2 (needs Python 3.12 or newer for it).
	@$(BIN)/python benchmarks/close.py $(ARGS)

bench-limit: $(DEV_STAMP) ## Closing a round over what moving its bytes takes.
	@$(BIN)/python benchmarks/limit.py $(ARGS)

bench-files: $(DEV_STAMP) ## Closing a round from verified payload files beside gradientmail 0.0.2.
	@$(BIN)/python benchmarks/files.py $(ARGS)

bench-mean: $(DEV_STAMP) ## A weighted mean beside Flower's.
	@$(BIN)/python benchmarks/mean.py $(ARGS)

bench-encode: $(DEV_STAMP) ## Encoding with error feedback beside torch and the memory's limit.
	@$(BIN)/python benchmarks/encode.py $(ARGS)

bench-announcement: $(DEV_STAMP) ## From a round's last envelope to its announcement, over its parts alone.
	@$(BIN)/python benchmarks/announcement.py $(ARGS)

bench-curves: $(DEV_STAMP) ## Time and memory over learners, elements, fragments and aggregators, drawn.
	@$(BIN)/python benchmarks/curves.py $(ARGS)

bench-billion: $(DEV_STAMP) ## Two rounds of a billion parameters, over its parts; not in bench. 24 GB RAM, 40 GB disk.
	@$(BIN)/python benchmarks/billion.py $(ARGS)

bench-job: $(DEV_STAMP) ## The whole job beside gradientmail 0.0.2: last upload to aligned, S3 requests a round.
	@$(BIN)/python benchmarks/job.py $(ARGS)

bench-intake: $(DEV_STAMP) ## Envelopes taken in per second beside a bare loop. ARGS="--record" keeps the result.
	@$(BIN)/python benchmarks/intake.py $(ARGS)

bench-liars: $(DEV_STAMP) ## Two liars of eight against every merge rule. ARGS="--record" keeps the result.
	@$(BIN)/python benchmarks/liars.py $(ARGS)

bench-takeover: $(DEV_STAMP) ## Two aggregators beside one, and one of them killed. ARGS="--record" keeps the result.
	@$(BIN)/python benchmarks/takeover.py $(ARGS)

load: $(DEV_STAMP) ## Five minutes of a thousand learners on real servers. ARGS="--record load" keeps the result.
	@$(BIN)/python benchmarks/load.py $(ARGS)

soak: $(DEV_STAMP) ## The same for two hours.
	@$(BIN)/python benchmarks/load.py --minutes 120 $(ARGS)

up: ## Starts Valkey, an S3 server, Postgres, aggregator and ledger in containers.
	$(COMPOSE) up --build --detach --wait

down: ## Stops them; their data stays in volumes.
	$(COMPOSE) down

learner: ## Lets ID learn in RUN in those containers, and prints its settings. ROLE=creator may create the run.
	@$(COMPOSE) run --rm --no-deps --entrypoint grant secrets $(or $(ROLE),learner) $(ID) $(RUN)
	@$(COMPOSE) kill --signal SIGHUP objects >&2
	@$(COMPOSE) exec -T valkey sh -c 'valkey-cli --no-auth-warning -u "$$(cat /server-secrets/valkey-operator)" ACL LOAD' >&2

migrate: $(DEMO_STAMP) ## Brings the database of DELTAPOST_LEDGER_URL to this release's tables.
	$(BIN)/deltapost ledger migrate $(ARGS)

constraints: $(DEV_STAMP) ## Writes constraints.txt from what .venv holds.
	$(BIN)/python -m pip --disable-pip-version-check list --format=freeze --exclude-editable > $(VENV)/installed.txt
	{ head -n 1 constraints.txt; \
	  awk -F '==' '{ name = tolower($$1); gsub(/[_.]/, "-", name); sub(/\+.*/, "", $$2); print name "==" $$2 }' $(VENV)/installed.txt \
	  | grep -v -E '^(deltapost|pip|setuptools)==' | LC_ALL=C sort; } > $(VENV)/constraints.txt
	mv $(VENV)/constraints.txt constraints.txt

clean: ## Removes .venv, builds and caches.
	rm -rf $(VENV) build dist shared/*.egg-info *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The interpreter is looked for only when .venv has to be made: PYTHON=... names one.
$(BIN)/python:
	@python=; \
	for candidate in $(if $(PYTHON),'$(PYTHON)',python3 python3.14 python3.13 python3.12 python3.11); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo 'deltapost needs Python 3.11 or newer and found none. Name one: make PYTHON=/path/to/python3.12 ...' >&2; exit 1; \
	fi; \
	"$$python" -m venv --clear $(VENV) || { \
	  rm -rf $(VENV); \
	  echo "$$python cannot make a virtual environment (on Debian and Ubuntu: install python3-venv)." >&2; exit 1; \
	}

INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
DOWNLOAD = echo "Installing $(1) into $(VENV). The first time this downloads about $(2) MB with torch's CPU build \
	(macOS: 100 MB less), or 3 GB where pip takes the CUDA build: README.md says how to choose."

# The kernels are compiled at the installation: other sources need another one.
KERNELS = $(wildcard shared/deltapost/adapters/kernels/*.[ch])

$(DEV_STAMP): pyproject.toml constraints.txt $(KERNELS) | $(BIN)/python
	@$(call DOWNLOAD,everything for development,450)
	@$(INSTALL) -e '.[dev]'
	@touch $(DEMO_STAMP) $@

# Whoever has the development install has the demo's too: both stamps are set there.
$(DEMO_STAMP): pyproject.toml constraints.txt $(KERNELS) | $(BIN)/python
	@$(call DOWNLOAD,what the demo needs,260)
	@$(INSTALL) -e '.[demo]'
	@touch $@
