# Every target makes its own virtual environment and installs what it needs, once.
#
# On a machine without an accelerator, set TORCH_INDEX to PyTorch's index of CPU builds (the README has the line):
# the build on the default index installs gigabytes of CUDA packages.

VENV ?= .venv
PYTHON ?=
TORCH_INDEX ?=
ARGS ?=
SEEDS ?= 2000
MINUTES ?= 5
CHROMIUM ?= chromium
RESUME ?=
LONG_PART ?=
SYSTEM := chromium docker-compose docker.io debootstrap iproute2 iptables munge prometheus slurm-client slurmctld slurmd \
  docker-registry sqlite3

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile --constraint constraints.txt
# pip would compile one file after the other, which takes half of its time. Files that cannot be compiled are ignored,
# as pip does.
COMPILE := $(BIN)/python -m compileall -q -q -j 0 $(VENV)/lib || true
# An environment from before the distribution was renamed to dips-training still contains the old name, and both provide
# the command: the old one is removed before the new one is installed.
RENAMED := if $(BIN)/python -m pip show -q dips 2>/dev/null; then $(BIN)/python -m pip uninstall -q -y dips; fi
VENV_STAMP := $(VENV)/.made
TORCH_STAMP := $(VENV)/.installed-torch
DEMO_STAMP := $(VENV)/.installed-demo
DEV_STAMP := $(VENV)/.installed-dev
FOREIGN_STAMP := $(VENV)/.installed-foreign
INPUTS := pyproject.toml constraints.txt

# For deploy/images.sh, deploy/kubernetes/make_monitoring.py and the commands of tests/tiers.py, from the command line as from the environment.
export VENV TORCH_INDEX IMAGES TAG BASE SOURCE_URL RUNBOOKS

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-landing test-long system foreign check sim frozen model-check mutants fuzz soak protos papers bench docs dist images clean manifests manifests-test e2e-kubernetes dashboards-test page-test compose compose-test

help:  ## this list
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 22
	@echo
	@echo '  ARGS="..."       more arguments, for demo, the tests (pytest), sim, frozen, model-check, mutants and bench'
	@echo '  MINUTES=5        how long `make fuzz` runs, and `make soak` (10), about'
	@echo '  SEEDS=2000       how many runs `make sim` simulates'
	@echo '  TORCH_INDEX=URL  package index for PyTorch alone, such as the index of its CPU builds'
	@echo '  PYTHON=PATH      the interpreter that makes the environment (3.11 or newer); VENV=DIR where it is made'

demo: $(DEMO_STAMP)  ## train a small model on four clusters here, and kill a cluster and a slave during the run
	$(BIN)/dips demo $(ARGS)

test: $(DEV_STAMP)  ## the first tier: all checks, unit tests, and the main path in real processes, in a little over three minutes
	$(BIN)/python tests/run_all.py --tier first $(ARGS)

test-landing: $(DEV_STAMP) system  ## the landing tier: short faults, simulations, dashboards, the status page
	$(BIN)/python tests/run_all.py --tier landing $(ARGS)

test-long: $(FOREIGN_STAMP) system  ## the long tier, and what other tiers did not pass yet; RESUME=1 goes on, LONG_PART=1: a fifth
	$(BIN)/python tests/run_all.py $(if $(LONG_PART),--tier long --part $(LONG_PART),\
	  --tier first --tier landing --tier long --seen) $(if $(RESUME),--resume) $(ARGS)

system:  ## install what the landing and long tiers need from Debian: a browser, Prometheus, a container engine, Slurm
	@missing=(); \
	for package in $(SYSTEM); do dpkg -s "$$package" >/dev/null 2>&1 || missing+=("$$package"); done; \
	if [ "$${#missing[@]}" = 0 ]; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	  echo "make: apt-get install $${missing[*]} (as root): the landing and long tiers need them" >&2; exit 1; \
	fi; \
	apt-get -o DPkg::Lock::Timeout=600 update -q && DEBIAN_FRONTEND=noninteractive \
	  apt-get -o DPkg::Lock::Timeout=600 install -y -q --no-install-recommends "$${missing[@]}"

foreign: $(FOREIGN_STAMP)  ## install the programs of other people that the long tier runs: trl, timm, torchtitan, wandb, mlflow, trackio, etcd

