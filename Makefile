# make demo | test | check | notebooks | browser | registry | fuzz | slice | integration | dist | docs | bench | bench-scale: each installs what it needs into .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
# The CPU build; a plain "torch" would pull gigabytes of CUDA packages.
TORCH := torch==2.13.0
DEEPSPEED := deepspeed==0.19.8
RAY := ray[train]==2.60.0
TRANSFORMERS := transformers==5.23.0
ACCELERATE := accelerate==1.15.0
LIGHTNING := lightning==2.6.6
TORCHTITAN := torchtitan==0.3.0
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint check notebooks browser registry fuzz slice integration dist docs bench bench-scale mcore clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) "$(TORCH)"
	$(PIP) --editable ".[dev]"
	touch $@

$(VENV)/.installed-bench: $(VENV)/.installed-dev
	$(PIP) --editable ".[bench]"
	touch $@

$(VENV)/.installed-deepspeed: $(VENV)/.installed-dev
	DS_BUILD_OPS=0 $(PIP) "$(DEEPSPEED)"
	touch $@

$(VENV)/.installed-dist: $(VENV)/.installed-dev
	$(PIP) "build>=1.2" "twine>=6.1" "uv>=0.5"
	touch $@

$(VENV)/.installed-ray: $(VENV)/.installed-dev
	$(PIP) "$(RAY)"
# Servers that speak S3 and the interface of Google's store, started by the tests, and what reads them; none is needed by `make test`.
$(VENV)/.installed-storage: $(VENV)/.installed-dev
	$(PIP) --editable ".[s3,gcs,hf]" "s3fs>=2026.4" "moto[server]>=5.1" "gcsfs>=2026.4" "gcp-storage-emulator>=2026.7.18" "huggingface_hub>=2.0"
	touch $@

# Of its own: the tests of DeepSpeed run without transformers, those of the Trainer with both. megatron-core needs einops and psutil.
# The part of torchtitan that saves and loads needs tyro and spmd_types, none of the hundreds of megabytes of the rest.
$(VENV)-transformers/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-transformers
	$(VENV)-transformers/bin/pip install --quiet --disable-pip-version-check "$(TORCH)" "$(TRANSFORMERS)" "$(LIGHTNING)" einops psutil tyro spmd_types
	$(VENV)-transformers/bin/pip install --quiet --disable-pip-version-check --no-deps "$(TORCHTITAN)"
	DS_BUILD_OPS=0 $(VENV)-transformers/bin/pip install --quiet --disable-pip-version-check "$(DEEPSPEED)" "$(ACCELERATE)"
	$(VENV)-transformers/bin/pip install --quiet --disable-pip-version-check --editable .
	touch $@

# For the demo's training run.
$(VENV)/.installed-torch: $(VENV)/.installed
	$(PIP) "$(TORCH)"
	touch $@

demo: $(VENV)/.installed-torch
	PATH="$(CURDIR)/$(BIN):$$PATH" sh docs/tutorial/demo.sh

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n auto -m "not integration"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint
	$(BIN)/python -m pytest -n auto -m "not integration" --cov --cov-report=term --cov-fail-under=90 -q

# The notebooks of the docs run from start to end.
notebooks: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -p no:xdist --nbmake docs/notebooks

# The pages of --html in Chromium (apt-get install chromium chromium-driver). UCP_IMAGES=1 make browser also makes the pictures of the docs anew.
browser: $(VENV)/.installed-browser
	$(BIN)/python -m pytest -m integration -p no:xdist -rs tests/cli/pages/web

$(VENV)/.installed-browser: $(VENV)/.installed-dev
	$(PIP) "selenium>=4.20"
	touch $@

# How many (parameter, axis) pairs of the kept checkpoints a declared pattern places.
registry: $(VENV)/.installed-dev
	$(BIN)/python -m tests.registry

# Five minutes unless told otherwise: make fuzz FUZZ="--seconds 3600 --seed 7"
FUZZ ?=
fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m tests.fuzz $(FUZZ)

# One cell of each framework's matrix, for real: DeepSpeed, Megatron, FSDP2 and `load_into`, in some three minutes.
slice: $(VENV)/.installed-deepspeed
	DS_ACCELERATOR=cpu $(BIN)/python -m pytest -m integration -p no:xdist \
	    tests/integration/conversion/test_slice.py tests/cli/pages/test_tutorial.py

integration: $(VENV)/.installed-deepspeed $(VENV)/.installed-browser $(VENV)/.installed-dist $(VENV)/.installed-ray $(VENV)/.installed-storage $(VENV)-transformers/.installed
	UCP_TRANSFORMERS=$(VENV)-transformers/bin/python DS_ACCELERATOR=cpu $(BIN)/python -m pytest -m integration -p no:xdist -s

# The wheel and the sdist in dist/, tried in empty environments: every Python of `python3.11 python3.12 python3.13` that is there, and the oldest
# dependencies that pyproject.toml admits.
dist: $(VENV)/.installed-dist
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m pytest -m integration -p no:xdist -q tests/integration/conversion/test_wheel.py

# The site in .site/, every link and anchor inside it checked, and the spelling and words of every page. To publish a version: .venv/bin/mike deploy 0.2 latest
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/codespell --ignore-words-list te --dictionary - --dictionary docs/words.txt --skip docs/changes,docs/images,docs/words.txt,*.svg,*.json docs *.md

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) --editable ".[docs]"
	touch $@

# Releases of megatron-core, unpacked side by side; tests that need one fetch it themselves.
mcore: $(VENV)/.installed-dev
	$(BIN)/python fixtures/make/megatron/megatron_versions.py

bench: $(VENV)/.installed-bench $(VENV)/.installed-deepspeed
	DS_ACCELERATOR=cpu $(BIN)/python -m tests.bench

# Indexes of up to a trillion parameters over sparse files: 3 GB of disk at a time, some twenty minutes.
bench-scale: $(VENV)/.installed-bench
	$(BIN)/python -m tests.bench.scale

clean:
	rm -rf $(VENV) $(VENV)-transformers .mcore .bench .site dist demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
