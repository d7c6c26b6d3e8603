#include "llama/checkpoint_dir.h"

#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <set>

#include "data/json.h"
#include "data/safetensors.h"
#include "layers/core/rng.h"
#include "test/files.h"

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int64_t kNumel = 5000;

TrainerState state_of(int64_t step) {
  return {step, 4096 * step, 8 * step, {{"train", {{"steps", 100}}}}};
}

/// A whole save as the trainer does it: tensors whose every element is the step, moments, companions, state.
void save(const fs::path& dir, int64_t step, const FileSystem& file_system = {}) {
  PendingCheckpoint pending(dir, step, file_system);
  const std::vector<float> values(kNumel, static_cast<float>(step));
  pending.write_file("config.json", "{}");
  pending.write_files({{"tokenizer.json", "{\"a\":1}"}, {"additional_chat_templates/tool.jinja", "x"}});
  for (const char* name : {"model.safetensors", "optimizer/exp_avg.safetensors"}) {
    file_system.create_directories((pending.path() / name).parent_path());
    SafetensorsWriter writer(pending.path() / name, {{"w", DType::F32, {kNumel}}}, {}, true, file_system);
    writer.write("w", 0, kNumel, DType::F32, values.data());
    writer.finish();
  }
  pending.commit(state_of(step));
}

/// The tensors of a complete checkpoint are those of its step.
void expect_intact(const Checkpoint& checkpoint) {
  const int64_t step = checkpoint.state.step;
  EXPECT_EQ(checkpoint.state.num_tokens, 4096 * step);
  EXPECT_EQ(checkpoint.state.next_sample, 8 * step);
  for (const fs::path& part : {checkpoint.path, checkpoint.path / "optimizer"}) {
    std::vector<float> values(kNumel);
    SafetensorsDirectory(part, part == checkpoint.path ? "model" : "exp_avg")
        .read("w", 0, kNumel, DType::F32, values.data());
    EXPECT_TRUE(std::all_of(values.begin(), values.end(), [&](float v) { return v == static_cast<float>(step); }));
  }
}

std::vector<int64_t> steps_in(const fs::path& dir) {
  std::vector<int64_t> steps;
  for (const Checkpoint& checkpoint : find_checkpoints(dir).complete) steps.push_back(checkpoint.state.step);
  return steps;
}

std::set<std::string> names_in(const fs::path& dir) {
  std::set<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(dir)) names.insert(entry.path().filename());
  return names;
}

using Steps = std::vector<int64_t>;
using Names = std::set<std::string>;

TEST(CheckpointDir, a_save_is_found_with_its_state_and_its_tensors) {
  TempDir dir;
  EXPECT_TRUE(find_checkpoints(dir / "none").empty());
  save(dir.path(), 100);
  save(dir.path(), 2'000'000);
  EXPECT_EQ(names_in(dir.path()), (Names{"step_000100", "step_2000000"}));
  const FoundCheckpoints found = find_checkpoints(dir.path());
  EXPECT_EQ(steps_in(dir.path()), (Steps{100, 2'000'000}));
  EXPECT_TRUE(found.incomplete.empty());
  for (const Checkpoint& checkpoint : found.complete) expect_intact(checkpoint);
  EXPECT_EQ(found.complete[0].state.run, state_of(100).run);
  const json written = parse_json(read_bytes(dir / "step_000100/trainer_state.json"), "state");
  EXPECT_EQ(written["files"]["tokenizer.json"], 7);
  EXPECT_EQ(written["files"]["optimizer/exp_avg.safetensors"], fs::file_size(dir / "step_000100/model.safetensors"));
}

TEST(CheckpointDir, trainer_state_keeps_every_bit_of_large_counts) {
  TempDir dir;
  const TrainerState big{7, INT64_MAX, (int64_t{1} << 53) + 1, {{"lr", 0.1}, {"path", "caf\xe9"}}};  // not UTF-8
  PendingCheckpoint(dir.path(), 7).commit(big);
  const TrainerState read = open_checkpoint(dir / "step_000007").state;
  EXPECT_EQ(read.num_tokens, INT64_MAX);
  EXPECT_EQ(read.next_sample, (int64_t{1} << 53) + 1);
  EXPECT_EQ(read.run["lr"], 0.1);
}

