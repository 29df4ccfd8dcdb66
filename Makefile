# Every target sets up what it needs: each works as the first command on a fresh clone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help demo test lint check search explore conformance bench fuzz soak kills clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    trains a model that is split over three workers on this machine"
	@echo "make test    the whole test suite, in TEST_PROCESSES (3) processes"
	@echo "make lint    format, lint, types and layers"
	@echo "make check   make lint and the fast tests"
	@echo "make search  the largest searches through the ownership of references, which the tests leave out"
	@echo "make explore the random tests with new seeds, for EXPLORE_SECONDS (1800) from EXPLORE_SEED (the clock) on"
	@echo "make conformance   PyTorch's own tests of rpc, autograd, optimizer and remote modules, on gradwire"
	@echo "                   PYTORCH=/path/to/pytorch: those of sharded tensors, from a checkout of its sources"
	@echo "make bench   gradwire and torch in turns, as ratios: calls and autograd"
	@echo "make fuzz    the wire decoder against bad bytes, and every operation of a worker against bad data, for FUZZ_SECONDS (60)"
	@echo "make kills   trains while workers are killed at random, KILLS (30) times"
	@echo "make soak    random programs on four workers, SOAK_PROGRAMS (10000) from SOAK_SEED (0) on"

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# Tests of one file stay together: they share a cluster. The files are in the order of tests/conftest.py, the longest first.
# Three processes for two cores, because a good part of the time is spent in waits.
TEST_PROCESSES ?= 3
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
test: $(STAMP)
	$(PYTEST)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint
	$(PYTEST) -m "not slow" -x -q

search: $(STAMP)
	GRADWIRE_LARGE_SEARCHES=1 $(BIN)/python -m pytest tests/properties/test_ownership_exhaustive.py

EXPLORE_SECONDS ?= 1800
explore: $(STAMP)
	PYTHONPATH=tests:tests/integration $(BIN)/python -m explore --seconds $(EXPLORE_SECONDS) $(if $(EXPLORE_SEED),--seed $(EXPLORE_SEED))

conformance: $(STAMP)
	PYTHONPATH=tests:tests/integration $(BIN)/python -m conformance $(if $(PYTORCH),--pytorch $(PYTORCH)) $(CONFORMANCE)

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

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

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
