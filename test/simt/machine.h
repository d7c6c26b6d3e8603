// The machine that runs kernels: what its parts (schedule, memory, grid, checker) share. Tests do not include this.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "layers/core/check.h"
#include "test/simt/context.h"
#include "test/simt/device_side.h"
#include "test/simt/simt.h"

constexpr unsigned kWarpLanes = 32;
constexpr unsigned kMaxThreads = 1024;  // of a block

/// Where an address range lies; the check of membership is one subtraction.
struct Region {
  uintptr_t begin = 0;
  size_t size = 0;
  bool contains(uintptr_t address) const { return address - begin < size; }
};

// ---- threads

struct Warp;

/// A cp.async that has not landed.
struct AsyncCopy {
  void* to;
  const void* from;
  size_t size_bytes;
  int group;
  const void* return_address;  ///< of the kernel's call
};

/// A CUDA thread.
struct Fiber {
  enum class State : uint8_t { Ready, AtBarrier, InCollective, Done };

  Context context;
  char* stack = nullptr;
  uint3 thread_index = {};
  unsigned index = 0, lane = 0;  ///< in the block, in the warp
  Warp* warp = nullptr;
  State state = State::Done;
  // what it waits in (or waited in last), and brought there
  const char* operation = nullptr;
  SimtSite site;
  SimtVote vote = SimtVote::None;
  int predicate = 0;  ///< after the barrier: the result of the vote
  uint32_t mask = 0;
  SimtCollective collective = {};
  void* frame = nullptr;
  std::vector<AsyncCopy> copies;  ///< of the groups that no wait has reached
  int num_copy_groups = 0;        ///< closed ones
};

struct Warp {
  uint32_t existing = 0, exited = 0, waiting = 0;  ///< sets of lanes
  std::array<Fiber*, kWarpLanes> fibers = {};
  /// Vector clocks: clock[a][b] is how much of lane b's past lane a has been synchronised with by __syncwarp.
  std::array<std::array<uint32_t, kWarpLanes>, kWarpLanes> clock = {};
};

/// The state of the one emulated GPU. It is global because CUDA's own interface is (threadIdx), and because signal
/// handlers and the compiler's callbacks for memory accesses have no argument to carry it.
struct Machine {
  SimtOptions options;
  Fiber* current = nullptr;  ///< null: host code runs
  SimtLaunch launch;
  unsigned num_threads = 0, num_exited = 0, num_at_barrier = 0;  ///< of the block

  // One counter of launches, blocks and barriers: what happened at a smaller epoch of the same block is ordered before.
  uint32_t epoch = 0;
  uint32_t launch_epoch = 0, block_epoch = 0;
  uint32_t acquired_epoch = 0;  ///< everything before is visible to this block, other blocks' writes too
  uint64_t blocks_done = 0;
  bool has_fenced = false;  ///< a thread of this block called __threadfence
  bool in_atomic = false;

  Region arena, stacks, static_shared;
  void* dynamic_shared = nullptr;

  std::string reports;
  int num_reports = 0;
  std::string fatal;  ///< why the grid was given up
};
extern Machine machine;

/// CUDA's built-in variables, of the thread that runs.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

// ---- reports: collected during a launch, thrown as one Error at its end

void add_report(std::string text);
template <class... Args>
void report(fmt::format_string<Args...> format, Args&&... args) {
  add_report(fmt::format(format, std::forward<Args>(args)...));
}
/// Gives the grid up, once machine.fatal says why. Called by a thread of it, whose stack, like all others, is
/// abandoned: the caller must own nothing.
[[noreturn]] void give_up();
/// "block (0,0,0) thread (3,0,0)"
std::string describe(const Fiber& fiber);
std::string describe(const SimtSite& site);
/// Source lines of code addresses, and the function that holds one.
std::string source_line(uintptr_t return_address);
std::string function_name(const void* function);
/// The program's own code and static data.
Region program_image();

// ---- schedule

/// Runs `launch` for all threads of one block.
void run_block(unsigned block_number);
/// The next number of the schedule's random sequence, below n.
uint64_t random_below(uint64_t n);
void seed_schedule();

// ---- memory: every allocation ends at a page that traps; addresses are never used twice

void* allocate_device(size_t size_bytes, const char* kind);
bool release_device(void* data);
size_t free_device_bytes();
/// Reports writes to the bytes between an allocation and the bounds of its pages.
void check_margins();
/// Whether [address, address + size) lies in one live allocation.
bool is_allocated(uintptr_t address, size_t size_bytes);
/// Whether it is an address of the shared memory of the block that runs.
bool is_shared(uintptr_t address);
/// "byte 4 of a global allocation of 4 bytes"
std::string describe_address(uintptr_t address);

// ---- streams

/// Queues `work` on a cudaStream_t. It says whether it is done; if not it is called again, when others have run.
void enqueue(void* stream, std::function<bool()> work);
void finish_all_streams();

// ---- checker: judges each access of a kernel by CUDA's ordering rules (check build); elsewhere these do nothing

bool checker_is_linked();
void checker_begin_block();
void checker_atomic_begins(const void* data);
/// An access that the runtime carries out for the running thread, on behalf of the kernel's code at `return_address`.
void checker_access(const void* data, size_t size_bytes, bool is_write, const void* return_address);
/// The contents are undefined from here on.
void checker_forget(const void* data, size_t size_bytes);
void checker_release_pages(const void* data, size_t size_bytes);
void checker_host_writes(const void* data, size_t size_bytes);
void checker_host_reads(const void* data, size_t size_bytes);
