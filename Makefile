# Each target sets up what it needs (virtual environment, dependencies, build) and then runs.
# It needs a Python of 3.11 to 3.14 with venv, a C++17 compiler and an internet connection, no more.
#
#   make test PYTHON=python3.13           another interpreter (remove $(VENV) to change it later)
#   make test VENV=.venv313               another environment beside the first
#   make test PYTEST_ARGS="-k spmm -n0"   choose tests
#   make demo DEMO_ARGS="--help"          options of the demo
#   make gpu-test GPU_PYTHON=python3.12   on a machine with an NVIDIA GPU, without a network: uses what
#                                         that interpreter has (jax with its CUDA plugin, pytest, ...)

VENV ?= .venv
PYTEST_ARGS ?= -n 2 --dist loadgroup
DEMO_ARGS ?=
BENCH_ARGS ?=
# avx2, say: the sanitized library is of this instruction set alone, a fourth of the time to build.
SANITIZE_ISA ?=
SANITIZE_TESTS ?= tests/oracle -k "not reference and not emulated"
FUZZ_ARGS ?= --draws 1000000
MUTANT_ARGS ?=

SUITABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.14 python3.11 python; do \
  "$$python" -c '$(SUITABLE)' >/dev/null 2>&1 && { command -v "$$python"; break; }; done)

BIN := $(abspath $(VENV))/bin
STAMPS := $(VENV)/stamps
NATIVE_SOURCES := CMakeLists.txt pyproject.toml $(shell find cpu cuda cmake -type f 2>/dev/null)
# An editable install finds by path the modules that it was made with, and would miss one that has
# become a package since; it finds new ones. Its stamp lists them.
INSTALLED := $(shell cat $(STAMPS)/package 2>/dev/null)
MOVED := $(filter-out $(wildcard $(INSTALLED)),$(INSTALLED))

# Installing takes a minute or two, once for what is built; each GPU target ends within nine.
GPU_PYTHON ?= python3
# For programs that need no package: `make gpu` reports also where GPU_PYTHON is not there.
ANY_PYTHON = $(or $(PYTHON),$(GPU_PYTHON))
GPU_WORKERS ?= $(shell $(ANY_PYTHON) benchmarks/gpu/everything.py --workers || echo 1)
GPU_SECONDS ?= 360
GPU_ARGS ?=
PREDICT_ARGS ?=
RESULTS ?= benchmarks/results

.PHONY: help demo check test test-all test-gpu-compile xla-gpu lint lint-python lint-types lint-layers lint-cpp lint-text format bench docs sanitize \
  sanitize-address sanitize-thread sanitized-address sanitized-thread fuzz fuzz-address mutants gpu gpu-install gpu-test gpu-bench gpu-octets gpu-attention \
  gpu-figures gpu-tables gpu-tuned gpu-taco gpu-doctor predict clean moved-modules

