# `make demo`, `make test` and `make quick` do all of their own set-up; they need Python 3.10 or newer, make and pip.
PYTHON ?= python3
VENV ?= .venv
DEMO_DIR ?= .demo
# Which versions: constraints.txt pins those that everything is tested with, .ci/oldest.txt the oldest that are promised.
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin

# A test starts many processes, none of which is to compile what another one has compiled before.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test coverage quick frameworks lint docs dist clean

demo: $(VENV)/installed
	$(BIN)/padiff demo $(DEMO_DIR)

test: $(VENV)/installed
	$(BIN)/python -m pytest -n auto --dist worksteal

# Fails below the floor of pyproject.toml.
coverage: $(VENV)/installed
	$(BIN)/python -m pytest -n auto --dist worksteal --cov --cov-report=term:skip-covered --cov-report=xml

quick: $(VENV)/installed
	$(BIN)/python -m pytest -n auto --dist worksteal --no-frameworks -m 'not slow' -rfE

# Whether the installed torch and paddle will do.
frameworks: $(VENV)/installed
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'not slow' $(addprefix tests/,core dump hooks frameworks recorder weights)

lint: $(VENV)/installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# Warnings are errors: a link or an anchor that leads nowhere.
docs: $(VENV)/installed-docs
	$(BIN)/zensical build --clean --strict -f mkdocs.yml

# The wheel and the source archive in dist/, and whether PyPI would take them.
dist: $(VENV)/installed
	rm -rf dist
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) build twine
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

clean:
	rm -rf $(VENV) $(DEMO_DIR) site dist coverage.xml

# Pinned by constraints.txt. A venv that was made halfway has no stamp and is finished the next time.
$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	@echo "Setting up $(VENV): torch, paddle, Lightning and TensorBoard; this takes a few minutes the first time."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[demo,test]'
	@touch $@

$(VENV)/installed-lint: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[lint]'
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[docs]'
	@touch $@
