// train_gpt: full fine-tuning and pre-training of decoder-only transformers. This file tells the whole story of a run;
// what each word means is in llama/, data/, comm/ and layers/. It holds no kernel: without CUDA it is plain C++.
//
//   [mpirun -n N] build/train_gpt CONFIG.json [--section.key value] [--plan]

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <optional>
#include <thread>

#include "comm/host_ranks.h"
#include "comm/mesh.h"
#include "data/deal.h"
#include "data/loader.h"
#include "layers/attention_cudnn.h"
#include "layers/core/gemm.h"
#include "layers/core/integer.h"
#include "layers/core/log.h"
#include "layers/core/parallel.h"
#include "llama/checkpoint.h"
#include "llama/debug_dump.h"
#include "llama/fingerprint.h"
#include "llama/flops.h"
#include "llama/gemm_peak.h"
#include "llama/host_memory.h"
#include "llama/metrics.h"
#include "llama/report.h"
#include "llama/schedule.h"
#include "llama/selftest.h"
#include "llama/stop_signal.h"
#include "llama/validate.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

DataOptions data_options(const RunConfig& run, const ModelConfig& model, const MeshShape& mesh, bool is_eval) {
  DataOptions o;
  for (const SourceConfig& s : is_eval ? run.data.eval : run.data.train) o.sources.push_back({s.path, s.weight});
  o.format = run.data.format, o.seq_len = run.data.seq_len, o.packing = run.data.packing;
  o.long_documents = run.data.long_documents, o.shuffle = run.data.shuffle && !is_eval, o.seed = run.data.seed;
  o.cache_dir = run.data.cache_dir, o.vocab_size = model.vocab_size;
  o.image_tokens = model.image_tokens;
  o.pad_token = static_cast<int32_t>(std::max<int64_t>(model.pad_token_id, 0));
  o.row_alignment = mesh.sp;
  o.is_eval = is_eval;
  return o;
}

/// A loader on every rank. The first of each host goes ahead: the others find its indexes.
Loader make_loader(const DataOptions& options, Communicator& world, HostRanks& host, Console& console) {
  const DataProgress report = report_data_progress(console);
  const DataProgress progress = [&world, report](int64_t done, int64_t total, Progress::Unit unit,
                                                 const std::string& label) {
    world.moved();
    report(done, total, unit, label);
  };
  std::optional<Loader> loader;
  if (host.rank() == 0) loader.emplace(options, progress);
  host.barrier();
  if (host.rank() > 0) loader.emplace(options, progress);
  return std::move(*loader);
}

/// What one rank computes of a micro-step: its tokens of some rows of the global batch.
struct MicroBatch {
  Batch batch;
  std::vector<int64_t> rows;  ///< numbered within the global batch
  int64_t first_token = 0;    ///< of this rank, in the flattened rows
  double flops = 0;
};

MicroBatch micro_batch(Loader& loader, int64_t first_sample, std::vector<int64_t> rows, const ModelConfig& model,
                       Mesh& mesh) {
  MicroBatch micro;
  std::vector<int64_t> samples;
  for (const int64_t row : rows) samples.push_back(first_sample + row);
  const Batch whole = loader.rows(samples);
  micro.rows = std::move(rows);
  micro.flops = batch_flops(model, whole) / mesh.sp().size();
  micro.batch = slice_of(whole, mesh.sp().rank(), mesh.sp().size());
  micro.first_token = micro.batch.size() * mesh.sp().rank();
  return micro;
}

/// Rows [first, first + count) of the data, dealt to the data-parallel groups.
struct StepRows {
  std::vector<MicroBatch> micro_batches;
  double imbalance = 1;
};

StepRows step_rows(Loader& loader, int64_t first, int64_t count, const RunConfig& run, const ModelConfig& model,
                   Mesh& mesh) {
  std::vector<double> costs;
  for (int64_t row = 0; row < count; row++) costs.push_back(row_flops(model, loader.document_lengths(first + row)));
  Deal deal = deal_rows(costs, mesh.shape().data_parallel(), run.batch.micro_batch_size);
  StepRows step;
  step.imbalance = deal.imbalance;
  for (auto& groups : deal.rows) {
    auto& mine = groups[static_cast<size_t>(mesh.data_parallel_rank())];
    step.micro_batches.push_back(micro_batch(loader, first, std::move(mine), model, mesh));
  }
  return step;
}

/// A signal that any rank has received, agreed on by all: 0 = none.
int agreed_signal(StopSignal& stop, Communicator& world) {
  return static_cast<int>(world.max(stop.received()));
}