help:
	@echo "make demo      train the sparse transformer and compare it with dense attention"
	@echo "make test      build, then test every operation, dtype and backend"
	@echo "make check     the quick part of it, after every edit; make test-all is everything"
	@echo "make test-gpu-compile  the part of it that runs XLA's GPU compiler, without a GPU (XLA_CUDA=12, XLA_JAX=0.10.1)"
	@echo "make lint      ruff, mypy, layers, clang-format and two text rules; make format mends layout"
	@echo "make bench     measure against the other libraries; writes benchmarks/results"
	@echo "make docs      HTML pages in docs/_build/html"
	@echo "make sanitize  oracle tests under address, undefined-behaviour and thread sanitizers (SANITIZE_ISA=avx2)"
	@echo "make fuzz      a million random index arrays under the address sanitizer (FUZZ_ARGS)"
	@echo "make mutants   plant bugs, one by one: which tier notices each (MUTANT_ARGS=--focused)"
	@echo "make gpu       on an NVIDIA GPU: the targets below in turn, up to an hour, and a report; run"
	@echo "               it again to go on where it ended; RESULTS=folder"
	@echo "make gpu-doctor on an NVIDIA GPU: which layer works, from the driver to XLA; RESULTS=folder"
	@echo "make gpu-test  on an NVIDIA GPU: oracles, gradients, bits against the emulator; RESULTS=folder"
	@echo "make gpu-bench on an NVIDIA GPU: measure against cuSPARSE and others; RESULTS=folder"
	@echo "make gpu-octets on an NVIDIA GPU: column vectors on tensor cores; RESULTS=folder"
	@echo "make gpu-attention on an NVIDIA GPU: attention and its gradients on tensor cores; RESULTS=folder"
	@echo "make gpu-figures on an NVIDIA GPU: Figures 17 and 19 of vectorSparse; RESULTS=folder"
	@echo "make gpu-tables on an NVIDIA GPU: Tables 1 to 3 of Sgap, compiled loops; RESULTS=folder"
	@echo "make gpu-tuned on an NVIDIA GPU: Tables 4 and 5 and Figure 11 of Sgap; RESULTS=folder"
	@echo "make gpu-taco on an NVIDIA GPU: Figures 16, 18, 20 and section 8.3 of TACO; RESULTS=folder"
	@echo "make predict   times of the default kernels on an H100 and an A100, predicted without a GPU"
	@echo "make clean     remove build products (keeps $(VENV))"

demo: $(STAMPS)/package $(STAMPS)/group-demo
	$(BIN)/python examples/sparse_transformer/demo.py $(DEMO_ARGS)

# tests/helpers/tiers.py says what each runs.
check: TIER = check
test: TIER = test
test-all: TIER = all
test-all: xla-gpu
check test test-all: $(STAMPS)/package $(STAMPS)/group-test
	$(BIN)/python -m pytest --tier=$(TIER) $(PYTEST_ARGS)

test-gpu-compile: $(STAMPS)/package $(STAMPS)/group-test xla-gpu
	SGAP_XLA=$(XLA_NAME) $(BIN)/python -m pytest --tier=all tests/xla_gpu $(PYTEST_ARGS)

# XLA's GPU compiler, which needs no GPU: JAX's CUDA plugin, ptxas and libdevice, without the other
# libraries of NVIDIA, in a folder that only the processes of tests/xla_gpu have on their path, since
# a plugin changes what jax.devices() is. Without a network the tests say so and are skipped.
# XLA_JAX=0.10.1 takes that version of JAX in place of the environment's (before a release).
XLA_CUDA ?= 13
XLA_JAX ?=
XLA_NAME = cuda$(XLA_CUDA)$(XLA_JAX:%=-jax-%)
XLA_GPU = $(abspath $(VENV))/xla-gpu/$(XLA_NAME)
XLA_PTXAS_13 = "nvidia-cuda-nvcc>=13,<13.1" "nvidia-nvvm>=13,<13.1"
XLA_PTXAS_12 = "nvidia-cuda-nvcc-cu12>=12.8,<13"

xla-gpu: $(STAMPS)/package
	@version=$(XLA_JAX); \
	version=$${version:-$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)')}; \
	test -d $(XLA_GPU)/jax_cuda$(XLA_CUDA)_plugin-$$version.dist-info && exit 0; \
	echo "== installing XLA's GPU compiler (about 230 MB of wheels)"; rm -rf $(XLA_GPU); \
	$(BIN)/python -m pip install --quiet --no-deps --target $(XLA_GPU) \
	  jax-cuda$(XLA_CUDA)-plugin==$$version jax-cuda$(XLA_CUDA)-pjrt==$$version \
	  $(XLA_JAX:%=jax==% jaxlib==%) \
	  $(XLA_PTXAS_$(XLA_CUDA)) || rm -rf $(XLA_GPU)

lint: lint-python lint-types lint-layers lint-cpp lint-text

lint-python: $(STAMPS)/group-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-types: $(STAMPS)/group-lint
	$(BIN)/mypy

lint-layers: $(STAMPS)/group-lint
	PYTHONPATH=. $(BIN)/lint-imports

CPP_SOURCES = $(shell find cpu cuda -name '*.cc' -o -name '*.h' -o -name '*.cuh' 2>/dev/null)

