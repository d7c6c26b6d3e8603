// Runs build/train_gpt (or the trainer on the emulated GPU) as its user does, and keeps what it said.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

/// A directory that goes away with the test.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "train gpt test XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  std::string str() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

struct ProgramResult {
  int exit_code = -1;  ///< 128 + signal when it was killed
  std::string output;  ///< stdout and stderr, in order
};

/// mpirun for so many ranks, of one thread each, however many cores there are and whoever asks.
inline std::vector<std::string> mpirun(int ranks) {
  setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
  setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
  return {"/usr/bin/env", "OMP_NUM_THREADS=1",  "mpirun", "--oversubscribe", "--bind-to", "none",
          "-n",           std::to_string(ranks)};
}

constexpr const char* kTrainer = "build/train_gpt";
constexpr const char* kEmulatedTrainer = "build/simt/plain/train_gpt";

/// A started program; its output goes to a file.
class Program {
 public:
  /// `launcher`: what starts it, with its arguments.
  Program(const std::vector<std::string>& arguments, const std::filesystem::path& output,
          std::vector<std::string> launcher = {}, const char* program = kTrainer)
      : output_(output) {
    std::vector<std::string> all = std::move(launcher);
    all.push_back(program);
    all.insert(all.end(), arguments.begin(), arguments.end());
    std::filesystem::remove(output);  // what an earlier program said must not be taken for this one's
    pid_ = fork();
    if (pid_ != 0) return;
    const int out = open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    dup2(out, 1), dup2(out, 2);
    setenv("CUDA_VISIBLE_DEVICES", "", 1);  // what these tests claim holds for the CPU, also where there is a GPU
    std::vector<char*> argv;
    for (std::string& a : all) argv.push_back(a.data());
    argv.push_back(nullptr);
    execv(argv[0], argv.data());
    _exit(127);
  }
  Program(const Program&) = delete;
  ~Program() {
    if (pid_ > 0) kill(SIGKILL), wait();
  }

  void kill(int signal) const { ::kill(pid_, signal); }
  std::string output() const { return read_text(output_); }
  /// Waits until the output holds `text`; false when the program ended before.
  bool wait_for(const std::string& text) {
    while (output().find(text) == std::string::npos) {
      if (waitpid(pid_, &status_, WNOHANG) == pid_) {
        has_ended_ = true;
        return output().find(text) != std::string::npos;
      }
      usleep(5000);
    }
    return true;
  }
  ProgramResult wait() {
    if (!has_ended_) waitpid(pid_, &status_, 0);
    pid_ = -1;
    return {WIFSIGNALED(status_) ? 128 + WTERMSIG(status_) : WEXITSTATUS(status_), output()};
  }

 private:
  std::filesystem::path output_;
  pid_t pid_ = -1;
  int status_ = 0;
  bool has_ended_ = false;
};

inline ProgramResult run_program(const std::vector<std::string>& arguments, std::vector<std::string> launcher = {},
                                 const char* program = kTrainer) {
  const TemporaryDirectory dir;
  return Program(arguments, dir / "output", std::move(launcher), program).wait();
}

/// The lines of a JSONL log.
inline std::vector<nlohmann::json> read_log(const std::filesystem::path& path) {
  std::vector<nlohmann::json> lines;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

/// A small run in `dir` on the trained model and text of test/fixtures; `options` are added, or replace its own.
inline std::vector<std::string> small_run(const TemporaryDirectory& dir, const std::vector<std::string>& options = {}) {
  std::vector<std::string> arguments = {"--model.path",
                                        "test/fixtures/stories260k",
                                        "--data.train",
                                        "test/fixtures/shakespeare.jsonl",
                                        "--data.seq_len",
                                        "256",
                                        "--data.cache_dir",
                                        dir / "cache",
                                        "--batch.micro_batch_size",
                                        "2",
                                        "--batch.global_batch_size",
                                        "4",
                                        "--optimizer.lr",
                                        "1e-3",
                                        "--checkpoint.dir",
                                        dir / "run"};
  for (size_t i = 0; i < options.size(); i += 2) {
    const auto own = std::find(arguments.begin(), arguments.end(), options[i]);
    if (own != arguments.end()) {
      *(own + 1) = options[i + 1];
    } else {
      arguments.insert(arguments.end(), options.begin() + static_cast<int64_t>(i),
                       options.begin() + static_cast<int64_t>(std::min(i + 2, options.size())));
    }
  }
  return arguments;
}

/// A run whose files are larger than what MPI needs for itself: two rows a step, `steps` steps in all.
inline std::vector<std::string> large_run(const TemporaryDirectory& dir, const std::string& steps,
                                          const std::string& micro_batch_size) {
  return {"configs/bytes_from_scratch.json",
          "--data.cache_dir",
          dir / "cache",
          "--data.seq_len",
          "64",
          "--batch.micro_batch_size",
          micro_batch_size,
          "--batch.global_batch_size",
          "2",
          "--checkpoint.dir",
          dir / "run",
          "--schedule.warmup_steps",
          "0",
          "--train.steps",
          steps};
}
