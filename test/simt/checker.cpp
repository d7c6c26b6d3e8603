// The check build: kernels are compiled with g++ -fsanitize=thread but not linked with libtsan. The compiler then calls
// __tsan_readN / __tsan_writeN before each access, and those functions are defined here: they judge the access by
// CUDA's ordering rules. They find races in shared and in global memory, between threads and between blocks; reads of
// what was never written; accesses outside an allocation; pointers to host memory.
//
// What orders two accesses: different launches; a block barrier between them; __syncwarp, by vector clocks within a
// warp (a shuffle orders nothing, as in the CUDA guide); both being atomic; and the ticket idiom, below.
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <set>

#include "test/simt/machine.h"

namespace {

constexpr uint16_t kSeveralLanes = 0x8000;  // Record::thread of readers: kSeveralLanes | warp, or
constexpr uint16_t kSeveralWarps = 0xffff;
constexpr uint8_t kAtomic = 1, kSeveralBlocks = 2;

/// The last write of a cell, or its readers since. Readers of one epoch are merged into one record.
struct Record {
  uint32_t epoch, clock, pc;  ///< pc: offset in the program's image; 0: host code
  uint16_t thread;
  uint8_t bytes, flags;  ///< bytes: set of the cell's two
};
/// The past of two bytes of memory.
struct Cell {
  Record write, read;
  uint8_t initialised;  ///< set of the two bytes
};
constexpr size_t kCellBytes = 2;

/// The cells of a region, zero at first. Addresses only: pages come as they are touched.
class Shadow {
 public:
  void cover(Region region) {
    region_ = {region.begin & ~(kCellBytes - 1), region.size + kCellBytes};
    const size_t size_bytes = region_.size / kCellBytes * sizeof(Cell);
    void* cells = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(cells != MAP_FAILED, "cannot map {} bytes of shadow memory", size_bytes);
    cells_ = static_cast<Cell*>(cells);
  }
  bool is_mapped() const { return cells_ != nullptr; }
  Cell* cell(uintptr_t address) const { return cells_ + (address - region_.begin) / kCellBytes; }
  void clear() { std::memset(static_cast<void*>(cells_), 0, region_.size / kCellBytes * sizeof(Cell)); }
  /// Gives the pages back that lie within the cells of [begin, end).
  void release(uintptr_t begin, uintptr_t end) {
    constexpr uintptr_t kPage = 4096;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(cell(begin)) + kPage - 1) & ~(kPage - 1);
    const uintptr_t last = reinterpret_cast<uintptr_t>(cell(end)) & ~(kPage - 1);
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  }

 private:
  Region region_;
  Cell* cells_ = nullptr;
};

Shadow arena_shadow, static_shared_shadow;
Region image;
std::set<std::pair<uint64_t, uint32_t>> reported;  // each pair of source lines once

bool is_new(char kind, uint32_t pc, uint32_t other = 0) {
  return reported.insert({uint64_t(static_cast<unsigned char>(kind)) << 32 | pc, other}).second;
}

std::string line_of(uint32_t pc) {
  return pc == 0 ? "host code" : source_line(image.begin + pc);
}

unsigned warp_of(uint16_t thread) {
  return thread & kSeveralLanes ? thread & ~kSeveralLanes : thread / kWarpLanes;
}

// ---- order

/// Whether what `record` says happened before what the fiber does now.
bool is_ordered(const Record& record, const Fiber& fiber) {
  if (record.epoch < machine.acquired_epoch) return true;  // an earlier launch, or acquired by a ticket
  if (record.epoch < machine.block_epoch) return false;    // another block of this launch
  if (record.epoch < machine.epoch) return true;           // before a barrier of this block
  if (record.thread == fiber.index) return true;
  if (record.thread == kSeveralWarps || warp_of(record.thread) != fiber.index / kWarpLanes) return false;
  const auto& seen = fiber.warp->clock[fiber.lane];
  if (!(record.thread & kSeveralLanes)) return record.clock <= seen[record.thread % kWarpLanes];
  for (unsigned lane = 0; lane < kWarpLanes; lane++) {  // any of them may have been the last
    if (lane != fiber.lane && (fiber.warp->existing >> lane & 1) && record.clock > seen[lane]) return false;
  }
  return true;
}

std::string who(const Record& record) {
  if (record.epoch < machine.block_epoch) return "another block";
  if (record.thread == kSeveralWarps) return "threads of several warps";
  if (record.thread & kSeveralLanes) return fmt::format("several lanes of warp {}", warp_of(record.thread));
  return fmt::format("thread {}", record.thread);
}

void report_race(const char* kind, const Record& other, uintptr_t address, uint32_t pc) {
  if (!is_new('r', pc, other.pc)) return;
  report("race ({}) on {}: {} at {}, not ordered after {} at {}", kind, describe_address(address),
         describe(*machine.current), line_of(pc), who(other), line_of(other.pc));
}

// ---- one access

struct Access {
  uintptr_t address;
  uint32_t pc;
  bool is_write;
  uint8_t flags;  ///< kAtomic
};