TEST(CheckpointDir, only_complete_checkpoints_are_found_and_the_reason_is_said) {
  TempDir dir;
  for (const int64_t step : {1, 2, 3, 4, 5, 6, 7}) save(dir.path(), step);
  fs::remove(dir / "step_000001/trainer_state.json");
  fs::resize_file(dir / "step_000002/model.safetensors", 100);
  fs::remove(dir / "step_000003/optimizer/exp_avg.safetensors");
  fs::resize_file(dir / "step_000004/trainer_state.json", 50);
  fs::rename(dir / "step_000005", dir / "step_000009");  // says that it is 5
  fs::rename(dir / "step_000006", dir / "step_6");       // not a name of ours
  fs::copy(dir / "step_000007", dir / "step_000008.tmp", fs::copy_options::recursive);
  write_bytes(dir / "step_000010", "a file");
  EXPECT_EQ(steps_in(dir.path()), Steps{7});
  std::vector<std::string> reasons = find_checkpoints(dir.path()).incomplete;
  for (std::string& reason : reasons) reason = error_of([&] { fail("{}", reason); }, dir.path());
  ASSERT_EQ(reasons.size(), 5u);
  EXPECT_EQ(reasons[0], "'@/step_000001' is no complete checkpoint: it has no trainer_state.json");
  EXPECT_EQ(reasons[1],
            "'@/step_000002' is no complete checkpoint: 'model.safetensors' has 100 bytes, but 20072 were written");
  EXPECT_EQ(reasons[2],
            "'@/step_000003' is no complete checkpoint: 'optimizer/exp_avg.safetensors' cannot be found: No such file "
            "or directory");
  EXPECT_EQ(reasons[3].find("'@/step_000004/trainer_state.json': not JSON: "), 0u) << reasons[3];
  EXPECT_EQ(reasons[4], "'@/step_000009' says that it is step 5");
}

TEST(CheckpointDir, a_bad_trainer_state_is_named) {
  TempDir dir;
  const std::pair<const char*, const char*> kCases[] = {
      {"[]", " is no JSON object"},
      {"{}", ": 'format' is missing, or no integer from 0 to 2^63 - 1"},
      {R"({"format":2})", " has format 2, this program reads format 1"},
      {R"({"format":1,"step":-1})", ": 'step' is missing, or no integer from 0 to 2^63 - 1"},
      {R"({"format":1,"step":1.5})", ": 'step' is missing, or no integer from 0 to 2^63 - 1"},
      {R"({"format":1,"step":1,"num_tokens":9223372036854775808})",
       ": 'num_tokens' is missing, or no integer from 0 to 2^63 - 1"},
      {R"({"format":1,"step":1,"num_tokens":1,"next_sample":1})", " has no object 'run'"},
      {R"({"format":1,"step":1,"num_tokens":1,"next_sample":1,"run":{}})", " has no object 'files'"},
      {R"({"format":1,"step":1,"num_tokens":1,"next_sample":1,"run":{},"files":{"a":"b"}})",
       ": 'a' is missing, or no integer from 0 to 2^63 - 1"},
  };
  for (const auto& [text, message] : kCases) {
    write_bytes(dir / "c/trainer_state.json", text);
    EXPECT_EQ(error_of([&] { open_checkpoint(dir / "c"); }, dir / "c"),
              std::string("'@/trainer_state.json'") + message);
  }
}

TEST(CheckpointDir, the_start_removes_what_killed_runs_left_and_nothing_else) {
  TempDir dir;
  save(dir.path() / "new/run", 1);  // made with its parents
  const fs::path run = dir / "new/run";
  write_bytes(run / "step_000002.tmp/optimizer/x", "half");
  write_bytes(run / "notes.tmp/x", "mine");
  write_bytes(run / "step_2.tmp", "mine");
  EXPECT_EQ(prepare_checkpoint_dir(run),
            std::vector<std::string>{
                fmt::format("removed '{}', which an earlier run left unfinished", (run / "step_000002.tmp").string())});
  EXPECT_EQ(names_in(run), (Names{"notes.tmp", "step_000001", "step_2.tmp"}));
  EXPECT_TRUE(prepare_checkpoint_dir(dir / "another").empty());
  EXPECT_EQ(names_in(dir / "another"), Names{});
  write_bytes(dir / "file", "");
  EXPECT_EQ(error_of([&] { prepare_checkpoint_dir(dir / "file/run"); }, dir.path()),
            "cannot make the directory '@/file/run': Not a directory");
}

TEST(CheckpointDir, a_directory_that_cannot_be_written_is_seen_at_the_start) {
  TempDir dir;
  const FileSystem read_only(
      [](const char* operation, const fs::path&) { return std::string(operation) == "create" ? EROFS : 0; });
  EXPECT_EQ(error_of([&] { prepare_checkpoint_dir(dir.path(), read_only); }, dir.path()),
            "cannot create '@/.write_test': Read-only file system; choose a directory that this user may write");
}