check: $(DEV_STAMP)  ## lint, types and layers, without running anything
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy deploy
	$(BIN)/mypy --config-file tests/mypy.ini --cache-dir .mypy_cache/tests tests benchmarks tools
	$(BIN)/lint-imports --no-cache

sim: $(DEV_STAMP)  ## simulate SEEDS runs with every fault, all invariants checked after every step
	$(BIN)/python -m dips.lab.sim.seeds --seeds $(SEEDS) $(ARGS)

frozen: $(DEV_STAMP)  ## compare the records of 500 simulated runs with tests/frozen/seeds.txt, in a minute or two
	$(BIN)/python tools/canonical_records.py --check tests/frozen/seeds.txt $(ARGS)

model-check: $(DEV_STAMP)  ## visit every state of small runs, breadth first, in two minutes; ARGS=--short or ARGS=--long
	PYTHONPATH=tests $(BIN)/python -m search --counts tests/frozen/searches.txt $(ARGS)

mutants: $(DEV_STAMP)  ## make small faults, one at a time, and see whether a unit test fails; ARGS="--sample 240 --seed 1"
	PYTHONPATH=tests $(BIN)/python -m mutants $(ARGS)

fuzz: $(DEV_STAMP)  ## feed unexpected bytes to every decoder for MINUTES, and to the compiled loops
	PYTHONPATH=tests $(BIN)/python -m fuzz --minutes $(MINUTES) $(ARGS)

soak: $(DEV_STAMP)  ## train twice, without faults and under many kills, for MINUTES, and compare the losses
	$(BIN)/python tests/soak.py --minutes $(if $(filter file,$(origin MINUTES)),10,$(MINUTES)) $(ARGS)

dashboards-test: $(DEV_STAMP)  ## scrape a real run with a real Prometheus: each panel and rule must have data; two minutes
	$(BIN)/python -m pytest --require-passed tests/e2e/dashboards $(ARGS)

page-test: $(DEV_STAMP)  ## check the status page of a real run with a real browser, for two minutes; pictures in runs/page
	@if ! command -v $(CHROMIUM) >/dev/null; then \
	  echo "make page-test: there is no $(CHROMIUM) here (Debian, Ubuntu: apt-get install chromium)" >&2; exit 1; fi
	DIPS_TEST_CHROMIUM="$$(command -v $(CHROMIUM))" $(BIN)/python -m pytest --require-passed -rs tests/e2e/page $(ARGS)

compose:  ## check this machine, then start the run of docker-compose.yml in the background
	@$(or $(PYTHON),python3) deploy/compose/up.py --build --detach $(ARGS)

compose-test: $(DEV_STAMP)  ## train in containers, kill each of them, cut a network, verify, remove everything; needs Docker
	$(BIN)/python tests/e2e/compose/run.py $(ARGS)

manifests: $(DEV_STAMP)  ## generate deploy/kubernetes/base (from base.toml) and monitoring (from rules and dashboards)
	rm -rf deploy/kubernetes/base
	$(BIN)/dips deploy render deploy/kubernetes/base.toml --output deploy/kubernetes/base
	rm -rf deploy/kubernetes/base/scripts deploy/kubernetes/base/cluster-jobset
	$(BIN)/python deploy/compose/pin.py deploy/kubernetes/base
	$(BIN)/dips deploy rights deploy/kubernetes/base.toml >deploy/kubernetes/rights.yaml
	$(BIN)/python deploy/kubernetes/make_monitoring.py

manifests-test: $(DEV_STAMP)  ## check every object for Kubernetes against the published schemas of three versions
	$(BIN)/python -m pytest --require-passed -rs -s tests/slow/test_manifests.py $(ARGS)

e2e-kubernetes: $(DEV_STAMP)  ## deploy to the cluster that KUBECONFIG names; skipped without one
	@if [ -z "$${KUBECONFIG:-}" ]; then echo "make e2e-kubernetes: skipped: KUBECONFIG names no cluster"; \
	else $(BIN)/python -m pytest --require-passed -rs -s tests/e2e/kubernetes $(ARGS); fi

protos: $(DEV_STAMP)  ## generate the stubs, the messages and their codec from src/dips/protos/*.proto
	$(BIN)/python tools/generate_messages.py

papers: $(DEV_STAMP)  ## every figure and table of five papers next to what this project does: a report in runs/papers
	PYTHONPATH=benchmarks $(BIN)/python -m papers $(ARGS)

