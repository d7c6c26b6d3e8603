#include "llama/report.h"

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <optional>

namespace {

/// Parts of the model that a person thinks in.
std::string part_of(const std::string& param) {
  if (param == param_name::kEmbedding) return "embedding";
  if (param == param_name::kLmHead) return "lm_head";
  if (param.starts_with("qkv_proj") || param.starts_with("o_proj")) return "attention";
  if (param.starts_with("gate_up_proj") || param.starts_with("down_proj")) return "MLP";
  if (param.starts_with("router") || param == param_name::kSharedGate) return "router";
  if (param.starts_with("experts")) return "experts";
  if (param == param_name::kSinks) return "attention";
  for (const char* latent : {"q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj"}) {
    if (param.starts_with(latent)) return "attention";
  }
  return "norms";
}

std::string percent(double part, double whole) {
  return fmt::format("{:.1f}%", whole > 0 ? 100 * part / whole : 0);
}

}  // namespace

void report_model(Console& console, const ModelConfig& model, const std::vector<ParamUnit>& units) {
  std::map<std::string, int64_t> parts;
  int64_t total = 0;
  for (const ParamUnit& unit : units) {
    for (const ParamSpec& param : unit.params) {
      parts[part_of(param.name)] += param.shape.numel();
      total += param.shape.numel();
    }
  }
  console.heading("Model");
  console.info("{}: {} layers, width {}, {} heads of {}, {} kv heads, MLP {}, vocabulary {}{}", model.architecture,
               model.num_layers, model.hidden_size, model.num_heads, model.head_dim, model.num_kv_heads,
               model.intermediate_size, model.vocab_size, model.tie_word_embeddings ? ", tied embeddings" : "");
  if (model.moe) {
    const RouterShape& router = model.moe.router;
    const auto layers =
        std::count_if(model.layers.begin(), model.layers.end(), [](const LayerConfig& l) { return l.is_moe; });
    console.info(
        "experts in {} layers: {} of width {}, {} for each token{}{}", layers, router.num_experts,
        model.moe.intermediate_size, router.top_k,
        model.moe.shared_intermediate_size > 0
            ? fmt::format(", and one of width {} for all", model.moe.shared_intermediate_size)
            : "",
        model.moe.balance_coef > 0 ? fmt::format("; load-balancing loss times {}", model.moe.balance_coef) : "");
  }
  Table table({{"part"}, {"parameters", Table::Align::Right}, {"share", Table::Align::Right}});
  for (const char* part : {"embedding", "attention", "MLP", "router", "experts", "norms", "lm_head"}) {
    if (!parts.count(part)) continue;
    table.row(
        {part, std::to_string(parts[part]), percent(static_cast<double>(parts[part]), static_cast<double>(total))});
  }
  table.rule();
  table.row({"total", std::to_string(total), format_count(static_cast<double>(total))});
  console.table(table);
  if (model.vision_tensors.empty()) return;
  double bytes = 0;
  for (const TensorToWrite& tensor : model.vision_tensors) {
    bytes += static_cast<double>(size_of(tensor.dtype)) *
             std::accumulate(tensor.shape.begin(), tensor.shape.end(), 1.0, std::multiplies());
  }
  console.info("vision tensors: {} ({}) are kept as they are; text is trained", model.vision_tensors.size(),
               format_bytes(bytes));
}

void report_weights(Console& console, const ModelConfig& model, const SafetensorsDirectory& weights) {
  if (model.hf.contains("quantization_config") && !model.hf["quantization_config"].is_null()) {
    console.info("the weights are {}: decoded, trained and saved unquantised",
                 model.hf["quantization_config"].value("quant_method", "quantised"));
  }
  const std::vector<std::string> names = weights.names();
  const auto num_mtp =
      std::count_if(names.begin(), names.end(), [&](const std::string& name) { return is_mtp_tensor(model, name); });
  if (num_mtp > 0) {
    console.info("{} tensors of layers that predict further tokens (MTP) are left out: not trained and not saved",
                 num_mtp);
  }
}

DataProgress report_data_progress(Console& console) {
  struct Bar {
    std::string label;
    std::optional<Progress> progress;
  };
  return [&console, bar = std::make_shared<Bar>()](int64_t done, int64_t total, Progress::Unit unit,
                                                   const std::string& label) {
    if (!bar->progress || bar->label != label) {
      bar->label = label;
      bar->progress.emplace(console, label, total, unit);
    }
    bar->progress->update(done);
    if (done >= total) {
      // Of what is done for every epoch, only what takes its time leaves a line.
      if (unit == Progress::Unit::Bytes || bar->progress->elapsed_s() > 2) bar->progress->finish(done);
      bar->progress.reset();
    }
  };
}

void report_changes(Console& console, const nlohmann::json& saved, const nlohmann::json& now) {
  const nlohmann::json before = saved.flatten(), after = now.flatten();
  std::vector<std::string> lines;
  nlohmann::json either = before;
  either.update(after);
  for (const auto& [pointer, any] : either.items()) {
    if (pointer.starts_with("/checkpoint") || pointer.starts_with("/log") || pointer.starts_with("/debug")) continue;
    const nlohmann::json old = before.value(pointer, nlohmann::json()), value = after.value(pointer, nlohmann::json());
    std::string key = pointer.substr(1);
    std::replace(key.begin(), key.end(), '/', '.');
    if (old != value)
      lines.push_back(fmt::format("{} was {} when the checkpoint was saved, now {}", key, old.dump(), value.dump()));
  }
  for (const std::string& line : lines) console.warning("{}", line);
}

