// The checker of the builds whose kernels do not report their accesses.
#include "test/simt/machine.h"

bool checker_is_linked() {
  return false;
}
void checker_begin_block() {}
void checker_atomic_begins(const void*) {}
void checker_access(const void*, size_t, bool, const void*) {}
void checker_forget(const void*, size_t) {}
void checker_release_pages(const void*, size_t) {}
void checker_host_writes(const void*, size_t) {}
void checker_host_reads(const void*, size_t) {}