/// Mean loss over the evaluation set: sum of nll over all targets, divided once. None when a signal comes meanwhile.
std::optional<double> evaluate(Loader& loader, const RunConfig& run, TrainState& state, Mesh& mesh, StopSignal& stop,
                               Console& console) {
  const int64_t rows = loader.rows_in_epoch(0), micro = run.batch.micro_batch_size;
  const int64_t rows_a_step = micro * mesh.shape().data_parallel();
  Progress progress(console, "evaluating", rows);
  double nll = 0;
  int64_t targets = 0;
  for (int64_t step = 0; step < rows; step += rows_a_step) {
    if (agreed_signal(stop, mesh.world())) return std::nullopt;
    const int64_t first = step + mesh.data_parallel_rank() * micro;
    std::vector<int64_t> mine(static_cast<size_t>(std::clamp<int64_t>(rows - first, 0, micro)));
    std::iota(mine.begin(), mine.end(), first);
    const MicroBatch part = micro_batch(loader, 0, mine, state.llama.config(), mesh);
    state.llama.evaluate(part.batch, state.params);
    nll += state.llama.take_nll();
    targets += part.batch.num_loss_tokens;
    progress.update(std::min(rows, step + rows_a_step));
  }
  return mesh.world().sum(nll) / static_cast<double>(mesh.world().sum(targets));
}

void check_finite(double loss, double grad_norm, int64_t step) {
  CHECK(std::isfinite(loss) && std::isfinite(grad_norm),
        "step {}: loss {} and gradient norm {} are not finite; the weights are unchanged since step {}. Lower "
        "optimizer.lr, or raise schedule.warmup_steps",
        step, loss, grad_norm, step - 1);
}

/// Every rank writes where rank 0 does, wherever it was started.
void use_paths_of_first(RunConfig& run, Communicator& world) {
  if (world.size() == 1) return;
  for (std::string* path : {&run.checkpoint.dir, &run.debug.dump_dir}) {
    if (!path->empty()) *path = world.text_of_first(std::filesystem::absolute(*path).string());
  }
}

/// The ranks of a host share its memory, and its GPUs where they are more. All look before one takes.
MemoryLimits memory_limits(Device& device, HostRanks& host) {
  constexpr int64_t kForLibraries = int64_t{512} << 20;  // what CUDA's libraries take when they are first used
  MemoryLimits limits;
  limits.host_bytes = available_host_memory() / host.size();
  if (device.is_cuda()) {
    const int64_t ranks_of_gpu = ceil_div(host.size(), cuda_device_count());
    limits.gpu_bytes = (device.free_bytes() - kForLibraries) / ranks_of_gpu;
  }
  host.barrier();
  return limits;
}

/// Rank 0 looks for the checkpoint to go on from; every rank reads what it says.
std::optional<Checkpoint> agree_on_checkpoint(const RunConfig& run, Communicator& world, Console& console) {
  std::optional<Checkpoint> chosen;
  if (world.rank() == 0) {
    std::vector<std::string> notices;
    chosen = choose_checkpoint(run.checkpoint.resume, run.checkpoint.dir, notices);
    for (const std::string& notice : notices) console.info("{}", notice);
  }
  const std::string path = world.text_of_first(chosen ? std::filesystem::absolute(chosen->path).string() : "");
  if (!path.empty() && world.rank() > 0) chosen = open_checkpoint(path);
  return chosen;
}

/// Weights from a checkpoint of this run, from a pretrained model, or from the generator.
TrainerState resume_or_init(const RunConfig& run, const ModelConfig& model, const std::optional<Checkpoint>& resumed,
                            TrainState& state, Communicator& world, Console& console) {
  std::optional<Progress> progress;
  const LoadProgress report = [&](int64_t done, int64_t total) {
    world.moved();
    if (!progress) progress.emplace(console, "loading", total, Progress::Unit::Bytes);
    done < total ? progress->update(done) : progress->finish(done);
  };
  if (resumed) {
    load_checkpoint(*resumed, state, model, report);
    console.info("resumed from {} after step {}", resumed->path.string(), resumed->state.step);
    return resumed->state;
  }
  if (run.model.init == "pretrained") {
    SafetensorsDirectory weights(run.model.path);
    report_weights(console, model, weights);
    load_weights(state.params, model, state.units, weights, report);
    state.frozen.load(std::move(weights), state.llama);
  } else {
    init_random(state.params, model, state.units, run.model.seed);
    console.info("weights drawn at random with seed {}", run.model.seed);
  }
  return {};
}