// ---- retention

TEST(CheckpointDir, retention_keeps_the_newest_and_never_the_last_complete_one_goes) {
  struct Case {
    Steps before;
    int64_t keep, step;
    Steps after;
  };
  const Case kCases[] = {
      {{1, 2, 3, 4}, 2, 4, {3, 4}},
      {{1, 2, 3, 4}, 1, 4, {4}},
      {{1, 2, 3, 4}, 4, 4, {1, 2, 3, 4}},
      {{1, 2, 3, 4}, 5, 4, {1, 2, 3, 4}},
      {{1, 2, 3, 4}, INT64_MAX, 4, {1, 2, 3, 4}},
      {{1, 2, 3, 4}, 0, 4, {1, 2, 3, 4}},
      {{1, 2, 3, 4}, -1, 4, {1, 2, 3, 4}},
      {{1, 2, 3, 4}, INT64_MIN, 4, {1, 2, 3, 4}},
      {{1, 2, 3, 4}, 1, 2, {2, 3, 4}},  // newer ones are not ours to remove
      {{1}, 1, 1, {1}},
      {{1, 2}, 1, 3, {1, 2}},  // 3 is not there: nothing may go
      {{}, 1, 3, {}},
      {{999'999, 1'000'000}, 1, 1'000'000, {1'000'000}},  // by number, not by name
  };
  for (const Case& c : kCases) {
    TempDir dir;
    for (const int64_t step : c.before) PendingCheckpoint(dir.path(), step).commit(state_of(step));
    remove_old_checkpoints(dir.path(), c.keep, c.step);
    EXPECT_EQ(steps_in(dir.path()), c.after) << "keep " << c.keep << " step " << c.step;
    EXPECT_EQ(names_in(dir.path()).size(), c.after.size());
  }
}

TEST(CheckpointDir, retention_leaves_incomplete_ones_and_goes_on_when_one_cannot_be_removed) {
  TempDir dir;
  for (const int64_t step : {1, 2, 3, 4}) save(dir.path(), step);
  fs::remove(dir / "step_000002/config.json");
  const FileSystem stubborn([&](const char* operation, const fs::path& path) {
    return std::string(operation) == "remove" && path.string().find("step_000001.tmp/model") != std::string::npos
               ? EBUSY
               : 0;
  });
  const auto log = remove_old_checkpoints(dir.path(), 1, 4, stubborn);
  ASSERT_EQ(log.size(), 2u);
  EXPECT_EQ(log[0].find(fmt::format("could not remove '{}': cannot remove", (dir / "step_000001").string())), 0u)
      << log[0];
  EXPECT_EQ(log[1], fmt::format("removed '{}' (checkpoint.keep = 1)", (dir / "step_000003").string()));
  EXPECT_EQ(steps_in(dir.path()), Steps{4});
  EXPECT_EQ(names_in(dir.path()), (Names{"step_000001.tmp", "step_000002", "step_000004"}));
}

// ---- resume

TEST(CheckpointDir, auto_takes_the_newest_complete_one_or_none) {
  TempDir dir;
  std::vector<std::string> log;
  EXPECT_FALSE(choose_checkpoint("auto", dir / "none", log));
  for (const int64_t step : {999'999, 1'000'000, 1'000'001}) save(dir.path(), step);
  fs::remove(dir / "step_1000001/trainer_state.json");
  const auto chosen = choose_checkpoint("auto", dir.path(), log);
  ASSERT_TRUE(chosen);
  EXPECT_EQ(chosen->state.step, 1'000'000);
  EXPECT_EQ(
      log, std::vector<std::string>{fmt::format("ignored: '{}' is no complete checkpoint: it has no trainer_state.json",
                                                (dir / "step_1000001").string())});
}

TEST(CheckpointDir, never_refuses_a_directory_with_checkpoints) {
  TempDir dir;
  std::vector<std::string> log;
  EXPECT_FALSE(choose_checkpoint("never", dir.path(), log));
  save(dir.path(), 5);
  EXPECT_EQ(error_of([&] { choose_checkpoint("never", dir.path(), log); }, dir.path()),
            "checkpoint.resume = never, but checkpoint.dir = '@' already has checkpoints: @/step_000005; choose an "
            "empty checkpoint.dir, or resume = auto");
  fs::remove(dir / "step_000005/trainer_state.json");
  EXPECT_NE(error_of([&] { choose_checkpoint("never", dir.path(), log); }), "");
}

TEST(CheckpointDir, a_path_is_a_checkpoint_or_a_directory_of_them) {
  TempDir dir, other;
  std::vector<std::string> log;
  for (const int64_t step : {1, 2}) save(other.path(), step);
  fs::create_directory_symlink("step_000001", other / "best");
  const auto step_from = [&](const std::string& path, const fs::path& to) {
    return choose_checkpoint(path, to, log)->state.step;
  };
  EXPECT_EQ(step_from(other.path().string(), dir.path()), 2);
  EXPECT_EQ(step_from((other / "step_000001").string(), dir.path()), 1);
  EXPECT_EQ(step_from((other / "step_000001").string() + "/", dir.path()), 1);
  EXPECT_EQ(step_from((other / "best").string(), dir.path()), 1);
  EXPECT_EQ(step_from(other.path().string(), other.path()), 2);
  EXPECT_EQ(step_from((other / "step_000002").string() + "/", other.path()), 2);
}

TEST(CheckpointDir, a_path_that_cannot_be_resumed_is_an_error_that_says_why) {
  TempDir dir, run;
  std::vector<std::string> log;
  const auto error = [&](const fs::path& path, const fs::path& hide) {
    return error_of([&] { choose_checkpoint(path.string(), run.path(), log); }, hide);
  };
  EXPECT_EQ(error(dir / "none", dir.path()),
            "checkpoint.resume = '@/none' is no directory; it may be auto, never, or a path");
  EXPECT_EQ(error(dir.path(), dir.path()),
            "checkpoint.resume = '@' is neither a checkpoint (it has no trainer_state.json) nor a directory of step_* "
            "checkpoints; to start from the weights of a model directory, give it as model.path");
  save(dir.path(), 1);
  fs::copy(dir / "step_000001", dir / "step_000003.tmp", fs::copy_options::recursive);
  EXPECT_EQ(error(dir / "step_000003.tmp", dir.path()),
            "checkpoint.resume = '@/step_000003.tmp' is a save that did not finish; resume from an older one");
  fs::remove(dir / "step_000001/model.safetensors");
  const std::string missing =
      "'@/step_000001' is no complete checkpoint: 'model.safetensors' cannot be found: No such file or directory";
  EXPECT_EQ(error(dir / "step_000001", dir.path()), missing);
  EXPECT_EQ(error(dir.path(), dir.path()), "checkpoint.resume = '@' has no complete checkpoint: " + missing);
}

TEST(CheckpointDir, resuming_does_not_mix_two_runs_nor_overwrite_newer_checkpoints) {
  TempDir dir, other;
  std::vector<std::string> log;
  for (const int64_t step : {1, 2, 3}) save(dir.path(), step);
  save(other.path(), 7);
  EXPECT_EQ(error_of([&] { choose_checkpoint((dir / "step_000002").string(), dir.path(), log); }, dir.path()),
            "checkpoint.resume = '@/step_000002' goes back to step 2, but checkpoint.dir has newer checkpoints, which "
            "the run would overwrite: @/step_000003; move them away, or choose an empty checkpoint.dir");
  EXPECT_EQ(error_of([&] { choose_checkpoint((dir / "step_000002").string(), other.path(), log); }, other.path()),
            fmt::format("checkpoint.resume = '{}' starts a run in checkpoint.dir = '@', which holds checkpoints of "
                        "another: @/step_000007; choose an empty checkpoint.dir",
                        (dir / "step_000002").string()));
}

TEST(CheckpointDir, a_complete_checkpoint_is_never_overwritten_but_an_incomplete_one_is_replaced) {
  TempDir dir;
  save(dir.path(), 1);
  EXPECT_EQ(error_of([&] { save(dir.path(), 1); }, dir.path()),
            "checkpoint '@/step_000001' exists already, and is never overwritten");
  expect_intact(open_checkpoint(dir / "step_000001"));
  EXPECT_EQ(names_in(dir.path()), Names{"step_000001"});
  fs::remove(dir / "step_000001/model.safetensors");
  save(dir.path(), 1);
  expect_intact(open_checkpoint(dir / "step_000001"));
  EXPECT_EQ(error_of([&] { PendingCheckpoint(dir.path(), 2).commit(state_of(3)); }, dir.path()),
            "checkpoint '@/step_000002.tmp' cannot hold the state of step 3");
}

TEST(CheckpointDir, a_checkpoint_is_committed_once) {
  TempDir dir;
  PendingCheckpoint pending(dir.path(), 2);
  pending.commit(state_of(2));
  EXPECT_EQ(error_of([&] { pending.commit(state_of(2)); }, dir.path()),
            "checkpoint '@/step_000002.tmp' is committed already");
  EXPECT_EQ(names_in(dir.path()), Names{"step_000002"});
}

TEST(CheckpointDir, one_run_at_a_time_holds_a_directory) {
  TempDir dir;
  {
    const RunLock first(dir.path());
    EXPECT_EQ(error_of([&] { RunLock second(dir.path()); }, dir.path()).find("checkpoint.dir = '@' is in use"), 0u);
  }
  EXPECT_NO_THROW(RunLock(dir.path()));
}

TEST(CheckpointDir, companions_are_the_tokenizer_and_not_the_weights) {
  TempDir model, dir;
  const Names kTaken = {"tokenizer.json",
                        "tokenizer_config.json",
                        "special_tokens_map.json",
                        "vocab.json",
                        "merges.txt",
                        "tokenizer.model",
                        "added_tokens.json",
                        "generation_config.json",
                        "chat_template.jinja",
                        "chat_template.json",
                        "preprocessor_config.json",
                        "processor_config.json",
                        "video_preprocessor_config.json",
                        "additional_chat_templates/tool_use.jinja"};
  for (const std::string& name : kTaken) write_bytes(model / name, "of " + name);
  for (const char* name : {"config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
                           "trainer_state.json", "README.md", "optimizer/vocab.json"}) {
    write_bytes(model / name, "not taken");
  }
  const CompanionFiles files = read_companion_files(model.path());
  Names taken;
  for (const auto& [name, bytes] : files) {
    taken.insert(name);
    EXPECT_EQ(bytes, "of " + name);
  }
  EXPECT_EQ(taken, kTaken);
  EXPECT_EQ(read_companion_files(model / "config.json"), files);
  PendingCheckpoint pending(dir.path(), 1);
  pending.write_files(files);
  pending.commit(state_of(1));
  EXPECT_EQ(read_companion_files(dir / "step_000001"), files);
}

// ---- faults

TEST(CheckpointDir, a_save_that_fails_at_any_operation_leaves_the_previous_one_and_no_waste) {
  int total = 0;
  {
    TempDir dir;
    save(dir.path(), 2, FileSystem([&](const char*, const fs::path&) { return total++, 0; }));
  }
  EXPECT_GT(total, 30);
  for (int fail_at = 0; fail_at < total; fail_at++) {
    TempDir dir;
    save(dir.path(), 1);
    int count = 0;
    std::string failed;
    const FileSystem full([&](const char* operation, const fs::path& path) {
      if (count++ != fail_at) return 0;
      failed = fmt::format("{} {}", operation, path.filename().string());
      return ENOSPC;
    });
    const std::string error = error_of([&] { save(dir.path(), 2, full); }, dir.path());
    EXPECT_NE(error.find("No space left on device; free space"), std::string::npos) << failed << ": " << error;
    expect_intact(open_checkpoint(dir / "step_000001"));
    // After the rename only the parent's sync can fail: the checkpoint is there, though perhaps not durable.
    const bool renamed = failed == "sync " + dir.path().filename().string();
    EXPECT_EQ(names_in(dir.path()), (renamed ? Names{"step_000001", "step_000002"} : Names{"step_000001"})) << failed;
    EXPECT_EQ(steps_in(dir.path()), (renamed ? Steps{1, 2} : Steps{1})) << failed;
    EXPECT_EQ(renamed, fail_at == total - 1) << failed;
  }
}

/// Runs `body` in a child process; its exit status, or 128 + signal.
template <class Body>
int in_child(Body&& body) {
  const pid_t child = fork();
  if (child == 0) {
    const std::string error = error_of(body);
    if (!error.empty()) fmt::print(stderr, "child: {}\n", error);
    _exit(error.empty() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST(CheckpointDir, a_process_that_dies_at_any_operation_of_save_and_retention_leaves_a_loadable_checkpoint) {
  constexpr int kDied = 42;
  int exit_code = kDied;
  int die_at = 0;
  for (; exit_code == kDied; die_at++) {
    TempDir dir;
    save(dir.path(), 1), save(dir.path(), 2);
    exit_code = in_child([&] {
      int count = 0;
      const FileSystem mortal([&](const char*, const fs::path&) {
        if (count++ == die_at) _exit(kDied);
        return 0;
      });
      save(dir.path(), 3, mortal);
      remove_old_checkpoints(dir.path(), 1, 3, mortal);
    });
    const Steps steps = steps_in(dir.path());
    ASSERT_TRUE(steps == Steps({1, 2}) || (!steps.empty() && steps.back() == 3)) << die_at;
    const FoundCheckpoints found = find_checkpoints(dir.path());
    EXPECT_TRUE(found.incomplete.empty()) << die_at << ": " << found.incomplete.front();
    for (const Checkpoint& checkpoint : found.complete) expect_intact(checkpoint);
    prepare_checkpoint_dir(dir.path());
    EXPECT_EQ(names_in(dir.path()).size(), steps.size()) << die_at;
  }
  EXPECT_EQ(exit_code, 0);
  EXPECT_GT(die_at, 50);  // every operation was tried
}

TEST(CheckpointDir, kill_9_at_random_moments_leaves_a_loadable_checkpoint) {
  TempDir dir;
  save(dir.path(), 1);
  int64_t newest = 1;
  for (uint64_t round = 0; round < 25; round++) {
    const pid_t child = fork();
    if (child == 0) {
      for (int64_t step = newest + 1;; step++) {
        save(dir.path(), step);
        remove_old_checkpoints(dir.path(), 2, step);
      }
    }
    usleep(static_cast<useconds_t>(40'000 * Philox(7, 0).uniform(round)));
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
    const FoundCheckpoints found = find_checkpoints(dir.path());
    ASSERT_TRUE(found.incomplete.empty()) << found.incomplete.front();
    ASSERT_FALSE(found.complete.empty());
    ASSERT_GE(found.complete.back().state.step, newest);
    newest = found.complete.back().state.step;
    for (const Checkpoint& checkpoint : found.complete) expect_intact(checkpoint);
    prepare_checkpoint_dir(dir.path());
    ASSERT_EQ(names_in(dir.path()).size(), found.complete.size());
  }
  save(dir.path(), newest + 1);  // a kill between save and retention leaves one too many; the next retention removes it
  remove_old_checkpoints(dir.path(), 2, newest + 1);
  EXPECT_EQ(steps_in(dir.path()), Steps({newest, newest + 1}));
}

TEST(CheckpointDir, a_file_size_limit_leaves_the_previous_checkpoint_intact) {
  TempDir dir;
  save(dir.path(), 1);
  const int exit_code = in_child([&] {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{10'000, 10'000};
    setrlimit(RLIMIT_FSIZE, &limit);
    const std::string error = error_of([&] { save(dir.path(), 2); }, dir.path());
    CHECK(error.find("cannot allocate '@/step_000002.tmp/model.safetensors' (20072 bytes; ") == 0 &&
              error.find("File too large; raise the file size limit (ulimit -f)") != std::string::npos,
          "the message is: {}", error);
  });
  EXPECT_EQ(exit_code, 0);
  EXPECT_EQ(names_in(dir.path()), Names{"step_000001"});
  expect_intact(open_checkpoint(dir / "step_000001"));
}

TEST(CheckpointDir, a_full_disk_leaves_the_previous_checkpoint_intact) {
  constexpr int kNotPermitted = 77;
  TempDir dir;
  const int exit_code = in_child([&] {
    // A disk of 80 KiB in a mount namespace of its own: room for one checkpoint and a half.
    if (unshare(geteuid() == 0 ? CLONE_NEWNS : CLONE_NEWUSER | CLONE_NEWNS) != 0 ||
        mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("none", dir.path().c_str(), "tmpfs", 0, "size=80k") != 0) {
      _exit(kNotPermitted);
    }
    save(dir.path(), 1);
    const std::string error = error_of([&] { save(dir.path(), 2); }, dir.path());
    CHECK(error.find("cannot allocate '@/step_000002.tmp/") == 0 &&
              error.find(" (20072 bytes; ") != std::string::npos &&
              error.find(" free on its disk): No space left on device; free space") != std::string::npos,
          "the message is: {}", error);
    CHECK(names_in(dir.path()) == Names{"step_000001"}, "waste was left");
    expect_intact(open_checkpoint(dir / "step_000001"));
    CHECK(!testing::Test::HasFailure(), "the previous checkpoint is damaged");
  });
  if (exit_code == kNotPermitted) GTEST_SKIP() << "mounting a small tmpfs is not permitted here";
  EXPECT_EQ(exit_code, 0);
}

}  // namespace