/// The slow path: some byte of the cell was never written. Out of bounds, or uninitialised.
void check_unwritten(Cell& cell, const Access& access, unsigned size_bytes) {
  const char* what = access.is_write ? "write" : "read";
  if (machine.arena.contains(access.address) && !is_allocated(access.address, size_bytes)) {
    if (is_new('b', access.pc)) {
      report("out-of-bounds {} of {}: {} at {}", what, describe_address(access.address), describe(*machine.current),
             line_of(access.pc));
    }
    return;
  }
  if (access.is_write) return;
  if (is_new('u', access.pc)) {
    report("read of uninitialised {}: {} at {}", describe_address(access.address), describe(*machine.current),
           line_of(access.pc));
  }
  cell.initialised = 3;  // said once
}

void check_races(const Cell& cell, const Access& access, uint8_t bytes) {
  const Fiber& fiber = *machine.current;
  const bool atomic = access.flags & kAtomic;
  if ((cell.write.bytes & bytes) && !(atomic && cell.write.flags & kAtomic) && !is_ordered(cell.write, fiber)) {
    report_race(access.is_write ? "write after write" : "read after write", cell.write, access.address, access.pc);
  }
  if (!access.is_write || !(cell.read.bytes & bytes) || (atomic && cell.read.flags & kAtomic)) return;
  const bool read_elsewhere = cell.read.flags & kSeveralBlocks && cell.read.epoch >= machine.acquired_epoch;
  if (read_elsewhere || !is_ordered(cell.read, fiber)) {
    report_race("write after read", cell.read, access.address, access.pc);
  }
}

/// Merges a read into the cell's readers.
void record_read(Record& readers, const Access& access, uint8_t bytes) {
  const Fiber& fiber = *machine.current;
  Record now = {machine.epoch, fiber.warp->clock[fiber.lane][fiber.lane],
                access.pc,     static_cast<uint16_t>(fiber.index),
                bytes,         access.flags};
  if (readers.bytes && readers.epoch >= machine.acquired_epoch) {
    if (!(readers.flags & kAtomic)) now.flags &= static_cast<uint8_t>(~kAtomic);
    now.flags |= readers.flags & kSeveralBlocks;
    if (readers.epoch < machine.block_epoch) now.flags |= kSeveralBlocks;
    if (readers.epoch == machine.epoch) {
      now.bytes |= readers.bytes;
      if (readers.thread != now.thread) {
        const bool same_warp = readers.thread != kSeveralWarps && warp_of(readers.thread) == warp_of(now.thread);
        now.thread = same_warp ? static_cast<uint16_t>(kSeveralLanes | warp_of(now.thread)) : kSeveralWarps;
        now.clock = std::max(now.clock, readers.clock);
      }
    }
  }
  readers = now;
}

void record_write(Cell& cell, const Access& access, uint8_t bytes) {
  const Fiber& fiber = *machine.current;
  cell.write = {machine.epoch, fiber.warp->clock[fiber.lane][fiber.lane],
                access.pc,     static_cast<uint16_t>(fiber.index),
                bytes,         access.flags};
  cell.initialised |= bytes;
}

/// Null where accesses are not judged: locals of a thread, constants, and, with a report, host memory.
Cell* find_cells(uintptr_t address, bool is_write, uint32_t pc) {
  if (machine.arena.contains(address)) return arena_shadow.cell(address);
  if (machine.static_shared.contains(address)) return static_shared_shadow.cell(address);
  const Region parameters = {reinterpret_cast<uintptr_t>(machine.launch.parameters), machine.launch.parameters_size};
  if (machine.stacks.contains(address) || image.contains(address) || parameters.contains(address)) return nullptr;
  if (is_new('h', pc)) {
    report("kernel {} host memory at {:#x}: {} at {}", is_write ? "writes" : "reads", address,
           describe(*machine.current), line_of(pc));
  }
  return nullptr;
}

void on_access(const void* data, size_t size_bytes, bool is_write, const void* return_address) {
  if (!machine.current) return;  // host code of a .cu file
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  const auto pc = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(return_address) - image.begin);
  Cell* cell = find_cells(begin, is_write, pc);
  if (!cell) return;
  if (std::has_single_bit(size_bytes) && begin % size_bytes != 0 && is_new('a', pc)) {
    report("misaligned access of {} bytes to {}: {} at {}", size_bytes, describe_address(begin),
           describe(*machine.current), line_of(pc));
  }
  for (uintptr_t address = begin, end = begin + size_bytes; address < end; cell++) {
    const unsigned offset = address % kCellBytes;
    const unsigned count = static_cast<unsigned>(std::min<uintptr_t>(kCellBytes - offset, end - address));
    const uint8_t bytes = static_cast<uint8_t>(((1u << count) - 1) << offset);
    const Access access = {address, pc, is_write, machine.in_atomic ? kAtomic : uint8_t{0}};
    if ((cell->initialised & bytes) != bytes) check_unwritten(*cell, access, count);
    check_races(*cell, access, bytes);
    is_write ? record_write(*cell, access, bytes) : record_read(cell->read, access, bytes);
    address += count;
  }
}

