PYTHON ?= .venv/bin/python

.PHONY: demo test quick lowest lint types kernels bench gpu docs site release help
.DEFAULT_GOAL := help

# Tests of the core that compile nothing, start no other rank and need no extension.
QUICK = $(wildcard $(patsubst %,tests/test_%.py,layering size storage data_* generation_* model_* nn_* registry_* \
	train_evaluate train_hooks train_loop train_optim train_prefetch train_schedule_free train_settings train_step))
PLUGINS = $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))

.venv: requirements-dev.txt constraints.txt $(wildcard plugins/*/pyproject.toml)
	python3 -m venv .venv
	.venv/bin/pip install -c constraints.txt hatchling editables
	.venv/bin/pip install --no-build-isolation -r requirements-dev.txt $(patsubst %,-e %,$(PLUGINS))
	touch .venv

demo: .venv  ## train a small model on this machine, save it, reload it, write text
	.venv/bin/elman demo

test: .venv  ## all tests, on every core
	$(PYTHON) -m pytest -n auto

quick: .venv  ## tests of the core without compilers, ranks and extensions, in about a minute on two cores
	CXX=none $(PYTHON) -m pytest -q -n 2 -m "not slow" $(QUICK)

lowest:  ## `make quick` and the tests of transformers, with the lowest versions that the packages admit
	python3 -m venv .lowest
	.lowest/bin/pip install packaging
	.lowest/bin/python tests/bounds.py lowest > .lowest/requirements.txt
	.lowest/bin/pip install -r .lowest/requirements.txt accelerate peft editables httpx openai
	.lowest/bin/pip install --no-deps --no-build-isolation $(patsubst %,-e %,. baselines csrc_common checkpoints $(PLUGINS) $(wildcard extensions/*/))
	CXX=none .lowest/bin/python -m pytest -q -n 2 -m "not slow" $(QUICK) $(wildcard tests/test_hf_*.py) extensions

lint: .venv  ## style of Python and C++, spelling (`make lint FIX=1` rewrites)
	$(PYTHON) -m ruff check $(if $(FIX),--fix) .
	$(PYTHON) -m ruff format $(if $(FIX),,--check) .
	$(PYTHON) -m codespell_lib
	git ls-files '*.h' '*.cuh' '*.cu' '*.cpp' | xargs -r .venv/bin/clang-format $(if $(FIX),-i,--dry-run -Werror)

types: .venv  ## static types
	$(PYTHON) -m mypy
	MYPYPATH=tests:csrc_common/tests $(PYTHON) -m mypy --config-file tests/mypy.ini tests csrc_common/tests

kernels: .venv  ## compile the kernels of every plugin ahead of their first use
	.venv/bin/elman build

bench: .venv  ## measure kernels and training steps on this machine's GPU
	$(PYTHON) benchmarks/run.py dense gates elementwise matrix step --out benchmarks.json

gpu: .venv  ## everything that needs a GPU: its tests, then verification and every benchmark beside its peers
	$(PYTHON) -m pytest -m gpu -n auto --table gpu_tests.jsonl; $(PYTHON) benchmarks/run.py all --peers --out benchmarks.json

docs: .venv  ## write the references and the tables of options, and check that the documentation is true
	$(PYTHON) docs/commands.py > docs/reference/commands.md
	$(PYTHON) docs/settings.py > docs/reference/settings.md
	$(PYTHON) docs/options.py
	$(PYTHON) -m pytest -q tests/test_docs.py

.site: .venv requirements-site.txt constraints.txt docs/site/package-lock.json
	python3 -m venv .site
	echo "import site; site.addsitedir('$$($(PYTHON) -c "import sysconfig; print(sysconfig.get_path('purelib'))")')" \
		> "$$(.site/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/packages.pth"
	.site/bin/pip install -r requirements-site.txt
	cp docs/site/package*.json .site && cd .site && npm ci --no-audit --no-fund
	touch .site

site: .site  ## the documentation as a site, in site/index.html; needs node and npm; once they are installed, no network
	NO_MKDOCS_2_WARNING=1 .site/bin/mkdocs build

release: .venv  ## wheels and source distributions of every package into dist/, checked and used in an empty environment
	rm -rf dist
	$(PYTHON) tests/release.py dist

help:  ## this list
	@awk -F ':.*##' '/^[a-z]+:.*##/ {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
