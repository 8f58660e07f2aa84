# make demo | lint | check | test | test-torch | coverage | mutants | lab | bench | bench-check | faults | field | clean. Each makes what it needs, once; see CONTRIBUTING.md.
#
#   PYTHON       the interpreter that makes the environment (3.11 or newer)
#   TORCH_INDEX  package index for torch alone, for example https://download.pytorch.org/whl/cpu;
#                empty: where pip looks. Another choice takes effect after `make clean`.
#   JOBS         files of tests that run at the same time, by default two more than cores, as tests wait for much, and at
#                most 6; 0: one after the other, in this process
#   FAULT_FLAGS  for faults, such as "--seeds 2 --ranks 2 --engines ours"
#   FIELD_FLAGS  for field, such as "--only bad_label halo_recv_first --moments standing --jobs 4 --fork"
#   BENCH_FLAGS  for the two benches, such as "--quick --cases 3.3M", for the first also "--only live trace"; "--help"
#                lists them

PYTHON ?= python3
TORCH_INDEX ?=
JOBS ?= $(shell $(PYTHON) -c 'import os; print(min((os.cpu_count() or 1) + 2, 6))')
BENCH_FLAGS ?=
FAULT_FLAGS ?=
FIELD_FLAGS ?=
FIELD_PYTHON ?= $(BIN)/python# of the ranks: another environment's, for another torch
TORCH := $(shell sed -n 's/^torch==\([0-9.]*\).*/\1/p' $(dir $(firstword $(MAKEFILE_LIST)))binder/requirements.txt)# the default, also of Binder
OTHER_TORCH := 2.13.0 2.14.1# the others that are tested, the oldest first

# What depends on torch's version, for the other two: what the engine takes from torch's inside; its numbers, names and
# choices beside those of torch's own FSDP; what gives modules, tensors and groups of ours to another part of torch; ranks
# that abort their groups. What only our code decides runs with one torch, as do cross products and many examples.
INSIDE := torch_private imports process_groups cancellable_waits pipelining
BESIDE := parity against_torch same_script names gradients roots unused_params mixed_precision
# with the oldest alone: it differs most from the default, with which all tests run
OTHER_PARTS := first_iteration inner_losses call checkpoint checkpointing state_dict optimizers meta_init mesh_dims \
  tensor_parallel manual_finalization param_dtypes software
OLDEST_MODELS := torch_sharding verified_fully_shard verified_wrappers
CLASSIC := options wrap oracle comm_hooks sharded_grad_scaler state_dict optim_state torch_checkpoint
OTHER_TESTS := $(patsubst %,tests/engine/test_%.py,$(INSIDE) $(BESIDE)) \
  $(CLASSIC:%=tests/engine/classic/test_%.py) tests/engine/classic/test_tensor_parallel.py::test_it_trains_as_torchs_wrapper \
  $(patsubst %,tests/runtime/test_%.py,recovery meshes watched) \
  $(filter-out $(OLDEST_MODELS:%=tests/models/test_%.py),$(wildcard tests/models/test_*.py))
OLDEST_TESTS := $(OTHER_PARTS:%=tests/engine/test_%.py) $(OLDEST_MODELS:%=tests/models/test_%.py)
TESTS_OF = $(OTHER_TESTS) $(if $(filter $(firstword $(OTHER_TORCH)),$*),$(OLDEST_TESTS))

CHECKED := tests/trace tests/replay tests/views tests/engine/test_parity.py# what `check` runs: few examples of the laws,
FEW := not browser and (not parity or 2-None)# nothing in a browser, and the engine once

WHOLE := $(if $(CI),-m "")# in CI all tests, elsewhere those that are not marked `exhaustive` or `thorough`
SPREAD = --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder# files in the order of tests/conftest.py
export PYTHONDONTWRITEBYTECODE :=# tests start hundreds of Pythons: each would compile all sources again
PANEL := $(wildcard extension/*.json extension/*/*.ts extension/*/*.tsx extension/*/*/*.tsx extension/*/*.css workbench/widgets/static/* workbench/widgets/static/*/*)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
COLOUR := $(if $(CI),--color=no,)

.DEFAULT_GOAL := help
.PHONY: help demo lint check test test-torch coverage mutants lab bench bench-check faults field clean
.PRECIOUS: .venv-torch-%/installed
.DELETE_ON_ERROR:

