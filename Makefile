# On a fresh machine with Python >= 3.10: `make quickstart` runs the product, `make check` the quick tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PRODUCT := $(VENV)/.product
DEV := $(VENV)/.dev
WORKERS ?= 2
PYTEST := HF_HUB_OFFLINE=1 pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
LOG = benchmarks/results/tests-$(shell date +%Y-%m-%d).log

export PATH := $(CURDIR)/$(BIN):$(PATH)
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: quickstart check test test-all lint docs materials audit crds environment clean

quickstart: $(PRODUCT)
	infembed quickstart $(ARGS)

# Seconds: linters, types, import contracts, and tests that start neither a process nor a cluster.
check: lint
	$(PYTEST) -m 'not ray and not integration and not end_to_end and not slow' $(ARGS)

# What CI runs: everything but the slow tests.
test: lint
	$(PYTEST) --durations=30 $(ARGS)

# Adds the slow tests (kills, chaos, full size); the log names the machine and the duration of every test over a second.
test-all: lint
	@{ date -u +'%Y-%m-%d %H:%M UTC'; uname -srm; lscpu | grep -E '^(Model name|CPU\(s\)):'; \
	   git rev-parse --short HEAD; } > $(LOG)
	bash -o pipefail -c '$(PYTEST) -m "" --durations=0 --durations-min=1 $(ARGS) 2>&1 | tee -a $(LOG)'

lint: environment
	ruff check .
	ruff format --check .
	mypy
	lint-imports --no-logo

# The documentation site, in .cache/site; warnings and broken links are errors.
docs: environment
	python -m scripts.site

# Bill of materials (CycloneDX) and licences of the environment, in .cache/materials. docker/Dockerfile has a target for an image's.
# The tools have an environment of their own: what they install makes every process that imports Ray start a second later.
materials: environment
	python3 -m venv .cache/materials && .cache/materials/bin/pip install -q 'cyclonedx-bom>=7' 'pip-licenses>=5'
	.cache/materials/bin/cyclonedx-py environment --pyproject pyproject.toml --output-file .cache/materials/sbom.json $(BIN)/python
	.cache/materials/bin/pip-licenses --python=$(BIN)/python --format=csv --with-urls --output-file=.cache/materials/licences.csv

# Known vulnerabilities of the environment, except those that .ci/audit-allowed.txt accepts with a reason. Where the database cannot
# be reached, it says that nothing was checked and ends with status 3.
audit: environment
	.ci/audit $(BIN)/python

# The CRDs of KubeRay and of the Prometheus operator, in .cache/crds: tests/manifests validates against them if they are there.
KUBERAY := https://raw.githubusercontent.com/ray-project/kuberay/v1.7.0/ray-operator/config/crd/bases
OPERATOR := https://raw.githubusercontent.com/prometheus-operator/prometheus-operator/v0.84.1/example/prometheus-operator-crd
crds:
	mkdir -p .cache/crds
	for kind in rayjobs rayservices; do curl -fsSL $(KUBERAY)/ray.io_$$kind.yaml -o .cache/crds/$$kind.yaml || exit 1; done
	for kind in servicemonitors podmonitors; do \
	  curl -fsSL $(OPERATOR)/monitoring.coreos.com_$$kind.yaml -o .cache/crds/$$kind.yaml || exit 1; done

environment: $(DEV)

$(PRODUCT): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[cpu,quickstart,onnx]'
	@touch $@

$(DEV): $(PRODUCT)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[cpu,dev]' milvus-lite
	@touch $@

clean:
	rm -rf $(VENV) .cache runs
