# The demos and the tests need Python ≥ 3.11 and nothing before them: each sets up .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo demo-study demo-distill figures test test-all lint clean help

help:
	@echo "make demo          set up, make small Sudokus, train on them for two minutes, watch one being solved"
	@echo "make demo-study    set up, train twelve models, say in a report what width and learning rate change"
	@echo "make demo-distill  set up, train a small language model, quantise it to 4 and 2 bits, distil back what was lost"
	@echo "make figures       make the pictures and the demo's figures of README and docs again, from three seeds"
	@echo "make test          set up, then formatting, lint, types and tests (the slow ones left out)"
	@echo "make test-all      the same with the slow tests"
	@echo "make clean         remove .venv and caches; data/ and runs/ stay"

.venv/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tinypod needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	touch $@

.venv/runtime: .venv/python pyproject.toml
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/lm: .venv/runtime
	$(BIN)/pip install --quiet --editable '.[lm]'
	touch $@

.venv/dev: .venv/runtime
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

data/demo/dataset.json: | .venv/runtime
	$(BIN)/tinypod data sudoku data/demo --generate --box 2x3 --clues 12 --train-size 1000 --test-size 500

demo: .venv/runtime
	$(BIN)/tinypod demo

demo-study: .venv/runtime data/demo/dataset.json
	$(BIN)/tinypod study run studies/demo

demo-distill: .venv/lm
	$(BIN)/python examples/distill/demo.py

figures: .venv/runtime
	$(BIN)/python docs/figures.py

lint: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest --numprocesses 2 --dist worksteal --durations 20 -m "not slow"

test-all: lint
	$(BIN)/pytest --numprocesses 2 --dist worksteal

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
