// A launch: all blocks of a grid, one after another, with faults of the kernel turned into an Error.
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <ctime>
#include <memory>
#include <numeric>
#include <vector>

#include "test/simt/machine.h"

Machine machine;

extern "C" [[gnu::weak]] void __asan_poison_memory_region(void const volatile* data, size_t size_bytes);

namespace {

constexpr unsigned kMaxGridYZ = 65535, kMaxBlockZ = 64;
constexpr size_t kMaxShared = 227 << 10;  // sm_90
constexpr int kFresh = 0xff;

std::set<const void*> launched_kernels;

// ---- signals of a kernel

std::string describe_fault(int signal, const siginfo_t& info) {
  switch (signal) {
    case SIGALRM:
      return "watchdog: the kernel still runs";
    case SIGFPE:
      return "integer division fault";
    case SIGABRT:
      return "assert or abort";
    default:
      break;
  }
  if (info.si_code == SI_KERNEL) return "misaligned vector access, or a wild pointer";
  const uintptr_t address = reinterpret_cast<uintptr_t>(info.si_addr);
  if (machine.stacks.contains(address)) return "stack overflow of a thread";
  return "invalid access to " + describe_address(address);
}

/// Runs on its own stack and never returns: it goes on in the host, as the end of the grid does.
void on_signal(int signal, siginfo_t* info, void*) {
  if (!machine.current) {  // not the kernel's fault
    std::signal(signal, SIG_DFL);
    raise(signal);
    return;
  }
  const Fiber& fiber = *machine.current;
  machine.fatal = describe_fault(signal, *info) + " in " + describe(fiber);
  if (fiber.operation) machine.fatal += fmt::format(", last seen in {} {}", fiber.operation, describe(fiber.site));
  give_up();
}

/// While it lives, faults and a watchdog go to on_signal.
class SignalGuard {
 public:
  explicit SignalGuard(double watchdog_s) : signal_stack_(64 << 10) {
    stack_t stack = {};
    stack.ss_sp = signal_stack_.data();
    stack.ss_size = signal_stack_.size();
    sigaltstack(&stack, &old_stack_);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (size_t i = 0; i < kSignals.size(); i++) sigaction(kSignals[i], &action, &old_actions_[i]);

    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;  // not to one of OpenMP's threads
    event.sigev_signo = SIGALRM;
    event._sigev_un._tid = gettid();
    CHECK(timer_create(CLOCK_MONOTONIC, &event, &timer_) == 0, "timer_create failed");
    itimerspec when = {};
    when.it_value.tv_sec = static_cast<time_t>(watchdog_s);
    when.it_value.tv_nsec = static_cast<long>(std::fmod(watchdog_s, 1.0) * 1e9);
    timer_settime(timer_, 0, &when, nullptr);
  }
  SignalGuard(const SignalGuard&) = delete;
  SignalGuard& operator=(const SignalGuard&) = delete;
  ~SignalGuard() {
    timer_delete(timer_);
    for (size_t i = 0; i < kSignals.size(); i++) sigaction(kSignals[i], &old_actions_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  static constexpr std::array<int, 5> kSignals = {SIGSEGV, SIGBUS, SIGFPE, SIGABRT, SIGALRM};
  std::vector<char> signal_stack_;
  stack_t old_stack_ = {};
  std::array<struct sigaction, kSignals.size()> old_actions_ = {};
  timer_t timer_ = {};
};

// ---- static shared memory

/// The thread-local data of the program itself, where __shared__ arrays lie (not under ASan).
Region find_static_shared() {
  if (__asan_poison_memory_region) return {};
  Region region;
  const auto visit = [](dl_phdr_info* info, size_t, void* result) {
    for (int i = 0; i < info->dlpi_phnum; i++) {
      if (info->dlpi_phdr[i].p_type == PT_TLS && info->dlpi_tls_data) {
        *static_cast<Region*>(result) = {reinterpret_cast<uintptr_t>(info->dlpi_tls_data),
                                         static_cast<size_t>(info->dlpi_phdr[i].p_memsz)};
      }
    }
    return 1;  // the first entry is the program
  };
  dl_iterate_phdr(visit, &region);
  return region;
}

/// Keeps what host code has in that segment (other thread-local data of the program) over a launch.
class StaticSharedGuard {
 public:
  StaticSharedGuard() {
    if (machine.static_shared.size == 0) machine.static_shared = find_static_shared();
    saved_.assign(data(), data() + machine.static_shared.size);
  }
  StaticSharedGuard(const StaticSharedGuard&) = delete;
  StaticSharedGuard& operator=(const StaticSharedGuard&) = delete;
  ~StaticSharedGuard() { std::copy(saved_.begin(), saved_.end(), data()); }

 private:
  static char* data() { return reinterpret_cast<char*>(machine.static_shared.begin); }
  std::vector<char> saved_;
};

/// Shared memory has no contents when a block starts.
void clear_shared_memory() {
  std::memset(reinterpret_cast<void*>(machine.static_shared.begin), kFresh, machine.static_shared.size);
  if (machine.dynamic_shared) std::memset(machine.dynamic_shared, kFresh, machine.launch.shared_bytes);
  checker_begin_block();
}

// ---- the grid

void check_shape(const SimtLaunch& launch) {
  const dim3 &grid = launch.grid, &block = launch.block;
  const uint64_t num_threads = uint64_t{block.x} * block.y * block.z;
  const uint64_t num_blocks = uint64_t{grid.x} * grid.y * grid.z;
  CHECK(!machine.current, "a launch inside a kernel");
  CHECK(num_blocks > 0 && grid.x < 1u << 31 && grid.y <= kMaxGridYZ && grid.z <= kMaxGridYZ && num_threads > 0 &&
            num_threads <= kMaxThreads && block.z <= kMaxBlockZ && launch.shared_bytes <= kMaxShared,
        "invalid launch of {}: grid ({}, {}, {}), block ({}, {}, {}), {} bytes of shared memory",
        function_name(launch.kernel), grid.x, grid.y, grid.z, block.x, block.y, block.z, launch.shared_bytes);
  CHECK(num_blocks <= 1u << 24, "{}: {} blocks are too many to emulate", function_name(launch.kernel), num_blocks);
}

std::vector<unsigned> block_order(unsigned num_blocks) {
  std::vector<unsigned> order(num_blocks);
  std::iota(order.begin(), order.end(), 0u);
  if (machine.options.schedule == kSimtDescending) std::reverse(order.begin(), order.end());
  if (machine.options.schedule > kSimtDescending) {
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random_below(i)]);
  }
  return order;
}

/// Dynamic shared memory of a launch.
class DynamicSharedGuard {
 public:
  explicit DynamicSharedGuard(size_t size_bytes) {
    if (size_bytes > 0) machine.dynamic_shared = allocate_device(size_bytes, "dynamic __shared__");
  }
  DynamicSharedGuard(const DynamicSharedGuard&) = delete;
  DynamicSharedGuard& operator=(const DynamicSharedGuard&) = delete;
  ~DynamicSharedGuard() {
    if (machine.dynamic_shared) release_device(machine.dynamic_shared);
    machine.dynamic_shared = nullptr;
  }
};

void run_blocks(const std::vector<unsigned>& order) {
  const DynamicSharedGuard dynamic_shared(machine.launch.shared_bytes);
  const StaticSharedGuard static_shared;
  const SignalGuard signals(machine.options.watchdog_s);
  for (const unsigned block : order) {
    clear_shared_memory();
    run_block(block);
    if (!machine.fatal.empty()) break;
    machine.blocks_done++;
  }
  check_margins();
}

void throw_reports() {
  if (machine.fatal.empty() && machine.num_reports == 0) return;
  std::string text = function_name(machine.launch.kernel) + ": ";
  text += machine.fatal.empty() ? fmt::format("{} report(s)", machine.num_reports) : machine.fatal;
  throw Error(text + machine.reports);
}

void run(const SimtLaunch& launch) {
  machine.launch = launch;
  machine.num_threads = launch.block.x * launch.block.y * launch.block.z;
  blockDim = launch.block;
  gridDim = launch.grid;
  machine.launch_epoch = ++machine.epoch;
  machine.blocks_done = 0;
  machine.num_reports = 0;
  machine.reports.clear();
  machine.fatal.clear();
  launched_kernels.insert(launch.kernel);
  seed_schedule();
  run_blocks(block_order(launch.grid.x * launch.grid.y * launch.grid.z));
  ++machine.epoch;
  throw_reports();
}

}  // namespace

void simt_queue(void* stream, const SimtLaunch& launch, void (*release)(const void* parameters)) {
  const std::shared_ptr<const void> parameters(launch.parameters, release);
  check_shape(launch);
  enqueue(stream, [launch, parameters] {
    run(launch);
    return true;
  });
}

void* simt_dynamic_shared() {
  return machine.dynamic_shared;
}

void simt_fence() {
  machine.has_fenced = true;
}

void simt_atomic_begin(const void* data) {
  checker_atomic_begins(data);
  machine.in_atomic = true;
}

void simt_atomic_end() {
  machine.in_atomic = false;
}

SimtBuild simt_build() {
  if (checker_is_linked()) return SimtBuild::Check;
  return __asan_poison_memory_region ? SimtBuild::Asan : SimtBuild::Plain;
}

SimtOptions& simt_options() {
  return machine.options;
}

std::set<std::string> simt_launched_kernels() {
  std::set<std::string> names;
  for (const void* kernel : launched_kernels) names.insert(function_name(kernel));
  return names;
}