bench: $(DEV_STAMP)  ## run the benchmarks, or one: BENCH=sync runs benchmarks/bench_sync.py; ARGS=--quick: small sizes
	@shopt -s nullglob; found=(benchmarks/bench_$(or $(BENCH),*).py); \
	if [ "$${#found[@]}" = 0 ]; then echo "make bench: there is no benchmarks/bench_$(or $(BENCH),*).py" >&2; exit 1; fi; \
	failed=(); absent=(); \
	for file in "$${found[@]}"; do \
		echo "== $$file"; code=0; $(BIN)/python "$$file" $(ARGS) || code=$$?; \
		case $$code in 0) ;; 2) absent+=("$$file") ;; *) failed+=("$$file") ;; esac; \
	done; \
	if [ "$${#absent[@]}" != 0 ]; then echo "make bench: not possible here, as they say above: $${absent[*]}" >&2; fi; \
	if [ "$${#failed[@]}" != 0 ]; then echo "make bench: not done: $${failed[*]}" >&2; exit 1; fi; \
	if [ "$${#absent[@]}" = "$${#found[@]}" ]; then exit 2; fi

docs: $(DEV_STAMP)  ## update the generated parts of docs/
	$(BIN)/python tools/generate_docs.py --write docs

dist: $(DEV_STAMP)  ## build the wheel and the source archive that an index would have, in dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist $(ARGS) .

images:  ## build the images of master, slave and worker, with labels; IMAGES=registry.example.org/dips TAG=0.1.0
	@deploy/images.sh $(ARGS)

clean:  ## remove the environment and everything that tools left behind; runs/ stays
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Without PYTHON=, the first of these that is new enough is used. The version is checked before anything is made,
# because pip reports it late and names no remedy.
$(VENV_STAMP):
	@new_enough() { "$$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }; \
	as_root() { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; }; \
	python=""; \
	if [ -z "$(PYTHON)" ] && ! command -v python3 >/dev/null && as_root; then \
	  echo "make: there is no python3 yet: installing it"; \
	  apt-get update -q && apt-get install -y -q --no-install-recommends python3 python3-venv; \
	fi; \
	for candidate in $(or $(PYTHON),python3 python3.12 python3.13 python3.11 python3.14); do \
	  if new_enough "$$candidate"; then python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "make: dips needs Python 3.11 or newer, and $(or $(PYTHON),python3) is" \
	    "$$( ($(or $(PYTHON),python3) --version || echo not there) 2>/dev/null): install it" \
	    "(Debian, Ubuntu: apt-get install python3 python3-venv), or say make PYTHON=/path/to/python3.11" >&2; \
	  exit 1; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	  package="python$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"; \
	  if as_root; then \
	    echo "make: $$python cannot make environments yet: installing $$package"; \
	    apt-get update -q && apt-get install -y -q --no-install-recommends "$$package"; \
	  else \
	    echo "make: $$python cannot make virtual environments: apt-get install $$package (as root)" >&2; exit 1; \
	  fi; \
	fi; \
	echo "make: environment $(VENV) from $$("$$python" --version)"; \
	"$$python" -m venv $(VENV)
	@touch $@

# Only PyTorch comes from its own index, without dependencies: these come from the usual index with everything else, at
# the versions of constraints.txt. The next step finds this build installed and keeps it.
$(TORCH_STAMP): $(VENV_STAMP) $(INPUTS)
ifneq ($(TORCH_INDEX),)
	$(PIP) --no-deps --index-url $(TORCH_INDEX) torch
endif
	@touch $@

$(DEMO_STAMP): $(TORCH_STAMP)
	@$(RENAMED)
	$(PIP) --editable '.[demo]'
	$(COMPILE)
	$(BIN)/dips warm-up
	@touch $@

# pyproject.toml says why timm and trackio are installed alone.
$(FOREIGN_STAMP): $(DEV_STAMP)
	$(PIP) --editable '.[foreign]'
	$(PIP) --no-deps timm trackio brotli gradio-client orjson python-multipart
	$(COMPILE)
	@touch $@

# It includes everything that the demo needs.
$(DEV_STAMP): $(TORCH_STAMP)
	@$(RENAMED)
	$(PIP) --editable '.[dev]'
	$(COMPILE)
	$(BIN)/dips warm-up
	@touch $(DEMO_STAMP) $@
