# make demo                 install into .venv, then fine-tune the embedded model
# make test                 run the default tests: three to four minutes on two cores
# make test-long            run the tests that the default leaves out
# make test-all             run both
# make test-avx2            run the numeric tests without CPU instructions newer than AVX2
# make test-pretended-gpu   run the GPU tests on a simulated GPU (downloads 2.6 GB, needs 5 GB of disk)
# make docs                 build the documentation site in site/
# make lint                 run ruff, pyright and import-linter, as CI does
# make clean                remove everything that these commands made

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Tests run in several processes with one thread each. The limit keeps machines with little memory from swapping.
PYTEST_ARGS ?= -n auto --maxprocesses 4
# Which tests run on the simulated GPU, as an expression of pytest's marks.
GPU_TESTS ?= gpu

NUMERIC := $(addprefix tests/,losses models optim memory peft generation recipes/test_dpo.py recipes/test_quantize.py)

.PHONY: demo test test-all test-avx2 test-long test-pretended-gpu docs lint clean

demo: $(VENV)/installed
	$(BIN)/leanft run full_finetune_single_device --config tiny/full
	@echo "To type leanft yourself, activate the environment: source $(VENV)/bin/activate"

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# tests/selection.py says which tests are default, and tests/cpu_seconds.json how long each takes.
test-long: $(VENV)/installed-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m long

test-all: $(VENV)/installed-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m ''

# The first variable limits ATen and the code that Inductor generates; the second limits oneDNN. Inductor's cache does not distinguish
# the two kinds of code, and mixing them gives wrong results, so these tests have their own cache.
test-avx2: $(VENV)/installed-dev
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 TORCHINDUCTOR_CACHE_DIR=$(abspath $(VENV))/inductor_avx2 $(BIN)/python -m pytest $(PYTEST_ARGS) $(NUMERIC)

test-pretended-gpu:
	PYTHON="$(PYTHON)" PYTEST_ARGS="$(PYTEST_ARGS)" GPU_TESTS="$(GPU_TESTS)" tests/pretended_gpu/check.sh

# --strict: a broken link, or a page that mkdocs.yml does not list, is an error.
docs: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

lint: $(VENV)/installed-dev
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pre-commit run --all-files

clean:
	rm -rf $(VENV) .venv-pretended-gpu tests/pretended_gpu/build dist build site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find lean_ft recipes tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Install torch first and pinned: a plain `pip install torch` takes the newest release, with gigabytes of CUDA libraries.
$(VENV)/torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("lean_ft needs Python 3.11 or newer; choose one: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt torch
	touch $@

$(VENV)/installed: $(VENV)/torch pyproject.toml
	$(PIP) install --quiet -c constraints.txt -e '.[plots]'
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	touch $@
