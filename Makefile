# Every target sets up what it needs.  `make` alone lists them.

NEW     := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON  ?= $(shell for p in python3.11 python3; do $$p -c '$(NEW)' 2>/dev/null && echo $$p && break; done)
BIN     := .venv/bin
STAMP   := .venv/.set-up
MODULES := codegen_templates compiler entry formats grammar plans runtime testing tools
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

# Every process that imports scalec reads its modules compiled, whatever the shell's environment says.
export PYTHONDONTWRITEBYTECODE =

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

setup: $(STAMP) ## make .venv with pinned packages

demo: $(STAMP) ## compile a small plan and train it on 4 ranks of this machine
	$(BIN)/scalec compile plans/tiny_llama.scale -o out/tiny_llama
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node=4 out/tiny_llama/train.py

test: $(STAMP) ## check format, lint, layers and types, then run the tests
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	cd .typing && ../$(BIN)/lint-imports --no-logo --config ../pyproject.toml # there all of scalec lies side by side
	@mkdir -p out
	@echo '$(BIN)/pyright, beside $(BIN)/pytest -n 2 --dist loadgroup --durations=10'
	@$(BIN)/pyright > out/types.txt & types=$$!; \
	$(BIN)/pytest -n 2 --dist loadgroup --durations=10; tests=$$?; \
	wait $$types || { cat out/types.txt; exit 1; }; \
	exit $$tests

test-long: $(STAMP) ## run the tests that take minutes
	$(BIN)/pytest -n 2 --dist loadgroup --long -m long

check: $(STAMP) ## the same checks, but of changed files: their types, and the tests nearest to them
	$(BIN)/python tests/check.py

readability: $(STAMP) ## print how densely code and English read, beside ratchets that only fall
	$(BIN)/python benchmarks/readability.py

docs: $(STAMP) ## write the documents as a site to out/site
	$(BIN)/mkdocs build --strict --quiet

format: $(STAMP) ## format the code and apply safe lint fixes
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# torch and triton come first and exactly: an unpinned torch may be another build of several gigabytes.
# The package is built with the pinned setuptools of .venv, so that nothing unpinned takes part.
$(STAMP): pyproject.toml constraints.txt compiler/__init__.py # which has the version
	@"$(PYTHON)" -c '$(NEW)' 2>/dev/null || \
	    { echo 'make: scalec needs Python 3.11 or newer; name one with: make setup PYTHON=/path/to/python3.11' >&2; exit 1; }
	@echo 'making .venv (a few minutes the first time)'
	"$(PYTHON)" -m venv .venv
	$(INSTALL) setuptools torch==2.13.0 triton==3.7.1
	$(INSTALL) --no-build-isolation --editable '.[dev]'
	$(BIN)/python -m compileall -q $(MODULES)
	@touch $@

.PHONY: help setup demo test test-long check readability docs format
