# make demo   the main job on real text, no network once installed
# make check  style, types and the main road of the package, in a minute
# make test   the test suite
# make docs   the documentation, as a site in site/
# make notebooks   runs the notebooks from top to bottom
# make tables      writes into pages the tables of residual connections, the lists of the reference and the help of commands
# make address     writes the addresses of pyproject.toml into the files that show them
# Each but the last creates .venv and installs by constraints.txt.

PYTHON ?= python3
PIP = .venv/bin/python -m pip --disable-pip-version-check --quiet
# Python compiles what it imports, at the first import. pip would compile all files, which takes a minute on one core.
INSTALL = $(PIP) install --no-compile --constraint constraints.txt
# Where PYTHONDONTWRITEBYTECODE is set, as in many containers, an import keeps nothing: every command would compile for
# six seconds. There all files are compiled once, in 40 seconds on two cores. A few are for newer releases of Python.
COMPILE = $(if $(PYTHONDONTWRITEBYTECODE),.venv/bin/python -m compileall -qq -j 0 .venv/lib || true)

.PHONY: demo check test lint types docs notebooks tables address serving engines suite versions clean
demo: .venv/demo.installed
	.venv/bin/attnres demo --overwrite

SMOKE = tests/test_smoke.py tests/test_rooms.py tests/test_names.py tests/test_release.py tests/modeling_attnres/test_travelled_files.py
check: lint
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -m "not slow" $(SMOKE)

# .ci/run chooses the slow tests too.
MARKS = not slow
test: .venv/test.installed
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -m "$(MARKS)" --numprocesses 3 --dist worksteal

# The type checker needs the types of torch and transformers, so the whole environment.
lint: .venv/test.installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	$(MAKE) --no-print-directory types

types: .venv/test.installed
	.venv/bin/python .ci/link_types.py
	.venv/bin/pyrefly check --output-format min-text

notebooks: .venv/test.installed
	OMP_NUM_THREADS=1 .venv/bin/python notebooks/execute.py

tables: .venv/test.installed
	.venv/bin/python docs/tables.py

address:
	$(PYTHON) docs/address.py

.venv/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "attnres needs Python 3.11 or newer, not " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	@touch $@

# torch first and by name: a range would take a build with CUDA where one for the CPU is at hand.
.venv/torch.installed: constraints.txt | .venv/created
	@echo "Installing into .venv (takes some minutes the first time)"
	$(INSTALL) $$(grep '^torch==' constraints.txt)
	@touch $@

.venv/demo.installed: .venv/torch.installed pyproject.toml
	$(INSTALL) --editable '.[train]'
	$(COMPILE)
	@touch $@

.venv/test.installed: .venv/torch.installed pyproject.toml
	$(INSTALL) --editable '.[dev]'
	$(COMPILE)
	@touch $@

docs: .venv/docs.installed
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict

.venv/docs.installed: .venv/torch.installed pyproject.toml
	$(INSTALL) --editable '.[docs]'
	$(COMPILE)
	@touch $@

# What takes an environment of its own under .peer-*, made by pip.
serving: .venv/test.installed
	.venv/bin/python -m pytest -m serving

engines: .venv/test.installed
	.venv/bin/python -m pytest -m engines

# `transformers`' own model tests with every residual connection on two backbones.
suite: .venv/test.installed
	.venv/bin/python tests/peers/transformers_suite.py --every

versions: .venv/test.installed
	OMP_NUM_THREADS=1 .venv/bin/python tests/peers/versions.py

clean:
	rm -rf .venv .peer* build site *.egg-info
