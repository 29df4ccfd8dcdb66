# Every target sets up what it needs: each works as the first command on a fresh clone.
PYTHON ?= python3
TORCH  ?=
# Another release of torch than the pinned one (make test TORCH=2.8.0) gets an environment of its own.
VENV   := .venv$(addprefix -torch-,$(TORCH))
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PINS   := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)

.PHONY: help demo test stable browser lint check docs docs-links docs-examples dist dist-check sdist-check \
        search explore conformance accelerator-check bench bench-peers fuzz soak kills clean
.DEFAULT_GOAL := help

help:
	@echo "make demo                train a model that is split over three workers on this machine; with DASHBOARD=1"
	@echo "                         it trains longer, and the dashboard shows it"
	@echo "make test                run the whole test suite, in TEST_PROCESSES (4) processes; with TORCH=2.8.0 on that release"
	@echo "make stable              run it STABLE_RUNS (20) times, until one fails"
	@echo "make browser             install a Chromium for the tests of the dashboard, if there is none and you are root"
	@echo "make lint                check format, lint, types and layers"
	@echo "make check               run make lint and the fast tests"
	@echo "make docs                build the documentation into docs/_build/html"
	@echo "make docs-links          look for dead links to other sites; needs a network"
	@echo "make docs-examples       run EXAMPLES (all) and store their output for the documentation"
	@echo "make dist                build and check the wheel and the source distribution, in dist"
	@echo "make dist-check          also run the README's program with that wheel alone in a new environment"
	@echo "make sdist-check         unpack the source distribution and run its test suite in a new environment"
	@echo "make bench               measure gradwire and torch in turns, as ratios: calls and autograd"
	@echo "make bench-peers         measure gradwire, torch, Ray and Monarch in turns, in an environment of its own, .venv-peers"
	@echo "make conformance         run PyTorch's own tests of rpc, autograd, optimizer and remote modules on gradwire;"
	@echo "                         with PYTORCH=/path/to/pytorch those of sharded tensors, from a checkout of its sources"
	@echo "make accelerator-check   run the accelerator tests on the first two devices of DEVICE (cuda), not on the stand-in"
	@echo "make search              run the largest searches through the ownership of references, which the tests leave out"
	@echo "make explore             run the random tests with new seeds, for EXPLORE_SECONDS (1800) from EXPLORE_SEED (the clock) on"
	@echo "make fuzz                send bad bytes to the wire decoder and bad data to every operation, for FUZZ_SECONDS (60)"
	@echo "make kills               train while workers are killed at random, KILLS (30) times"
	@echo "make soak                run random programs on four workers, SOAK_PROGRAMS (10000) from SOAK_SEED (0) on"
	@echo "make clean               remove what the other targets have made, .venv included"

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),sed "s/^torch==.*/torch==$(TORCH)/" constraints.txt > $(PINS))
	$(BIN)/python -m pip install --quiet -c $(PINS) -e ".[dev]"
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py $(if $(DASHBOARD),--dashboard)

# Tests of one file stay together: they share a cluster. The files are in the order of tests/file_order.py, the longest first.
# Four processes for two cores, because a good part of the time is spent in waits.
TEST_PROCESSES ?= 4
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
test: $(STAMP)
	$(PYTEST)

STABLE_RUNS ?= 20
stable: $(STAMP)
	for run in $$(seq $(STABLE_RUNS)); do echo "run $$run of $(STABLE_RUNS)"; $(PYTEST) -q || exit 1; done

browser:
	.ci/install_browser.sh

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint
	$(PYTEST) -m "not slow" -x -q

# The tools for releases have a stamp of their own, so that `make test` does without them.
$(VENV)/.installed-release: $(STAMP)
	$(BIN)/python -m pip install --quiet -c $(PINS) -e ".[release]"
	@touch $@

dist: $(VENV)/.installed-release
	$(BIN)/python .ci/build_dist.py

dist-check: dist
	$(BIN)/python .ci/check_wheel.py

sdist-check: dist
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && trap 'exit 130' INT TERM && \
	  tar -xzf dist/gradwire-*.tar.gz -C "$$folder" --strip-components 1 && $(MAKE) -C "$$folder" test

search: $(STAMP)
	GRADWIRE_LARGE_SEARCHES=1 $(BIN)/python -m pytest tests/properties/test_ownership_exhaustive.py

EXPLORE_SECONDS ?= 1800
explore: $(STAMP)
	PYTHONPATH=tests:tests/integration $(BIN)/python -m explore --seconds $(EXPLORE_SECONDS) $(if $(EXPLORE_SEED),--seed $(EXPLORE_SEED))

conformance: $(STAMP)
	PYTHONPATH=tests:tests/integration $(BIN)/python -m conformance $(if $(PYTORCH),--pytorch $(PYTORCH)) $(CONFORMANCE)
	PYTHONPATH=tests:tests/integration $(BIN)/python -m accelerator.torch_device_maps

DEVICE ?= cuda
accelerator-check: $(STAMP)
	GRADWIRE_ACCELERATOR=$(DEVICE) $(BIN)/python -m pytest tests/accelerator

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

# Ray and Monarch are not dependencies: they are measured from an environment of their own. Without the stamp, the next run
# tries again to install them.
PEERS := .venv-peers
$(PEERS)/.installed: pyproject.toml constraints.txt benchmarks/peers-constraints.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet -c constraints.txt -e .
	@complete=yes; for peer in ray torchmonarch; do \
	  $(PEERS)/bin/python -m pip install --quiet -c constraints.txt -c benchmarks/peers-constraints.txt $$peer || complete=; \
	done; if [ "$$complete" ]; then touch $@; else echo "measuring without the peers that could not be installed"; fi

bench-peers: $(PEERS)/.installed
	$(PEERS)/bin/python benchmarks/compare_peers.py $(PEERS_OPTIONS)

FUZZ_SECONDS ?= 60
fuzz: $(STAMP)
	$(BIN)/python tests/fuzz/fuzz_wire.py --seconds $$(($(FUZZ_SECONDS) / 2))
	PYTHONPATH=tests:tests/integration $(BIN)/python -m fuzz.fuzz_operations --seconds $$(($(FUZZ_SECONDS) / 2))

SOAK_PROGRAMS ?= 10000
SOAK_SEED ?= 0
soak: $(STAMP)
	PYTHONPATH=tests:tests/integration $(BIN)/python -m autograd.soak --programs $(SOAK_PROGRAMS) --seed $(SOAK_SEED)

KILLS ?= 30
kills: $(STAMP)
	$(BIN)/python examples/survives_kills.py --kills $(KILLS)

DOCS_STAMP := $(VENV)/.installed-docs
$(DOCS_STAMP): $(STAMP)
	@$(BIN)/python -c "import sys; sys.exit(sys.version_info < (3, 11) and 'make docs needs Python 3.11 or later, for Sphinx 9')"
	$(BIN)/python -m pip install --quiet -c $(PINS) -e ".[docs]"
	@touch $@

SPHINX = $(BIN)/python -m sphinx -W --keep-going -j auto -d docs/_build/doctrees
docs: $(DOCS_STAMP)
	$(SPHINX) -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# Needs a network, unlike `make docs`.
docs-links: $(DOCS_STAMP)
	GRADWIRE_DOCS_ONLINE=1 $(SPHINX) -b linkcheck docs docs/_build/links

docs-examples: $(STAMP)
	$(BIN)/python docs/scripts/run_examples.py $(EXAMPLES)

clean:
	rm -rf docs/_build docs/examples/programs build dist .venv .venv-torch-* $(PEERS)
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
