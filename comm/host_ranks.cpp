#include "comm/host_ranks.h"

#include <fmt/ranges.h>
#include <omp.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace {

/// The cores that this process may run on, a character each: '1' or '0'.
std::string allowed_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::string cores;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; core++) cores += CPU_ISSET(core, &set) ? '1' : '0';
  return cores;
}

int64_t count(const std::string& cores) {
  return std::count(cores.begin(), cores.end(), '1');
}

bool overlap(const std::string& a, const std::string& b) {
  for (size_t i = 0; i < std::min(a.size(), b.size()); i++) {
    if (a[i] == '1' && b[i] == '1') return true;
  }
  return false;
}

}  // namespace

HostRanks::HostRanks(Communicator& world) : comm_(world.split_by_host()) {}

std::vector<std::string> HostRanks::choose_threads() {
  std::vector<std::string> notes;
  const std::string mine = allowed_cores();
  const auto all = comm_->all_texts(mine);
  const int64_t num_mine = std::max<int64_t>(1, count(mine));
  const int64_t sharers =
      std::count_if(all.begin(), all.end(), [&](const auto& cores) { return overlap(cores, mine); });
  const char* given = std::getenv("OMP_NUM_THREADS");
  const int64_t threads =
      given ? omp_get_max_threads() : std::max<int64_t>(1, num_mine / std::max<int64_t>(1, sharers));
  omp_set_num_threads(static_cast<int>(threads));
  const int64_t host_cores = sysconf(_SC_NPROCESSORS_ONLN), used = threads * size();
  if (threads * sharers > num_mine) {
    notes.push_back(fmt::format("{} ranks x {} threads share {} cores: they will be slow{}", sharers, threads, num_mine,
                                given ? "; unset OMP_NUM_THREADS" : ""));
  }
  if (used < host_cores && num_mine < host_cores && !given) {
    notes.push_back(
        fmt::format("mpirun binds each rank to {} of the {} cores of this host, {} of which are used; "
                    "`mpirun --bind-to none` lets train_gpt share them out",
                    num_mine, host_cores, used));
  }
  return notes;
}

void check_same(Communicator& world, const std::string& what, const std::string& text) {
  if (world.size() == 1) return;
  const auto hosts = world.all_texts(world.host());
  const auto texts = world.all_texts(text);
  std::vector<std::string> others;
  for (size_t r = 1; r < texts.size(); r++) {
    if (texts[r] != texts[0]) others.push_back(fmt::format("{} ({})", r, hosts[r]));
  }
  CHECK(others.empty(), "ranks {} have another {} than rank 0 ({}): start the same program with the same files on all",
        fmt::join(others, ", "), what, hosts[0]);
}

std::vector<std::string> lines_of_hosts(Communicator& world, HostRanks& host, const std::vector<std::string>& lines) {
  const auto hosts = world.all_texts(world.host());
  const auto texts = world.all_texts(host.rank() == 0 ? fmt::format("{}", fmt::join(lines, "\n")) : "");
  const bool is_one_host = host.size() == world.size();
  std::vector<std::string> all;
  for (size_t r = 0; r < texts.size(); r++) {
    std::istringstream text(texts[r]);
    for (std::string line; std::getline(text, line);) all.push_back(is_one_host ? line : hosts[r] + ": " + line);
  }
  return all;
}

void check_shared(Communicator& world, const std::string& option, const std::string& directory) {
  if (world.size() == 1) return;
  const std::filesystem::path mark = std::filesystem::path(directory) / fmt::format(".shared_by_{}", getpid());
  const std::string path = world.text_of_first(mark.string());
  if (world.rank() == 0) std::ofstream(path) << "";
  world.barrier();
  std::error_code ignored;
  const auto seen = world.all_texts(std::filesystem::exists(path, ignored) ? "" : world.host());
  if (world.rank() == 0) std::filesystem::remove(path, ignored);
  std::vector<std::string> blind;
  for (size_t r = 0; r < seen.size(); r++) {
    if (!seen[r].empty()) blind.push_back(fmt::format("{} ({})", r, seen[r]));
  }
  CHECK(blind.empty(),
        "{} '{}' of rank 0 ({}) is not there on ranks {}: it must be on a file system that all hosts share", option,
        directory, world.host(), fmt::join(blind, ", "));
}
