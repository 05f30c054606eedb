# make demo   the main job on real text, no network once installed
# make test   the test suite
# make docs   the documentation, as a site in site/
# make notebooks   runs the notebooks from top to bottom
# Each creates .venv and installs by constraints.txt.

PYTHON ?= python3
PIP = .venv/bin/python -m pip --disable-pip-version-check --quiet
INSTALL = $(PIP) install --constraint constraints.txt

.PHONY: demo test lint docs notebooks serving suite versions clean
demo: .venv/demo.installed
	.venv/bin/attnres demo --overwrite

test: .venv/test.installed
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -m "not slow" --numprocesses 2 --dist worksteal

lint: .venv/test.installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

notebooks: .venv/test.installed
	OMP_NUM_THREADS=1 .venv/bin/python notebooks/execute.py

# torch first and by name: a range would take a build with CUDA where one for the CPU is at hand.
.venv/torch.installed: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "attnres needs Python 3.11 or newer, not " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	@echo "Installing into .venv (takes some minutes the first time)"
	$(PYTHON) -m venv .venv
	$(INSTALL) $$(grep '^torch==' constraints.txt)
	@touch $@

.venv/demo.installed: .venv/torch.installed pyproject.toml
	$(INSTALL) --editable .
	@touch $@

.venv/test.installed: .venv/torch.installed pyproject.toml
	$(INSTALL) --editable '.[dev]'
	@touch $@

docs: .venv/docs.installed
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict

.venv/docs.installed: .venv/torch.installed pyproject.toml
	$(INSTALL) --editable '.[docs]'
	@touch $@

# What takes an environment of its own under .peer-*, made by pip.
serving: .venv/test.installed
	.venv/bin/python -m pytest -m serving

# `transformers`' own model tests with every residual connection on two backbones.
suite: .venv/test.installed
	.venv/bin/python tests/peers/transformers_suite.py --every

versions: .venv/test.installed
	.venv/bin/python tests/peers/versions.py

clean:
	rm -rf .venv .peer* build site *.egg-info
