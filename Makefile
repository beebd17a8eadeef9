# Each target installs what it needs (.venv, and a CuPy for the NVIDIA driver) and passes ARGS on.
# Without a GPU, tests run on every core; ARGS="-n 0 --pdb" runs them one after the other.
# PYTHON is the first working Python 3.11 or later (tomllib came with 3.11).
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11 python3; do \
	$$python -c "import tomllib" 2>/dev/null && break; done; echo $$python)
ARGS ?=

.PHONY: demo test check docs

demo:
	@$(PYTHON) tools/setup_env.py demo $(ARGS)

test:
	@$(PYTHON) tools/setup_env.py test $(ARGS)

check:
	@$(PYTHON) tools/setup_env.py check $(ARGS)

docs:
	@$(PYTHON) tools/setup_env.py docs $(ARGS)
