# Every target sets up .venv by itself; nothing but Python >= 3.11 and make is needed.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test test-random test-slow lint types format bench docs wheel release-check clean

demo: $(STAMP)
	$(BIN)/tailguard demo

# One thread each: two workers with two threads on two cores would mostly wait for each other.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

# In another order each time, printed as "random seed"; `make test-random SEED=7` repeats one.
test-random: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow" -p randomly --randomly-dont-reset-seed $(if $(SEED),--randomly-seed=$(SEED))

test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/tailguard bench

# Strict, and nothing in it may be fetched from the net.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@! grep -rlE '<(script|link|img|iframe)[^>]+(src|href)="(https?:)?//' site --include='*.html'

# From an empty build/: setuptools would put into the wheel what an earlier build left there.
wheel: $(STAMP)
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist .

# The wheel in a clean environment of every Python: make release-check PYTHONS="python3.11 python3.13"
release-check: wheel
	.ci/release-check $(PYTHONS)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Tailguard needs Python 3.11 or newer, and {sys.executable} is {v.major}.{v.minor}. Try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

.venv/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

clean:
	rm -rf .venv build dist site runs .pytest_cache .mypy_cache .ruff_cache
