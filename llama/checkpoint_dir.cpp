#include "llama/checkpoint_dir.h"

#include <fnmatch.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "data/json.h"
#include "layers/core/check.h"

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kStateFile = "trainer_state.json";
constexpr int64_t kStateFormat = 1;

// Patterns of CompanionFiles, in the model directory and in additional_chat_templates/.
constexpr const char* kCompanionPatterns[] = {
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "generation_config.json",
    "*.jinja",
    "chat_template*.json",
    "LICENSE*",
    "USE_POLICY.md",
    "NOTICE*",
    "*.py",
    "*processor_config.json",
};

std::string step_name(int64_t step) {
  return fmt::format("step_{:06}", step);
}

/// The step in "step_000100"; none for any other name, "step_100" and "step_0000100" included.
std::optional<int64_t> parse_step_name(std::string_view name) {
  constexpr std::string_view kPrefix = "step_";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  int64_t step = -1;
  const std::string_view digits = name.substr(kPrefix.size());
  const auto [end, error] = std::from_chars(digits.begin(), digits.end(), step);
  if (error != std::errc() || end != digits.end() || step < 0 || step_name(step) != name) return std::nullopt;
  return step;
}

/// Names in a directory, sorted; none when it does not exist.
std::vector<std::string> list_names(const fs::path& dir) {
  std::vector<std::string> names;
  std::error_code error;
  if (!fs::exists(dir, error) && !error) return names;
  fs::directory_iterator it(dir, error);
  for (; !error && it != fs::directory_iterator(); it.increment(error)) names.push_back(it->path().filename().string());
  CHECK(!error, "cannot list the directory '{}': {}", dir.string(), error.message());
  std::sort(names.begin(), names.end());
  return names;
}

std::string join(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += (text.empty() ? "" : ", ") + line;
  return text;
}

std::vector<std::string> paths_of(const std::vector<Checkpoint>& checkpoints) {
  std::vector<std::string> paths;
  for (const Checkpoint& checkpoint : checkpoints) paths.push_back(checkpoint.path.string());
  return paths;
}

int64_t get_count(const json& state, const char* key, const std::string& where) {
  const auto found = state.find(key);
  CHECK(found != state.end() && found->is_number_unsigned() && found->get<uint64_t>() <= INT64_MAX,
        "{}: '{}' is missing, or no integer from 0 to 2^63 - 1", where, key);
  return found->get<int64_t>();
}

/// Renames before it removes: a kill in between leaves a step_N.tmp, never half a checkpoint.
void remove_checkpoint(const fs::path& dir, int64_t step, const FileSystem& file_system) {
  const fs::path waste = pending_checkpoint_path(dir, step);
  file_system.remove_all(waste);
  file_system.rename(checkpoint_path(dir, step), waste);
  file_system.sync_path(dir);
  file_system.remove_all(waste);
}

/// resume = PATH: `path` is a checkpoint, or a directory of them.
Checkpoint resolve_resume_path(const fs::path& path) {
  std::error_code error;
  const fs::path real = fs::canonical(path, error);
  CHECK(!error && fs::is_directory(real), "checkpoint.resume = '{}' is no directory; it may be auto, never, or a path",
        path.string());
  CHECK(real.extension() != ".tmp", "checkpoint.resume = '{}' is a save that did not finish; resume from an older one",
        path.string());
  if (fs::exists(real / kStateFile)) return open_checkpoint(real);
  const FoundCheckpoints found = find_checkpoints(real);
  CHECK(!found.complete.empty() || found.incomplete.empty(), "checkpoint.resume = '{}' has no complete checkpoint: {}",
        path.string(), join(found.incomplete));
  CHECK(!found.complete.empty(),
        "checkpoint.resume = '{}' is neither a checkpoint (it has no {}) nor a directory of step_* checkpoints; to "
        "start from the weights of a model directory, give it as model.path",
        path.string(), kStateFile);
  return found.complete.back();
}

/// What a run that starts from `from` would overwrite or mix with its own must not be in `dir`.
void check_no_conflict(const Checkpoint& from, const fs::path& dir) {
  const FoundCheckpoints found = find_checkpoints(dir);
  if (found.empty()) return;
  if (!fs::equivalent(from.path.parent_path(), dir)) {
    std::vector<std::string> others = paths_of(found.complete);
    others.insert(others.end(), found.incomplete.begin(), found.incomplete.end());
    fail(
        "checkpoint.resume = '{}' starts a run in checkpoint.dir = '{}', which holds checkpoints of another: {}; "
        "choose an empty checkpoint.dir",
        from.path.string(), dir.string(), join(others));
  }
  std::vector<Checkpoint> newer;
  for (const Checkpoint& other : found.complete) {
    if (other.state.step > from.state.step) newer.push_back(other);
  }
  CHECK(newer.empty(),
        "checkpoint.resume = '{}' goes back to step {}, but checkpoint.dir has newer checkpoints, which the run would "
        "overwrite: {}; move them away, or choose an empty checkpoint.dir",
        from.path.string(), from.state.step, join(paths_of(newer)));
}

