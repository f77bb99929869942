# make demo and make test do all the set-up on a fresh machine: Python 3.11+, make and a C compiler are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test matrix fast fingerprints lint shape clean

$(BIN)/.installed-core: pyproject.toml constraints.txt
	@echo "Setting up $(VENV): a minute or two, once."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(BIN)/.installed-dev: $(BIN)/.installed-core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,hf]'
	touch $@

# Models for tests/zoo, apart from the rest: tests/zoo/packages.py says why.
$(VENV)/zoo: $(BIN)/.installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade -c constraints.txt --target $@ timm torchvision
	touch $@

demo: $(BIN)/.installed-core
	$(BIN)/shoal demo

test: $(BIN)/.installed-dev $(VENV)/zoo
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q -m "not matrix"

fast: $(BIN)/.installed-dev $(VENV)/zoo
	$(BIN)/python -m pytest -q -m fast

matrix: $(BIN)/.installed-dev $(VENV)/zoo
	$(BIN)/python -m pytest -q -m "matrix or not matrix"

# What a refactoring must not change: weights and losses of many plans, to the bit, before and after it.
fingerprints: $(BIN)/.installed-dev
	$(BIN)/python -m tests.parity.fingerprints compare

lint: $(BIN)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

# How large files and functions are, and who names devices and axes: printed, and held.
shape: $(BIN)/.installed-dev
	$(BIN)/python -m tests.shape

clean:
	rm -rf $(VENV) runs build
