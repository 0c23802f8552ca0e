# Every target sets up what it needs; the second run starts within seconds.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test check format peer bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    set up, then build, fine-tune and replay a digit classifier"
	@echo "make test    set up, then run the tests"
	@echo "make check   lint, format check, strict types"
	@echo "make peer    the reference system, in a virtual environment of its own"
	@echo "make bench   step time and peak memory against the reference"

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[demo,test,oracle,dev]' 'torch==2.13.0'
	@touch $@

setup: $(VENV)/.ready

peer:
	@scripts/setup_peer.sh .venv-peer

clean:
	rm -rf $(VENV) .venv-peer build
