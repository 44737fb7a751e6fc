# make test           everything CI runs: lint, types, unit tests, tests with real engines
# make test-units     only the unit tests; test-project, test-contract, test-schedulers and
#                     test-engines are the other parts, each with vLLM's environment
# make test-sglang    only those with SGLang, which has an environment of its own
# make demo           multi-turn conversations on a real engine, with and without KVConnect, in an
#                     environment of its own (.venv-demo)
# make demo-sglang    prefill on one SGLang server, decode on another
# make bench          every benchmark that has no result of this commit, one after the other;
#                     those that need SGLang or peers where these are set up. BENCH_ARGS="--list"
#                     says which, and how long they take; BENCH_ARGS="tiers router" narrows it
# make bench-sglang   the one with SGLang
# make bench-serve    load generators and routers that others wrote, against real engines with and
#                     without KVConnect. SERVE_ARGS="--quick --only trace" narrows it
# make outside        test suites, routers and clients that others wrote, against real engines with
#                     KVConnect; makes docs/compatibility.md. OUTSIDE_ARGS="--only clients" narrows it
# make models         a tiny model of every architecture that vLLM's CPU engine runs, with and without
#                     KVConnect; makes docs/models.md. MODELS_ARGS="--only qwen3" narrows it
# make gpu            tests and benchmark of the copies, on a machine with an NVIDIA GPU; PIECES=DIR
#                     has the packages (scripts/gpu_run pack) where there is no registry
# make docs           the documentation as a site, in build/site; needs no engine
# make fuzz           a million broken inputs against everything that reads what others wrote, and a
#                     million more to each reader, guided by coverage; then random runs of vLLM's
#                     and SGLang's schedulers. SCHEDULER_ARGS="--seed 7 --hours 8" says which and
#                     for how long each
# make sanitize       tests of the C extension under the address, undefined and thread sanitizers
# make wheels         sdist and wheels for x86-64 and Arm in dist/, checked; make release: with an SBOM
# make lock           requirements/*.lock from the environments as they are
# make setup          only the environment (.venv) for all but SGLang; setup-sglang: its own
#
# PYTHON=python3.12 chooses the interpreter; PYTEST_ARGS="-k ledger" narrows `make test` (which then
# leaves SGLang out) or `make test-sglang`; FUZZ_ARGS="--seed 7" starts `make fuzz` elsewhere.

