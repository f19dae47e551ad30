# Two commands do all the set-up: `make demo` runs the pipeline end to end, `make test` the tests.
# Everything they make lies in .venv/ and build/.

PYTHON ?= python3
BIN := .venv/bin
MEKI := $(BIN)/meki-edge
RUNNER := build/runner/meki-runner
DEMO := build/demo
JOBS ?= 2
ORT_HEADER_DIRECTORIES := $(if $(ORT_HOME),$(ORT_HOME)/include $(ORT_HOME)/include/onnxruntime $(ORT_HOME)/headers) \
  $(foreach prefix,/usr /usr/local,$(prefix)/include $(prefix)/include/onnxruntime)
JSON_INCLUDE = $$($(BIN)/python -c 'import nlohmann_json, pathlib; print(pathlib.Path(nlohmann_json.__file__).parent / "include")')

.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
.PHONY: help setup runner test test-sanitizers test-arm64 demo demo-hub clean check-system

help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

check-system:
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "missing: CPython 3.11 or later with venv (Debian: apt-get install python3 python3-venv; or set PYTHON=…)" >&2; exit 1; }
	@for pair in "g++ g++" "cmake cmake" "make make" "git git"; do set -- $$pair; \
	  command -v $$1 >/dev/null || { echo "missing: $$1 (Debian: apt-get install $$2)" >&2; exit 1; }; done
	@for directory in $(ORT_HEADER_DIRECTORIES); do \
	  test -e $$directory/onnxruntime_cxx_api.h && exit 0; done; command -v npm >/dev/null || \
	  { echo "missing: npm, which fetches ONNX Runtime's C++ headers (Debian: apt-get install npm; or set ORT_HOME)" >&2; exit 1; }

setup: .venv/.installed ## create .venv and install meki-edge with its tested dependencies

.venv/.installed: pyproject.toml constraints.txt | check-system
	@echo "installing meki-edge and what it needs into .venv: minutes, the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,build]'
	@touch $@

runner: $(RUNNER) ## build the C++ harness for this machine

$(RUNNER): .venv/.installed $(wildcard android_runner/CMakeLists.txt android_runner/src/*)
	sh android_runner/fetch_headers.sh build/ort-headers
	cmake -S android_runner -B build/runner -DCMAKE_BUILD_TYPE=Release --log-level=WARNING \
	  -DMEKI_ORT_HEADERS=$(abspath build/ort-headers) \
	  -DMEKI_JSON_INCLUDE="$(JSON_INCLUDE)"
	cmake --build build/runner --parallel $(JOBS) --target meki-runner --target meki-rom-probe
	@touch $@

test: runner ## run the test suite (C++ and Python)
	cmake --build build/runner --parallel $(JOBS)
	ctest --test-dir build/runner --output-on-failure
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile

test-sanitizers: runner ## run the C++ tests with ASan, UBSan and TSan
	JOBS=$(JOBS) sh android_runner/test_sanitizers.sh build "$(JSON_INCLUDE)"

test-arm64: runner ## cross-compile the harness for 64-bit Arm and test it under qemu
	JOBS=$(JOBS) sh android_runner/test_arm64.sh build $(abspath $(BIN)/python) "$(JSON_INCLUDE)"

clean: ## remove build/ (keeps .venv)
	rm -rf build

include demo.mk
include demo-hub.mk