lint-cpp: $(STAMPS)/group-lint
	$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES)

# `[_]` and `/(` keep these two patterns from matching themselves.
lint-text:
	@git rev-parse --git-dir >/dev/null
	@! git grep --untracked -nE 'jax\.[_]src' || { echo "lint: a private JAX name (above)"; exit 1; }
	@! git grep --untracked -nIE '(^|[^[:alnum:]_.~-])/(home|root|tmp|work|farm|Users)/[[:alnum:]_.]' \
	  || { echo "lint: an absolute path of one machine (above)"; exit 1; }

format: $(STAMPS)/group-lint
	$(BIN)/ruff check --fix --quiet --exit-zero .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_SOURCES)

bench: $(STAMPS)/package $(STAMPS)/group-bench
	$(BIN)/python -m benchmarks.run $(BENCH_ARGS)

# Not measured: what the emulator counts, over what a GPU is said to do in a second.
predict: $(STAMPS)/package $(STAMPS)/group-test
	$(BIN)/python -m benchmarks.gpu.predict --gpu h100 --gpu a100 $(PREDICT_ARGS)

docs: $(STAMPS)/package $(STAMPS)/group-docs
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs docs/_build/html
	@echo "docs/_build/html/index.html"

# The sanitized library is a second editable install that borrows the first one's dependencies. The
# sanitizer's runtime must be in the process before Python, and libstdc++ with it (GCC only).
SANITIZED = build/sanitize-$*
SITE = $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
LIBRARY = $$($${CXX:-g++} -print-file-name=$(1))
PRELOAD_address = $(call LIBRARY,libasan.so) $(call LIBRARY,libubsan.so)
PRELOAD_thread = $(call LIBRARY,libtsan.so)
# Python itself leaks by design; everything else ends the run.
export ASAN_OPTIONS ?= detect_leaks=0:quarantine_size_mb=64:malloc_context_size=8
export UBSAN_OPTIONS ?= halt_on_error=1:print_stacktrace=1
# NumPy and jaxlib are not instrumented: of their mutexes ThreadSanitizer sees half.
export TSAN_OPTIONS ?= ignore_noninstrumented_modules=1:suppressions=tests/thread_sanitizer.txt:halt_on_error=1:report_signal_unsafe=0:report_mutex_bugs=0:detect_deadlocks=0

sanitize: sanitize-address sanitize-thread

SANITIZED_RUN = LD_PRELOAD="$(PRELOAD_$*) $(call LIBRARY,libstdc++.so)" $(SANITIZED)/bin/python

sanitize-address sanitize-thread: sanitize-%: sanitized-%
	$(SANITIZED_RUN) -m pytest -n 2 -p no:cacheprovider $(SANITIZE_TESTS)

# Index arrays that hold anything, through every operation, format and derivative.
fuzz: fuzz-address
fuzz-address: fuzz-%: sanitized-%
	$(SANITIZED_RUN) tests/helpers/structure_fuzz.py $(FUZZ_ARGS)

sanitized-address sanitized-thread: sanitized-%: $(STAMPS)/package $(STAMPS)/group-test
	$(BIN)/python -m venv --without-pip $(SANITIZED)
	echo "$(call SITE,$(VENV))" > "$(call SITE,$(SANITIZED))/dependencies.pth"
	$(BUILD) --python $(SANITIZED)/bin/python install --quiet --no-deps --no-build-isolation --editable . \
	  --config-settings=build-dir=$(SANITIZED)/cmake --config-settings=cmake.define.SGAP_SANITIZE=$* \
	  --config-settings=cmake.define.SGAP_ONLY_ISA=$(SANITIZE_ISA) \
	  --config-settings=cmake.build-type=RelWithDebInfo --config-settings=install.strip=false

# In a copy outside of the checkout, see tests/mutants/run.py: MUTANT_ARGS="--focused NAME ...".
mutants: $(STAMPS)/package $(STAMPS)/group-test
	$(BIN)/python tests/mutants/run.py $(MUTANT_ARGS)

