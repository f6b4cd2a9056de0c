# SPDX-License-Identifier: Apache-2.0
#
# The front door. Set-up is in scripts/setup, build settings are in CMakePresets.json.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help test test-core test-asan test-fuzz test-python demo bench lint format clean

JOBS ?= $(shell nproc)
ARGS ?=

CMAKE_BUILD = cmake --build --parallel $(JOBS) --preset
CTEST = ctest --parallel $(JOBS) --preset
SOURCES = git ls-files -z --cached --others --exclude-standard --deduplicate
CXX_FILES = $(SOURCES) -- '*.cpp' '*.h' '*.cu' '*.cuh' | xargs -0 --no-run-if-empty
PYTHON_FILES = python tests/python bench/run scripts/check_text scripts/mutate scripts/torch_cuda

help:
	@echo 'make demo              pack a tensor at each width; print size, error and speed'
	@echo 'make test              every test: core, sanitizers, fuzzer, Python'
	@echo 'make test-core         the C++ tests and examples (preset dev)'
	@echo 'make test-asan         the C++ tests under the address and undefined sanitizers'
	@echo 'make test-fuzz         the fuzzer, for a bounded time'
	@echo 'make test-python       build the Python package into .venv and run its tests'
	@echo 'make bench ARGS=...    benchmarks; ARGS goes to bench/run'
	@echo 'make lint              formatting and static checks'
	@echo 'make format            rewrite sources the way make lint wants them'
	@echo 'make clean             delete build/ (.venv stays)'

test: test-core test-asan test-fuzz test-python

test-core:
	@scripts/setup build tests
	cmake --preset dev
	$(CMAKE_BUILD) dev
	$(CTEST) dev

test-asan:
	@scripts/setup build tests
	cmake --preset asan
	$(CMAKE_BUILD) asan
	$(CTEST) asan

test-fuzz:
	@scripts/setup build fuzz
	cmake --preset fuzz
	$(CMAKE_BUILD) fuzz
	$(CTEST) fuzz

# The GPU kernels are of use to Python only where torch has CUDA.
test-python:
	@scripts/setup build python
	SKBUILD_CMAKE_DEFINE="BACKFOLD_CUDA=$$(.venv/bin/python scripts/torch_cuda)" \
	  .venv/bin/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	.venv/bin/python -m pytest tests/python

demo:
	@scripts/setup build
	cmake --preset release -DBACKFOLD_EXAMPLES=ON
	$(CMAKE_BUILD) release --target examples/cpp/widths
	build/release/examples/cpp/widths

bench:
	@scripts/setup build bench
	cmake --preset release -DBACKFOLD_BENCH=ON
	$(CMAKE_BUILD) release
	bench/run $(ARGS)

lint:
	@scripts/setup lint
	$(CXX_FILES) clang-format --dry-run --Werror
	.venv/bin/python -m ruff check $(PYTHON_FILES)
	.venv/bin/python -m ruff format --check $(PYTHON_FILES)
	scripts/check_text

format:
	@scripts/setup lint
	$(CXX_FILES) clang-format -i
	.venv/bin/python -m ruff check --fix $(PYTHON_FILES)
	.venv/bin/python -m ruff format $(PYTHON_FILES)

clean:
	rm -rf build dist
