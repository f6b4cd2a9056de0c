# SPDX-License-Identifier: Apache-2.0
#
# The front door. Set-up is in scripts/setup, build settings are in CMakePresets.json.
#
# TORCH=2.15.0, for example, uses a separate environment and builds for that torch and leaves the others
# alone.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help test test-core test-asan test-asan-torch test-fuzz test-python package wheel sdist demo demo-core \
  bench docs lint format clean

JOBS ?= $(shell nproc)
ARGS ?=
TORCH ?=
export TORCH

OF_TORCH = $(if $(TORCH),-$(TORCH))
PYTHON = $(CURDIR)/.venv$(OF_TORCH)/bin/python
PYTHON_BUILD = build/python$(OF_TORCH)
ASAN_BUILD = build/asan-torch$(OF_TORCH)
# Enough to reach every part of the torch layer without long training.
ASAN_TESTS = $(patsubst %,tests/python/test_%.py,codecs controller derive_copies derive_layers derive_lifetimes \
  derive_traps derive_writes probe recording replay sites traps traps_context traps_tensors)

CMAKE_BUILD = cmake --build --parallel $(JOBS) --preset
CTEST = ctest --parallel $(JOBS) --preset
SOURCES = git ls-files -z --cached --others --exclude-standard --deduplicate
CXX_FILES = $(SOURCES) -- '*.cpp' '*.h' '*.cu' '*.cuh' | xargs -0 --no-run-if-empty
PYTHON_FILES = python tests/python examples/python bench/run bench/format_errors bench/host_cost.py \
  bench/host_instructions.py bench/compiled.py bench/offload.py bench/workloads bench/plans bench/accuracy bench/codecs \
  bench/zoo docs/site \
  scripts/check_links scripts/check_text scripts/derivative_tables scripts/evidence scripts/mutate \
  scripts/report_picture scripts/torch_cuda

help:
	@echo 'make demo ARGS=...     train two models, plain and folded; print memory, time and accuracy'
	@echo 'make demo-core         pack a tensor at each width; print size, error and speed'
	@echo 'make test              every test: core, sanitizers, fuzzers, torch layer, Python'
	@echo 'make test TORCH=2.15.0 the tests of the torch layer, with that torch in a separate environment'
	@echo 'make test-core         the C++ tests and examples (preset dev)'
	@echo 'make test-asan         the C++ tests under the address and undefined sanitizers'
	@echo 'make test-fuzz         the fuzzers, for a bounded time'
	@echo 'make test-python       the tests of the torch layer, from C++ and from Python'
	@echo 'make test-asan-torch   the torch layer under the address sanitizer, from C++ and from Python'
	@echo 'make package           build the Python package into .venv'
	@echo 'make wheel             a wheel in dist/, for the Python and the torch of .venv'
	@echo 'make sdist             the source distribution in dist/, which pip builds for the torch it finds'
	@echo 'make bench ARGS=...    benchmarks; ARGS goes to bench/run'
	@echo 'make docs              the documentation site, in build/docs'
	@echo 'make lint              formatting and static checks'
	@echo 'make format            rewrite sources the way make lint wants them'
	@echo 'make clean             delete build/ (.venv stays)'

test: $(if $(TORCH),,test-core test-asan test-fuzz) test-python test-asan-torch

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

# The C++ tests and examples that use torch are built with the package.
test-python: PACKAGE_PARTS = tests demo zoo browser
test-python: PACKAGE_OPTIONS = ;BACKFOLD_TESTS=ON;BACKFOLD_EXAMPLES=ON
test-python: package
	ctest --test-dir $(PYTHON_BUILD) --parallel $(JOBS) --output-on-failure --no-tests=error
	BACKFOLD_BUILD=$(CURDIR)/$(PYTHON_BUILD) $(PYTHON) -m pytest tests/python --numprocesses $(JOBS) --dist worksteal

test-asan-torch:
	@scripts/setup build tests python
	cmake --preset asan-torch -B $(ASAN_BUILD) -DPython_EXECUTABLE=$(PYTHON)
	cmake --build $(ASAN_BUILD) --parallel $(JOBS)
	ctest --test-dir $(ASAN_BUILD) --parallel $(JOBS) --output-on-failure --no-tests=error
	JOBS=$(JOBS) scripts/asan_python $(PYTHON) $(ASAN_BUILD) $(ASAN_TESTS)

# GPU kernels are useful to Python only if torch has CUDA.
package:
	@scripts/setup build python $(PACKAGE_PARTS)
	SKBUILD_CMAKE_DEFINE="BACKFOLD_CUDA=$$($(PYTHON) scripts/torch_cuda)$(PACKAGE_OPTIONS)" \
	  SKBUILD_BUILD_DIR=$(PYTHON_BUILD) \
	  $(PYTHON) -m pip install --quiet --no-build-isolation --no-deps --editable .

# A wheel works with the release of torch that it was built for, and says so otherwise.
wheel:
	@scripts/setup build python
	SKBUILD_CMAKE_DEFINE="BACKFOLD_CUDA=$$($(PYTHON) scripts/torch_cuda)" SKBUILD_BUILD_DIR=build/wheel$(OF_TORCH) \
	  $(PYTHON) -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	@ls -l dist/*.whl

sdist:
	@scripts/setup build python
	$(PYTHON) -c 'import scikit_build_core.build as backend; print("dist/" + backend.build_sdist("dist"))'

demo: PACKAGE_PARTS = demo
demo: package
	$(PYTHON) examples/python/demo.py $(ARGS)

demo-core:
	@scripts/setup build
	cmake --preset release -DBACKFOLD_EXAMPLES=ON
	$(CMAKE_BUILD) release --target examples/cpp/widths
	build/release/examples/cpp/widths

bench: $(if $(filter host h200 probes cap frontier ddp offload evidence,$(firstword $(ARGS))),package)
	@scripts/setup build bench
	cmake --preset release -DBACKFOLD_BENCH=ON
	$(CMAKE_BUILD) release
	bench/run $(ARGS)

# The references come from the docstrings of the package and from the comments of the headers.
docs: PACKAGE_PARTS = docs
docs: package
	doxygen docs/site/Doxyfile
	$(PYTHON) -m sphinx --quiet --fail-on-warning --keep-going --conf-dir docs/site docs build/docs
	@echo 'build/docs/index.html'

lint:
	@scripts/setup lint
	$(CXX_FILES) clang-format --dry-run --Werror
	$(PYTHON) -m ruff check $(PYTHON_FILES)
	$(PYTHON) -m ruff format --check $(PYTHON_FILES)
	scripts/check_text
	$(PYTHON) scripts/check_links
	scripts/evidence

format:
	@scripts/setup lint
	$(CXX_FILES) clang-format -i
	$(PYTHON) -m ruff check --fix $(PYTHON_FILES)
	$(PYTHON) -m ruff format $(PYTHON_FILES)

clean:
	rm -rf build dist
