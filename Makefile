# make demo      a virtual environment, the sample model, a shipped template over shipped data
# make test      the same setup, then formatting, lint, types and every test that needs no GPU
# make lint      formatting, lint and types only
# make clean     removes what runs and checks left; make distclean the virtual environment too

# The first interpreter that is new enough; PYTHON=... chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
    "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
MODEL := smollm2-135m
DEMO := templates/multiple_choice.py samples/questions.jsonl --model $(MODEL)
PYTEST_ARGS ?= -n 2 --dist loadfile

.PHONY: demo test lint model clean distclean

demo: $(VENV)/.installed
	$(BIN)/sglbatch run $(DEMO) --show 3
	@mkdir -p demo-output
	$(BIN)/sglbatch run $(DEMO) -o demo-output/answers.parquet

test: lint model
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

model: $(VENV)/.installed
	@$(BIN)/python -c "from sglbatch.models import resolve_model; resolve_model('$(MODEL)', report=print)"

$(VENV)/.made:
	$(if $(PYTHON),,$(error Python 3.11 or newer is needed: install it, or name it with PYTHON=...))
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

clean:
	rm -rf demo-output build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find sglbatch tests templates benchmarks -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
