# Both set up what they need (.venv, and the CuPy that the NVIDIA driver serves); ARGS is passed on.
PYTHON ?= python3
ARGS ?=

.PHONY: demo test check

demo:
	@$(PYTHON) tools/setup_env.py demo $(ARGS)

test:
	@$(PYTHON) tools/setup_env.py test $(ARGS)

check:
	@$(PYTHON) tools/setup_env.py check $(ARGS)
