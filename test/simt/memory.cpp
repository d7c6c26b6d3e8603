// Device memory, dynamic shared memory included: one reserved range of addresses, in which every allocation ends at a
// page that traps. Addresses are never used twice, so that a use after free traps too. Fresh memory is NaN.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>

#include "test/simt/machine.h"

extern "C" {
[[gnu::weak]] void __asan_poison_memory_region(void const volatile* data, size_t size_bytes);
[[gnu::weak]] void __asan_unpoison_memory_region(void const volatile* data, size_t size_bytes);
}

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kArenaBytes = size_t{16} << 30;  // of addresses, not of memory
// Small, so that the end of the data meets the trap; no access here is wider. CUDA itself promises 256.
constexpr size_t kAlignment = 16;
constexpr int kFresh = 0xff;  // NaN in fp32, fp16 and bf16; -1 in integers

struct Allocation {
  char* pages;
  size_t pages_bytes;
  char* data;
  size_t size_bytes;
  const char* kind;
  bool is_freed = false;

  uintptr_t begin() const { return reinterpret_cast<uintptr_t>(data); }
  uintptr_t end() const { return begin() + size_bytes; }
  size_t distance(uintptr_t address) const {
    return address < begin() ? begin() - address : address < end() ? 0 : address - end() + 1;
  }
};
std::map<uintptr_t, Allocation> allocations;  // by begin()
uintptr_t next_pages = 0;

size_t round_up(size_t n, size_t to) {
  return (n + to - 1) / to * to;
}

void reserve_arena() {
  void* base = mmap(nullptr, kArenaBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(base != MAP_FAILED, "cannot reserve {} bytes of addresses", kArenaBytes);
  machine.arena = {reinterpret_cast<uintptr_t>(base), kArenaBytes};
  next_pages = machine.arena.begin + kPage;
}

/// The allocation nearest to an address.
const Allocation* nearest(uintptr_t address) {
  const auto above = allocations.upper_bound(address);
  if (above == allocations.begin()) return above == allocations.end() ? nullptr : &above->second;
  const auto below = std::prev(above);
  if (above == allocations.end()) return &below->second;
  return &(below->second.distance(address) <= above->second.distance(address) ? below : above)->second;
}

/// Reports the first byte of [begin, end) that was written to.
void check_margin(const char* begin, const char* end) {
  const char* p = std::find_if(begin, end, [](char c) { return c != static_cast<char>(kFresh); });
  if (p != end) report("out-of-bounds write to {}", describe_address(reinterpret_cast<uintptr_t>(p)));
}

}  // namespace

void* allocate_device(size_t size_bytes, const char* kind) {
  if (machine.arena.size == 0) reserve_arena();
  const size_t aligned_bytes = round_up(size_bytes, kAlignment);
  const size_t pages_bytes = round_up(std::max<size_t>(aligned_bytes, 1), kPage);
  if (next_pages + pages_bytes + kPage > machine.arena.begin + machine.arena.size) return nullptr;
  char* pages = reinterpret_cast<char*>(next_pages);
  next_pages += pages_bytes + kPage;
  CHECK(mprotect(pages, pages_bytes, PROT_READ | PROT_WRITE) == 0, "mprotect of {} bytes failed", pages_bytes);
  madvise(pages, pages_bytes, MADV_HUGEPAGE);  // the workspace of a Device is 64 MiB
  std::memset(pages, kFresh, pages_bytes);
  char* data = pages + pages_bytes - aligned_bytes;
  allocations[reinterpret_cast<uintptr_t>(data)] = {pages, pages_bytes, data, size_bytes, kind};
  if (__asan_poison_memory_region) {
    __asan_poison_memory_region(pages, static_cast<size_t>(data - pages));
    __asan_poison_memory_region(data + size_bytes, aligned_bytes - size_bytes);
  }
  return data;
}

bool release_device(void* data) {
  const auto it = allocations.find(reinterpret_cast<uintptr_t>(data));
  if (it == allocations.end() || it->second.is_freed) return false;
  Allocation& a = it->second;
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(a.pages, a.pages_bytes);
  checker_release_pages(a.pages, a.pages_bytes);
  mprotect(a.pages, a.pages_bytes, PROT_NONE);
  madvise(a.pages, a.pages_bytes, MADV_DONTNEED);
  a.is_freed = true;
  return true;
}

size_t free_device_bytes() {
  return machine.arena.begin + machine.arena.size - next_pages;
}

void check_margins() {
  for (const auto& [begin, a] : allocations) {
    if (a.is_freed) continue;
    check_margin(a.pages, a.data);
    check_margin(a.data + a.size_bytes, a.pages + a.pages_bytes);
  }
}

bool is_allocated(uintptr_t address, size_t size_bytes) {
  const Allocation* a = nearest(address);
  return a && !a->is_freed && address >= a->begin() && address + size_bytes <= a->end();
}

bool is_shared(uintptr_t address) {
  const Region dynamic = {reinterpret_cast<uintptr_t>(machine.dynamic_shared), machine.launch.shared_bytes};
  if (machine.dynamic_shared && dynamic.contains(address)) return true;
  // under ASan static shared memory is ordinary static data
  return (machine.static_shared.size > 0 ? machine.static_shared : program_image()).contains(address);
}

std::string describe_address(uintptr_t address) {
  if (machine.static_shared.contains(address)) {
    return fmt::format("static __shared__ byte {}", address - machine.static_shared.begin);
  }
  const Allocation* a = machine.arena.contains(address) ? nearest(address) : nullptr;
  if (!a) return fmt::format("host address {:#x}", address);
  return fmt::format("byte {} of a {}{} allocation of {} bytes", static_cast<int64_t>(address - a->begin()),
                     a->is_freed ? "freed " : "", a->kind, a->size_bytes);
}

void simt_poison(void* device_data, size_t size_bytes) {
  CHECK(is_allocated(reinterpret_cast<uintptr_t>(device_data), size_bytes), "simt_poison: {} bytes leave {}",
        size_bytes, describe_address(reinterpret_cast<uintptr_t>(device_data)));
  std::memset(device_data, kFresh, size_bytes);
  checker_forget(device_data, size_bytes);
}
