# setup, demo and test each work on a bare machine with python3 >= 3.11 and its venv module, and again where .venv exists.
PYTHON ?= python3
# pinned or system; what was set up stays
TORCH  ?= $(or $(patsubst .venv/ready.%,%,$(wildcard .venv/ready.*)),pinned)
PY     := .venv/bin/python
# nothing here needs the Hub, so nothing waits for it
export HF_HUB_OFFLINE = 1

.PHONY: setup demo test lint faults branches clean

setup: .venv/ready.$(TORCH)

.venv/ready.$(TORCH): requirements.txt requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "python3 >= 3.11 is needed, this is $$($(PYTHON) -V); name another with make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "python3 lacks the venv module: apt-get install python3-venv" >&2; exit 2; }
ifeq ($(TORCH),system)
	$(PYTHON) -m venv $(if $(wildcard $@),,--clear) --system-site-packages .venv
	@# an image may keep its torch in a venv of its own, which that option does not see
	@$(PYTHON) -c 'import site; print("\n".join(site.getsitepackages()))' > $$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/image.pth
	@$(PY) -c 'import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)' || { echo "TORCH=system needs this python to have torch >= 2.11" >&2; exit 2; }
	grep -hv -e '^torch==' -e '^-r' requirements.txt requirements-dev.txt > .venv/requirements.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r .venv/requirements.txt
else
	$(PYTHON) -m venv $(if $(wildcard $@),,--clear) .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
endif
	@touch $@

demo: setup
	$(PY) prepare.py config/data_demo.py
	$(PY) train.py config/train_demo.py
	$(PY) sample.py --out_dir=out/demo
	@echo "the report: out/demo/report.md and out/demo/report.png"

lint: setup
	$(PY) -m ruff check .

test: lint
	$(PY) -m pytest -q --durations=15 -W ignore::DeprecationWarning:torch.jit._script tests

# 200 SIGKILLs in runs and what they cost: 20 minutes on 2 cores under a load of 17; PY=... takes another Python
faults: $(if $(findstring command,$(origin PY)),,setup)
	$(PY) tests/crash.py

# runs cut by SIGKILL and gone on with, on 1, 2 and 3 ranks, against runs that never were
branches: $(if $(findstring command,$(origin PY)),,setup)
	$(PY) tests/branches.py

clean:
	rm -rf .venv .pytest_cache .ruff_cache
