# SPDX-License-Identifier: Apache-2.0
# The doors: `make demo`, and the tests in three tiers. Each sets up what it needs; a second run does no work twice.
SHELL := /bin/bash
.DEFAULT_GOAL := help

JOBS ?= $(shell nproc)
CASES ?= 10000
VENV := .venv
export JOBS

.PHONY: help
help:
	@echo 'make demo               build, report accuracy and speed here (build/report.html), then train a small Llama with'
	@echo '                        full-precision and INT8 attention side by side (build/demo/report.html)'
	@echo 'make check              the quick tests: style, C++, Python'
	@echo 'make test               and CUDA kernels on an emulator, hooks, trainer, address sanitizer, nvcc (13 minutes on two cores)'
	@echo 'make test-all           and everything else: other targets, thread sanitizer, frameworks, long fuzz'
	@echo 'make build              library, tool and tests in build/'
	@echo 'make docs               the documentation as a site in build/site; a broken link or a missing docstring fails'
	@echo 'make bench ARGS=…       build, and run the benchmark'
	@echo 'make wheel              a wheel for any Linux in dist/, for the CPU; make wheel-cuda: for the CPU and every GPU'
	@echo 'make fuzz CASES=10000   the long fuzz run'
	@echo 'make setup              only what is missing: system packages, virtual environment'
	@echo 'make clean              remove the build directories; make distclean: the virtual environment too'
	@echo 'JOBS=n                  compile jobs, now $(JOBS)'
	@echo 'INSTALL=no              name missing system packages instead of installing them with apt-get'

.PHONY: packages setup
packages:
	@tools/setup/packages.sh
setup: packages
	@tools/setup/venv.sh $(VENV) tests/requirements.txt

# Ninja configures again by itself when a CMake file changes; the presets are the one file it does not watch.
build/build.ninja: CMakePresets.json | packages
	@. tools/setup/ccache.sh && cmake --preset release

.PHONY: build
build: build/build.ninja
	@cmake --build build -j $(JOBS)

.PHONY: check test test-all
check test test-all: packages
	@tools/run_tests.sh $@

.PHONY: demo
demo: setup build/build.ninja
	@cmake --build build -j $(JOBS) --target bin/sagebwd
	@tools/setup/package.sh $(VENV)
	@SAGEBWD_PYTHON=$(VENV)/bin/python build/bin/sagebwd report --html build/report.html --json build/report.json
	@OMP_WAIT_POLICY=passive $(VENV)/bin/python -m sagebwd.train.demo --accuracy build/report.json --out build/demo

# The pages are read and the Python sources parsed: nothing has to be built. Every warning is an error.
.PHONY: docs
docs:
	@tools/setup/venv.sh build/venv-docs tools/docs/requirements.txt
	@NO_MKDOCS_2_WARNING=1 build/venv-docs/bin/mkdocs build --strict
	@echo 'build/site/index.html'

.PHONY: bench
bench: build/build.ninja
	@cmake --build build -j $(JOBS) --target bin/sagebwd
	@build/bin/sagebwd bench $(ARGS)

.PHONY: fuzz
fuzz: build/build.ninja
	@cmake --build build -j $(JOBS) --target bin/sagebwd_tests
	@SAGEBWD_FUZZ_CASES=$(CASES) build/bin/sagebwd_tests --gtest_brief=1 --gtest_filter='*Fuzz*'

.PHONY: wheel wheel-cuda
wheel: setup
	@tools/package/wheel.sh cpu $(VENV)
wheel-cuda: setup
	@tools/package/wheel.sh cuda $(VENV)

.PHONY: clean distclean
clean:
	rm -rf build build-* dist
distclean: clean
	rm -rf $(VENV)