/// Sets every cell of [data, data + size) by `set(cell, bytes)`.
template <class Set>
void for_each_cell(const void* data, size_t size_bytes, Set&& set) {
  uintptr_t address = reinterpret_cast<uintptr_t>(data);
  const bool is_static = machine.static_shared.contains(address) && static_shared_shadow.is_mapped();
  if (!is_static && !machine.arena.contains(address)) return;
  if (!arena_shadow.is_mapped()) arena_shadow.cover(machine.arena);
  const Shadow& shadow = is_static ? static_shared_shadow : arena_shadow;
  for (const uintptr_t end = address + size_bytes; address < end;) {
    const unsigned offset = address % kCellBytes;
    const unsigned count = static_cast<unsigned>(std::min<uintptr_t>(kCellBytes - offset, end - address));
    set(*shadow.cell(address), static_cast<uint8_t>(((1u << count) - 1) << offset));
    address += count;
  }
}

// ---- the ticket idiom: the last block adds the partial results of all
//
// A block that fences and then does an atomic on a counter has released its writes; a block whose atomic comes after
// those of all blocks before it, each released on the same counter, has acquired them.
struct Ticket {
  uint32_t launch_epoch = 0, block_epoch = 0;
  uint64_t num_blocks = 0;
};
std::map<const void*, Ticket> tickets;

}  // namespace

bool checker_is_linked() {
  return true;
}

void checker_begin_block() {
  if (image.size == 0) image = program_image();
  if (!arena_shadow.is_mapped() && machine.arena.size > 0) arena_shadow.cover(machine.arena);
  if (!static_shared_shadow.is_mapped()) static_shared_shadow.cover(machine.static_shared);
  static_shared_shadow.clear();
  if (machine.dynamic_shared) checker_forget(machine.dynamic_shared, machine.launch.shared_bytes);
}

void checker_atomic_begins(const void* data) {
  if (!machine.has_fenced) return;
  Ticket& ticket = tickets[data];
  if (ticket.launch_epoch != machine.launch_epoch) ticket = {machine.launch_epoch, 0, 0};
  if (ticket.block_epoch == machine.block_epoch) return;
  ticket.block_epoch = machine.block_epoch;
  if (ticket.num_blocks++ == machine.blocks_done) machine.acquired_epoch = machine.block_epoch;
}

void checker_access(const void* data, size_t size_bytes, bool is_write, const void* return_address) {
  on_access(data, size_bytes, is_write, return_address);
}

void checker_forget(const void* data, size_t size_bytes) {
  for_each_cell(data, size_bytes, [](Cell& cell, uint8_t bytes) {
    cell.initialised &= static_cast<uint8_t>(~bytes);
    if (cell.initialised == 0) cell = {};
  });
}

void checker_release_pages(const void* data, size_t size_bytes) {
  if (!arena_shadow.is_mapped()) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  arena_shadow.release(begin, begin + size_bytes);
}

void checker_host_writes(const void* data, size_t size_bytes) {
  for_each_cell(data, size_bytes, [](Cell& cell, uint8_t bytes) {
    cell.write = {machine.epoch, 0, 0, 0, static_cast<uint8_t>(cell.write.bytes | bytes), 0};
    cell.read.bytes = 0;
    cell.initialised |= bytes;
  });
}

void checker_host_reads(const void* data, size_t size_bytes) {
  for_each_cell(data, size_bytes, [&](Cell& cell, uint8_t bytes) {
    CHECK((cell.initialised & bytes) == bytes, "the host reads uninitialised device memory: within {} bytes from {}",
          size_bytes, describe_address(reinterpret_cast<uintptr_t>(data)));
  });
}

// ---- the compiler's callbacks

extern "C" {
#define SIMT_CALLBACKS(N)                                \
  void __tsan_read##N(void* p) {                         \
    on_access(p, N, false, __builtin_return_address(0)); \
  }                                                      \
  void __tsan_write##N(void* p) {                        \
    on_access(p, N, true, __builtin_return_address(0));  \
  }                                                      \
  void __tsan_unaligned_read##N(void* p) {               \
    on_access(p, N, false, __builtin_return_address(0)); \
  }                                                      \
  void __tsan_unaligned_write##N(void* p) {              \
    on_access(p, N, true, __builtin_return_address(0));  \
  }
SIMT_CALLBACKS(1)
SIMT_CALLBACKS(2)
SIMT_CALLBACKS(4)
SIMT_CALLBACKS(8)
SIMT_CALLBACKS(16)
#undef SIMT_CALLBACKS
void __tsan_read_range(void* p, size_t size_bytes) {
  on_access(p, size_bytes, false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, size_t size_bytes) {
  on_access(p, size_bytes, true, __builtin_return_address(0));
}
/// Host code only: the guard of a function's static variable.
uint8_t __tsan_atomic8_load(const volatile uint8_t* p, int) {
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
}
