# Every target sets up what it needs: .venv in the checkout, from any Python >= 3.12 (tools/bootstrap.sh).
.PHONY: help venv wheels golden-wheels demo test slow slow-marked machine lint format types deviceless random-goldens \
	random-goldens-sample notebook gpu newest

# Dozens of processes import jax. Each would compile its modules anew where the environment forbids to keep them.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/.cache/pycache

PYTHON_BIN := .venv/bin/python
# A worker takes whole files: what a file compiles once stays in one process. Those with tests marked `long` come first.
PYTEST := $(PYTHON_BIN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# Where hardly two tests have a program in common, a worker that is done takes from the other.
PYTEST_SINGLY := $(PYTHON_BIN) -m pytest -n 2 --dist worksteal
# The tests' programs are large and their inputs tiny: nearly all time goes to compiling. LLVM at level 0 and XLA's
# emitters that do without MLIR take a fifth of the CPU time for a decode loop (7.6 s instead of 36 s). They do not round
# two programs alike where their memory is laid out differently, so tests marked `exact` run with XLA's own emitters.
FAST_COMPILE := XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 \
	--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
# A program is one LLVM module: to cut it up for several threads costs a fifth more, and there is a worker for every core.
ONE_MODULE := XLA_FLAGS=--xla_cpu_parallel_codegen_split_count=1
# Without the CUDA libraries the plugin wheels can compile, not run.
DEVICELESS := PYTHONPATH=.cache/plugins JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1

# A worker of the GPU tests compiles on one core; 24 have run out of a card's memory. Asserts stay as they are
# written: to have pytest rewrite them takes every worker seconds, and nearly all of them compare by numpy.
GPU_WORKERS := $(shell n=$$(nproc); echo $$((n < 20 ? n : 20)))
# .ci/run has `make test` run the slow tests too, LEFT_OUT="and not repeated": those that compare bits have programs in
# common with the fast ones that do, the others take half the CPU time compiled as the fast ones are.
LEFT_OUT := and not slow

# What also runs on the newest jax (and, compiled alone, MLA decode through jax-triton 0.4): the index operations and
# attention over the pool, and what names their rows. Not the same program again over random batches, other head counts
# and other drafts: `make test` asks for these.
ON_NEWEST := tests/kernels/test_gather_translate.py tests/kernels/test_mla_decode.py tests/test_translator.py \
	tests/pool/test_worked_numbers.py -k "not (RandomBatches or head_counts or many_heads or queries_are_causal)"

help:
	@echo "make demo        a hybrid model decoding from one byte pool, beside a static split"
	@echo "make test        the fast test suite (no GPU needed); make slow runs the rest"
	@echo "make deviceless  compile the kernels and steps for GPUs that need not be here"
	@echo "make random-goldens  models of random shape against transformers, in an environment of its own (-sample: two of each)"
	@echo "make gpu         the suites and benchmarks that need a GPU, with the python3 of a CUDA jaxlib"
	@echo "make lint types notebook newest"

venv:
	@tools/bootstrap.sh .venv pinned

demo:
	@tools/bootstrap.sh .venv demo
	$(PYTHON_BIN) -m ukv_jax demo

test: venv
	$(FAST_COMPILE) $(PYTEST) -m "not gpu $(LEFT_OUT) and not deviceless and not exact"
	$(ONE_MODULE) $(PYTEST) -m "exact and not gpu $(LEFT_OUT) and not deviceless"

slow: slow-marked machine

# What takes minutes, compiled as a user's programs are.
slow-marked: venv
	$(ONE_MODULE) $(PYTEST_SINGLY) -m "slow and not gpu and not deviceless"

# The pool's state machine at length.
machine: venv
	$(FAST_COMPILE) UKV_MACHINE_EXAMPLES=60 $(PYTHON_BIN) -m pytest -n 2 tests/pool/test_state_machine.py

lint: venv
	$(PYTHON_BIN) -m ruff check .
	$(PYTHON_BIN) -m ruff format --check .

format: venv
	$(PYTHON_BIN) -m ruff check --fix .
	$(PYTHON_BIN) -m ruff format .

types: venv
	$(PYTHON_BIN) -m mypy

# What deviceless, newest and random-goldens would fetch on their first run.
wheels: venv
	@tools/bootstrap.sh .cache/plugins plugins
	@tools/bootstrap.sh .cache/newest newest
	@tools/bootstrap.sh .cache/triton-next triton-next

golden-wheels: venv
	@tools/random_goldens.sh environment

deviceless: venv
	@tools/bootstrap.sh .cache/plugins plugins
	$(DEVICELESS) $(PYTEST_SINGLY) -m deviceless

random-goldens: venv
	@tools/random_goldens.sh

random-goldens-sample: venv
	@tools/random_goldens.sh sample $(SEED)

notebook: venv
	JAX_PLATFORMS=cpu .venv/bin/jupyter-execute notebooks/*.ipynb

# Runs in the environment at hand, which has a CUDA jaxlib: results go to bench/results beside the committed ones.
gpu:
	python3 -m pytest -m gpu -n $(GPU_WORKERS) --dist loadgroup --assert=plain
	for name in index move mla mla_prefill gqa gqa_prefill experts state step; do \
		python3 -m bench $$name --json bench/results/$$name.json || exit 1; \
	done

newest: venv
	@tools/bootstrap.sh .cache/newest newest
	PYTHONPATH=.cache/newest $(PYTHON_BIN) -c "import jax; print('jax', jax.__version__)"
	$(FAST_COMPILE) PYTHONPATH=.cache/newest $(PYTEST) -m "not gpu and not slow and not deviceless" $(ON_NEWEST)
	@tools/bootstrap.sh .cache/plugins plugins
	@tools/bootstrap.sh .cache/triton-next triton-next
	$(DEVICELESS) PYTHONPATH=.cache/triton-next:.cache/plugins $(PYTEST_SINGLY) -m deviceless tests/kernels/test_mla_triton.py \
		-k "h200-32 or rtx4090 or a100 or no_copy"
