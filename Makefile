# make demo: set up, then race our methods against torch's on a 100 Mbit/s link.   make test: set up, then the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.done

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-loops test-mutants test-gpu lint format bench bench-wire bench-accuracy data clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(SETUP)  ## .venv with pinned dependencies
$(SETUP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Paceline needs Python 3.11 or newer; this is $$($(PYTHON) --version). Say make PYTHON=python3.12, for example."; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(SETUP)  ## the main job: a race on the text task over a 100 Mbit/s link, report.html
	$(BIN)/paceline race text --workers 2 --link 100mbit --steps 20 \
		--methods floor,torch:ddp,torch:fp16,torch:powersgd,exact,half,powersgd \
		--set powersgd.rank=2 --json race.json --html report.html -- --eval-every 5

test: $(SETUP) lint  ## lint, then all tests that need no GPU and no patience
	$(BIN)/python -m pytest -m "not slow and not gpu" -n 3 --dist worksteal

test-slow: $(SETUP)  ## the long ones
	$(BIN)/python -m pytest -m "slow and not gpu" -n 2 --dist worksteal --timeout 600 -o faulthandler_timeout=1000

test-loops: $(SETUP)  ## loops that users write, under every method, beside one plain process
	$(BIN)/python tests/loops --report --jobs 2

test-mutants: $(SETUP)  ## small faults in the sources, one at a time: does a test notice each?
	$(BIN)/python tests/mutants --jobs 2 --out bench/results/mutants.json

test-gpu: $(SETUP)  ## the ones that need a CUDA device
	$(BIN)/python -m pytest -m gpu

lint: $(SETUP)  ## ruff and mypy
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy

format: $(SETUP)  ## ruff, changing files
	$(BIN)/ruff check --fix src tests bench
	$(BIN)/ruff format src tests bench

bench: $(SETUP)  ## the figures behind the docs (tens of minutes; leave the machine alone meanwhile)
	$(BIN)/python bench/telemetry.py --out bench/results/telemetry.json
	$(BIN)/python bench/reducers.py --out bench/results/reducers.json
	$(BIN)/python bench/parity.py --out bench/results/parity.json
	$(BIN)/python bench/adam_cpu.py --out bench/results/adam_cpu.json

bench-wire: $(SETUP)  ## shared memory, hosts, the order of bytes (half an hour; root for the shaped links)
	$(BIN)/python bench/collectives.py --out bench/results/collectives.json
	$(BIN)/python bench/order.py --out bench/results/order.json

bench-accuracy: $(SETUP)  ## seconds to a target accuracy, every reducer on four links (two hours; can be interrupted)
	$(BIN)/python bench/time_to_accuracy.py --out bench/results/time_to_accuracy.json --plot docs/methods/plots
	$(BIN)/python bench/pages.py

data:  ## Fashion-MNIST for the task `fashion` (Debian, root)
	apt-get install -y dataset-fashion-mnist

clean:  ## what these targets made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis report.html race.json
