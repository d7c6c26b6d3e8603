// Threads of a block as fibers: who runs next, the block barrier, and warp collectives.
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <vector>

#include "test/simt/machine.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kStackBytes = 256 << 10;  // ASan's frames are large; untouched pages cost nothing

struct Schedule {
  std::vector<Fiber> fibers = std::vector<Fiber>(kMaxThreads);
  std::array<Warp, kMaxThreads / kWarpLanes> warps;
  std::deque<Fiber*> ready;
  Context host;
  std::mt19937_64 random;
  bool has_abandoned_stacks = false;
};
Schedule schedule;

Context& context_of(Fiber* fiber) {
  return fiber ? fiber->context : schedule.host;
}

/// Goes on in `next`; null is the host, which waits in run_block.
void switch_to(Fiber* next) {
  Fiber* self = machine.current;
  if (next == self) return;
  machine.current = next;
  if (next) threadIdx = next->thread_index;
  context_switch(context_of(self), context_of(next), self && self->state == Fiber::State::Done);
}

void make_ready(Fiber* fiber) {
  fiber->state = Fiber::State::Ready;
  schedule.ready.push_back(fiber);
}

/// Makes all fibers of `list` ready, in the order of the schedule.
void make_ready(std::vector<Fiber*>& list) {
  if (machine.options.schedule == kSimtDescending) std::reverse(list.begin(), list.end());
  for (Fiber* fiber : list) make_ready(fiber);
}

Fiber* take_ready() {
  auto& ready = schedule.ready;
  if (machine.options.schedule > kSimtDescending) std::swap(ready.front(), ready[random_below(ready.size())]);
  Fiber* fiber = ready.front();
  ready.pop_front();
  return fiber;
}

std::string describe_deadlock() {
  std::map<std::string, std::pair<int, const Fiber*>> groups;
  for (unsigned i = 0; i < machine.num_threads; i++) {
    const Fiber& fiber = schedule.fibers[i];
    std::string what = "returned from the kernel";
    if (fiber.state != Fiber::State::Done) what = fmt::format("wait in {} {}", fiber.operation, describe(fiber.site));
    if (fiber.state == Fiber::State::InCollective) what += fmt::format(" mask {:08x}", fiber.mask);
    auto& group = groups[what];
    if (group.first++ == 0) group.second = &fiber;
  }
  std::string text = "deadlock: threads of one block wait for each other:";
  for (const auto& [what, group] : groups) {
    text += fmt::format("\n    {} thread(s) {} (first: {})", group.first, what, describe(*group.second));
  }
  return text;
}

void run_next() {
  if (schedule.ready.empty()) {
    machine.fatal = describe_deadlock();
    give_up();
  }
  switch_to(take_ready());
}

bool same_line(const SimtSite& a, const SimtSite& b) {
  return a.line() == b.line() && std::strcmp(a.file_name(), b.file_name()) == 0;
}

/// Opens the barrier once every thread that has not returned waits at it.
void release_barrier_if_complete() {
  if (machine.num_at_barrier == 0 || machine.num_at_barrier + machine.num_exited < machine.num_threads) return;
  std::vector<Fiber*> waiting;
  for (unsigned i = 0; i < machine.num_threads; i++) {
    if (schedule.fibers[i].state == Fiber::State::AtBarrier) waiting.push_back(&schedule.fibers[i]);
  }
  int count = 0;
  for (const Fiber* fiber : waiting) {
    if (!same_line(fiber->site, waiting[0]->site) || fiber->vote != waiting[0]->vote) {
      report("divergent __syncthreads: {} is at {}, {} at {}", describe(*waiting[0]), describe(waiting[0]->site),
             describe(*fiber), describe(fiber->site));
    }
    count += fiber->predicate;
  }
  for (Fiber* fiber : waiting) {
    const bool all = count == static_cast<int>(waiting.size());
    fiber->predicate = fiber->vote == SimtVote::Count ? count : fiber->vote == SimtVote::And ? all : count > 0;
  }
  machine.num_at_barrier = 0;
  machine.epoch++;
  make_ready(waiting);
}

/// Joins the vector clocks of `lanes`: each has now seen what any of them had.
void join_clocks(Warp& warp, uint32_t lanes) {
  std::array<uint32_t, kWarpLanes> joined = {};
  for (unsigned a = 0; a < kWarpLanes; a++) {
    if (!(lanes >> a & 1)) continue;
    for (unsigned b = 0; b < kWarpLanes; b++) joined[b] = std::max(joined[b], warp.clock[a][b]);
  }
  for (unsigned a = 0; a < kWarpLanes; a++) {
    if (!(lanes >> a & 1)) continue;
    warp.clock[a] = joined;
    warp.clock[a][a]++;
  }
}

