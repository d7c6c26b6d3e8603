#include "llama/plan.h"

#include <algorithm>

#include "layers/core/integer.h"

namespace {

constexpr int64_t kLossTileBytes = int64_t{32} << 20;  // of fp32 logits: a few tiles fit the last-level cache
constexpr int64_t kLossTileGranule = 64;

int64_t default_loss_tile(int64_t T, int64_t V) {
  const int64_t rows = kLossTileBytes / (V * static_cast<int64_t>(sizeof(float)));
  return std::min(T, std::max(kLossTileGranule, rows / kLossTileGranule * kLossTileGranule));
}

void measure(Arena& arena, const RunConfig& run, const ModelConfig& model, const MeshShape& shape) {
  Device device = Device::planned(run.train.device == "cuda" ? DeviceKind::Cuda : DeviceKind::Cpu);
  TrainState(arena, run, model, model_options(run, model, shape), shape, nullptr, device);
}

}  // namespace

TrainState::TrainState(Arena& arena, const RunConfig& run, const ModelConfig& model, const ModelOptions& options,
                       const MeshShape& shape, Mesh* mesh, Device& device)
    : units(param_units(model)),
      params(arena, unit_specs(units), options.dtype, shape, mesh, device),
      adamw(arena, params, units, run.optimizer),
      llama(arena, model, options, mesh ? &mesh->sp_tensors() : nullptr, device) {}

ModelOptions model_options(const RunConfig& run, const ModelConfig& model, const MeshShape& shape) {
  ModelOptions options;
  options.dtype = run.train.dtype == "bf16" ? DType::BF16 : DType::F32;
  options.sp_size = shape.sp;
  options.max_tokens = run.batch.micro_batch_size * ceil_div(run.data.seq_len, shape.sp);
  options.loss_tile_tokens = run.memory.loss_tile_tokens > 0 ? std::min(run.memory.loss_tile_tokens, options.max_tokens)
                                                             : default_loss_tile(options.max_tokens, model.vocab_size);
  options.recompute_blocks = run.memory.recompute == "block";
  return options;
}

size_t batch_bytes(const RunConfig& run, const MeshShape& shape) {
  constexpr size_t kBytesPerToken = 4 * sizeof(int32_t);  // tokens, targets, positions, document ids
  const int64_t mine = run.batch.global_batch_size / shape.data_parallel() * ceil_div(run.data.seq_len, shape.sp);
  const int64_t whole = shape.sp > 1 ? run.batch.micro_batch_size * run.data.seq_len : 0;
  return static_cast<size_t>(mine + whole) * kBytesPerToken;
}

MemoryPlan plan_memory(const RunConfig& run, const ModelConfig& model, const MeshShape& shape) {
  Arena arena;
  measure(arena, run, model, shape);
  MemoryPlan plan;
  plan.arena_bytes = arena.peak_bytes();
  for (const Arena::Entry& entry : arena.entries()) {
    const auto same = std::find_if(plan.rows.begin(), plan.rows.end(), [&](const MemoryPlan::Row& row) {
      return row.section == entry.section && row.name == entry.name && row.shape == entry.shape.str();
    });
    MemoryPlan::Row& row = same != plan.rows.end() ? *same : plan.rows.emplace_back();
    row.section = entry.section, row.name = entry.name, row.shape = entry.shape.str(), row.dtype = entry.dtype;
    row.count++;
    row.size_bytes += entry.size_bytes;
  }
  return plan;
}

Traffic plan_traffic(const RunConfig& run, const ModelConfig& model, const MeshShape& shape) {
  Traffic traffic;
  const auto add = [](Traffic::Kind& kind, int64_t calls, int64_t bytes) {
    kind.calls += calls, kind.bytes += calls * bytes;
  };
  const ModelOptions options = model_options(run, model, shape);
  const int64_t size = static_cast<int64_t>(size_of(options.dtype)), L = model.num_layers;
  const int64_t grad_size = static_cast<int64_t>(size_of(accumulator_dtype(options.dtype)));
  const int64_t M = run.batch.global_batch_size / (run.batch.micro_batch_size * shape.data_parallel());
  const auto units = unit_specs(param_units(model));
  for (int64_t u = 0; u < static_cast<int64_t>(units.size()); u++) {
    const int64_t shard = FlatLayout(units[static_cast<size_t>(u)].tensors, shape.shards()).shard_numel();
    if (shape.shards() > 1) {
      const bool is_block = u >= 1 && u <= L;
      const int64_t forward = is_block && u > 2 ? M - 1 : 0, backward = is_block && u < L - 1 ? M : 0;
      add(traffic.gathers, 1 + forward + backward, (shape.shards() - 1) * shard * size);
      add(traffic.reduces, M, (shape.shards() - 1) * shard * grad_size);
    }
    const int64_t R = shape.dp_replicate, part = ParamStore::replica_part(shard, shape.dp_replicate);
    if (R > 1) add(traffic.replica_sums, 1, 2 * (R - 1) * part * grad_size);
  }
  if (shape.sp > 1) {
    const UlyssesShape heads = ulysses_shape(model, shape.sp);
    const int64_t token = model.head_dim * size * (shape.sp - 1) * options.max_tokens;
    const int64_t passes = (options.recompute_blocks ? 3 : 2) * L * M;
    add(traffic.exchanges, passes, heads.part_qkv_heads() * token);
    add(traffic.exchanges, passes, heads.part_heads() * token);
  }
  return traffic;
}

Traffic measured_traffic(const TrainState& state) {
  Traffic traffic = state.params.traffic();
  if (const Ulysses* ulysses = state.llama.ulysses()) traffic.exchanges = ulysses->traffic();
  return traffic;
}

std::vector<RecomputeChoice> recompute_choices(const RunConfig& run, const ModelConfig& model, const MeshShape& shape) {
  std::vector<RecomputeChoice> choices;
  for (const char* recompute : {"none", "block"}) {
    RunConfig other = run;
    other.memory.recompute = recompute;
    choices.push_back({recompute, plan_memory(other, model, shape).arena_bytes});
  }
  return choices;
}