# No network and no environment of its own: the package goes to a folder in front of what GPU_PYTHON
# has, and the checkout, whose sgap_jax is not built, comes behind it.
GPU_SITE := $(abspath build/gpu)
GPU_RUN = PYTHONSAFEPATH=1 PYTHONPATH="$(GPU_SITE):$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" \
  JAX_PLATFORMS=$${JAX_PLATFORMS-cuda,cpu} XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1 \
  SGAP_GPU_SECONDS=$(GPU_SECONDS) SGAP_GPU_RUNS=$(GPU_RUNS) $(GPU_PYTHON)
# Runs of a target, which share its time.
GPU_RUNS = 1

# By name and content: a copy of the checkout has new times.
GPU_BUILT_OF = $(sort $(NATIVE_SOURCES) $(shell find sgap_jax -name '*.py'))

USE_INSTALLED = PYTHONSAFEPATH=1 $(GPU_PYTHON) benchmarks/gpu/use_installed.py "$(GPU_SITE)"
# The doctor runs without a GPU too, where the package is installed, and says what is missing.
GPU_NEEDED = yes

gpu-install:
	@gpu=$$($(GPU_RUN) -c "import jax; print('sm_' + jax.devices('cuda')[0].compute_capability.replace('.', ''))") || { \
	  echo "$(GPU_PYTHON) has no JAX that sees an NVIDIA GPU: name another with GPU_PYTHON="; \
	  test -z "$(GPU_NEEDED)" && $(USE_INSTALLED); exit; }; \
	built="$$gpu $$($(GPU_PYTHON) -VV) $$(cksum $(GPU_BUILT_OF) | cksum)"; \
	test "$$(cat $(GPU_SITE)/built 2>/dev/null)" != "$$built" || exit 0; \
	! $(USE_INSTALLED) || { echo "$$built" > $(GPU_SITE)/built; exit 0; }; \
	echo "== building sgap_jax for $$gpu"; rm -f $(GPU_SITE)/built; \
	$(GPU_PYTHON) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
	  --upgrade --target $(GPU_SITE) --config-settings=build-dir=build/gpu-cmake \
	  --config-settings=cmake.define.SGAP_CUBINS_FOR=$$gpu . && echo "$$built" > $(GPU_SITE)/built

# Under another name, so that `make -n gpu` prints this and does not run it.
MAKE_OF_PARTS = $(MAKE)

# Doctor, tests, benchmarks, each a target below. Always writes RESULTS/gpu_report.md and .json; what
# is finished there is not run again.
gpu:
	@$(ANY_PYTHON) benchmarks/gpu/everything.py --results "$(abspath $(RESULTS))" --make "$(MAKE_OF_PARTS)"

gpu-doctor: GPU_NEEDED =
gpu-doctor: gpu-install
	@mkdir -p "$(abspath $(RESULTS))"; rm -f "$(abspath $(RESULTS))/doctor.json"
	$(GPU_RUN) -m sgap_jax doctor --seconds 240 --json "$(abspath $(RESULTS))/doctor.json"

gpu-test: gpu-install
	SGAP_GPU_RESULTS="$(abspath $(RESULTS))" $(GPU_RUN) -m pytest tests/gpu -rs -p no:cacheprovider \
	  -n $(GPU_WORKERS) --dist worksteal $(GPU_ARGS)

gpu-bench: gpu-install
	$(GPU_RUN) -m benchmarks.gpu.run --results "$(abspath $(RESULTS))" $(GPU_ARGS)

gpu-octets: GPU_RUNS = 2
gpu-octets: gpu-install
	$(GPU_RUN) -m benchmarks.gpu.octets --results "$(abspath $(RESULTS))" $(GPU_ARGS)
	$(GPU_RUN) -m benchmarks.gpu.octets_sddmm --results "$(abspath $(RESULTS))" $(GPU_ARGS)

gpu-attention: gpu-install
	$(GPU_RUN) -m benchmarks.gpu.attention --results "$(abspath $(RESULTS))" $(GPU_ARGS)

gpu-figures: gpu-install
	$(GPU_RUN) -m benchmarks.gpu.figures --results "$(abspath $(RESULTS))" $(GPU_ARGS)

