# train_gpt: build, demo, test, bench, lint. `make help` lists the targets.
#
#   make [CUDA=0|1] [CUDNN=0|1] [MPI=0|1] [SAN=1] [ARCH=native]
#                                                      objects in build/<flavour>/, the program in build/train_gpt
#
# CUDA=1 is the default where nvcc is found, CUDNN=1 where cudnn.h is found too, MPI=1 where mpicxx is found. SAN=1 builds
# with ASan and UBSan.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

NVCC  ?= $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
MPICXX ?= $(shell command -v mpicxx)
CUDA  ?= $(if $(NVCC),1,0)
MPI   ?= $(if $(MPICXX),1,0)
SAN   ?= 0
ARCH  ?= native
# The GPUs that are here; where there is none, those that CI compiles for.
CUDA_ARCHS ?= $(or $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d . | grep -xE '[0-9]+' | sort -u),80 90 100)
JOBS  ?= $(shell nproc)

# cuDNN for attention, where its header is. Its C++ frontend is a set of headers in a wheel of PyPI, fetched once;
# CUDNN_FRONTEND=DIR names a DIR/include/cudnn_frontend.h that is there already, CUDNN=0 builds without.
CUDA_HOME := $(if $(filter 1,$(CUDA)),$(patsubst %/bin/nvcc,%,$(realpath $(NVCC))))
CUDNN_HEADER := $(if $(CUDA_HOME),$(firstword $(wildcard $(CUDA_HOME)/include/cudnn.h /usr/include/cudnn.h \
                  /usr/include/*-linux-gnu/cudnn.h build/carry/include/cudnn.h)))
CUDNN ?= $(if $(CUDNN_HEADER),1,0)
CUDNN_FRONTEND ?= build/cudnn_frontend

FLAVOUR := $(if $(filter 1,$(SAN)),san,release)$(if $(filter 1,$(CUDA)),-cuda)$(if $(filter 1,$(MPI)),-mpi)
FLAVOUR := $(FLAVOUR)$(if $(filter 0,$(CUDNN)),$(if $(CUDNN_HEADER),-nocudnn))
B := build/$(FLAVOUR)

# ---- flags
, := ,
# stringop-overflow, restrict, maybe-uninitialized: false alarms of GCC 12 inside fmt, std::string and nlohmann/json
WARN := -Wall -Wextra -Wshadow -Werror -Wno-unknown-pragmas -Wno-stringop-overflow -Wno-restrict -Wno-maybe-uninitialized
OPT   = -g1 $(if $(filter 1,$(SAN)),$(SAN_LEVEL) -fsanitize=address$(,)undefined -fno-sanitize-recover=all -fno-omit-frame-pointer,$(LEVEL))

# Headers and libraries that a machine without Debian's packages was given: scripts/gpu_check.sh --carry.
DEPS := $(wildcard build/carry)
CPPFLAGS := -I. $(if $(filter 1,$(CUDA)),-DTRAIN_GPT_CUDA) $(DEPS:%=-isystem %/include)
CXXFLAGS = -std=c++20 $(OPT) -march=$(ARCH) -fopenmp -fno-math-errno -fno-trapping-math -ffp-contract=fast $(WARN)
LDFLAGS  := -fopenmp $(DEPS:%=-L%/lib -Wl$(,)-rpath$(,)$(CURDIR)/%/lib) $(if $(filter 1,$(SAN)),-fsanitize=address$(,)undefined)
LDLIBS   := -lfmt -lpthread

# A register spill is an error. fmt 9 takes nvcc for a compiler without constexpr, which breaks its consteval formats.
NVCCFLAGS := -std=c++20 -O3 -lineinfo -Werror all-warnings --expt-relaxed-constexpr -DFMT_USE_CONSTEXPR=1 \
             -Xptxas --warn-on-spills,--warning-as-error -Xcompiler "-fopenmp -Wall -Wextra" \
             $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a))
ifeq ($(CUDA),1)
NCCL ?= $(if $(wildcard $(CUDA_HOME)/include/nccl.h /usr/include/nccl.h build/carry/include/nccl.h),1,0)
# cuBLASLt is the toolkit's shared library (its static one is not in every toolkit); programs find it where it was.
LDLIBS += $(foreach d,$(wildcard $(CUDA_HOME)/lib64 $(CUDA_HOME)/lib),-L$(d) -Wl$(,)-rpath$(,)$(d))
# Programs without attention or ranks do not load these. nvrtc is the wish of cuDNN's frontend.
LDLIBS += -Wl$(,)--push-state$(,)--as-needed -lcublasLt $(if $(filter 1,$(CUDNN)),-lcudnn -lnvrtc) \
          $(if $(filter 1,$(NCCL)),-lnccl) -Wl$(,)--pop-state -lcudart_static -ldl -lrt
endif
NCCL ?= 0
ifeq ($(MPI),1)
MPI_CPPFLAGS := -DOMPI_SKIP_MPICXX $(shell $(MPICXX) --showme:compile 2>/dev/null)
LDLIBS += $(shell $(MPICXX) --showme:link 2>/dev/null)
endif

# ---- sources: every .cpp of a folder is part of the program; comm/world_{mpi,self}.cpp are alternatives
SRC := $(sort $(wildcard layers/core/*.cpp layers/*.cpp comm/*.cpp data/*.cpp llama/*.cpp))
SRC := $(filter-out $(if $(filter 1,$(MPI)),comm/world_self.cpp,comm/world_mpi.cpp comm/mpi_comm.cpp comm/mpi_progress.cpp),$(SRC))
SRC := $(filter-out $(if $(filter 1,$(NCCL)),comm/nccl_none.cpp),$(SRC))
CU  := $(if $(filter 1,$(CUDA)),$(sort $(wildcard layers/core/*.cu layers/*.cu comm/*.cu)))
CU  := $(filter-out $(if $(filter 0,$(NCCL)),comm/nccl_comm.cu),$(CU))
# cuDNN's attention, or a stand-in
SRC := $(filter-out $(if $(filter 1,$(CUDNN)),layers/attention_cudnn_stub.cpp),$(SRC))
CU  := $(filter-out $(if $(filter 1,$(CUDNN)),,layers/attention_cudnn.cu),$(CU))
OBJ := $(SRC:%.cpp=$(B)/%.o) $(CU:%.cu=$(B)/%.cu.o)
LIB := $(B)/libtrain_gpt.a

.PHONY: all
all: $(B)/train_gpt
	@ln -sfn $(FLAVOUR)/train_gpt build/train_gpt

$(B)/train_gpt: $(B)/train_gpt.o $(LIB)
	$(CXX) $(LDFLAGS) -o $@ $^ $(LDLIBS)

$(LIB): $(OBJ)
	@rm -f $@
	ar rcs $@ $^

$(B)/%.o: %.cpp
	@mkdir -p $(@D)
	$(CXX) $(CPPFLAGS) $(CXXFLAGS) -MMD -MP -c -o $@ $<

# Loops over tensors are worth -O3; the rest is compiled for a short build.
LEVEL := -O3
SAN_LEVEL := -O1
$(B)/llama/%.o $(B)/test/%.o $(B)/train_gpt.o: LEVEL := -O1
$(B)/llama/%.o $(B)/test/%.o $(B)/train_gpt.o: SAN_LEVEL := -Og
$(B)/data/%.o: LEVEL := -O2

$(B)/comm/%.o: CPPFLAGS += $(MPI_CPPFLAGS)

$(B)/%.cu.o: %.cu
	@mkdir -p $(@D)
	$(NVCC) $(CPPFLAGS) $(NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c -o $@ $<

# attention_cudnn.cu holds no kernel, and the headers of the frontend are many: once, by the C++ compiler, takes 50 s.
$(B)/layers/attention_cudnn.cu.o: layers/attention_cudnn.cu | $(CUDNN_FRONTEND)/include/cudnn_frontend.h
	@mkdir -p $(@D)
	$(CXX) $(CPPFLAGS) $(CXXFLAGS) -isystem $(CUDNN_FRONTEND)/include -isystem $(CUDA_HOME)/include \
	  -DCUDNN_FRONTEND_SKIP_JSON_LIB -MMD -MP -MF $(@:.o=.d) -x c++ -c -o $@ $<
$(B)/layers/attention_cudnn.cu.o: LEVEL := -O1

# Headers that are there are not fetched again: another version is another `make clean`.
build/cudnn_frontend/include/cudnn_frontend.h:
	scripts/fetch_cudnn_frontend.sh scripts/requirements-cudnn.txt build/cudnn_frontend

# train_gpt.cu holds no kernel: nvcc compiles it where there is one, a plain C++ compiler elsewhere.
ifeq ($(CUDA),1)
$(B)/train_gpt.o: train_gpt.cu
	@mkdir -p $(@D)
	$(NVCC) $(CPPFLAGS) $(NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c -o $@ $<
else
$(B)/train_gpt.o: train_gpt.cu
	@mkdir -p $(@D)
	$(CXX) $(CPPFLAGS) $(CXXFLAGS) -MMD -MP -x c++ -c -o $@ $<
endif

# ---- demo: build, train on the embedded example, show a falling loss
.PHONY: demo
demo:
	@scripts/install_deps.sh build
	@$(MAKE) -j$(JOBS) --no-print-directory all
	@rm -rf build/demo
	build/train_gpt configs/demo.json

# ---- CUDA kernels without a GPU (test/simt/README.md). They do not depend on CUDA, MPI or SAN: objects in build/simt/.
# Three builds of the kernels; everything else of such a test is compiled once.
SIMT := build/simt
SIMT_CXX ?= g++
SIMT_KERNELS := $(filter-out layers/attention_cudnn.cu,$(sort $(wildcard layers/core/*.cu layers/*.cu)))
SIMT_HOST := $(sort $(wildcard layers/core/*.cpp $(SIMT_KERNELS:.cu=.cpp))) \
             $(addprefix test/simt/,context.cpp schedule.cpp memory.cpp async_copy.cpp tensor_core.cpp cuda_api.cpp streams.cpp \
               cublas_lt.cpp cudnn.cpp grid.cpp describe.cpp)
SIMT_HOST_OBJ := $(SIMT_HOST:%.cpp=$(SIMT)/host/%.o) $(SIMT)/host/layers/attention_cudnn.cu.o
SIMT_CPPFLAGS := -Itest/simt/include -I. -DTRAIN_GPT_CUDA
SIMT_CXXFLAGS := -std=c++20 -g -fno-strict-aliasing $(WARN)
SIMT_FLAGS_plain := -O2
SIMT_FLAGS_asan  := -O1 -fsanitize=address$(,)undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
SIMT_FLAGS_check := -O2 -fsanitize=thread --param tsan-instrument-func-entry-exit=0
SIMT_LINK_asan   := -fsanitize=address$(,)undefined
SIMT_CHECKER_plain := checker_off
SIMT_CHECKER_asan  := checker_off
SIMT_CHECKER_check := checker
SIMT_NAMES := $(patsubst test/simt/%.cpp,%,$(sort $(wildcard test/simt/*_test.cpp)))
SIMT_TESTS := $(foreach build,plain asan check,$(SIMT_NAMES:%=$(SIMT)/$(build)/%))

$(SIMT)/host/%.o: %.cpp
	@mkdir -p $(@D)
	$(SIMT_CXX) $(SIMT_CPPFLAGS) $(SIMT_CXXFLAGS) -O2 -fopenmp -MMD -MP -c -o $@ $<

# attention_cudnn.cu holds no kernel: once, against the double of cuDNN.
$(SIMT)/host/%.cu.o: %.cu
	@mkdir -p $(@D)
	$(SIMT_CXX) $(SIMT_CPPFLAGS) $(SIMT_CXXFLAGS) -O2 -fopenmp -MMD -MP -x c++ -c -o $@ $<

# Kernels first: of an inline function that both have, the linker keeps the first, which has to be the instrumented one.
define simt_build
$(SIMT)/$(1)/%.cu.o: %.cu
	@mkdir -p $$(@D)
	$(SIMT_CXX) $(SIMT_CPPFLAGS) $(SIMT_CXXFLAGS) $(SIMT_FLAGS_$(1)) -MMD -MP -x c++ -c -o $$@ $$<

$(SIMT)/$(1)/%_test: $(SIMT_KERNELS:%=$(SIMT)/$(1)/%.o) $(SIMT)/host/test/simt/%_test.o $(SIMT_HOST_OBJ) \
                     $(SIMT)/host/test/simt/$(SIMT_CHECKER_$(1)).o
	$(SIMT_CXX) $(SIMT_LINK_$(1)) -fopenmp -o $$@ $$^ -lgtest -lgtest_main -lfmt

$(SIMT)/$(1)/faults_test: $(SIMT)/$(1)/test/simt/faults.cu.o
endef
$(foreach build,plain asan check,$(eval $(call simt_build,$(build))))

# The whole trainer on the emulated GPU: layers and kernels as above, everything else as the program has it.
SIMT_TRAINER := $(SIMT)/plain/train_gpt
$(SIMT)/host/train_gpt.o: train_gpt.cu
	@mkdir -p $(@D)
	$(SIMT_CXX) $(SIMT_CPPFLAGS) $(SIMT_CXXFLAGS) -O1 -MMD -MP -x c++ -c -o $@ $<
$(SIMT_TRAINER): $(SIMT_KERNELS:%=$(SIMT)/plain/%.o) $(SIMT)/plain/comm/nccl_comm.cu.o $(SIMT)/host/train_gpt.o $(sort $(SIMT_HOST_OBJ) \
                 $(patsubst %.cpp,$(SIMT)/host/%.o,$(filter-out %_stub.cpp,$(wildcard layers/*.cpp))) $(SIMT)/host/test/simt/checker_off.o $(SIMT)/host/test/simt/nccl.o) \
                 $(patsubst %.cpp,$(B)/%.o,$(filter-out comm/nccl_none.cpp,$(filter comm/% data/% llama/%,$(SRC))))
	$(SIMT_CXX) -fopenmp -o $@ $^ -lfmt -lpthread $(if $(filter 1,$(MPI)),$(shell $(MPICXX) --showme:link 2>/dev/null))

# The benchmark of a GPU: on one, by scripts/gpu_check.sh, and there, to see that it runs.
.PHONY: gpu-bench gpu-bench-path
gpu-bench: $(B)/test/bench/gpu_bench
gpu-bench-path:
	@echo $(B)/test/bench/gpu_bench
SIMT_BENCH := $(SIMT)/plain/gpu_bench
$(SIMT_BENCH): $(SIMT_KERNELS:%=$(SIMT)/plain/%.o) $(SIMT)/host/test/bench/gpu_bench.o $(SIMT_HOST_OBJ) $(SIMT)/host/test/simt/checker_off.o
	$(SIMT_CXX) -fopenmp -o $@ $^ -lfmt

# Compiles everything that nvcc compiles, for every architecture; needs no GPU.
.PHONY: nvcc-check nvcc-objects
nvcc-check:
	@test -n "$(NVCC)" || { echo "nvcc-check: no nvcc on the PATH or in /usr/local/cuda/bin" >&2; exit 1; }
	$(MAKE) CUDA=1 nvcc-objects
nvcc-objects: $(CU:%.cu=$(B)/%.cu.o) $(patsubst %.cu,$(B)/%.o,$(wildcard train_gpt.cu))

# Registers, occupancy and instructions of the kernels, as a table; fails where they are not what they should be.
CUOBJDUMP ?= build/cuobjdump/nvidia/cu13/bin/cuobjdump
.PHONY: kernel-table
build/cuobjdump/nvidia/cu13/bin/cuobjdump: scripts/requirements-cuobjdump.txt
	scripts/fetch_wheels.sh $< build/cuobjdump
	@chmod +x build/cuobjdump/nvidia/cu13/bin/*
	@touch $@
kernel-table: $(filter build/cuobjdump/%,$(CUOBJDUMP))
	$(MAKE) CUDA=1 nvcc-objects
	python3 scripts/kernel_table.py $(CUOBJDUMP) $(filter-out %cudnn.cu.o,$(patsubst %.cu,$(B)/%.cu.o,$(filter layers/%,$(CU)))) \
	  --out test/simt/kernels.md

.PHONY: simt-mutate
simt-mutate:                            # by hand: breaks the kernels one line at a time, the tests have to notice
	test/simt/mutate.sh

# ---- tests: one program per file
TESTS := $(patsubst %.cpp,$(B)/%,$(sort $(wildcard test/unit/*_test.cpp test/numerics/*_test.cpp)))
DISTRIBUTED_TESTS := $(if $(filter 1,$(MPI)),$(patsubst %.cpp,$(B)/%,$(sort $(wildcard test/distributed/*_test.cpp))))
UNIT_TESTS := $(filter $(B)/test/unit/%,$(TESTS))
SYSTEM_TESTS := $(patsubst %.cpp,$(B)/%,$(sort $(wildcard test/system/*_test.cpp)))
CUDNN_TESTS := $(if $(filter 1,$(CUDNN)),$(patsubst %.cpp,$(B)/%,$(sort $(wildcard test/cudnn/*_test.cpp))))

$(B)/test/%_test: $(B)/test/%_test.o $(LIB)
	$(CXX) $(LDFLAGS) -o $@ $^ -lgtest -lgtest_main $(LDLIBS)

# They ask cuDNN what it would do on GPUs that are not here: it wants a driver library, the toolkit's stub will do.
# run_tests.sh puts it on the path of these programs only.
$(CUDNN_TESTS): build/cudnn_driver/libcuda.so.1
build/cudnn_driver/libcuda.so.1:
	@mkdir -p $(@D)
	ln -sfn $(CUDA_HOME)/lib64/stubs/libcuda.so $@

$(B)/test/distributed/%_test: $(B)/test/distributed/%_test.o $(B)/test/distributed/main.o $(LIB)
	$(CXX) $(LDFLAGS) -o $@ $^ -lgtest $(LDLIBS)

.PHONY: test tests run-tests run-simt-tests
test:
	@scripts/install_deps.sh build test
	@$(MAKE) -j$(JOBS) --no-print-directory all tests $(SIMT_TESTS) $(SIMT_TRAINER) $(SIMT_BENCH)
	@rm -f build/test.tally
	@export TEST_TALLY=build/test.tally; status=0; \
	  { $(MAKE) --no-print-directory run-simt-tests && $(MAKE) --no-print-directory run-tests; } 2>&1 | \
	    tee build/test.log || status=1; \
	  read -r passed failed skipped <build/test.tally; echo "$$passed passed, $$failed failed, $$skipped skipped"; exit $$status

tests: $(TESTS) $(DISTRIBUTED_TESTS) $(SYSTEM_TESTS) $(CUDNN_TESTS)

run-tests:
	@scripts/run_tests.sh $(TESTS) $(DISTRIBUTED_TESTS) $(SYSTEM_TESTS) $(CUDNN_TESTS)
run-simt-tests:                         # of one thread each
	@TEST_JOBS=$(JOBS) scripts/run_tests.sh $(SIMT_TESTS)

# Unit tests and three steps of the demo with ASan and UBSan; without CUDA and MPI, whose libraries are not ours to check.
.PHONY: test-sanitized unit-test-programs run-unit-tests
test-sanitized:
	@scripts/install_deps.sh build test
	@$(MAKE) -j$(JOBS) --no-print-directory SAN=1 CUDA=0 MPI=0 build/san/train_gpt $(UNIT_TESTS:$(B)/%=build/san/%)
	@rm -rf build/san/demo
	build/san/train_gpt configs/demo.json --train.steps 3 --schedule.warmup_steps 1 --checkpoint.dir build/san/demo
	@$(MAKE) --no-print-directory SAN=1 CUDA=0 MPI=0 run-unit-tests

unit-test-programs: $(UNIT_TESTS)
run-unit-tests:
	@TEST_JOBS=$(TEST_JOBS) scripts/run_tests.sh $(UNIT_TESTS)

# ---- the reference: PyTorch + transformers, pinned, in .venv; .venv/hf4 is transformers 4 on the same torch
.venv/ok: scripts/requirements.txt
	@scripts/install_deps.sh python
	python3 -m venv .venv
	.venv/bin/pip install -q --disable-pip-version-check -r $<
	@touch $@

.venv/hf4/ok: scripts/requirements-hf4.txt .venv/ok
	python3 -m venv .venv/hf4
	@for site in .venv/hf4/lib/python*/site-packages; do echo $(CURDIR)/$${site/hf4\//} > $$site/of_parent.pth; done
	.venv/hf4/bin/pip install -q --disable-pip-version-check -r $<
	@touch $@

.PHONY: test-reference fixtures
test-reference: .venv/ok .venv/hf4/ok
	@scripts/install_deps.sh build
	@$(MAKE) -j$(JOBS) --no-print-directory all
	OMP_WAIT_POLICY=PASSIVE .venv/bin/python scripts/test_scripts.py
	scripts/reference_test.sh

fixtures: .venv/ok
	.venv/bin/python scripts/make_fixtures.py

# ---- house keeping
.PHONY: lint format clean help
lint:
	@scripts/install_deps.sh lint
	@scripts/lint.sh
format:
	clang-format -i $$(git ls-files --cached --others --exclude-standard -- '*.cpp' '*.h' '*.cu' '*.cuh')
clean:
	rm -rf build
help:
	@sed -n '1,/^$$/p' Makefile | sed 's/^# \{0,1\}//'

# ---- benchmarks, on a quiet machine: operations against the FMA peak, the program against PyTorch
.PHONY: bench
bench: .venv/ok
	@$(MAKE) -j$(JOBS) --no-print-directory all $(B)/test/bench/kernels_bench
	scripts/bench.sh $(B)/test/bench/kernels_bench

$(B)/test/bench/%_bench: $(B)/test/bench/%_bench.o $(LIB)
	$(CXX) $(LDFLAGS) -o $@ $^ $(LDLIBS)

# ---- fuzzers (clang): test/fuzz/X_fuzz.cpp with seeds in test/fuzz/corpus/X/ and words in test/fuzz/X.dict. `make fuzz`
# runs each for FUZZ_SECONDS and fails on a crash, a hang or a leak; what it found of interest stays in build/fuzz/corpus.
CLANGXX ?= clang++
FUZZ_SECONDS ?= 10
FUZZERS  := $(patsubst test/fuzz/%.cpp,build/fuzz/%,$(sort $(wildcard test/fuzz/*_fuzz.cpp)))
FUZZ_OBJ := $(patsubst %.cpp,build/fuzz/obj/%.o,$(sort $(wildcard layers/core/*.cpp data/*.cpp \
              llama/checkpoint_dir.cpp llama/config*.cpp llama/family*.cpp llama/human_number.cpp llama/params.cpp llama/rope_tables.cpp llama/run_*.cpp \
              llama/schedule.cpp)))
FUZZ_FLAGS := -std=c++20 -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
# clang has its own OpenMP or none, and cannot read GCC's header: one thread serves, its pragmas are ignored.
FUZZ_CPPFLAGS := -I. -Ibuild/fuzz/include -Wall -Wextra -Wno-unknown-pragmas -Wno-source-uses-openmp

build/fuzz/include/omp.h:
	@mkdir -p $(@D)
	printf 'inline int %s() { return %d; }\n' omp_get_max_threads 1 omp_get_num_threads 1 omp_get_thread_num 0 \
	  omp_in_parallel 0 > $@

build/fuzz/obj/%.o: %.cpp | build/fuzz/include/omp.h
	@mkdir -p $(@D)
	$(CLANGXX) $(FUZZ_CPPFLAGS) $(FUZZ_FLAGS) -fsanitize=fuzzer-no-link -MMD -MP -c -o $@ $<

build/fuzz/%_fuzz: build/fuzz/obj/test/fuzz/%_fuzz.o $(FUZZ_OBJ)
	$(CLANGXX) $(FUZZ_FLAGS) -fsanitize=fuzzer -o $@ $^ -lfmt -lpthread

.PHONY: fuzz run-fuzzers
fuzz:
	@scripts/install_deps.sh build fuzz
	@$(MAKE) -j$(JOBS) --no-print-directory $(FUZZERS)
	@$(MAKE) --no-print-directory run-fuzzers

run-fuzzers:
	@for fuzzer in $(FUZZERS); do \
	  name=$$(basename $$fuzzer _fuzz); \
	  mkdir -p build/fuzz/corpus/$$name build/fuzz/crashes; \
	  seeds=test/fuzz/corpus/$$name; words=test/fuzz/$$name.dict; \
	  echo "fuzz $$name for $(FUZZ_SECONDS) s"; \
	  $$fuzzer -max_total_time=$(FUZZ_SECONDS) -timeout=20 -print_final_stats=1 -verbosity=0 -print_funcs=0 \
	    -artifact_prefix=build/fuzz/crashes/$$name- $$(test ! -f $$words || echo -dict=$$words) \
	    build/fuzz/corpus/$$name $$(test ! -d $$seeds || echo $$seeds); \
	done

.SECONDARY:
-include $(shell find build -name '*.d' 2>/dev/null)
