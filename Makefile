# `make demo` and `make test` are all that a fresh machine with Python 3.11 or newer needs.

PYTHON ?= python3
TORCH ?= 2.13.0
WORKERS ?= 2
PROGRAMS ?= 50000
NETWORKS ?= 20000
WORKER_PROGRAMS ?= 2000
WORKER_NETWORKS ?= 1000
TORCHES ?= 2.11.0 2.12.0 2.13.0
PYTHONS ?= 3.11 3.12 3.13 3.14

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test check frameworks conformance conformance-worker fuzz bench gpu docs matrix wheel sdist clean
.DELETE_ON_ERROR:

help:
	@echo "make demo         train a network with eager PyTorch and with Marid: time and losses of both, and a report"
	@echo "make test         ruff, pyright and the test suite"
	@echo "make check        ruff and pyright only"
	@echo "make frameworks   Lightning, Accelerate and transformers on the device, beside the CPU"
	@echo "make conformance  the long tests"
	@echo "make conformance-worker  the suite with the device on a worker process, the long tests too"
	@echo "make fuzz         PROGRAMS=$(PROGRAMS) random programs and NETWORKS=$(NETWORKS) networks against eager PyTorch"
	@echo "make bench        what recording an operation costs, and a quick run of the workloads"
	@echo "make gpu          on a machine with a CUDA device: its tests, and speed beside eager PyTorch and torch.compile"
	@echo "make docs         the documentation as a site, in build/site"
	@echo "make matrix       the core of the suite on PyTorch $(TORCHES) and Python $(PYTHONS), those that can be had"
	@echo "make wheel        a wheel that carries the C++ half, for this Python and PyTorch $(TORCH), in dist/"
	@echo "make sdist        the sources as an archive, in dist/; installing it needs a C++ compiler"
	@echo "make clean        remove what was built, the virtual environment too"

# PyTorch comes first and alone, so that exactly this build is used.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "marid needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==$(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -c 'import marid'  # builds its C++ half
	$(BIN)/python -m compileall -q src  # also where PYTHONDONTWRITEBYTECODE is set: an import takes a fifth of the time
	@touch $@

demo: $(READY)
	$(BIN)/python -m benchmarks.demo

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test: check
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not conformance"

frameworks: $(READY)
	$(BIN)/python -m pip install --quiet torch==$(TORCH) --editable '.[dev,frameworks]'
	$(BIN)/python -m pytest -n $(WORKERS) tests/test_frameworks.py

conformance: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) -m conformance

# A file at a time: each has its own workers, and a program of one is not another's.
conformance-worker: $(READY)
	@failed=0; for file in $$(ls tests/test_*.py tests/*/test_*.py | grep -v tests/test_remote_); do \
		echo "== $$file"; MARID_FUZZ_PROGRAMS=$(WORKER_PROGRAMS) MARID_FUZZ_NETWORKS=$(WORKER_NETWORKS) \
		$(BIN)/python -m pytest -q --worker -m "conformance or not conformance" $$file || [ $$? -eq 5 ] || failed=1; \
	done; exit $$failed

fuzz: $(READY)
	MARID_FUZZ_PROGRAMS=$(PROGRAMS) MARID_FUZZ_NETWORKS=$(NETWORKS) \
		$(BIN)/python -m pytest -n $(WORKERS) -m conformance tests/fuzz

bench: $(READY)
	$(BIN)/python benchmarks/capture.py
	$(BIN)/python -m benchmarks.suite --quick

gpu: $(READY)
	$(BIN)/python -m benchmarks.gpu --report build/gpu/report.md

docs: $(READY)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

matrix:
	$(PYTHON) tests/matrix.py --torch $(TORCHES) --python $(PYTHONS)

wheel: $(READY)
	$(BIN)/python packaging/wheel.py dist

sdist: $(READY)
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build --sdist --outdir dist .

clean:
	rm -rf $(VENV) build dist src/marid/native/_built .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