/// Whether two lanes are in the same collective. __syncwarp may be reached at different lines (since Volta); an
/// exchange of values may not.
bool agree(const Fiber& a, const Fiber& b) {
  return a.mask == b.mask && a.collective.exchange == b.collective.exchange &&
         (same_line(a.site, b.site) || !a.collective.exchange);
}

std::string describe_divergence(const Fiber& a, const Fiber& b) {
  return fmt::format("divergent warp collective: {} is in {} {}, {} in {} {}", describe(a), a.operation,
                     describe(a.site), describe(b), b.operation, describe(b.site));
}

/// Carries the collective out once all live lanes of the mask are in it.
void complete_collective(Warp& warp, uint32_t mask) {
  const uint32_t lanes = mask & warp.existing & ~warp.exited;
  if (lanes == 0 || (warp.waiting & lanes) != lanes) return;
  const Fiber& first = *warp.fibers[static_cast<size_t>(std::countr_zero(lanes))];
  std::array<void*, kWarpLanes> frames = {};
  for (unsigned lane = 0; lane < kWarpLanes; lane++) {
    if (!(lanes >> lane & 1)) continue;
    const Fiber& fiber = *warp.fibers[lane];
    if (!agree(first, fiber)) {
      machine.fatal = describe_divergence(first, fiber);
      give_up();
    }
    frames[lane] = fiber.frame;
  }
  if (first.collective.exchange) first.collective.exchange(frames.data(), lanes);
  if (first.collective.orders_memory) join_clocks(warp, lanes);
  warp.waiting &= ~lanes;
  std::vector<Fiber*> members;
  for (unsigned lane = 0; lane < kWarpLanes; lane++) {
    if (lanes >> lane & 1) members.push_back(warp.fibers[lane]);
  }
  make_ready(members);
}

/// A fiber's life. The last thread to return wakes the host.
void fiber_main() {
  machine.launch.call(machine.launch.parameters);
  Fiber& self = *machine.current;
  Warp& warp = *self.warp;
  if (!self.copies.empty()) {
    report("{} returned with a cp.async that it never waited for: {}", describe(self),
           source_line(reinterpret_cast<uintptr_t>(self.copies[0].return_address)));
  }
  self.state = Fiber::State::Done;
  machine.num_exited++;
  warp.exited |= 1u << self.lane;
  for (const Fiber* other : warp.fibers) {  // those that waited for this lane need not any longer
    if (other && (warp.waiting >> other->lane & 1) && (other->mask >> self.lane & 1)) {
      complete_collective(warp, other->mask);
    }
  }
  release_barrier_if_complete();
  if (machine.num_exited == machine.num_threads) switch_to(nullptr);
  run_next();
}

void create_stacks() {
  constexpr size_t kStride = kStackBytes + kPage;
  void* base =
      mmap(nullptr, kStride * kMaxThreads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(base != MAP_FAILED, "cannot map {} bytes of stacks", kStride * kMaxThreads);
  machine.stacks = {reinterpret_cast<uintptr_t>(base), kStride * kMaxThreads};
  for (unsigned i = 0; i < kMaxThreads; i++) {
    char* guard = static_cast<char*>(base) + i * kStride;
    mprotect(guard, kPage, PROT_NONE);
    schedule.fibers[i].stack = guard + kPage;
  }
}

void start_fiber(unsigned index) {
  constexpr size_t kSkew = 320;  // at most a page in all
  const dim3& block = machine.launch.block;
  Fiber& fiber = schedule.fibers[index];
  fiber.thread_index = {index % block.x, index / block.x % block.y, index / (block.x * block.y)};
  fiber.index = index;
  fiber.lane = index % kWarpLanes;
  fiber.warp = &schedule.warps[index / kWarpLanes];
  fiber.warp->fibers[fiber.lane] = &fiber;
  fiber.warp->existing |= 1u << fiber.lane;
  fiber.operation = nullptr;
  fiber.predicate = 0;
  fiber.copies.clear();
  fiber.num_copy_groups = 0;
  if (schedule.has_abandoned_stacks) context_clear_stack(fiber.stack, kStackBytes);
  context_create(fiber.context, fiber.stack, kStackBytes, index * kSkew % kPage, fiber_main);
}

}  // namespace

