# The two commands of the README are `make demo` and `make test`; both work on a fresh clone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test lint check bench bench-fairness kill-rounds format lock protos services clean simulate

$(READY): requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "Serai needs Python 3.11 or newer (PYTHON=...)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Serai needs Python 3.11 or newer, not $$($(PYTHON) -V)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	$(BIN)/serai coordinator --compile
	@touch $@

demo: $(READY)  ## a whole trial cluster: two tenants, three nodes of simulated GPUs, twelve jobs; JSON=FILE writes the result as data
	$(BIN)/serai dev --once $(if $(JSON),--json-file $(JSON))

services:  ## what the tests need and pip cannot bring: etcd, Docker Engine, a C compiler, busybox
	@.ci/services

# Those with live services mostly wait and the others mostly compute, so the two halves run side by side.
COMPUTED := build/test-computed.log
test: $(READY) services  ## every test, against a real etcd and a real Docker Engine
	@mkdir -p build; $(BIN)/pytest tests/unit tests/scenarios tests/simulation >$(COMPUTED) 2>&1 & computing=$$!; \
	trap "kill $$computing 2>/dev/null" INT TERM; \
	$(BIN)/pytest tests/contract tests/integration; live=$$?; \
	wait $$computing; computed=$$?; cat $(COMPUTED); exit $$((live ? live : computed))

lint: $(READY)  ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint  ## lint and the quick tests: what to run before each commit
	$(BIN)/pytest tests/unit tests/scenarios

bench-%: $(READY)  ## one benchmark, such as bench-packing or bench-core; its options are variables, see tests/benchmarks/NAME.py
	$(BIN)/python -m tests.benchmarks.$*

bench: bench-packing bench-links bench-core bench-fairness bench-e2e  ## all of them; each writes build/bench/NAME.json

bench-fairness: $(READY)  ## what tenants are owed and get, on public traces; TRACES=FOLDER takes all three (tests/benchmarks/data/README.md)
	$(BIN)/python -m tests.benchmarks.fairness $(if $(TRACES),--traces $(TRACES))

SEEDS ?= 300
FROM  ?= 0
simulate: $(READY)  ## the whole system on one virtual clock with faults at every step: SEEDS=N FROM=S, writes build/bench/simulate.json
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --from $(FROM)

ROUNDS ?= 100
kill-rounds: $(READY)  ## leaders and agents killed and paused under load on a real etcd: ROUNDS=N, writes build/bench/failover.json
	$(BIN)/python -m tests.benchmarks.kill_rounds --rounds $(ROUNDS)

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock:  ## write requirements.lock anew from pyproject.toml
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet --editable '.[dev,test]'
	{ echo '# Made by `make lock`: what a fresh install of Serai with its tests takes.'; \
	  build/lock/bin/pip freeze --exclude-editable; } > requirements.lock

protos:  ## the stubs of coordinator/etcdpb; an older generator than ours, so that an older protobuf will do too
	rm -rf build/protos && $(PYTHON) -m venv build/protos
	build/protos/bin/pip install --quiet grpcio-tools==1.76.0
	build/protos/bin/python -m grpc_tools.protoc -I coordinator --python_out=coordinator/etcdpb --pyi_out=coordinator/etcdpb coordinator/etcd.proto

clean:
	rm -rf $(VENV) build *.egg-info
