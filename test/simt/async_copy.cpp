// cp.async: a copy of a thread that lands at its wait. In between the destination holds NaN, and the check build takes
// it for undefined; landing is a write of that thread, which the others see after a barrier only.
#include <algorithm>
#include <cstring>

#include "test/simt/machine.h"

namespace {

constexpr int kUndefined = 0xff;

void land(const AsyncCopy& copy) {
  checker_access(copy.to, copy.size_bytes, true, copy.return_address);
  std::memcpy(copy.to, copy.from, copy.size_bytes);
}

}  // namespace

void simt_copy_async(void* shared, const void* global, size_t size_bytes) {
  const void* return_address = __builtin_return_address(0);
  Fiber& self = *machine.current;
  const auto is_aligned = [&](const void* p) { return reinterpret_cast<uintptr_t>(p) % size_bytes == 0; };
  if (!is_aligned(shared) || !is_aligned(global)) {
    report("cp.async: {} copies {} bytes between misaligned addresses at {}", describe(self), size_bytes,
           source_line(reinterpret_cast<uintptr_t>(return_address)));
  }
  if (!is_shared(reinterpret_cast<uintptr_t>(shared))) {
    report("cp.async: {} copies to {}, which is not shared memory, at {}", describe(self),
           describe_address(reinterpret_cast<uintptr_t>(shared)),
           source_line(reinterpret_cast<uintptr_t>(return_address)));
  }
  checker_access(global, size_bytes, false, return_address);
  checker_access(shared, size_bytes, true, return_address);
  std::memset(shared, kUndefined, size_bytes);
  checker_forget(shared, size_bytes);
  self.copies.push_back({shared, global, size_bytes, self.num_copy_groups, return_address});
}

void simt_copy_async_commit() {
  machine.current->num_copy_groups++;
}

void simt_copy_async_wait(int num_pending_groups) {
  Fiber& self = *machine.current;
  const auto lands = [&](const AsyncCopy& copy) { return copy.group + num_pending_groups < self.num_copy_groups; };
  for (const AsyncCopy& copy : self.copies) {
    if (lands(copy)) land(copy);
  }
  std::erase_if(self.copies, lands);
}
