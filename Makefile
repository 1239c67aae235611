# Needs Python >= 3.11 and make, nothing else. Every target can be run again at any time.
#   make demo    install the serving part into .venv, serve the bundled model, translate five sentences
#   make setup   install everything for development into .venv-dev
#   make check   lint, format, types, who may import whom
#   make test    the default tests
#   make wheel   build dist/*.whl and dist/*.tar.gz
PYTHON ?= python3
DEMO := .venv
DEV := .venv-dev
PIP_FLAGS := --quiet --disable-pip-version-check --no-input --no-compile -c constraints.txt
# An installation is fresh as long as nothing it was made from has changed.
SOURCES := pyproject.toml constraints.txt hatch_build.py $(wildcard protos/fuseq/v1/*.proto)

.PHONY: demo setup check format test wheel clean python

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

wheel: $(DEV)/installed
	$(DEV)/bin/python -m hatchling build

clean:
	rm -rf $(DEMO) $(DEV) dist fuseq/v1

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "fuseq needs Python 3.11 or newer, $(PYTHON) is older: make PYTHON=python3.12 ..." >&2; exit 1; }

# The stubs lie in the source tree; an installation without them is not one.
STUBS := fuseq/v1/translator_pb2.py
$(DEMO)/installed: EXTRAS := cpu
$(DEV)/installed: EXTRAS := dev
$(DEMO)/installed $(DEV)/installed: $(SOURCES) $(if $(wildcard $(STUBS)),,$(STUBS)) | python
	@echo "installing fuseq[$(EXTRAS)] into $(@D)"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install $(PIP_FLAGS) -e '.[$(EXTRAS)]'
	@touch $@

$(STUBS): ;
