# A fresh machine needs python3 (3.10 or newer, with venv), make and git; everything else goes into .venv.

PYTHON  ?= python3
# What `make reproduce` and `make bench` run, and where results go
SCALE   ?= laptop
SEEDS   ?=
OUT     ?= reproduced
# Notebooks and test files tested at once
WORKERS ?= 2

VENV   := .venv
LATEST := .venv-latest
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := -m pip --disable-pip-version-check

# The stamp holds the folder it was made in: an environment that was moved, or whose python is gone, is made again
BROKEN := $(if $(wildcard $(STAMP)),$(shell \
            { [ "$$(cat $(STAMP))" = "$(CURDIR)" ] && $(BIN)/python -c ''; } >/dev/null 2>&1 || echo broken))

.DEFAULT_GOAL := help
.PHONY: help env reproduce pages lint test test-fast test-data flaky test-latest bench readme llms docs constraints clean broken

help:  ## Show this list
	@echo 'usage: make TARGET'; echo
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r t d; do printf '  %-12s %s\n' "$$t" "$$d"; done
	@echo; echo 'variables: SCALE=smoke|laptop|paper  SEEDS=N  OUT=DIR  PAGES=nbs/22_lw.ipynb  WORKERS=N  PYTHON=python3.11'

# $(call python-ok): stop with advice when $(PYTHON) is missing or too old
define python-ok
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
  echo "'$(PYTHON)' is missing or older than Python 3.10. Install a newer one, or name it: make PYTHON=python3.11 ..." >&2; exit 1; }
endef

# $(call make-venv,DIR): make DIR unless a working one is there
define make-venv
@$(1)/bin/python $(PIP) --version >/dev/null 2>&1 || { \
  if [ -e $(1) ]; then echo "$(1) does not work here; making it anew"; fi; $(PYTHON) -m venv --clear $(1); } || { \
  echo "Could not make $(1). On Debian and Ubuntu: apt install python3-venv. Then: make clean, and try again" >&2; exit 1; }
endef

# $(call twice,COMMAND): what a download that was cut short has spoiled works the second time
define twice
$(1) || { echo 'That failed; trying once more' >&2; $(1); }
endef

# The stamp comes last, so an interrupted installation is taken up again
$(STAMP): settings.ini setup.py pyproject.toml constraints.txt $(BROKEN)
	$(python-ok)
	@rm -f $@
	$(if $(BROKEN),@rm -rf $(VENV))
	$(call make-venv,$(VENV))
	$(call twice,$(BIN)/python $(PIP) install -c constraints.txt -e '.[dev]')
	@echo '$(CURDIR)' > $@

env: $(STAMP)  ## Set up .venv (the others do it when needed)

reproduce: $(STAMP)  ## Run the synthetic study: tables, figures and a results page in OUT
	$(BIN)/reinit_repro synthetic --scale $(SCALE) $(if $(SEEDS),--seeds $(SEEDS)) --out $(OUT)

pages: $(STAMP)  ## Run the notebooks PAGES at laptop scale and keep their outputs
	$(BIN)/python .ci/execute.py $(PAGES)

lint: $(STAMP)  ## Check code, notebooks and pages against the rules of CONTRIBUTING.md
	$(BIN)/ruff check --quiet nbs tests .ci setup.py
	$(BIN)/python .ci/lint

# One thread each: the workers share the cores, and smoke networks are small
test: export REINIT_SCALE = smoke
test: lint  ## Test the notebooks and the library at smoke scale
	OMP_NUM_THREADS=1 $(BIN)/nbdev_test --n_workers $(WORKERS) --do_print --timing
	$(BIN)/python -m pytest -q -rs -n $(WORKERS) --dist loadfile tests

test-fast: export REINIT_SCALE = smoke
test-fast: lint  ## Run the tests without notebooks, browsers, kills, several processes and memory
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m 'not slow' tests

test-data: export REINIT_SCALE = smoke
test-data: $(STAMP)  ## Run only the tests that need real images and weights: REINIT_DATA names their folder
	@test -d "$$REINIT_DATA" || { echo 'REINIT_DATA must name the folder that holds the images and weights' >&2; exit 1; }
	$(BIN)/python -m pytest -q -rs -n $(WORKERS) --dist loadfile -m data tests

flaky: $(STAMP)  ## Run all notebooks with five other global random seeds each
	$(BIN)/python .ci/flaky.py --workers $(WORKERS)

# No constraints and no nbdev here, so the newest fastai and fastcore come in; upgraded on every call
test-latest: export REINIT_SCALE = smoke
test-latest:  ## Test the library on the newest fastai, fastcore and torch, in .venv-latest
	$(python-ok)
	$(call make-venv,$(LATEST))
	$(LATEST)/bin/python $(PIP) install -U --upgrade-strategy eager -e . pytest pytest-xdist hypothesis
	$(LATEST)/bin/python $(PIP) list | grep -iE '^(fastai|fastcore|torch|torchvision|numpy|pandas) '
	$(LATEST)/bin/python -m pytest -q -rs -n $(WORKERS) --dist loadfile tests

# Copies are executed, so that the committed pages stay as they are
bench: export REINIT_SCALE = $(SCALE)
bench: $(STAMP)  ## Run the benchmarks on this machine: pages with tables and figures in OUT/benchmarks
	@mkdir -p $(OUT)/benchmarks
	@cp nbs/benchmarks/*.ipynb $(OUT)/benchmarks
	$(BIN)/jupyter-execute --inplace --kernel_name=python3 $(OUT)/benchmarks/*.ipynb
	@echo 'The results are in:'; ls $(OUT)/benchmarks/*.ipynb

readme:  ## Make README.md from nbs/index.ipynb
	$(PYTHON) .ci/readme.py

llms: $(STAMP)  ## Make nbs/llms.txt from the sidebar and the pages' first lines
	$(BIN)/python .ci/docs/build.py --llms

# README.md is made first: nbdev_docs makes its own when ours is older than the notebook.
# Without Quarto, Sphinx renders what nbdev has processed; each page says at its end which of the two made it.
# nbdev runs the cells that import something: what they warn about would be shown on the pages
docs: export PYTHONWARNINGS = ignore::FutureWarning
docs: $(STAMP)  ## Build the site into _docs, with Quarto or, where there is none, with Sphinx
	@case '$(CURDIR)/' in */.*) echo 'nbdev skips folders whose name starts with a dot, so the pages would be empty: build from another path' >&2; exit 1;; esac
	@$(MAKE) --no-print-directory readme llms
	@if command -v quarto >/dev/null; then PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/nbdev_docs --n_workers $(WORKERS); \
	 else echo 'No Quarto here (https://quarto.org/docs/get-started): Sphinx renders the site' >&2; \
	   $(BIN)/python .ci/docs/build.py --n_workers $(WORKERS); fi

constraints: $(STAMP)  ## Pin what is installed in .venv (see CONTRIBUTING.md)
	$(BIN)/python .ci/constraints.py
	@echo '$(CURDIR)' > $(STAMP)

clean:  ## Remove environments, the built site and caches; results stay
	rm -rf $(VENV) $(LATEST) _docs _proc build dist *.egg-info .pytest_cache .hypothesis
	find nbs reinit_nb tests .ci \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -prune -exec rm -rf {} +
