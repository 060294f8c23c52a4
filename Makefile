# A fresh clone needs python3 >= 3.11, a C++ compiler and cmake; everything else comes into .venv from PyPI.
SHELL := bash
.SHELLFLAGS := -o pipefail -c

PYTHON ?= python3
BIN := .venv/bin
PACKAGES := jax_dsv4_fmha kernels interpreter tests examples

.DEFAULT_GOAL := help
.PHONY: help demo test test-hf lint build clean

help: ## show this
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 8

demo: build ## set up, build, and run examples/quickstart.py
	$(BIN)/python examples/quickstart.py

test: build ## set up, build, and run the tests
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-hf: .venv-hf/.tools ## compare layers with Hugging Face transformers, in an environment of its own
	PYTHONPATH=. .venv-hf/bin/python -m pytest -W ignore tests/test_hf.py

lint: .venv/.tools ## formatting, lint and types
	$(BIN)/ruff format --check $(PACKAGES)
	$(BIN)/ruff check $(PACKAGES)
	$(BIN)/mypy

build: .venv/.built ## compile the kernels and the library into the editable install in .venv

clean: ## remove the environment and everything built
	rm -rf .venv .venv-hf build dist jax_dsv4_fmha/_native.so

# What the build needs comes from pyproject.toml's own list, so that the build directory can be kept between builds.
.venv/.tools: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb')); x = p['project']; o = x['optional-dependencies']; \
	    print(*p['build-system']['requires'], *x['dependencies'], *o['test'], 'ruff', 'mypy', sep='\n')" > .venv/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r .venv/requirements.txt
	touch $@

# The version of torch has a build for CPUs alone; the layers run on the reference, so nothing is built here.
.venv-hf/.tools: pyproject.toml
	test -x .venv-hf/bin/python || $(PYTHON) -m venv .venv-hf
	.venv-hf/bin/python -m pip install --quiet --disable-pip-version-check pytest "jax>=0.10" "torch==2.13.0" "transformers>=5.23"
	touch $@

.venv/.built: .venv/.tools $(wildcard ffi/*) $(shell find kernels -name '*.py')
	$(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation --no-deps --verbose -e . 2>&1 \
	    | tee .venv/build.log | sed -un '/^ *kernels:/p; /WITHOUT GPU KERNELS/p' || { cat .venv/build.log; exit 1; }
	touch $@