/// Where the run ends: its last step, and the sample after its last row. What is done stays done, also when the batch
/// size has changed since: with train.steps the steps that are left are full, with train.epochs the rows that are left
/// are cut.
std::pair<int64_t, int64_t> length_of(const RunConfig& run, Loader& data, const TrainerState& done) {
  const int64_t global = run.batch.global_batch_size;
  if (run.train.steps) {
    return {*run.train.steps, done.next_sample + std::max<int64_t>(0, *run.train.steps - done.step) * global};
  }
  const int64_t rows = data.total_rows(*run.train.epochs), left = std::max<int64_t>(0, rows - done.next_sample);
  return {done.step + ceil_div(left, global), rows};
}

/// Every step, and the evaluation, needs a target: what would fail in the night is found before training starts.
void check_targets(const RunConfig& run, Loader& train, Loader* eval, const TrainerState& done, int64_t total_rows) {
  const int64_t batch = train.find_batch_without_target(done.next_sample, total_rows, run.batch.global_batch_size);
  CHECK(batch < 0,
        "step {}: none of its tokens would have a target (all labels are -100, or all documents have one token); give "
        "it more rows with batch.global_batch_size, or correct the labels",
        done.step + 1 + batch);
  if (eval == nullptr) return;
  const int64_t rows = eval->rows_in_epoch(0);
  CHECK(
      eval->find_batch_without_target(0, rows, rows) < 0,
      "no token of data.eval has a target (all labels are -100, or all documents have one token); correct the labels, "
      "or name other files");
}

/// What a step of the trainer computes, before the clock and the log.
struct StepResult {
  double loss = 0, grad_norm = 0, flops = 0;
  int64_t num_tokens = 0, num_loss_tokens = 0;
  std::optional<RouterLoad::Load> router_load;
};

/// One optimizer step. `step` counts from 1.
StepResult train_step(const RunConfig& run, const std::vector<MicroBatch>& micro_batches, int64_t step, double lr,
                      TrainState& state, Device& device, Mesh& mesh, DumpedBatch* dump) {
  Communicator& world = mesh.world();
  StepResult result;
  for (const MicroBatch& micro : micro_batches) {
    result.num_tokens += micro.batch.num_tokens;
    result.num_loss_tokens += micro.batch.num_loss_tokens;
    result.flops += micro.flops;
  }
  std::vector<double> sums = {static_cast<double>(result.num_tokens), static_cast<double>(result.num_loss_tokens),
                              result.flops};
  for (const MicroBatch& micro : micro_batches) sums.push_back(static_cast<double>(micro.batch.num_tokens));
  const auto totals = world.sums(sums);
  result.num_tokens = std::llround(totals[0]), result.num_loss_tokens = std::llround(totals[1]);
  result.flops = totals[2];
  CHECK(result.num_loss_tokens > 0, "step {}: no token has a target, other than before training; were files changed?",
        step);
  MicroStep micro_step;
  micro_step.grad_scale = 1.0 / static_cast<double>(result.num_loss_tokens);
  micro_step.weight = 1.0 / static_cast<double>(micro_batches.size());

  state.params.zero_grads();
  for (size_t m = 0; m < micro_batches.size(); m++) {
    const MicroBatch& micro = micro_batches[m];
    micro_step.num_tokens = std::llround(totals[3 + m]);
    const Tensor logits = dump ? dump->add(micro.batch, micro.rows, micro.first_token) : Tensor{};
    state.llama.forward(micro.batch, state.params);
    state.llama.backward(micro.batch, state.params, micro_step, logits);
  }
  state.params.finish_grads();
  if (device.is_cuda()) world.barrier();        // which is watched, as waiting for a GPU is not
  result.grad_norm = state.params.grad_norm();  // waits for the device, and the loss is there, too
  result.loss = world.sum(state.llama.take_nll()) * micro_step.grad_scale;
  if (RouterLoad* routers = state.llama.router_load()) {
    result.router_load = routers->take();
    result.loss += result.router_load->balance_loss;
  }
  check_finite(result.loss, result.grad_norm, step);
  state.adamw.step(device, state.params, lr, clip_scale(result.grad_norm, run.optimizer.max_grad_norm), step);
  return result;
}

