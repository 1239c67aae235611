# Needs Python >= 3.11 and make, nothing else. Every target can be run again at any time.
#   make demo    install the serving part into .venv, serve the bundled model, translate five sentences
#   make setup   install everything for development into .venv-dev
#   make check   lint, format, types, who may import whom
#   make test    the default tests
#   make bench   measure beside the other engines, an hour or two on an idle machine; make bench-quick: three minutes
#   make wheel   build dist/*.whl and dist/*.tar.gz
PYTHON ?= python3
DEMO := .venv
DEV := .venv-dev
BENCH := .venv-bench
# bergamot has no wheel for a newer Python; where there is no such one, it is left out of the benchmarks.
BERGAMOT := .venv-bergamot
OLD_PYTHON ?= python3.10
BENCH_FLAGS ?=
PIP_FLAGS := --quiet --disable-pip-version-check --no-input --no-compile -c constraints.txt
# An installation is fresh as long as nothing it was made from has changed.
SOURCES := pyproject.toml constraints.txt hatch_build.py $(wildcard protos/fuseq/v1/*.proto)

.PHONY: demo setup check format test bench bench-quick wheel clean python

demo: $(DEMO)/installed
	$(DEMO)/bin/python -m fuseq demo

setup: $(DEV)/installed

check: $(DEV)/installed
	$(DEV)/bin/ruff check .
	$(DEV)/bin/ruff format --check .
	$(DEV)/bin/mypy
	$(DEV)/bin/python -m pytest tests/test_floors.py

format: $(DEV)/installed
	$(DEV)/bin/ruff check --fix .
	$(DEV)/bin/ruff format .

test: $(DEV)/installed
	$(DEV)/bin/python -m pytest

bench: $(BENCH)/installed $(BERGAMOT)/tried
	FUSEQ_BENCH_PYTHON_BERGAMOT=$$(ls $(abspath $(BERGAMOT))/bin/python 2>/dev/null) \
	  $(BENCH)/bin/python -m benchmarks all $(BENCH_FLAGS)

bench-quick: $(BENCH)/installed
	$(BENCH)/bin/python -m benchmarks quick $(BENCH_FLAGS)

wheel: $(DEV)/installed
	$(DEV)/bin/python -m hatchling build

clean:
	rm -rf $(DEMO) $(DEV) $(BENCH) $(BERGAMOT) build dist fuseq/v1

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "fuseq needs Python 3.11 or newer, $(PYTHON) is older: make PYTHON=python3.12 ..." >&2; exit 1; }

# The stubs lie in the source tree; an installation without them is not one.
STUBS := fuseq/v1/translator_pb2.py
$(DEMO)/installed: EXTRAS := cpu
$(DEV)/installed: EXTRAS := dev
$(BENCH)/installed: EXTRAS := bench
$(DEMO)/installed $(DEV)/installed $(BENCH)/installed: $(SOURCES) $(if $(wildcard $(STUBS)),,$(STUBS)) | python
	@echo "installing fuseq[$(EXTRAS)] into $(@D)"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install $(PIP_FLAGS) -e '.[$(EXTRAS)]'
	@touch $@

$(STUBS): ;

$(BERGAMOT)/tried:
	@mkdir -p $(@D)
	@if $(OLD_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] > (3, 10))' 2>/dev/null; then \
	  $(OLD_PYTHON) -m venv $(@D) \
	    && $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps bergamot==0.4.5 sentencepiece; \
	else echo "no Python 3.10 here: bergamot is left out (make OLD_PYTHON=/path/to/python3.10 bench)"; fi
	@touch $@