void seed_schedule() {
  schedule.random.seed(machine.options.schedule);
}

uint64_t random_below(uint64_t n) {
  return schedule.random() % n;
}

void run_block(unsigned block_number) {
  const dim3& grid = machine.launch.grid;
  if (machine.stacks.size == 0) create_stacks();
  blockIdx = {block_number % grid.x, block_number / grid.x % grid.y, block_number / (grid.x * grid.y)};
  machine.num_exited = machine.num_at_barrier = 0;
  machine.block_epoch = ++machine.epoch;
  machine.acquired_epoch = machine.launch_epoch;
  machine.has_fenced = machine.in_atomic = false;
  for (unsigned w = 0; w * kWarpLanes < machine.num_threads; w++) {
    Warp& warp = schedule.warps[w] = {};
    for (unsigned lane = 0; lane < kWarpLanes; lane++) warp.clock[lane][lane] = 1;
  }
  std::vector<Fiber*> all;
  for (unsigned i = 0; i < machine.num_threads; i++) {
    start_fiber(i);
    all.push_back(&schedule.fibers[i]);
  }
  schedule.ready.clear();
  make_ready(all);
  schedule.has_abandoned_stacks = true;  // until the block has come to its end
  switch_to(take_ready());
  if (machine.fatal.empty()) schedule.has_abandoned_stacks = false;
}

void give_up() {
  switch_to(nullptr);  // the other fibers stay where they are
  __builtin_unreachable();
}

// ---- what kernels call

unsigned simt_lane() {
  return machine.current->lane;
}

int simt_block_barrier(SimtVote vote, bool predicate, const SimtSite& site) {
  Fiber& self = *machine.current;
  self.state = Fiber::State::AtBarrier;
  self.operation = "__syncthreads";
  self.site = site;
  self.vote = vote;
  self.predicate = predicate;
  machine.num_at_barrier++;
  release_barrier_if_complete();
  run_next();
  return self.predicate;
}

void simt_warp_collective(const SimtCollective& collective, uint32_t mask, void* frame, const SimtSite& site) {
  Fiber& self = *machine.current;
  if (!(mask >> self.lane & 1)) {
    machine.fatal =
        fmt::format("{} {}: {} is not in its own mask {:08x}", collective.name, describe(site), describe(self), mask);
    give_up();
  }
  self.state = Fiber::State::InCollective;
  self.operation = collective.name;
  self.site = site;
  self.mask = mask;
  self.collective = collective;
  self.frame = frame;
  self.warp->waiting |= 1u << self.lane;
  complete_collective(*self.warp, mask);
  run_next();
}

namespace {

struct ShuffleFrame {
  uint64_t in, out;
  int source;
  bool source_is_absent;
};

void exchange_shuffle(void* const* frames, uint32_t lanes) {
  for (unsigned lane = 0; lane < kWarpLanes; lane++) {
    if (!(lanes >> lane & 1)) continue;
    auto& frame = *static_cast<ShuffleFrame*>(frames[lane]);
    frame.source_is_absent = !(lanes >> frame.source & 1);
    frame.out = frame.source_is_absent ? ~uint64_t{0} : static_cast<ShuffleFrame*>(frames[frame.source])->in;
  }
}

void exchange_ballot(void* const* frames, uint32_t lanes) {
  uint32_t ballot = 0;
  for (unsigned lane = 0; lane < kWarpLanes; lane++) {
    if (lanes >> lane & 1) ballot |= *static_cast<uint32_t*>(frames[lane]) << lane;
  }
  for (unsigned lane = 0; lane < kWarpLanes; lane++) {
    if (lanes >> lane & 1) *static_cast<uint32_t*>(frames[lane]) = ballot;
  }
}

}  // namespace

uint64_t simt_shuffle(const char* name, uint32_t mask, uint64_t value, int source, const SimtSite& site) {
  ShuffleFrame frame = {value, 0, source, false};
  simt_warp_collective({name, exchange_shuffle, false}, mask, &frame, site);
  if (frame.source_is_absent) {
    report("{} {}: {} reads lane {}, which does not take part", name, describe(site), describe(*machine.current),
           source);
  }
  return frame.out;
}

uint32_t simt_ballot(const char* name, uint32_t mask, bool predicate, const SimtSite& site) {
  uint32_t frame = predicate;
  simt_warp_collective({name, exchange_ballot, false}, mask, &frame, site);
  return frame;
}
