# Every target sets up what it needs; the second run starts within seconds.
# PYTHON=/path/to/python3.12 names the interpreter, 3.11 or newer; JOBS how many tests run at once.
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= auto

.NOTPARALLEL:
.PHONY: help setup demo test check format peer bench fidelity kits-swift clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    set up, then build, train and replay a digit classifier"
	@echo "make test    set up, then run the tests"
	@echo "make check   lint, format check, strict types"
	@echo "make format  mend lint and format"
	@echo "make peer    the reference system, in a virtual environment of its own"
	@echo "make bench   step time and peak memory against the reference"
	@echo "make fidelity  predicted against measured memory and step times, on held-out models"
	@echo "make kits-swift  a Swift toolchain, then build and test the Swift kit"
	@echo "make clean   remove what these targets made"

demo: $(VENV)/.ready-demo
	@$(BIN)/odtpack demo --out build/demo

test: $(VENV)/.ready-full
	@$(BIN)/python -m pytest -n $(JOBS) --maxprocesses 4 --dist worksteal

check: $(VENV)/.ready-full
	@failed=0; \
	for command in "ruff check" "ruff format --check" mypy; do \
		echo "$$command"; \
		$(BIN)/$$command || failed=1; \
	done; \
	exit $$failed

format: $(VENV)/.ready-full
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

setup: $(VENV)/.ready-full

peer:
	@scripts/setup_peer.sh .venv-peer

bench: $(VENV)/.ready-full peer
	@$(BIN)/python -m benchmarks.compare_peer

fidelity: $(VENV)/.ready-full
	@$(BIN)/python -m benchmarks.fidelity --json build/fidelity.json --markdown build/fidelity.md

kits-swift: $(VENV)/.ready-full
	@scripts/setup_swift.sh
	@$(BIN)/python -m pytest tests/kits/test_swift.py tests/kits/test_swift_apps.py

clean:
	rm -rf $(VENV) .venv-peer build

$(VENV)/.ready-demo $(VENV)/.ready-full: $(VENV)/.ready-%: pyproject.toml scripts/setup_venv.sh
	@PYTHON="$(PYTHON)" scripts/setup_venv.sh $* $(VENV)
