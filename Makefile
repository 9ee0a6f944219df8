# `make demo`, `make test` and `make quick` do all of their own set-up; they need Python 3.10 or newer, make and pip.
PYTHON ?= python3
VENV ?= .venv
DEMO_DIR ?= .demo
BIN := $(VENV)/bin

# A test starts many processes, none of which is to compile what another one has compiled before.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test quick lint docs clean

demo: $(VENV)/installed
	$(BIN)/padiff demo $(DEMO_DIR)

test: $(VENV)/installed
	$(BIN)/python -m pytest -n auto --dist worksteal

quick: $(VENV)/installed
	$(BIN)/python -m pytest -n auto --dist worksteal --no-frameworks -m 'not slow' -rfE

lint: $(VENV)/installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# Warnings are errors: a link to nothing, a page that is not in the menu. The variable turns off an advertisement of the theme.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) $(DEMO_DIR) site

# Pinned by constraints.txt. A venv that was made halfway has no stamp and is finished the next time.
$(VENV)/installed: pyproject.toml constraints.txt
	@echo "Setting up $(VENV): torch, paddle, Lightning and TensorBoard; this takes a few minutes the first time."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,test]'
	@touch $@

$(VENV)/installed-lint: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[lint]'
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@
