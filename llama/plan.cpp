#include "llama/plan.h"

#include <algorithm>

#include "layers/core/gemm.h"
#include "layers/core/integer.h"
#include "llama/host_memory.h"

namespace {

// Of fp32 logits. On the CPU a few tiles fit the last-level cache. A GPU wants some thousand rows: for each tile it
// reads the head's weights and adds to their gradients.
constexpr int64_t kLossTileBytesCpu = int64_t{32} << 20, kLossTileBytesCuda = int64_t{2} << 30;
constexpr int64_t kLossTileGranule = 64;

int64_t default_loss_tile(int64_t T, int64_t V, bool is_cuda) {
  const int64_t bytes = is_cuda ? kLossTileBytesCuda : kLossTileBytesCpu;
  const int64_t rows = bytes / (V * static_cast<int64_t>(sizeof(float)));
  return std::min(T, std::max(kLossTileGranule, rows / kLossTileGranule * kLossTileGranule));
}

bool is_cuda(const RunConfig& run) {
  return run.train.device == "cuda";
}

void measure(Arena& arena, const RunConfig& run, const ModelConfig& model, const MeshShape& shape) {
  Device device = Device::planned(is_cuda(run) ? DeviceKind::Cuda : DeviceKind::Cpu);
  TrainState(arena, run, model, model_options(run, model, shape), shape, nullptr, device);
}

/// Of the shards of gradients, where it is not what gradients are anyway.
std::optional<DType> grad_dtype(const RunConfig& run) {
  return run.train.grad_dtype == "bf16" ? std::optional(DType::BF16) : std::nullopt;
}

}  // namespace

TrainState::TrainState(Arena& arena, const RunConfig& run, const ModelConfig& model, const ModelOptions& options,
                       const MeshShape& shape, Mesh* mesh, Device& device)
    : units(param_units(model)),
      params(arena, unit_specs(units), options.dtype, shape, mesh, device, grad_dtype(run)),
      adamw(arena, params, units, run.optimizer),
      llama(arena, model, options, mesh, device),
      frozen(model) {}

ModelOptions model_options(const RunConfig& run, const ModelConfig& model, const MeshShape& shape) {
  ModelOptions options;
  options.dtype = run.train.dtype == "bf16" ? DType::BF16 : DType::F32;
  options.mesh = shape;
  options.max_tokens = run.batch.micro_batch_size * ceil_div(run.data.seq_len, shape.sp);
  options.loss_tile_tokens = run.memory.loss_tile_tokens > 0
                                 ? std::min(run.memory.loss_tile_tokens, options.max_tokens)
                                 : default_loss_tile(options.max_tokens, model.vocab_size, is_cuda(run));
  options.recompute_blocks = run.memory.recompute == "block";
  options.offload_block_inputs = run.memory.offload == "block_inputs";
  return options;
}

namespace {

/// A rank's tokens of one step on the host, and a whole micro-batch before it is cut.
size_t batch_bytes(const RunConfig& run, const MeshShape& shape) {
  constexpr size_t kBytesPerToken = 4 * sizeof(int32_t);  // tokens, targets, positions, document ids
  const int64_t mine = run.batch.global_batch_size / shape.data_parallel() * ceil_div(run.data.seq_len, shape.sp);
  const int64_t whole = shape.sp > 1 ? run.batch.micro_batch_size * run.data.seq_len : 0;
  return static_cast<size_t>(mine + whole) * kBytesPerToken;
}

}  // namespace

