# Two commands do everything on a fresh machine with Python >= 3.10: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PRODUCT := $(VENV)/.product
DEV := $(VENV)/.dev

export PATH := $(CURDIR)/$(BIN):$(PATH)
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export RAY_USAGE_STATS_ENABLED := 0
# DeepSpeed compiles a communication op with g++ on first use; keep it beside the environment.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.cache/torch_extensions

.PHONY: quickstart test lint environment clean

quickstart: $(PRODUCT)
	infembed quickstart $(ARGS)

test: environment lint
	HF_HUB_OFFLINE=1 pytest $(ARGS)

lint: environment
	ruff check .
	ruff format --check .
	mypy
	lint-imports --no-logo

environment: $(DEV)

$(PRODUCT): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed: make PYTHON=python3.11 ...")'
	@command -v g++ >/dev/null || { echo "g++ is needed (DeepSpeed compiles a small op): apt-get install g++"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[cpu,quickstart,onnx]'
	@touch $@

$(DEV): $(PRODUCT)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[cpu,dev]'
	@touch $@

clean:
	rm -rf $(VENV) .cache runs