/// Every file below `root` but the state file, by relative path, with its size.
std::map<std::string, int64_t> list_files(const fs::path& root) {
  std::map<std::string, int64_t> files;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(root)) {
    const std::string name = entry.path().lexically_relative(root).generic_string();
    if (entry.is_regular_file() && name != kStateFile) files.emplace(name, static_cast<int64_t>(entry.file_size()));
  }
  return files;
}

void read_matching(const fs::path& root, const fs::path& below, CompanionFiles& files) {
  for (const std::string& name : list_names(root / below)) {
    const fs::path path = root / below / name;
    const bool matches = std::any_of(std::begin(kCompanionPatterns), std::end(kCompanionPatterns),
                                     [&](const char* pattern) { return fnmatch(pattern, name.c_str(), 0) == 0; });
    if (matches && fs::is_regular_file(path)) files.emplace((below / name).generic_string(), read_file(path));
  }
}

}  // namespace

fs::path checkpoint_path(const fs::path& dir, int64_t step) {
  CHECK(step >= 0, "a checkpoint of step {}", step);
  return dir / step_name(step);
}

fs::path pending_checkpoint_path(const fs::path& dir, int64_t step) {
  return checkpoint_path(dir, step) += ".tmp";
}

Checkpoint open_checkpoint(const fs::path& path) {
  const fs::path state_path = path / kStateFile;
  std::error_code error;
  const auto check_complete = [](bool holds, const std::string& message) {
    if (!holds) throw IncompleteCheckpoint(message);
  };
  check_complete(fs::exists(state_path, error),
                 fmt::format("'{}' is no complete checkpoint: it has no {}", path.string(), kStateFile));
  const std::string where = fmt::format("'{}'", state_path.string());
  const std::string text = read_file(state_path);
  json state;
  try {
    state = parse_json(text, where);
  } catch (const Error& e) {
    throw IncompleteCheckpoint(e.what());
  }
  CHECK(state.is_object(), "{} is no JSON object", where);
  const int64_t format = get_count(state, "format", where);
  CHECK(format == kStateFormat, "{} has format {}, this program reads format {}", where, format, kStateFormat);

  Checkpoint checkpoint{path, {}};
  checkpoint.state.step = get_count(state, "step", where);
  checkpoint.state.num_tokens = get_count(state, "num_tokens", where);
  checkpoint.state.next_sample = get_count(state, "next_sample", where);
  CHECK(state.contains("run") && state["run"].is_object(), "{} has no object 'run'", where);
  checkpoint.state.run = state["run"];

  CHECK(state.contains("files") && state["files"].is_object(), "{} has no object 'files'", where);
  for (const auto& [name, value] : state["files"].items()) {
    const int64_t size_bytes = get_count(state["files"], name.c_str(), where);
    const auto found_bytes = fs::file_size(path / name, error);
    check_complete(!error, fmt::format("'{}' is no complete checkpoint: '{}' cannot be found: {}", path.string(), name,
                                       error.message()));
    check_complete(static_cast<int64_t>(found_bytes) == size_bytes,
                   fmt::format("'{}' is no complete checkpoint: '{}' has {} bytes, but {} were written", path.string(),
                               name, found_bytes, size_bytes));
  }
  return checkpoint;
}

FoundCheckpoints find_checkpoints(const fs::path& dir) {
  FoundCheckpoints found;
  for (const std::string& name : list_names(dir)) {
    const std::optional<int64_t> step = parse_step_name(name);
    if (!step || !fs::is_directory(dir / name)) continue;
    try {
      Checkpoint checkpoint = open_checkpoint(dir / name);
      if (checkpoint.state.step != *step) {
        throw IncompleteCheckpoint(
            fmt::format("'{}' says that it is step {}", (dir / name).string(), checkpoint.state.step));
      }
      found.complete.push_back(std::move(checkpoint));
    } catch (const IncompleteCheckpoint& e) {
      found.incomplete.push_back(e.what());
    }
  }
  std::sort(found.complete.begin(), found.complete.end(),
            [](const Checkpoint& a, const Checkpoint& b) { return a.state.step < b.state.step; });
  return found;
}

std::optional<Checkpoint> choose_checkpoint(const std::string& resume, const fs::path& dir,
                                            std::vector<std::string>& log) {
  if (resume != "auto" && resume != "never") {
    Checkpoint chosen = resolve_resume_path(resume);
    check_no_conflict(chosen, dir);
    return chosen;
  }
  FoundCheckpoints found = find_checkpoints(dir);
  if (resume == "never") {
    std::vector<std::string> existing = paths_of(found.complete);
    existing.insert(existing.end(), found.incomplete.begin(), found.incomplete.end());
    CHECK(existing.empty(),
          "checkpoint.resume = never, but checkpoint.dir = '{}' already has checkpoints: {}; choose an empty "
          "checkpoint.dir, or resume = auto",
          dir.string(), join(existing));
    return std::nullopt;
  }
  for (const std::string& line : found.incomplete) log.push_back("ignored: " + line);
  if (found.complete.empty()) return std::nullopt;
  return std::move(found.complete.back());
}