MemoryPlan plan_memory(const RunConfig& run, const ModelConfig& model, const MeshShape& shape) {
  Arena arena;
  measure(arena, run, model, shape);
  MemoryPlan plan;
  plan.is_cuda = is_cuda(run);
  plan.arena_bytes = arena.peak_bytes();
  const ModelOptions options = model_options(run, model, shape);
  if (options.offload_block_inputs) {
    plan.offloaded_bytes =
        ResidualStream::offloaded_bytes(options.dtype, options.max_tokens, model.hidden_size, model.num_layers);
  }
  plan.program_bytes = static_cast<size_t>(read_process_memory().resident_bytes);
  plan.buffer_bytes =
      batch_bytes(run, shape) +
      (plan.is_cuda ? Device::kUploadBytes : gemm_buffer_bytes(DType::F32, static_cast<bool>(model.moe)));
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
  const int64_t grad_size = static_cast<int64_t>(size_of(grad_dtype(run).value_or(accumulator_dtype(options.dtype))));
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

std::vector<MemoryChoice> memory_choices(const RunConfig& run, const ModelConfig& model, const MeshShape& shape) {
  std::vector<MemoryChoice> choices;
  for (const char* recompute : {"none", "block"}) {
    for (const char* offload : {"none", "block_inputs"}) {
      RunConfig other = run;
      other.memory.recompute = recompute, other.memory.offload = offload;
      const bool offloads = other.memory.offload != "none";
      if (offloads && (!is_cuda(run) || other.memory.recompute == "none")) continue;
      choices.push_back(
          {fmt::format("memory.recompute {}{}", recompute, offloads ? ", memory.offload block_inputs" : ""),
           plan_memory(other, model, shape), run.memory.recompute == recompute && run.memory.offload == offload});
    }
  }
  return choices;
}

// ---- what fits

namespace {

int64_t to_come(const MemoryPlan& plan) {
  return static_cast<int64_t>(plan.host_bytes() - plan.program_bytes);
}

bool fits(const MemoryPlan& plan, const MemoryLimits& limits) {
  return (!plan.is_cuda || static_cast<int64_t>(plan.arena_bytes) <= limits.gpu_bytes) &&
         to_come(plan) <= limits.host_bytes;
}

/// The next larger parallel.sp_size that these ranks and heads allow; 0 = none.
int64_t larger_sp(const ModelConfig& model, const MeshShape& shape) {
  for (int64_t sp = shape.sp + 1; sp * shape.dp_replicate <= shape.world; sp++) {
    if (shape.world % (sp * shape.dp_replicate) == 0 && ulysses_shape(model, sp).is_legal()) return sp;
  }
  return 0;
}

/// Runs that compute the same in less and less memory, the cheapest first.
std::vector<RunConfig> smaller_runs(const RunConfig& run, const ModelConfig& model, const MeshShape& shape) {
  constexpr int64_t kSmallTile = 256;
  std::vector<RunConfig> runs;
  RunConfig next = run;
  const auto add = [&](auto& option, auto value) { option = value, runs.push_back(next); };
  if (run.memory.recompute == "none") add(next.memory.recompute, "block");
  if (model_options(next, model, shape).loss_tile_tokens > kSmallTile) add(next.memory.loss_tile_tokens, kSmallTile);
  if (is_cuda(run) && run.memory.offload == "none") add(next.memory.offload, "block_inputs");
  for (int64_t micro = run.batch.micro_batch_size - 1; micro > 0; micro--) {
    if (run.batch.micro_batch_size % micro == 0) add(next.batch.micro_batch_size, micro);
  }
  MeshShape mesh = shape;
  while ((mesh.sp = larger_sp(model, mesh)) > 0) add(next.parallel.sp_size, mesh.sp);
  return runs;
}

MeshShape shape_of(const RunConfig& run, const MeshShape& shape) {
  return mesh_shape(shape.world, run.parallel.dp_replicate_size, run.parallel.cp_size, run.parallel.sp_size);
}

/// Takes back what `run` does not need to fit.
void drop_needless(RunConfig& run, const RunConfig& original, const ModelConfig& model, const MeshShape& shape,
                   const MemoryLimits& limits) {
  const auto try_back = [&](auto option) {
    RunConfig other = run;
    option(other) = option(original);
    if (fits(plan_memory(other, model, shape_of(other, shape)), limits)) run = other;
  };
  try_back([](auto& r) -> auto& { return r.memory.loss_tile_tokens; });
  try_back([](auto& r) -> auto& { return r.memory.offload; });
  try_back([](auto& r) -> auto& { return r.batch.micro_batch_size; });
}

/// "--memory.recompute block ...": how `run` differs from `original`.
std::string options_of(const RunConfig& run, const RunConfig& original) {
  std::string text;
  const nlohmann::json after = to_json(run).flatten(), before = to_json(original).flatten();
  for (const auto& [pointer, value] : after.items()) {
    if (value == before.value(pointer, nlohmann::json())) continue;
    std::string key = pointer.substr(1);
    std::replace(key.begin(), key.end(), '/', '.');
    text += fmt::format("{}--{} {}", text.empty() ? "" : " ", key,
                        value.is_string() ? value.get<std::string>() : value.dump());
  }
  return text;
}

std::string gib(int64_t bytes) {
  return fmt::format("{:.2f} GiB", static_cast<double>(bytes) / (1 << 30));
}

}  // namespace

void check_memory(const RunConfig& run, const ModelConfig& model, const MeshShape& shape, const MemoryLimits& limits) {
  const MemoryPlan plan = plan_memory(run, model, shape);
  if (fits(plan, limits)) return;
  const auto needs = [&](const MemoryPlan& p) {
    return p.is_cuda ? fmt::format("{} of GPU memory and {} of the host's", gib(static_cast<int64_t>(p.arena_bytes)),
                                   gib(to_come(p)))
                     : fmt::format("{} of memory", gib(to_come(p)));
  };
  const std::string have =
      plan.is_cuda ? fmt::format("{} and {}", gib(limits.gpu_bytes), gib(limits.host_bytes)) : gib(limits.host_bytes);
  const std::string problem = fmt::format("this rank needs {}, of which {} can be had", needs(plan), have);
  RunConfig smallest = run;
  for (RunConfig& smaller : smaller_runs(run, model, shape)) {
    smallest = smaller;
    if (!fits(plan_memory(smaller, model, shape_of(smaller, shape)), limits)) continue;
    drop_needless(smaller, run, model, shape, limits);
    fail("{}. It fits with {}: {}", problem, options_of(smaller, run),
         needs(plan_memory(smaller, model, shape_of(smaller, shape))));
  }
  const std::string advice = "use more ranks, which share parameters, gradients and moments, or a smaller data.seq_len";
  if (options_of(smallest, run).empty()) fail("{}; {}", problem, advice);
  fail("{}. It does not fit with {} either ({}); {}", problem, options_of(smallest, run),
       needs(plan_memory(smallest, model, shape_of(smallest, shape))), advice);
}