PYTHON ?= python3
PYTEST_ARGS ?=
FUZZ_ARGS ?=
SCHEDULER_ARGS ?=
PIECES ?=
MODELS_ARGS ?=
SERVE_ARGS ?=
BENCH_ARGS ?=
OUTSIDE_ARGS ?=
# On a machine whose load nobody knows, a test that fails is run once more. The report lists it as
# RERUN: it is a defect of the test or of what it tests, and is mended as such.
RERUN := --reruns=1 --rerun-show-tracebacks -raR
# The halves of the unit tests, about as long as one another.
UNITS := test-units-1 test-units-2
FIRST_HALF := tests/unit/doctor tests/unit/peers tests/unit/router tests/unit/tiers
BIN := .venv/bin
READY := .venv/.ready
SGLANG_BIN := .venv-sglang/bin
SGLANG_READY := .venv-sglang/.ready
PEERS_READY := .venv-peers/.ready
DEMO_READY := .venv-demo/.ready
DOCS_READY := .venv-docs/.ready
SITE := mkdocs-material>=9.5,<10
GPU_PYTHON := .venv-gpu/bin/python
# What changes the installed package also makes an environment stale.
SOURCES := scripts/setup pyproject.toml $(wildcard requirements/*.lock setup.py kvconnect/native/*.[ch] kernels/*.cu*)

# The folders tests, demo and benchmarks import one another by their path from here.
export PYTHONPATH := $(CURDIR)
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: setup setup-sglang test test-engines test-units $(UNITS) test-project test-contract test-schedulers test-sglang demo demo-sglang bench bench-sglang bench-serve models outside outside-quick docs gpu fuzz sanitize wheels release lock clean
.DELETE_ON_ERROR:

setup: $(READY)
setup-sglang: $(SGLANG_READY)

$(READY): $(SOURCES)
	@PYTHON="$(PYTHON)" scripts/setup vllm

$(DEMO_READY): $(SOURCES)
	@PYTHON="$(PYTHON)" scripts/setup demo

$(SGLANG_READY): $(SOURCES) scripts/sglang_on_cpu.py
	@PYTHON="$(PYTHON)" scripts/setup sglang

$(PEERS_READY): scripts/setup
	@PYTHON="$(PYTHON)" scripts/setup peers

$(DOCS_READY): Makefile
	@$(PYTHON) -m venv .venv-docs && .venv-docs/bin/pip install --quiet '$(SITE)' && touch $@

# Runs a part of the tests and says what it took.
part = @echo "== $(1)" && start=$$(date +%s) && $(2) && \
  echo "== $(1): $$(($$(date +%s) - start)) s"

test: $(READY)
	$(call part,ruff check,ruff check .)
	$(call part,ruff format,ruff format --check .)
	$(call part,mypy,mypy)
ifeq ($(PYTEST_ARGS),)
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=line \
	  test-engines setup-sglang $(UNITS) test-sglang test-project test-contract test-schedulers \
	  outside-quick sanitize
else
	$(call part,pytest,pytest $(PYTEST_ARGS))
endif

# One of the two longest parts. The other, SGLang's, begins after the units, so that what is short is
# left for the end, and no core waits: two engines of vLLM at a time would need more than two.
test-engines: $(READY)
	$(call part,pytest tests/engines,pytest tests/engines --durations=20 $(RERUN))

# Half of the time unit tests wait: for sockets, threads and processes that they have started. So two
# halves run beside one another.
test-units: $(READY)
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=line $(UNITS)

test-units-1: $(READY)
	$(call part,pytest $(FIRST_HALF),pytest $(FIRST_HALF) --durations=20 $(RERUN))

test-units-2: $(READY)
	$(call part,pytest the other units,pytest tests/unit --ignore=tests/unit/project \
	  $(FIRST_HALF:%=--ignore=%) --durations=20 $(RERUN))

# The repository rather than the package: its pages, benchmarks and scripts, and what compilers, type
# checkers and pytest say of parts of it.
test-project: $(READY)
	$(call part,pytest tests/unit/project,pytest tests/test_architecture.py tests/unit/project \
	  tests/toolchain --durations=20 $(RERUN))

# Servers that others wrote, and what needs a GPU: skipped where there is none.
test-contract: $(READY)
	$(call part,pytest tests/contract,pytest tests/contract tests/gpu --durations=20 $(RERUN))

test-schedulers: $(READY)
	$(call part,pytest tests/schedulers,pytest tests/schedulers --durations=20 $(RERUN))

test-sglang: $(SGLANG_READY)
	$(call part,pytest tests/sglang,scripts/in-netns $(SGLANG_BIN)/python -m pytest tests/sglang \
	  $(or $(PYTEST_ARGS),--durations=20 $(RERUN)))

demo: $(DEMO_READY)
	@.venv-demo/bin/python -m demo.demo
	@.venv-demo/bin/python -m demo.handoff

# As a module: run by file name, demo/sglang.py would stand in for the engine's package.
demo-sglang: $(SGLANG_READY)
	@scripts/in-netns $(SGLANG_BIN)/python -m demo.sglang

bench: $(READY)
	@python -m scripts.bench $(BENCH_ARGS)

# Not in a namespace of its own: it makes two, and a link between them.
bench-sglang: $(SGLANG_READY)
	@$(SGLANG_BIN)/python -m benchmarks.sglang_handoff

bench-serve: $(READY) $(SGLANG_READY) $(PEERS_READY)
	@python -m benchmarks.serve $(SERVE_ARGS)

models: $(READY)
	@python -m benchmarks.models $(MODELS_ARGS)

# Neither engine is needed, so their environments, which have a torch without CUDA, are not made.
# An interpreter that has torch with CUDA and all else serves as it is.
gpu:
	@python="$(PYTHON)"; pieces="$(if $(PIECES),--pieces $(PIECES))"; \
	if ! $$python scripts/gpu_run ready $$pieces; then \
	  $$python -m venv .venv-gpu && \
	  $(GPU_PYTHON) -m pip install --quiet torch 'hypothesis>=6.100' 'pytest>=9.0,<10' \
	    'pytest-timeout>=2.3' 'xxhash>=3.4' \
	    --editable ".[cuda$$($$python scripts/gpu_run cuda)]" || exit 1; \
	  python=$(GPU_PYTHON); \
	fi; \
	$$python scripts/gpu_run a $$pieces --out build/gpu --limit 3600

outside: $(READY) $(SGLANG_READY) $(PEERS_READY)
	@python -m tests.outside $(OUTSIDE_ARGS)

outside-quick: $(READY) $(SGLANG_READY)
	$(call part,programs of others,python -m tests.outside --quick)

docs: $(DOCS_READY)
	@.venv-docs/bin/mkdocs build --strict --site-dir build/site

fuzz: $(READY) $(SGLANG_READY)
	@python -m tests.fuzz.fuzz_codec --runs 1000000 $(FUZZ_ARGS)
	@python -m tests.fuzz.guided --runs 1000000 --keep
	@python -m tests.schedulers.fuzz $(SCHEDULER_ARGS)
	@scripts/in-netns $(SGLANG_BIN)/python -m tests.sglang.schedulers.fuzz $(SCHEDULER_ARGS)

wheels: $(READY)
	@scripts/wheels

release: $(READY)
	@scripts/release

lock: $(READY) $(SGLANG_READY)
	@scripts/lock

sanitize: $(READY)
	$(call part,sanitizers,scripts/sanitize address && scripts/sanitize thread)

clean:
	rm -rf .venv .venv-demo .venv-sglang .venv-peers .venv-gpu .venv-docs build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find kvconnect -name '*.so' -delete
