# make run     the main job: plan and train the model of params.yaml on this machine (DEVICE=cuda: its GPU), and print
#              the result; a second run has nothing to do but print it again
# make test    everything that must hold before a commit, set up from scratch if needed
# make check   the same without setup
# make test-long      make test and everything that is exhaustive: before a release
# make test-versions  a short exactness suite on every Python and torch that is at hand
# make torture       random kills, interrupts, full disks, and changes of every file and parameter; MINUTES=60 SEED=7
# make docs    build the documents into build/site: warnings are errors
# make format  rewrite the code as `make check` wants it

PYTHON ?= python3
DEVICE ?= cpu
BIN := .venv/bin
INSTALLED := .venv/.installed

# One importable package `stowage` out of package/, flows/ and stages/, for tools that read code without running it.
PACKAGE := build/typing/stowage

# A stage that finds files which dvc.yaml did not name lists them and ends with an error: then once more.
LISTED := cksum dvc.yaml artifacts/inputs.yaml
REPRODUCE = listed=$$($(LISTED)); dvc repro || { test "$$listed" != "$$($(LISTED))" && dvc repro; }

# Groups of tests on all cores, in the order of tests/scheduling.py.
SPREAD := --numprocesses auto --dist loadfile --no-loadscope-reorder

export PATH := $(CURDIR)/$(BIN):$(PATH)
export DO_NOT_TRACK := 1
export DVC_NO_ANALYTICS := 1

.PHONY: run setup test check lint types contracts tests test-long test-versions torture docs format

run: setup
	python -m stowage.stages.device $(DEVICE)
	python -m stowage.stages.inputs
	if dvc status --quiet; then python -m stowage.flows.show; else $(REPRODUCE); fi

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

test: setup
	$(MAKE) check

check: lint types contracts tests

lint:
	ruff check .
	ruff format --check .

types: $(PACKAGE)
	MYPYPATH=build/typing mypy -p stowage.flows -p stowage.stages

contracts: $(PACKAGE)
	PYTHONPATH=build/typing lint-imports

# One thread a worker: two workers with two threads each wait for one another on two cores.
tests:
	OMP_NUM_THREADS=1 pytest -m "not long" $(SPREAD)

test-long: setup lint types contracts
	pytest --hypothesis-profile thorough $(SPREAD)

test-versions:
	$(PYTHON) tests/versions/run.py

MINUTES ?= 10
torture: setup $(PACKAGE)
	PYTHONPATH=build/typing python -m tests.torture --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

docs: setup $(PACKAGE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet

format:
	ruff check --fix .
	ruff format .

$(PACKAGE): $(wildcard package/*.py*)
	mkdir -p $@
	for part in flows stages $^; do ln -sfn ../../../$$part $@/$$(basename $$part); done
	touch $@