RunLock::RunLock(const fs::path& dir) {
  const FileSystem file_system;
  file_system.create_directories(dir);
  file_ = file_system.create(dir / ".lock");
  CHECK(
      ::flock(file_.fd(), LOCK_EX | LOCK_NB) == 0,
      "checkpoint.dir = '{}' is in use by another run of train_gpt ({}); wait for its end, or choose another directory",
      dir.string(), std::strerror(errno));
}

std::vector<std::string> prepare_checkpoint_dir(const fs::path& dir, const FileSystem& file_system) {
  file_system.check_writable(dir);
  std::vector<std::string> log;
  for (const std::string& name : list_names(dir)) {
    const fs::path path = dir / name;
    if (path.extension() != ".tmp" || !parse_step_name(path.stem().string())) continue;
    file_system.remove_all(path);
    log.push_back(fmt::format("removed '{}', which an earlier run left unfinished", path.string()));
  }
  return log;
}

CompanionFiles read_companion_files(const fs::path& model_dir) {
  const fs::path root = fs::is_directory(model_dir) ? model_dir : model_dir.parent_path();
  CompanionFiles files;
  read_matching(root, "", files);
  read_matching(root, "additional_chat_templates", files);
  return files;
}

PendingCheckpoint::PendingCheckpoint(const fs::path& dir, int64_t step, FileSystem file_system)
    : dir_(dir), path_(pending_checkpoint_path(dir, step)), step_(step), file_system_(std::move(file_system)) {
  const fs::path final_path = checkpoint_path(dir_, step_);
  if (fs::exists(fs::symlink_status(final_path))) {
    for (const Checkpoint& complete : find_checkpoints(dir_).complete) {
      CHECK(complete.state.step != step_, "checkpoint '{}' exists already, and is never overwritten",
            final_path.string());
    }
    remove_checkpoint(dir_, step_, file_system_);
  }
  file_system_.remove_all(path_);
  file_system_.create_directories(path_);
}

PendingCheckpoint::~PendingCheckpoint() {
  if (committed_) return;
  try {
    file_system_.remove_all(path_);
  } catch (const std::exception&) {
    // The Error that brought us here matters more; prepare_checkpoint_dir removes what is left.
  }
}

void PendingCheckpoint::write_file(const fs::path& name, std::string_view bytes) {
  const fs::path path = path_ / name;
  file_system_.create_directories(path.parent_path());
  file_system_.write_file(path, bytes);
}

void PendingCheckpoint::write_files(const CompanionFiles& files) {
  for (const auto& [name, bytes] : files) write_file(name, bytes);
}

void PendingCheckpoint::commit(const TrainerState& state) {
  CHECK(!committed_, "checkpoint '{}' is committed already", path_.string());
  CHECK(state.step == step_, "checkpoint '{}' cannot hold the state of step {}", path_.string(), state.step);
  const std::map<std::string, int64_t> files = list_files(path_);
  const json text = {{"format", kStateFormat},           {"step", state.step}, {"num_tokens", state.num_tokens},
                     {"next_sample", state.next_sample}, {"run", state.run},   {"files", files}};
  for (const auto& [name, size_bytes] : files) file_system_.sync_path(path_ / name);
  file_system_.write_file(path_ / kStateFile, dump_json(text, 2) + "\n");
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(path_)) {
    if (entry.is_directory()) file_system_.sync_path(entry.path());
  }
  file_system_.sync_path(path_);
  open_checkpoint(path_);  // what is renamed is what discovery accepts
  file_system_.rename(path_, checkpoint_path(dir_, step_));
  committed_ = true;
  file_system_.sync_path(dir_);
}

std::vector<std::string> remove_old_checkpoints(const fs::path& dir, int64_t keep, int64_t step,
                                                const FileSystem& file_system) {
  std::vector<std::string> log;
  if (keep <= 0) return log;
  std::vector<int64_t> steps;  // complete, up to `step`
  for (const Checkpoint& checkpoint : find_checkpoints(dir).complete) {
    if (checkpoint.state.step <= step) steps.push_back(checkpoint.state.step);
  }
  if (steps.empty() || steps.back() != step) {
    log.push_back(fmt::format("kept every checkpoint: '{}' is not complete", checkpoint_path(dir, step).string()));
    return log;
  }
  const int64_t num_old = static_cast<int64_t>(steps.size()) - keep;
  for (int64_t i = 0; i < num_old; i++) {
    const fs::path path = checkpoint_path(dir, steps[static_cast<size_t>(i)]);
    try {
      remove_checkpoint(dir, steps[static_cast<size_t>(i)], file_system);
      log.push_back(fmt::format("removed '{}' (checkpoint.keep = {})", path.string(), keep));
    } catch (const Error& e) {
      log.push_back(fmt::format("could not remove '{}': {}", path.string(), e.what()));
    }
  }
  return log;
}
