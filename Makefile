# pd-operator: `make help` lists the targets. Nothing here needs a GPU or Docker; the test cluster needs Linux, root and Go >= 1.26.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV   ?= .venv
PYTHON ?= python3
PY     := $(VENV)/bin/python
ENGINE ?= standin
# The harness, the stand-ins and the demo are packages under tests/.
export PYTHONPATH := $(CURDIR)/operator:$(CURDIR)/tests
# A skipped test is a failure: the plugin tests/plugins/noskip.py turns it into one.
PYTEST := $(PY) -m pytest -p plugins.noskip
# Sessions with real nodes, each a cluster of its own; one where the cluster is given.
SESSIONS := $(if $(PDD_KUBECONFIG)$(PDD_CLUSTER),1,2)
TIERS  := lint test-unit simulate-smoke test-integration test-e2e test-real
STAMP  := $(VENV)/.installed
# uv only writes lock files; what installs from them is pip.
UV     := 0.13.9

.PHONY: help setup tools images runtime packages venv lint generate lock test $(filter test-%,$(TIERS)) simulate-smoke simulate-browser bench demo demo-env demo-down docs clean

help: ## Show this list.
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

setup: venv packages ## Install what is missing: the virtual environment, then Debian packages (as root) for the test cluster.

tools: packages ## Build the test cluster's tools into the cache (minutes, the first time only).
	@$(PY) -m cluster build

images: packages ## The same, the images of the nodes' tests, and the load generator.
	@$(PY) -m cluster build base router standin real operator
	@$(PY) -m loadgen >/dev/null

runtime: packages ## The same for the real engines: vLLM on CPU, LMCache, NIXL, a tiny model.
	@$(PY) -m real build >/dev/null

packages: venv
	@if [[ -z "$${PDD_KUBECONFIG:-}" ]]; then \
	  $(PY) -c 'from cluster import packages as p; p.ensure({**p.NODE_PROGRAMS, **p.IMAGE_PROGRAMS})'; \
	  command -v go >/dev/null || { echo "Go >= 1.26 is not on PATH: it builds the test cluster's tools once (or set PDD_KUBECONFIG)"; exit 1; }; \
	fi

venv: $(STAMP)

$(STAMP): requirements-test.lock requirements-build.lock pyproject.toml
	@echo "== virtual environment $(VENV)" >&2
	@$(PYTHON) -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "$(PYTHON) must be Python >= 3.11 with venv (on Debian: apt-get install python3-venv)"; \
	  test $$(id -u) = 0 && command -v apt-get >/dev/null && apt-get -qq update && apt-get -qq install -y --no-install-recommends python3-venv; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-test.lock -r requirements-build.lock
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

lint: venv ## ruff, mypy --strict, import contracts, and: the generated files are the ones that `make generate` writes.
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(PY) -m generated --check

generate: venv ## Write the generated files: CRDs, the chart's copy of them, the reference pages.
	$(PY) -m generated

lock: venv ## Write the requirements*.lock files anew from pyproject.toml.
	@$(PY) -m pip install --quiet --disable-pip-version-check uv==$(UV)
	@compile() { $(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --custom-compile-command "make lock" "$$@"; }; \
	compile pyproject.toml -o requirements.lock; \
	compile pyproject.toml --extra test --extra docs -c requirements.lock -o requirements-test.lock; \
	compile requirements-build.in -o requirements-build.lock

test: setup ## Everything: lint, unit, integration, e2e and the real engines, with the time of each.
	@start=$$SECONDS; summary=""; \
	for tier in $(TIERS); do \
	  echo; echo "== $$tier (at $$((SECONDS - start)) s)"; begin=$$SECONDS; \
	  $(MAKE) --no-print-directory $$tier || { echo "== $$tier FAILED after $$((SECONDS - begin)) s$$summary"; exit 1; }; \
	  summary+="; $$tier $$((SECONDS - begin)) s"; \
	done; \
	echo; echo "== all passed in $$((SECONDS - start)) s$$summary"

# The tiers are cut by marker, not by folder, so that every test runs in exactly one of them.
test-unit: tools ## Tests without a cluster (helm renders the chart).
	$(PYTEST) -n auto --dist loadfile -m "not cluster and not nodes and not alone and not real"

test-integration: tools ## Tests against a real API server, some with KWOK nodes; two workers, each with clusters of its own.
	$(PYTEST) -n 2 --dist loadfile -m "cluster and not nodes and not alone and not real"

test-e2e: images ## Tests with real kubelets, real routers and stand-in engines; the quick start; the test cluster itself.
	$(PYTEST) -m "alone and not real"
	$(PYTEST) -p plugins.ownnet -n $(SESSIONS) --dist loadfile -m "nodes and not alone and not real"

test-real: images runtime ## Tests with vLLM on CPU, LMCache and NIXL.
	$(PYTEST) -m real

simulate-smoke: venv ## A small comparison in the simulator (minutes), and its report: build/simulate/report.html.
	@rm -rf build/simulate
	@$(PY) -m pd_simulate.cli compare --profile smoke -o build/simulate
	@$(PY) -m pd_simulate.cli report build/simulate -o build/simulate/report.html

simulate-browser: simulate-smoke ## Look at that report in headless Chromium (installed as root): widths, light and dark, print.
	@$(PY) -m browser build/simulate/report.html --pictures build/simulate/pictures

bench: tools ## Reconcile latency at 1 and 200 objects, memory, CPU and API calls of the operator; placement; signals; from backlog to pods; the simulator; clusters of growing size.
	$(PY) -m bench.placement
	$(PY) -m bench
	$(PY) -m bench.signals
	$(PY) -m bench.reaction
	$(PY) -m bench.cold
	$(PY) -m bench.simulate
	$(PY) -m bench.scale

demo: setup ## A cluster, the operator, a model, a request, an answer. ENGINE=vllm runs real vLLM on CPU.
	@$(PY) -m demo up --engine $(ENGINE)

demo-env: venv ## Print shell lines that point kubectl at the demo: eval "$$(make -s demo-env)".
	@$(PY) -m demo env

demo-down: venv ## Remove all that `make demo` made.
	@$(PY) -m demo down

docs: venv ## Build the documentation into site/.
	$(VENV)/bin/mkdocs build --strict --quiet

clean: ## Remove what was built in the checkout (the cache outside it stays).
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache operator/*.egg-info
