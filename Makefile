# Dragoman: `make demo` to see it work, `make test` to check it. Everything is installed into .venv only.
PYTHON ?= python3
BIN := .venv/bin

# Tests run one thread each, so several processes share the cores; tests of one file share what it trained, and files
# with slow tests are begun first (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# What a CPU without AVX-512 gets: limits of the instruction sets of oneDNN, PyTorch and CTranslate2.
AVX2 := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 CT2_FORCE_CPU_ISA=AVX2
CPU_TESTS := $(addprefix tests/, bench/test_bench_training.py bench/test_bench_translate.py cli/test_demo.py \
	kernels/test_attention_kernels.py modules/test_linear.py test_hardware.py \
	$(addprefix inference/test_, $(addsuffix .py, engine_ctranslate2 engine_huggingface engine_laws engine_onnx \
	engine_selection engine_torch export translator)))

.PHONY: setup demo test test-cpu lint format docs

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@echo "setting up .venv (a minute or two the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/dragoman demo

test: setup
	$(PYTEST)

test-cpu: setup
	$(AVX2) $(PYTEST) $(CPU_TESTS)
	DRAGOMAN_CPU_FEATURES=none $(PYTEST) $(CPU_TESTS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
