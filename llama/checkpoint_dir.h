// The directory protocol of checkpoints, without the tensors: a run's checkpoints are `checkpoint.dir/step_000100/`,
// each whole or not there. A save writes into `step_000100.tmp/`, makes every file and directory durable, and renames
// last; a removal renames first. Whatever instant the process dies at, what is called step_N is complete, and what is
// called step_N.tmp is waste that the next start removes. One rank (0) calls what changes the disk.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "data/file_system.h"

/// What a run needs besides weights and moments to go on as if it had never stopped (`trainer_state.json`). Random
/// numbers come from counters keyed by the seeds in `run`, so they need no state.
struct TrainerState {
  int64_t step = 0;                               ///< optimizer steps done
  int64_t num_tokens = 0;                         ///< trained on so far, without padding
  int64_t next_sample = 0;                        ///< rows of the global order consumed so far: where the data goes on
  nlohmann::json run = nlohmann::json::object();  ///< the resolved run config
};

/// A complete checkpoint.
struct Checkpoint {
  std::filesystem::path path;
  TrainerState state;
};

/// A checkpoint that a kill or a copy cut short. Anything else that keeps one from being opened (permissions, a newer
/// format) is a plain Error: `auto` must not start over because of it.
class IncompleteCheckpoint : public Error {
 public:
  using Error::Error;
};

/// Opens a checkpoint directory of any name. An Error says what is missing: trainer_state.json, or a file that it lists
/// with another size.
Checkpoint open_checkpoint(const std::filesystem::path& path);

/// What `dir` holds. A directory that does not exist holds nothing.
struct FoundCheckpoints {
  std::vector<Checkpoint> complete;     ///< by rising step
  std::vector<std::string> incomplete;  ///< step_* directories that are not: a line each, path and reason
  bool empty() const { return complete.empty() && incomplete.empty(); }
};
FoundCheckpoints find_checkpoints(const std::filesystem::path& dir);

/// The checkpoint that a run starts from, by `checkpoint.resume`; none: from the model's own weights.
///   auto   the newest complete one in `dir`, if any; lines about incomplete ones go to `log`
///   never  none; an Error when `dir` has checkpoints, which the new run would mix with its own
///   PATH   that checkpoint, or the newest complete one in that run directory; an Error when there is none, or when
///          `dir` has checkpoints that the run would overwrite: any of another run, or newer ones of this
std::optional<Checkpoint> choose_checkpoint(const std::string& resume, const std::filesystem::path& dir,
                                            std::vector<std::string>& log);

/// Held by a run from its start to its end: two runs in one directory would remove each other's unfinished saves.
class RunLock {
 public:
  /// Makes `dir`; an Error when another process holds it. Goes away with the process, however that ends.
  explicit RunLock(const std::filesystem::path& dir);

 private:
  FileHandle file_;
};

/// At the start: makes `dir`, proves that it can be written, and removes what killed saves and removals left. Returns
/// lines for the log.
std::vector<std::string> prepare_checkpoint_dir(const std::filesystem::path& dir, const FileSystem& file_system = {});

/// Small files that belong to a model besides weights and config.json: tokenizer, chat templates, generation config,
/// code. By path relative to the model directory. Read once at the start, so that a source that changes or goes away
/// (a checkpoint that retention removes) does not fail a save hours later.
using CompanionFiles = std::map<std::string, std::string>;
CompanionFiles read_companion_files(const std::filesystem::path& model_dir);

/// `dir`/step_000100
std::filesystem::path checkpoint_path(const std::filesystem::path& dir, int64_t step);
/// `dir`/step_000100.tmp: where every rank writes while rank 0 holds the PendingCheckpoint.
std::filesystem::path pending_checkpoint_path(const std::filesystem::path& dir, int64_t step);

/// A save in progress, on rank 0:
///   PendingCheckpoint save(dir, step);      // an empty step_N.tmp/, which other ranks may use after a barrier
///   ... every rank writes and syncs its parts below save.path() ...
///   save.commit(state);                     // after a barrier: durable, then visible
/// Without commit (an error, of this rank or another) the directory is removed; older checkpoints are untouched.
class PendingCheckpoint {
 public:
  /// An Error when there is a complete checkpoint of that step; an incomplete one is replaced by commit.
  PendingCheckpoint(const std::filesystem::path& dir, int64_t step, FileSystem file_system = {});
  ~PendingCheckpoint();
  PendingCheckpoint(const PendingCheckpoint&) = delete;
  PendingCheckpoint& operator=(const PendingCheckpoint&) = delete;

  const std::filesystem::path& path() const { return path_; }
  /// Writes a file at a path relative to the checkpoint; makes its directory.
  void write_file(const std::filesystem::path& name, std::string_view bytes);
  void write_files(const CompanionFiles& files);
  /// Records every file's size in trainer_state.json, syncs all files and directories, renames, syncs the parent.
  void commit(const TrainerState& state);

 private:
  std::filesystem::path dir_, path_;
  int64_t step_;
  FileSystem file_system_;
  bool committed_ = false;
};

/// Retention, after the checkpoint of `step` was committed: of the complete ones up to it, the newest `keep` stay
/// (keep <= 0: all). Never touches `step` itself, newer ones, or incomplete ones. One that cannot be removed is a line
/// for the log, not an Error: the run is more than its waste.
std::vector<std::string> remove_old_checkpoints(const std::filesystem::path& dir, int64_t keep, int64_t step,
                                                const FileSystem& file_system = {});
