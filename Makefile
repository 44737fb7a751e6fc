# make test    everything CI runs: lint, types, unit tests, real-engine tests
# make demo    multi-turn conversations on a real engine, with and without KVConnect
# make bench   every benchmark, one after the other
# make fuzz    a million broken inputs against everything that reads what others wrote
# make setup   only the environment (.venv) that the four above share
#
# PYTHON=python3.12 chooses the interpreter; PYTEST_ARGS="-k ledger" narrows `make test`;
# FUZZ_ARGS="--seed 7" starts `make fuzz` elsewhere.

PYTHON ?= python3
PYTEST_ARGS ?=
FUZZ_ARGS ?=
BIN := .venv/bin
READY := .venv/.ready
BENCHMARKS := $(filter-out common copy_cuda link nixl movers __init__,$(basename $(notdir $(wildcard benchmarks/*.py))))

# The folders tests, demo and benchmarks import one another by their path from here.
export PYTHONPATH := $(CURDIR)
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: setup test demo bench fuzz clean
.DELETE_ON_ERROR:

setup: $(READY)

# What changes the installed package also makes the environment stale.
$(READY): scripts/setup pyproject.toml $(wildcard setup.py kvconnect/*.[ch] kvconnect/kernels/*.cu*)
	@PYTHON="$(PYTHON)" scripts/setup

test: $(READY)
	@echo "== ruff check" && ruff check .
	@echo "== ruff format" && ruff format --check .
	@echo "== mypy" && mypy
	@echo "== pytest" && pytest $(PYTEST_ARGS)

demo: $(READY)
	@python demo/demo.py
	@python demo/handoff.py

# As modules: run by file name, benchmarks/copy.py would stand in for the standard library's copy.
bench: $(READY)
	@set -e; for name in $(BENCHMARKS); do echo "== benchmarks/$$name.py"; \
	  python -m benchmarks.$$name; done

fuzz: $(READY)
	@python -m tests.fuzz.fuzz_codec --runs 1000000 $(FUZZ_ARGS)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find kvconnect -name '*.so' -delete