void report_data(Console& console, const char* what, const DataSummary& s) {
  console.heading(what);
  Table table({{"source"},
               {"weight", Table::Align::Right},
               {"files", Table::Align::Right},
               {"documents", Table::Align::Right},
               {"tokens", Table::Align::Right},
               {"size", Table::Align::Right}});
  for (const SourceSummary& source : s.sources) {
    table.row({source.path, fmt::format("{:g}", source.weight), std::to_string(source.num_files),
               std::to_string(source.num_documents), std::to_string(source.num_tokens),
               format_bytes(static_cast<double>(source.size_bytes))});
  }
  console.table(table);
  console.info("{} documents, {} tokens ({} with loss), the longest has {}", s.num_documents, s.num_tokens,
               percent(static_cast<double>(s.num_loss_tokens), static_cast<double>(s.num_tokens)), s.longest_document);
  console.info("first epoch: {} rows, packing efficiency {:.1f}%", s.first_epoch.num_rows, 100 * s.packing_efficiency);
  const PackStats& p = s.first_epoch;
  if (s.num_empty_documents > 0) console.info("{} empty documents are not used", s.num_empty_documents);
  if (p.num_cut_documents > 0) console.info("{} documents are cut into pieces of at most a row", p.num_cut_documents);
  if (p.num_truncated_documents > 0) {
    console.info("{} documents are truncated to a row: {} tokens of an epoch are not used (data.long_documents)",
                 p.num_truncated_documents, p.num_truncated_tokens);
  }
  if (p.num_dropped_documents > 0) {
    console.info("{} documents are longer than a row and dropped: {} tokens of an epoch (data.long_documents)",
                 p.num_dropped_documents, p.num_dropped_tokens);
  }
  for (const std::string& notice : s.notices) console.info("{}", notice);
}

void report_steps(Console& console, const RunConfig& run, const MeshShape& mesh, Loader& train, int64_t total_steps,
                  int64_t total_rows) {
  const double epochs = static_cast<double>(total_rows) / static_cast<double>(train.rows_in_epoch(0));
  console.heading("Steps");
  console.info(
      "{} steps of {} rows x {} tokens ({} tokens a step), {} rows = {:.2f} epochs; micro-batch {}, "
      "accumulation {}",
      total_steps, run.batch.global_batch_size, run.data.seq_len, run.batch.global_batch_size * run.data.seq_len,
      total_rows, epochs, run.batch.micro_batch_size,
      run.batch.global_batch_size / (run.batch.micro_batch_size * mesh.data_parallel()));
  if (mesh.world > 1) {
    console.info("{} ranks: dp_replicate {} x dp_shard {} x sp {}; parameters, gradients and moments in {} shards",
                 mesh.world, mesh.dp_replicate, mesh.dp_shard, mesh.sp, mesh.shards());
  }
}

void report_traffic(Console& console, const Traffic& traffic, const MeshShape& mesh) {
  if (mesh.world == 1) return;
  console.heading("Sent by a rank in a step");
  Table table({{"what"}, {"calls", Table::Align::Right}, {"bytes", Table::Align::Right}});
  const auto row = [&](const char* what, const Traffic::Kind& kind) {
    if (kind.calls > 0) table.row({what, std::to_string(kind.calls), format_bytes(static_cast<double>(kind.bytes))});
  };
  row("weights (all-gather)", traffic.gathers);
  row("gradients (reduce-scatter)", traffic.reduces);
  row("gradients over the replicas (all-reduce)", traffic.replica_sums);
  row("attention (all-to-all), full micro-batches", traffic.exchanges);
  console.table(table);
}

void report_memory(Console& console, const std::vector<MemoryChoice>& choices) {
  const auto mib = [](size_t bytes) { return fmt::format("{:.2f}", static_cast<double>(bytes) / (1 << 20)); };
  const auto mine = std::find_if(choices.begin(), choices.end(), [](const auto& c) { return c.is_this_run; });
  const MemoryPlan& plan = mine->plan;
  console.heading("Memory plan (MiB)");
  Table table(
      {{"section"}, {"tensor"}, {"count", Table::Align::Right}, {"shape"}, {"dtype"}, {"MiB", Table::Align::Right}});
  for (const MemoryPlan::Row& row : plan.rows) {
    table.row({row.section, row.name, std::to_string(row.count), row.shape, name_of(row.dtype), mib(row.size_bytes)});
  }
  const auto sum = [&](const char* what, size_t bytes) { table.row({what, "", "", "", "", mib(bytes)}); };
  table.rule();
  sum("arena (with sharing)", plan.arena_bytes);
  if (plan.is_cuda) {
    sum("workspace of operations", Device::kWorkspaceBytes);
    sum("total of the GPU, without CUDA's libraries", plan.gpu_bytes());
    table.rule();
    if (plan.offloaded_bytes > 0) sum("offloaded block inputs (pinned)", plan.offloaded_bytes);
  }
  sum("program and libraries", plan.program_bytes);
  sum(plan.is_cuda ? "copies, rows of a step" : "GEMM packing, rows of a step", plan.buffer_bytes);
  sum(plan.is_cuda ? "total of the host" : "total", plan.host_bytes());
  console.table(table);
  for (const MemoryChoice& c : choices) {
    const std::string host =
        c.plan.is_cuda ? fmt::format(" of the GPU, {} MiB of the host", mib(c.plan.host_bytes())) : "";
    console.info("{:<52} {} MiB{}{}", c.options, mib(c.plan.is_cuda ? c.plan.gpu_bytes() : c.plan.host_bytes()), host,
                 c.is_this_run ? "   <- this run" : "");
  }
}
