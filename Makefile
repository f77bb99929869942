# make demo and make test do all the set-up on a fresh machine: Python 3.11+, make and a C compiler are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -q
# Three processes share the files of tests, since ranks that wait leave cores idle; what measures time or memory runs by
# itself afterwards.
WORKERS ?= 3
SHARED := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# pip compiles the modules that it installs on one core: COMPILED does so on all.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# Some packages have files for other versions of Python, which cannot be compiled.
COMPILED = $(BIN)/python -m compileall -qq -j 0 $(1) || true

# A process whose modules are not kept compiled takes 0.3 CPU seconds more to start, and the suite starts hundreds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test matrix fast fingerprints coverage mutate mutate-device cover-device lint shape clean

$(BIN)/.installed-core: pyproject.toml constraints.txt
	@echo "Setting up $(VENV): a minute or two, once."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt -e .
	$(call COMPILED,$(VENV)/lib)
	touch $@

$(BIN)/.installed-dev: $(BIN)/.installed-core
	$(PIP) -c constraints.txt -e '.[dev,hf]'
	$(call COMPILED,$(VENV)/lib)
	touch $@

# Models for tests/zoo, apart from the rest: tests/zoo/packages.py says why.
$(VENV)/zoo: $(BIN)/.installed-dev
	$(PIP) --no-deps --upgrade -c constraints.txt --target $@ timm torchvision
	$(call COMPILED,$@)
	touch $@

# Flower and scikit-learn for tests/federated, apart from the rest: tests/federated/packages.py says why.
$(VENV)/fed: $(BIN)/.installed-dev constraints-fed.txt
	$(PIP) --no-deps --upgrade --target $@ -r constraints-fed.txt
	$(call COMPILED,$@)
	touch $@

demo: $(BIN)/.installed-core
	$(BIN)/shoal demo

test: $(BIN)/.installed-dev $(VENV)/zoo $(VENV)/fed
	$(PYTEST) $(SHARED) -m "not matrix and not alone"
	$(PYTEST) -m "alone and not matrix"

fast: $(BIN)/.installed-dev $(VENV)/zoo $(VENV)/fed
	$(PYTEST) $(SHARED) -m "fast and not alone"
	$(PYTEST) -m "fast and alone"

matrix: $(BIN)/.installed-dev $(VENV)/zoo $(VENV)/fed
	$(PYTEST) $(SHARED) -m "not alone"
	$(PYTEST) -m alone

# Which lines and branches of the sources the tests of `make test` run through, in ranks too; and how many of a few changes
# of each room they notice. tests/covered.py, tests/mutate.py
coverage: $(BIN)/.installed-dev $(VENV)/zoo $(VENV)/fed
	$(PIP) -c constraints.txt coverage
	rm -rf build/coverage && mkdir -p build/coverage
	$(PYTEST) -p tests.covered $(SHARED) -m "not matrix and not alone" --junitxml=build/coverage/costs.xml
	$(BIN)/python -m tests.covered report

ROOMS ?= $(addprefix src/shoal/,checkpoint chunks comm exchange module optim parallel pipeline precision training)
mutate:
	$(BIN)/python -m tests.mutate sample 8 $(ROOMS)

# What no test on the simulated accelerator reports when it is removed: waits, events, record_stream, pinned memory; and
# branches of accelerators that none comes to. tests/device/mutate.py, tests/device/covered.py
mutate-device: $(BIN)/.installed-dev
	$(BIN)/python -m tests.device.mutate

cover-device: $(BIN)/.installed-dev
	$(BIN)/python -m tests.device.covered

# What a refactoring must not change: weights and losses of many plans, to the bit, before and after it.
fingerprints: $(BIN)/.installed-dev
	$(BIN)/python -m tests.parity.fingerprints compare

lint: $(BIN)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# How large files and functions are, and who names devices and axes: printed, and held.
shape: $(BIN)/.installed-dev
	$(BIN)/python -m tests.shape

clean:
	rm -rf $(VENV) runs build
