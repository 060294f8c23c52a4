# A fresh clone needs python3 >= 3.11; everything else comes into .venv from PyPI. Kernels also need a C++ compiler and cmake.
SHELL := bash
.SHELLFLAGS := -o pipefail -c

PYTHON ?= python3
BIN := .venv/bin
# The architecture of this machine's GPU, if kernels are made for it.
HERE := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sed -n '1s/^9[.]0$$/sm_90a/p; 1s/^10[.].$$/sm_100f/p')
, := ,
PACKAGES := jax_dsv4_fmha kernels ffi interpreter tests examples docs
CXX_FILES = $(shell find ffi tests -name '*.h' -o -name '*.cc')
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal  # a core for each
# Without a GPU, `make test` needs no others; where all were built, or may run, it builds all.
TESTED := .venv/.built$(if $(HERE)$(wildcard .venv/.built),,-tested)
# What `make test` leaves to `make test-all`; tests/conftest.py finds `faults` and `rest`.
LATER := slow or faults or rest

.DEFAULT_GOAL := help
.PHONY: help demo installed check quick test test-all test-gpu test-hf test-maxtext test-adapters test-witnesses test-orders wheel docs lint fmt build clean pictures
.NOTPARALLEL:

help: ## show this
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: installed ## set up .venv, with kernels for this machine's GPU if it has one, and run examples/quickstart.py
	@echo "make: examples/quickstart.py, a DeepSeek-V4 attention layer on $(if $(HERE),the GPU$(,) $(HERE),the reference$(,) without a GPU)"
	@$(BIN)/python examples/quickstart.py
	@echo "Next: README.md. To change the package's Python: edit, \`make quick\`; nothing is to be built. Kernels: \`make build\`."

# What `make build` made, if it ever did. Otherwise the package with kernels for this machine's GPU: without one, Python alone.
installed: $(if $(wildcard .venv/.built),,$(if $(HERE),.venv/.built-here,.venv/.python))
	@test ! -e .venv/.built || $(MAKE) --question .venv/.built >/dev/null 2>&1 \
	    || echo "make: kernels/, ffi/ or pyproject.toml have changed since \`make build\`, which builds what has changed"

check: installed .venv/.tools ## lint, types, and the tests of what differs from main, by tests/which.toml; ARGS='--since HEAD'
	$(BIN)/python -m tests.check $(ARGS)

quick: installed lint ## lint, and the shortest case of each test that neither compiles nor interprets a kernel; needs no kernel to be built
	$(PYTEST) --quick

test: $(TESTED) .venv/.tools ## set up, build the kernels that tests interpret, and run all tests except those of test-all
	$(PYTEST) -m 'not (fuzz or $(LATER))'

test-all: build .venv/.tools ## build every kernel, and run all that make test left out: slow tests, planted faults, the rest of the kernels
	$(PYTEST) -m '($(LATER)) and not fuzz'
	$(MAKE) test-orders test-hf
	@if $(MAKE) .venv-witnesses/.tools; then $(MAKE) test-witnesses ARGS=--quick; \
	    else echo "make: the witnesses did not run, because their packages could not be installed"; fi

test-gpu: build .venv/.tools ## run the tests of a GPU, several at a time; ARGS='--limit 540 --skip-passed build/gpu.jsonl'
	$(BIN)/python -m tests.gpu $(ARGS)

test-hf: .venv-hf/.tools ## compare with Hugging Face transformers, and ask the HTTP endpoint by OpenAI's client, in an environment of its own
	PYTHONPATH=. OPENBLAS_NUM_THREADS=1 .venv-hf/bin/python -m pytest -n 2 -W ignore tests/test_hf.py tests/test_hf_latent.py tests/test_hf_gpt_oss.py tests/test_hf_gemma4.py tests/test_hf_model.py tests/test_http.py

test-maxtext: .venv-maxtext/.tools ## attend and train in MaxText, on the CPU, in an environment of its own; PYTHON=python3.12, which MaxText wants
	PYTHONPATH=. .venv-maxtext/bin/python -m pytest --noconftest -W ignore tests/test_adapters_maxtext.py

test-adapters: .venv-adapters/.tools ## attend beside Levanter and ejkernel, on the CPU, in an environment of its own; PYTHON=python3.12, which Levanter wants
	PYTHONPATH=. OPENBLAS_NUM_THREADS=1 .venv-adapters/bin/python -m pytest --noconftest -W ignore tests/test_adapters.py

test-witnesses: .venv-witnesses/.tools ## run others' Blackwell kernels in the interpreter, in an environment of its own; ARGS=--quick for ten
	PYTHONPATH=. OPENBLAS_NUM_THREADS=1 .venv-witnesses/bin/python -m interpreter.witnesses $(ARGS)
	PYTHONPATH=. OPENBLAS_NUM_THREADS=1 .venv-witnesses/bin/python -m interpreter.witnesses.opinions ours

test-orders: build .venv/.tools ## show that attention's kernels end in every order of events; ARGS=mha for some
	PYTHONPATH=. OPENBLAS_NUM_THREADS=1 $(BIN)/python -m interpreter.kernels.orders $(ARGS)

