// A checkpoint of any mesh loads on any other: weights and moments bit for bit.
#include <filesystem>

#include "llama/checkpoint.h"
#include "llama/config.h"
#include "test/distributed/world.h"
#include "test/testing.h"

namespace {

namespace fs = std::filesystem;

const char* const kModel = "test/fixtures/stories260k";

/// A value of every element of every tensor, of its own.
float element(const std::string& name, int kind, int64_t i) {
  const Philox rng(static_cast<uint64_t>(kind), hash_name(name));
  return static_cast<float>(rng.uniform(static_cast<uint64_t>(i))) - 0.25f;
}

class Trainer {
 public:
  Trainer(Communicator& ranks, int replicas, int sp)
      : model_(load_model_config(kModel)),
        mesh_(ranks, mesh_shape(ranks.size(), replicas, 1, sp), device_),
        arena_(device_, size_t{64} << 20),
        state_(arena_, run(), model_, model_options(run(), model_, mesh_.shape()), mesh_.shape(), &mesh_, device_) {}

  void fill() {
    visit([](float& x, float value) { x = value; });
  }
  void expect_filled() {
    int64_t wrong = 0, all = 0;
    visit([&](float& x, float value) { wrong += x != value, all++; });
    EXPECT_EQ(wrong, 0);
    EXPECT_GT(all, 0);
  }
  void save(const fs::path& dir, int64_t step) {
    TrainerState trainer;
    trainer.step = step, trainer.next_sample = 17;
    save_checkpoint(dir, state_, model_, {}, trainer, mesh_);
  }
  void load(const fs::path& path) { load_checkpoint(open_checkpoint(path), state_, model_); }

 private:
  static RunConfig run() {
    RunConfig run;
    run.data.seq_len = 8;
    return run;
  }
  template <class Visit>
  void visit(Visit&& visit_element) {
    for (const ShardPiece& piece : shard_pieces(state_.units, state_.params)) {
      const Tensor parts[] = {state_.params.param_shard(piece.unit), state_.adamw.exp_avg(piece.unit),
                              state_.adamw.exp_avg_sq(piece.unit)};
      for (int kind = 0; kind < 3; kind++) {
        float* x = piece_of(parts[kind], piece).as<float>();
        for (int64_t i = 0; i < piece.count; i++) {
          visit_element(x[i], element(piece.disk->hf_name, kind, piece.begin + i));
        }
      }
    }
  }

  Device device_ = Device::cpu();
  ModelConfig model_;
  Mesh mesh_;
  Arena arena_;
  TrainState state_;
};

struct Ranks {
  int size, replicas, sp;
};

TEST(Checkpoint, of_any_mesh_loads_on_any_other_bit_for_bit) {
  Communicator& world = test_world();
  const fs::path dir = world.text_of_first((fs::temp_directory_path() / fmt::format("reshard_{}", getpid())).string());
  const Ranks kMeshes[] = {{4, 1, 2}, {1, 1, 1}, {3, 1, 1}, {8, 2, 2}, {8, 1, 8}, {2, 2, 1}};
  int64_t step = 0;
  for (const Ranks& from : kMeshes) {
    step++;
    if (const auto ranks = first_ranks(from.size)) {
      Trainer trainer(*ranks, from.replicas, from.sp);
      trainer.fill();
      trainer.save(dir, step);
    }
    world.barrier();
    for (const Ranks& to : kMeshes) {
      if (const auto ranks = first_ranks(to.size)) {
        Trainer trainer(*ranks, to.replicas, to.sp);
        trainer.load(checkpoint_path(dir, step));
        trainer.expect_filled();
      }
    }
    world.barrier();
  }
  if (world.rank() == 0) fs::remove_all(dir);
}

}  // namespace
