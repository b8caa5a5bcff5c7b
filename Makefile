# Two commands matter: `make demo` and `make test`. Both make .venv first (requirements/setup.sh).
PY := .venv/bin/python
PYTEST := $(PY) -m pytest
# One thread each: the tests start servers, and small models are slower on many threads.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM = false
export HF_HUB_OFFLINE ?= 1

.PHONY: help setup demo test lint format unit onnx tensorrt vllm-v1 vllm-v2 bench-tiny clean

help:
	@echo "make demo        serve the tiny pair without and with Domino, side by side (CPU, minutes)"
	@echo "make test        set-up, lint, types and every test of the repository"
	@echo "make lint        ruff, format check, mypy        make format      ruff, rewriting"
	@echo "make unit | onnx | tensorrt | vllm-v1 | vllm-v2  one suite       ARGS='-k name' passes on to pytest"
	@echo "make bench-tiny  the benchmark suite of the tiny pair on this machine"

setup:
	@sh requirements/setup.sh

demo: setup
	@.venv/bin/vllm-domino demo $(ARGS)

# Every suite runs even when one before it failed; the exit status is that of the whole.
test: setup
	@failed=; for suite in lint unit onnx tensorrt vllm-v1 vllm-v2; do \
		echo "=== $$suite"; $(MAKE) --no-print-directory $$suite || failed="$$failed $$suite"; \
	done; \
	if [ -n "$$failed" ]; then echo "FAILED:$$failed"; exit 1; fi; echo "all suites passed"

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

# pytest's exit status 5 is "no test here": nothing failed.
run_suite = $(1) $(PYTEST) $(2) $(ARGS) || [ $$? -eq 5 ]

unit: setup
	$(call run_suite,,tests/unit)

onnx: setup
	$(call run_suite,,tests/onnx)

tensorrt: setup
	$(call run_suite,,tests/tensorrt)

# The same tests on vLLM's two model runners. The second is the one that GPUs use by default: without a GPU its Triton
# kernels run in Triton's interpreter, on a stub of a Triton backend (tests/vllm/triton_cpu).
vllm-v1: setup
	$(call run_suite,,tests/vllm)

vllm-v2: setup
	$(call run_suite,TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR)/tests/vllm/triton_cpu,tests/vllm)

bench-tiny: setup
	.venv/bin/vllm-domino bench benchmarks/suites/tiny-cpu.toml $(ARGS)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache build
