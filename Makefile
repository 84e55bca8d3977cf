# Every target sets up what it needs; nothing has to be done before.
PREFIX ?= /usr/local
ARGS ?=
# Python with the package of this checkout, on the binding of the release build.
LIBRARY = build/release/bindings/torch/_tilewise.so
PACKAGE = PYTHONPATH=python TILEWISE_TORCH_LIBRARY=$(LIBRARY) .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help build test asan emulate races tsan coverage fuzz bench figures docs wheel hub lint format install stage
.PHONY: results-status bare setup clean
# Ninja and ctest use all cores by themselves, and the targets share build trees.
.NOTPARALLEL:

help: ## show the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 24

build: setup ## build the library, the tests and the benchmark into build/release
	@scripts/build.sh release

test: about-test setup ## lint, build and run every test, then again with sanitizers, CUDA kernels on the CPU, then fuzz
	@.venv/bin/python scripts/test.py lint release python asan emulated fuzz

emulate: setup ## run the CUDA kernels on the CPU: random problems and fixed tests on tests/emulator
	@.venv/bin/python scripts/test.py emulated

races: setup ## the same, looking for accesses to memory that nothing puts in order (about 10 minutes)
	@.venv/bin/python scripts/test.py races

asan: setup ## build and run the tests with AddressSanitizer and UBSan
	@.venv/bin/python scripts/test.py asan

tsan: setup ## build and run the CPU's tests with ThreadSanitizer
	@.venv/bin/python scripts/test.py tsan

coverage: setup ## say which lines and branches the tests run, and fail below the floors (ARGS: cpp, python)
	@.venv/bin/python scripts/coverage.py $(ARGS)

fuzz: setup ## fuzz the library on the CPU with Clang (ARGS="--seconds 60" for each target; else 600)
	@.venv/bin/python scripts/fuzz.py $(ARGS)

bench: about-bench setup ## measure our kernels and their peers, and write a report (ARGS="--help" for options)
	@scripts/build.sh release --target tilewise_torch
	@$(PACKAGE) -m tilewise bench $(ARGS)

figures: setup ## draw the documents' pictures and tables from the records in results/
	@scripts/build.sh release --target tilewise_torch
	@$(PACKAGE) -m tilewise.bench.figures

docs: ## build the site from docs/ into build/site
	@scripts/docs.sh

wheel: setup ## build a wheel for many Linux machines and an sdist into build/wheel (ARGS: options of cmake)
	@scripts/wheel.sh $(ARGS)

hub: wheel ## lay the wheel out as Hugging Face's kernels package loads it, into build/hub
	@python3 scripts/hub.py

lint: setup ## check the layout of the sources and the package's types
	@scripts/lint.sh

format: setup ## mend the layout of the sources
	@scripts/lint.sh --fix

install: about-install ## install headers, library, CMake package and licence to PREFIX (/usr/local)
	@scripts/install.sh "$(PREFIX)"

stage: setup ## build with CUDA and gather build/stage for a GPU machine (ARGS: options of cmake)
	@SWEEPS=$(SWEEPS) EXAMPLES=$(EXAMPLES) scripts/stage.sh $(ARGS)

results-status: ## say which records in results/ are older than the sources
	@python3 scripts/results_status.py

bare: ## try all of this in fresh minimal Debians (root and debootstrap; ARGS="--help" for options)
	@python3 scripts/bare.py $(ARGS)

about-%:
	@scripts/about.sh $*

setup: ## install missing system packages and make .venv
	@scripts/setup.sh

clean: ## remove the build trees
	rm -rf build