int train(Communicator& world, StopSignal& stop, int argc, char** argv) {
  RunConfig run = parse_run_config(argc, argv);
  if (!run.answer.empty()) {
    if (world.rank() == 0) std::fputs(run.answer.c_str(), stdout);
    return 0;
  }
  Console console = Console::standard(world.rank() == 0);
  if (run.selftest) {
    Device gpu = Device::cuda(0);
    return selftest(gpu, console) ? 0 : 1;
  }
  resolve_device(run);
  console.heading("Run");
  console.print(describe(run, console.width()));

  world.set_timeout(run.parallel.timeout_s);
  if (run.debug.check_collectives) world.check_collectives();
  check_same(world, "program", program_fingerprint());
  check_same(world, "run configuration", to_json(run).dump());
  use_paths_of_first(run, world);
  const MeshShape shape = mesh_shape(run.world > 0 ? run.world : world.size(), run.parallel.dp_replicate_size,
                                     run.parallel.cp_size, run.parallel.sp_size);
  HostRanks host(world);
  for (const std::string& line : lines_of_hosts(world, host, host.choose_threads())) console.info("{}", line);

  // The checkpoint that the run goes on from says what the model is, too.
  std::optional<RunLock> lock;
  if (!run.plan && world.rank() == 0) lock.emplace(run.checkpoint.dir);
  if (!run.plan) check_shared(world, "checkpoint.dir", run.checkpoint.dir);
  const auto resumed = agree_on_checkpoint(run, world, console);
  const std::string model_path = resumed ? resumed->path.string() : run.model.path;
  const ModelConfig model = load_model_config(model_path);
  check_same(world, "model configuration", model.hf.dump());
  validate(run, model, shape, console);
  Device device = open_device(run, host.rank());
  attention_cudnn_log([&](const std::string& line) { console.info("{}", line); });
  report_model(console, model, param_units(model));

  Loader train_data = make_loader(data_options(run, model, shape, false), world, host, console);
  report_data(console, "Training data", train_data.summary());
  std::optional<Loader> eval_data;
  if (!run.data.eval.empty()) {
    eval_data.emplace(make_loader(data_options(run, model, shape, true), world, host, console));
    report_data(console, "Evaluation data", eval_data->summary());
  }
  const int64_t global = run.batch.global_batch_size;
  const TrainerState done = resumed ? resumed->state : TrainerState{};
  const auto [total_steps, total_rows] = length_of(run, train_data, done);
  validate_schedule(run.schedule, total_steps);
  if (world.size() > 1) {
    check_same(world, "content of data.train", fingerprint(train_data));
    if (eval_data) check_same(world, "content of data.eval", fingerprint(*eval_data));
    if (resumed || run.model.init == "pretrained") {
      check_same(world, "content of " + model_path, fingerprint(SafetensorsDirectory(model_path)));
    }
  }
  report_steps(console, run, shape, train_data, total_steps, total_rows);
  check_targets(run, train_data, eval_data ? &*eval_data : nullptr, done, total_rows);

  report_memory(console, memory_choices(run, model, shape));
  report_traffic(console, plan_traffic(run, model, shape), shape);
  if (run.plan) return 0;
  check_memory(run, model, shape, memory_limits(device, host));

  Mesh mesh(world, shape, device);
  if (world.rank() == 0) {
    for (const std::string& line : prepare_checkpoint_dir(run.checkpoint.dir)) console.info("{}", line);
    if (!run.debug.dump_dir.empty()) FileSystem().check_writable(run.debug.dump_dir);
  }
  if (!run.debug.dump_dir.empty()) check_shared(world, "debug.dump_dir", run.debug.dump_dir);
  const CompanionFiles companions = read_companion_files(model_path);
  const ModelOptions options = model_options(run, model, shape);
  const double peak_flops = world.sum(gemm_peak(device, options.dtype));
  Arena arena(device, plan_memory(run, model, shape).arena_bytes);
  TrainState state(arena, run, model, options, shape, &mesh, device);

  console.heading("Training");
  TrainerState trainer = resume_or_init(run, model, resumed, state, world, console);
  if (resumed) report_changes(console, trainer.run, to_json(run));
  console.info("weight decay on {} parameters, none on {} (optimizer.no_decay)", state.adamw.num_decayed(),
               state.adamw.num_not_decayed());
  if (trainer.step >= total_steps) console.info("all {} steps are done already", total_steps);
  trainer.run = to_json(run);
  console.info("device {}, {}, {} threads, GEMM peak {:.1f} GFLOP/s", device.name(), name_of(options.dtype),
               num_threads(), peak_flops * 1e-9);
  if (run.train.grad_dtype != "fp32") {
    console.info("gradients are {} where they are summed over micro-batches or sent (train.grad_dtype)",
                 run.train.grad_dtype);
  }
  if (shape.world > 1) console.info("tensors travel by {}", mesh.transport());
  std::optional<MetricsLog> log;
  if (world.rank() == 0) log.emplace(log_path(run), trainer.step, console);
  const FileSystem disk([&](const char*, const std::filesystem::path&) {
    world.moved();  // a slow disk is not a hang
    return 0;
  });
  const auto save = [&] {
    save_checkpoint(run.checkpoint.dir, state, model, companions, trainer, mesh, disk);
    if (world.rank() == 0) {
      for (const std::string& line :
           remove_old_checkpoints(run.checkpoint.dir, run.checkpoint.keep, trainer.step, disk)) {
        console.info("{}", line);
      }
    }
    console.info("saved {}", checkpoint_path(run.checkpoint.dir, trainer.step).string());
  };

  StepRate rate;
  int64_t saved_step = resumed ? trainer.step : -1;
  int signal = 0;
  while (trainer.step < total_steps && !(signal = agreed_signal(stop, world))) {
    const auto start = Clock::now();
    const int64_t step = trainer.step + 1;
    const double lr = lr_at(run.schedule, run.optimizer.lr, trainer.step, total_steps);
    const int64_t rows = std::min(global, total_rows - trainer.next_sample);
    const StepRows data = step_rows(train_data, trainer.next_sample, rows, run, model, mesh);
    std::optional<DumpedBatch> dump;
    if (!run.debug.dump_dir.empty() && step - done.step <= run.debug.dump_steps) {
      dump.emplace(train_data.rows(trainer.next_sample, rows), model.vocab_size, run.debug.dump_logits, device);
    }

    const Traffic sent_before = measured_traffic(state);
    const double waited_before_s = world.waited_s();
    const StepResult result =
        train_step(run, data.micro_batches, step, lr, state, device, mesh, dump ? &*dump : nullptr);
    trainer.step = step, trainer.next_sample += rows, trainer.num_tokens += result.num_tokens;
    if (dump) write_dump(run.debug.dump_dir, step, result.loss, result.grad_norm, state, *dump, mesh);

    const double step_s = seconds_since(start);
    rate.add(step_s, static_cast<double>(result.num_tokens), result.flops);
    StepMetrics metrics;
    metrics.step = step, metrics.loss = result.loss, metrics.grad_norm = result.grad_norm, metrics.lr = lr;
    metrics.num_tokens = result.num_tokens, metrics.num_loss_tokens = result.num_loss_tokens;
    metrics.tokens_per_s = static_cast<double>(result.num_tokens) / step_s;
    metrics.mfu = result.flops / step_s / peak_flops;
    metrics.step_ms = 1e3 * step_s;
    metrics.mem_mib = static_cast<double>(world.max(read_process_memory().peak_bytes)) / (1 << 20);
    metrics.imbalance = data.imbalance;
    metrics.router_load = result.router_load;
    if (run.log.traffic) metrics.traffic = measured_traffic(state) - sent_before;
    metrics.wait_ms = 1e3 * (world.waited_s() - waited_before_s);
    const bool is_last = step == total_steps;
    if (eval_data && (is_last || (run.train.eval_every > 0 && step % run.train.eval_every == 0))) {
      metrics.eval_loss = evaluate(*eval_data, run, state, mesh, stop, console);
    }
    if (is_logged_step(step, total_steps, run.log.every, metrics.eval_loss.has_value())) {
      if (log) log->write(metrics);
      console.info("{}", to_console_line(metrics, total_steps, rate.tokens_per_s(), rate.flops_per_s() / peak_flops,
                                         rate.eta_s(total_steps - step)));
    }
    if (is_last || (run.checkpoint.every > 0 && step % run.checkpoint.every == 0)) {
      save();
      saved_step = step;
    }
  }
  if (signal != 0) {
    if (trainer.step > 0 && saved_step != trainer.step) save();
    console.info("stopped by signal {} after step {}; start again to go on", signal, trainer.step);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::string who = "train_gpt";
  StopSignal stop;                      // before MPI starts its threads, which would be killed by the signals otherwise
  std::unique_ptr<Communicator> world;  // outlives a failure: an unwound rank would wait for the others in its end
  try {
    world = make_world_communicator(&argc, &argv);
    who = fmt::format("rank {}/{} {}", world->rank(), world->size(), world->host());
    return train(*world, stop, argc, argv);
  } catch (const std::exception& e) {
    // What fails on several ranks is said once, by the first, whose abort ends the others (SIGTERM) while they wait.
    const int rank = world ? world->rank() : 0;
    const auto patience = std::chrono::milliseconds(rank == 0 ? 0 : 1000 + 100 * std::min(rank, 20));
    stop.arrived();  // what came before the error is not the abort
    for (const auto start = Clock::now(); Clock::now() - start < patience;) {
      if (stop.arrived() == SIGTERM) std::_Exit(1);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    std::fflush(stdout);
    std::fprintf(stderr, "[%s] error: %s\n", who.c_str(), e.what());
    abort_world(1);
  }
}