docs: .venv-docs/.tools ## build the pages into build/site; a warning, such as a link that leads nowhere, is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict  # not --quiet, which drops warnings before they count
	@echo "Open build/site/index.html. Its search needs a server: python3 -m http.server -d build/site"

pictures: build .venv/.tools ## write tables and draw pictures of the pages anew, from docs/*.json
	$(BIN)/python -m jax_dsv4_fmha bench --from docs/h200.json --suite dsv4 --plot docs/h200.svg
	$(BIN)/python -m jax_dsv4_fmha bench --from docs/h200.json --suite dense --suite window --plot docs/h200_dense.svg
	$(BIN)/python -m jax_dsv4_fmha bench --from docs/h200_decode.json --plot docs/h200_decode.svg
	$(BIN)/python -m jax_dsv4_fmha bench --from docs/h200_grad.json --plot docs/h200_grad.svg
	PYTHONPATH=. $(BIN)/python -m examples.deepseek_v4.metrics docs/learns_v4.jsonl docs/learns_v4_rounded.jsonl docs/learns_dense.jsonl --plot docs/learns.svg
	PYTHONPATH=. $(BIN)/python docs/draw.py
	$(BIN)/python docs/generate.py

lint: .venv/.tools ## formatting of Python and C++, lint, the form of pages, and types
	$(BIN)/ruff format --check $(PACKAGES)
	$(BIN)/ruff check $(PACKAGES)
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/python docs/lint.py
	$(BIN)/mypy

fmt: .venv/.tools ## format Python and C++
	$(BIN)/ruff format $(PACKAGES)
	$(BIN)/ruff check --fix $(PACKAGES)
	$(BIN)/clang-format -i $(CXX_FILES)

wheel: ## build a wheel into dist/, and try it in an empty environment; KERNELS=none, sm_90a, … for fewer, JAX=jax==0.10.0 for another
	rm -rf .venv-wheel dist/*.whl
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir dist . \
	    -C cmake.define.KERNELS=$(or $(KERNELS),all)
	@ls -l dist; test -z "$$(find dist -type f -size +40000k)" || { echo "make: a wheel of more than 40 MB"; exit 1; }
	.venv-wheel/bin/python -m pip install --disable-pip-version-check $(if $(JAX),'$(JAX)') dist/*.whl
	cd .venv-wheel && bin/python -I -m jax_dsv4_fmha info
	cd .venv-wheel && bin/python -I -m jax_dsv4_fmha check --quick --filter fmha

build: .venv/.built ## compile every kernel and the library into the editable install in .venv; Python alone needs none

clean: ## remove the environment and everything built; compiled kernels stay in ~/.cache/jax_dsv4_fmha
	rm -rf .venv .venv-* build dist jax_dsv4_fmha/_native.so

$(BIN)/python:
	@echo "make: a virtual environment, .venv"
	@$(PYTHON) -m venv .venv

# The package's Python, as an editable install, and JAX.
.venv/.python: pyproject.toml | $(BIN)/python
	@echo "make: jax_dsv4_fmha and JAX, from PyPI into .venv"
	@$(PIP) install -e '.$(if $(HERE),[cuda12])' -C cmake.define.KERNELS=none
	@touch $@

# Lists of pyproject.toml; LISTS is Python that picks them from p.
REQUIREMENTS = $(BIN)/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb')); \
    print(*(w for w in $(LISTS) if not w.startswith(p['project']['name'])), sep='\n')" > $@.txt
.venv/.tools: LISTS = [*p['project']['optional-dependencies']['test'], *p['project']['optional-dependencies']['dev']]
.venv/.compilers: LISTS = [*p['build-system']['requires'], *p['dependency-groups']['kernels']]
.venv/.tools .venv/.compilers: pyproject.toml | $(BIN)/python
	@echo "make: what $(if $(filter %tools,$@),lint and tests need,kernels are built with), from PyPI into .venv"
	@$(REQUIREMENTS)
	@$(PIP) install -r $@.txt
	@touch $@

# An environment has the packages of a group of pyproject.toml, and first those of NAME-alone, without what they ask for.
.venv-%/.tools: pyproject.toml
	@echo "make: packages from PyPI, into .venv-$*"
	@test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	@for list in "$*-alone --no-deps" $*; do set -- $$list; \
	    .venv-$*/bin/python -c "import tomllib; \
	        print(*tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups'].get('$$1', ()), sep='\n')" > .venv-$*/$$1.txt && \
	    .venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $$2 -r .venv-$*/$$1.txt || exit 1; done
	@touch $@

# All kernels, this machine's, or those that `make test` interprets. The build directory is kept between builds.
.venv/.built: KERNELS = all
.venv/.built-here: KERNELS = $(HERE)
.venv/.built-tested: KERNELS = tested
.venv/.built .venv/.built-here .venv/.built-tested: .venv/.compilers $(wildcard ffi/*) $(shell find kernels -name '*.py') | .venv/.python
	@echo "make: the C++ library, with kernels for: $(KERNELS)"
	@$(PIP) install --no-build-isolation --no-deps --verbose -e . \
	    -C cmake.define.KERNELS=$(KERNELS) 2>&1 | tee .venv/build.log \
	    | sed -un '/^ *kernels:/p; /WITHOUT GPU KERNELS/p' || { cat .venv/build.log; exit 1; }
	@touch $@
