// What the CUDA front end (include/) asks of the runtime on behalf of a kernel.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <source_location>

using SimtSite = std::source_location;

/// One launch. `call` runs the kernel for one thread with the parameters that lie at `parameters`.
struct SimtLaunch {
  dim3 grid, block;
  size_t shared_bytes = 0;
  const void* kernel = nullptr;  ///< its address, for its name
  void (*call)(const void* parameters) = nullptr;
  const void* parameters = nullptr;
  size_t parameters_size = 0;
};

/// Runs every block of the grid when its turn in the stream comes, then throws Error if anything was reported.
/// `release` takes the parameters of the launch back when it is over.
void simt_queue(void* stream, const SimtLaunch& launch, void (*release)(const void* parameters));

void* simt_dynamic_shared();
unsigned simt_lane();

enum class SimtVote { None, Count, And, Or };
/// The barrier of a block; gives the vote over `predicate` of all threads that wait at it.
int simt_block_barrier(SimtVote vote, bool predicate, const SimtSite& site);

/// A warp collective: each lane of `mask` brings a frame; the last to arrive calls `exchange` once with the frames of
/// all lanes that take part (indexed by lane), then all go on. Shuffle, vote, and whatever the tensor cores do are
/// made of this. `orders_memory`: what a lane wrote before is visible to the others after (__syncwarp only).
using SimtExchange = void (*)(void* const* frames, uint32_t lanes);
struct SimtCollective {
  const char* name;
  SimtExchange exchange;  ///< may be null
  bool orders_memory;
};
void simt_warp_collective(const SimtCollective& collective, uint32_t mask, void* frame, const SimtSite& site);

/// `value` of lane `source`, all sizes up to 64 bits.
uint64_t simt_shuffle(const char* name, uint32_t mask, uint64_t value, int source, const SimtSite& site);
uint32_t simt_ballot(const char* name, uint32_t mask, bool predicate, const SimtSite& site);

/// Accesses between begin and end are one atomic access to `data`. (One OS thread runs all: they are not interrupted.)
void simt_atomic_begin(const void* data);
void simt_atomic_end();
void simt_fence();

/// cp.async: the destination is undefined until the wait that the copy lands at.
void simt_copy_async(void* shared, const void* global, size_t size_bytes);
void simt_copy_async_commit();
void simt_copy_async_wait(int num_pending_groups);

/// ldmatrix.x4 and mma.m16n8k16 with bf16 operands and fp32 sums; fragments as in layers/core/cuda_primitives.cuh.
void simt_load_matrices(unsigned (&matrix)[4], const void* row, bool transposed, const SimtSite& site);
void simt_mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const SimtSite& site);