help:
	@echo "make demo         run the tour on CPU ranks; write build/demo/tour.html and build/demo/tour.trace"
	@echo "make lint         ruff and mypy alone"
	@echo "make check        lint, types, few examples of every law of traces and views, and whether the engine trains: a minute"
	@echo "make test         lint, types and tests; the last lines say which were left out for want of a tool, and what brings it;"
	@echo "                  with CI set also more values of options, and long scenes in a browser or on several hosts"
	@echo "make test-torch   what depends on torch's version with torch $(OTHER_TORCH), each in an environment of its own"
	@echo "make coverage     all tests again, and which lines and branches of workbench/ they run (twice the time)"
	@echo "make mutants FILE=...   which small changes of a file of workbench/ its tests do not notice"
	@echo "make lab          open the tour in JupyterLab, with the panel"
	@echo "make bench        measure steps, recording, views, the dashboard and the panel; write build/bench.json"
	@echo "make bench-check  the comparison alone; fails where it is not as fast as it should be"
	@echo "make faults       inject every fault of %fsdp fault 20 times on 2 and 4 ranks, and write which verdict each got to"
	@echo "                  build/faults.html; fails where a fault was not named"
	@echo "make field        run training scripts as strangers write them, and judge what where, verify and lint say of each:"
	@echo "                  build/field.html; fails where a rank is wrongly accused, or too little is right; FIELD_PYTHON=..."
	@echo "make clean        remove the environment and all that was made"

demo: $(VENV)/installed
	@$(BIN)/workbench demo

lab: $(VENV)/panel
	@$(BIN)/workbench lab

bench: $(VENV)/installed-dev
	@$(BIN)/python -m bench $(BENCH_FLAGS)

bench-check: $(VENV)/installed
	@$(BIN)/python -m bench --check $(BENCH_FLAGS)

faults: $(VENV)/installed
	@$(BIN)/python -m bench.faults $(FAULT_FLAGS)

field: $(VENV)/installed
	@$(BIN)/python -m bench.field --python $(FIELD_PYTHON) $(FIELD_FLAGS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint
	$(BIN)/python -m pytest $(COLOUR) $(SPREAD) --quiet \
	  --hypothesis-profile=few -k "$(FEW)" $(CHECKED)

test: lint .venv-nbgrader/installed
	$(BIN)/python -m pytest $(COLOUR) $(SPREAD) $(WHOLE)

test-torch: $(OTHER_TORCH:%=test-torch-%)

test-torch-%: .venv-torch-%/installed
	.venv-torch-$*/bin/python -m pytest $(COLOUR) $(SPREAD) --hypothesis-profile=few $(TESTS_OF)

mutants: $(VENV)/installed-mutants
	@$(BIN)/python -m tests.helpers.mutants $(FILE)

coverage: $(VENV)/installed-dev .venv-nbgrader/installed
	$(BIN)/python -m pytest $(COLOUR) $(SPREAD) --cov --cov-report=term

clean:
	rm -rf $(VENV) .venv-* build dist extension/node_modules tests/firefox/node_modules extension/lib workbench/labextension .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "The workbench needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`."; \
	  echo "Install one, or name it: make $(or $(MAKECMDGOALS),demo) PYTHON=python3.12"; exit 1; } >&2
	@echo "Making the environment $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first, pinned: resolved together with the rest, pip would take the newest one and other GPU libraries
$(VENV)/torch: $(VENV)/made
	@echo "Installing torch $(TORCH) ..."
	@$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH)
	@touch $@

$(VENV)/installed: $(VENV)/torch pyproject.toml
	@echo "Installing the workbench ..."
	@WORKBENCH_PANEL=skip $(PIP) install --editable '.[notebook]'
	@touch $@

# The JupyterLab panel is built apart, as it may need Node and packages of it: nothing but JupyterLab waits for these.
$(VENV)/panel: $(VENV)/installed hatch_build.py $(PANEL)
	@echo "Building the JupyterLab panel ..."
	@$(PIP) install --editable . --no-deps
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "Installing what the tests need ..."
	@WORKBENCH_PANEL=skip $(PIP) install --editable '.[dev]'
	@touch $@

$(VENV)/installed-mutants: $(VENV)/installed-dev
	@WORKBENCH_PANEL=skip $(PIP) install --editable '.[mutants]'
	@touch $@

# torch alone; all the rest is lent by the main environment
.venv-torch-%/installed: $(VENV)/installed-dev
	@echo "Installing torch $* ..."
	@$(BIN)/python -m venv .venv-torch-$*
	@.venv-torch-$*/bin/python -m pip --disable-pip-version-check --quiet install \
	  $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$*
	@$(call LEND,.venv-torch-$*)
	@touch $@

# nbgrader and what it alone needs: in the main environment, its extensions would join every JupyterLab of a test
.venv-nbgrader/installed: $(VENV)/installed-dev
	@echo "Installing nbgrader ..."
	@$(BIN)/python -m venv --without-pip .venv-nbgrader
	@$(call LEND,.venv-nbgrader)
	@$(PIP) --python .venv-nbgrader/bin/python install 'nbgrader>=0.9.6,<0.10'
	@touch $@

# lends another environment the packages of the main one, which are looked for after its own
LEND = lent=`$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'`; \
  own=`$(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'`; \
  echo "import site; site.addsitedir('$$lent')" > "$$own/lent.pth"