gpu-tables: gpu-install
	$(GPU_RUN) -m benchmarks.gpu.tables --results "$(abspath $(RESULTS))" $(GPU_ARGS)

gpu-tuned: gpu-install
	$(GPU_RUN) -m benchmarks.gpu.tuned --results "$(abspath $(RESULTS))" $(GPU_ARGS)

gpu-taco: gpu-install
	$(GPU_RUN) -m benchmarks.gpu.taco --results "$(abspath $(RESULTS))" $(GPU_ARGS)

clean:
	rm -rf build dist docs/_build .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

# --- set-up -----------------------------------------------------------------------------------

$(STAMPS)/venv:
	@test -n "$(PYTHON)" || { \
	  echo "No Python of 3.11 to 3.14 with the venv module was found. Install one (on Debian and"; \
	  echo "Ubuntu also its python3-venv package), or name one: make PYTHON=/path/to/python3.12"; \
	  exit 1; }
	@"$(PYTHON)" -c '$(SUITABLE)' || { \
	  echo "$(PYTHON) is not a Python of 3.11 to 3.14 with the modules venv and ensurepip."; \
	  echo "On Debian and Ubuntu the modules come with the package python3-venv."; exit 1; }
	@echo "== $(VENV): a virtual environment of $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@mkdir -p $(STAMPS)
	@touch $@

# The packages that the build needs, in a folder of their own: the library is compiled against the
# oldest supported jax headers (pyproject.toml), whichever jax the environment has. pip's own build
# isolation does so too, but with new paths each time, so that every edit would compile everything.
TOOLS := $(abspath $(VENV))/build-tools
LISTED = $(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))$(1), sep="\n")'
BUILD = PATH="$(TOOLS)/bin:$$PATH" PYTHONPATH="$(TOOLS)" $(BIN)/python -m pip

$(STAMPS)/build-tools: pyproject.toml | $(STAMPS)/venv
	@echo "== installing the packages that the build needs"
	@$(call LISTED,["build-system"]["requires"]) > $@.txt
	@$(BIN)/python -m pip install --quiet --upgrade --target "$(TOOLS)" -r $@.txt
	@PYTHONPATH="$(TOOLS)" $(BIN)/python -c 'from scikit_build_core import build; \
	  print(*build.get_requires_for_build_editable(), sep="\n")' > $@.txt
	@! test -s $@.txt || $(BIN)/python -m pip install --quiet --upgrade --target "$(TOOLS)" -r $@.txt
	@rm $@.txt
	@touch $@

$(STAMPS)/package: $(NATIVE_SOURCES) $(if $(MOVED),moved-modules) | $(STAMPS)/build-tools
	@command -v "$${CXX:-c++}" >/dev/null || command -v g++ >/dev/null \
	  || command -v clang++ >/dev/null || { \
	  echo "No C++ compiler was found: install g++ (>= 11) or clang (>= 14), or set CXX."; exit 1; }
	@$(BIN)/python -c 'import pathlib, sysconfig as s; \
	  raise SystemExit(not (pathlib.Path(s.get_path("include")) / "Python.h").exists())' || { \
	  echo "This Python has no headers (Python.h). On Debian and Ubuntu install python3-dev."; \
	  exit 1; }
	@echo "== building sgap_jax and installing jax (a few minutes the first time)"
	@touch $@.begun
	@$(call LISTED,["project"]["dependencies"]) > $@.txt
	@$(BIN)/python -m pip install --quiet -r $@.txt
	@$(BUILD) install --quiet --no-deps --no-build-isolation --editable .
	@find sgap_jax -name '*.py' ! -name '* *' > $@
	@touch -r $@.begun $@  # what was edited during the build is built by the next one
	@rm $@.begun $@.txt

# The dependency groups of pyproject.toml.
$(STAMPS)/group-%: pyproject.toml | $(STAMPS)/venv
	@echo "== installing the packages that 'make $*' needs"
	@$(BIN)/python -m pip install --quiet --group $*
	@touch $@
