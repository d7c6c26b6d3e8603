# train_gpt: build, demo, test, bench, lint. `make help` lists the targets.
#
#   make [CUDA=0|1] [MPI=0|1] [SAN=1] [ARCH=native]      objects in build/<flavour>/, the program in build/train_gpt
#
# CUDA=1 is the default where nvcc is found, MPI=1 where mpicxx is found. SAN=1 builds with ASan and UBSan.

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
CUDA_ARCHS ?= 80 90 100
JOBS  ?= $(shell nproc)

FLAVOUR := $(if $(filter 1,$(SAN)),san,release)$(if $(filter 1,$(CUDA)),-cuda)$(if $(filter 1,$(MPI)),-mpi)
B := build/$(FLAVOUR)

# ---- flags
, := ,
WARN := -Wall -Wextra -Wshadow -Werror -Wno-unknown-pragmas
OPT  := $(if $(filter 1,$(SAN)),-O1 -g -fsanitize=address$(,)undefined -fno-sanitize-recover=all -fno-omit-frame-pointer,-O3 -g1)

CPPFLAGS := -I. $(if $(filter 1,$(CUDA)),-DTRAIN_GPT_CUDA)
CXXFLAGS := -std=c++20 $(OPT) -march=$(ARCH) -fopenmp -fno-math-errno -fno-trapping-math -ffp-contract=fast $(WARN)
LDFLAGS  := -fopenmp $(if $(filter 1,$(SAN)),-fsanitize=address$(,)undefined)
LDLIBS   := -lfmt -lopenblas -lpthread

NVCCFLAGS := -std=c++20 -O3 -lineinfo -Werror all-warnings --expt-relaxed-constexpr -Xcompiler "-fopenmp -Wall -Wextra" \
             $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a))
ifeq ($(CUDA),1)
CUDA_HOME := $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
LDLIBS += -L$(CUDA_HOME)/lib64 -L$(CUDA_HOME)/lib -lcudart_static -ldl -lrt
endif
ifeq ($(MPI),1)
MPI_CPPFLAGS := $(shell $(MPICXX) --showme:compile 2>/dev/null)
LDLIBS += $(shell $(MPICXX) --showme:link 2>/dev/null)
endif

# ---- sources: every .cpp of a folder is part of the program; comm/world_{mpi,self}.cpp are alternatives
SRC := $(sort $(wildcard layers/core/*.cpp layers/*.cpp comm/*.cpp data/*.cpp llama/*.cpp))
SRC := $(filter-out $(if $(filter 1,$(MPI)),comm/world_self.cpp,comm/world_mpi.cpp comm/mpi_comm.cpp),$(SRC))
CU  := $(if $(filter 1,$(CUDA)),$(sort $(wildcard layers/core/*.cu layers/*.cu comm/*.cu)))
OBJ := $(SRC:%.cpp=$(B)/%.o) $(CU:%.cu=$(B)/%.cu.o)
LIB := $(B)/libtrain_gpt.a

.PHONY: all
all: build/train_gpt

build/train_gpt: $(B)/train_gpt
	@ln -sfn $(FLAVOUR)/train_gpt $@

$(B)/train_gpt: $(B)/train_gpt.o $(LIB)
	$(CXX) $(LDFLAGS) -o $@ $^ $(LDLIBS)

$(LIB): $(OBJ)
	@rm -f $@
	ar rcs $@ $^

$(B)/%.o: %.cpp
	@mkdir -p $(@D)
	$(CXX) $(CPPFLAGS) $(CXXFLAGS) -MMD -MP -c -o $@ $<

$(B)/comm/%.o: CPPFLAGS += $(MPI_CPPFLAGS)

$(B)/%.cu.o: %.cu
	@mkdir -p $(@D)
	$(NVCC) $(CPPFLAGS) $(NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c -o $@ $<

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

# ---- tests: one program per file
TESTS := $(patsubst %.cpp,$(B)/%,$(sort $(wildcard test/unit/*_test.cpp test/numerics/*_test.cpp test/system/*_test.cpp)))

$(B)/test/%_test: $(B)/test/%_test.o $(LIB)
	$(CXX) $(LDFLAGS) -o $@ $^ -lgtest -lgtest_main $(LDLIBS)

# ---- fuzzers (clang): test/fuzz/X_fuzz.cpp with seeds in test/fuzz/corpus/X/ and words in test/fuzz/X.dict. `make fuzz`
# runs each for FUZZ_SECONDS and fails on a crash, a hang or a leak; what it found of interest stays in build/fuzz/corpus.
CLANGXX ?= clang++
FUZZ_SECONDS ?= 10
FUZZERS  := $(patsubst test/fuzz/%.cpp,build/fuzz/%,$(sort $(wildcard test/fuzz/*_fuzz.cpp)))
FUZZ_OBJ := $(patsubst %.cpp,build/fuzz/obj/%.o,$(sort $(wildcard layers/core/*.cpp data/*.cpp llama/config.cpp llama/run_config.cpp)))
FUZZ_FLAGS := -std=c++20 -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
# clang has its own OpenMP or none: GCC's header and library serve, and the pragmas are ignored (one thread).
FUZZ_CPPFLAGS := -I. -Ibuild/fuzz/include -Wall -Wextra -Wno-unknown-pragmas -Wno-source-uses-openmp

build/fuzz/include/omp.h:
	@mkdir -p $(@D)
	ln -sfn "$$($(CXX) -print-file-name=include/omp.h)" $@

build/fuzz/obj/%.o: %.cpp | build/fuzz/include/omp.h
	@mkdir -p $(@D)
	$(CLANGXX) $(FUZZ_CPPFLAGS) $(FUZZ_FLAGS) -fsanitize=fuzzer-no-link -MMD -MP -c -o $@ $<

build/fuzz/%_fuzz: build/fuzz/obj/test/fuzz/%_fuzz.o $(FUZZ_OBJ)
	$(CLANGXX) $(FUZZ_FLAGS) -fsanitize=fuzzer -o $@ $^ -lfmt -lopenblas -lgomp -lpthread

.PHONY: fuzz
fuzz: $(FUZZERS)
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
