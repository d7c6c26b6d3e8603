// train_gpt: full fine-tuning and pre-training of decoder-only transformers. This file tells the whole story of a run;
// what each word means is in llama/, data/, comm/ and layers/. It holds no kernel: without CUDA it is plain C++.
//
//   [mpirun -n N] build/train_gpt CONFIG.json [--section.key value] [--plan]

#include <chrono>
#include <cmath>
#include <cstdio>
#include <limits>
#include <optional>

#include "comm/communicator.h"
#include "data/loader.h"
#include "layers/core/gemm.h"
#include "layers/core/log.h"
#include "layers/core/parallel.h"
#include "llama/checkpoint.h"
#include "llama/debug_dump.h"
#include "llama/flops.h"
#include "llama/gemm_peak.h"
#include "llama/metrics.h"
#include "llama/report.h"
#include "llama/schedule.h"
#include "llama/stop_signal.h"
#include "llama/validate.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

DataOptions data_options(const RunConfig& run, const ModelConfig& model, bool is_eval) {
  DataOptions o;
  for (const SourceConfig& s : is_eval ? run.data.eval : run.data.train) o.sources.push_back({s.path, s.weight});
  o.format = run.data.format, o.seq_len = run.data.seq_len, o.packing = run.data.packing;
  o.long_documents = run.data.long_documents, o.shuffle = run.data.shuffle && !is_eval, o.seed = run.data.seed;
  o.cache_dir = run.data.cache_dir, o.vocab_size = model.vocab_size;
  o.pad_token = static_cast<int32_t>(std::max<int64_t>(model.pad_token_id, 0));
  o.is_eval = is_eval;
  return o;
}

/// Micro-batches of rows [first, first + count).
std::vector<Batch> micro_batches(Loader& loader, int64_t first, int64_t count, int64_t micro_batch_size) {
  std::vector<Batch> batches;
  for (int64_t row = 0; row < count; row += micro_batch_size) {
    batches.push_back(loader.rows(first + row, std::min(micro_batch_size, count - row)));
  }
  return batches;
}

int64_t count_targets(const std::vector<Batch>& batches) {
  int64_t n = 0;
  for (const Batch& batch : batches) n += batch.num_loss_tokens;
  return n;
}

/// Mean loss over the evaluation set: sum of nll over all targets, divided once. None when a signal comes meanwhile.
std::optional<double> evaluate(Loader& loader, const RunConfig& run, TrainState& state, Communicator& world,
                               StopSignal& stop, Console& console) {
  const int64_t rows = loader.rows_in_epoch(0), micro = run.batch.micro_batch_size;
  Progress progress(console, "evaluating", rows);
  double nll = 0;
  int64_t targets = 0;
  for (int64_t row = 0; row < rows; row += micro) {
    if (stop.received()) return std::nullopt;
    const Batch batch = loader.rows(row, std::min(micro, rows - row));
    nll += state.llama.evaluate(batch, state.params);
    targets += batch.num_loss_tokens;
    progress.update(row + batch.rows);
  }
  return world.sum(nll) / static_cast<double>(world.sum(targets));
}

void check_finite(double loss, double grad_norm, int64_t step) {
  CHECK(std::isfinite(loss) && std::isfinite(grad_norm),
        "step {}: loss {} and gradient norm {} are not finite; the weights are unchanged since step {}. Lower "
        "optimizer.lr, or raise schedule.warmup_steps",
        step, loss, grad_norm, step - 1);
}

/// Weights from a checkpoint of this run, from a pretrained model, or from the generator.
TrainerState resume_or_init(const RunConfig& run, const ModelConfig& model, const std::optional<Checkpoint>& resumed,
                            TrainState& state, Console& console) {
  std::optional<Progress> progress;
  const LoadProgress report = [&](int64_t done, int64_t total) {
    if (!progress) progress.emplace(console, "loading", total, Progress::Unit::Bytes);
    done < total ? progress->update(done) : progress->finish(done);
  };
  if (resumed) {
    load_checkpoint(*resumed, state, model, report);
    console.info("resumed from {} after step {}", resumed->path.string(), resumed->state.step);
    return resumed->state;
  }
  if (run.model.init == "pretrained") {
    load_weights(state.params, model, state.units, SafetensorsDirectory(run.model.path), report);
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
  return {done.step + (left + global - 1) / global, rows};
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
};

/// One optimizer step on `batches`. `step` counts from 1.
StepResult train_step(const RunConfig& run, const std::vector<Batch>& batches, int64_t step, double lr,
                      TrainState& state, Device& device, Communicator& world, DumpedBatch* dump) {
  StepResult result;
  for (const Batch& batch : batches) {
    result.num_tokens += batch.num_tokens;
    result.flops += batch_flops(state.llama.config(), batch);
  }
  result.num_loss_tokens = world.sum(count_targets(batches));
  CHECK(result.num_loss_tokens > 0, "step {}: no token has a target, other than before training; were files changed?",
        step);
  const double grad_scale = 1.0 / static_cast<double>(result.num_loss_tokens);

  state.params.zero_grads();
  double nll = 0;
  for (const Batch& batch : batches) {
    state.llama.forward(batch, state.params);
    nll += state.llama.backward(batch, state.params, grad_scale, dump ? dump->add(batch) : Tensor{});
  }
  result.loss = world.sum(nll) * grad_scale;
  result.grad_norm = state.params.grad_norm();
  check_finite(result.loss, result.grad_norm, step);
  state.adamw.step(device, state.params, lr, clip_scale(result.grad_norm, run.optimizer.max_grad_norm), step);
  return result;
}

int train(Communicator& world, StopSignal& stop, int argc, char** argv) {
  const RunConfig run = parse_run_config(argc, argv);
  if (!run.answer.empty()) {
    if (world.rank() == 0) std::fputs(run.answer.c_str(), stdout);
    return 0;
  }
  Console console = Console::standard(world.rank() == 0);
  console.heading("Run");
  console.print(describe(run, console.width()));

  // The checkpoint that the run goes on from says what the model is, too.
  std::optional<RunLock> lock;
  if (!run.plan) lock.emplace(run.checkpoint.dir);
  std::vector<std::string> notices;
  const auto resumed = choose_checkpoint(run.checkpoint.resume, run.checkpoint.dir, notices);
  for (const std::string& notice : notices) console.info("{}", notice);
  const std::string model_path = resumed ? resumed->path.string() : run.model.path;
  const ModelConfig model = load_model_config(model_path);
  validate(run, model, world, console);
  Device device = open_device(run, console);
  report_model(console, model, param_units(model));

  Loader train_data(data_options(run, model, false), report_data_progress(console));
  report_data(console, "Training data", train_data.summary());
  std::optional<Loader> eval_data;
  if (!run.data.eval.empty()) {
    eval_data.emplace(data_options(run, model, true), report_data_progress(console));
    report_data(console, "Evaluation data", eval_data->summary());
  }
  const int64_t global = run.batch.global_batch_size;
  const TrainerState done = resumed ? resumed->state : TrainerState{};
  const auto [total_steps, total_rows] = length_of(run, train_data, done);
  validate_schedule(run.schedule, total_steps);
  report_steps(console, run, train_data, total_steps, total_rows);
  check_targets(run, train_data, eval_data ? &*eval_data : nullptr, done, total_rows);

  MemoryPlan plan = plan_memory(run, model);
  plan.host_bytes =
      static_cast<size_t>(read_process_memory().resident_bytes) + gemm_buffer_bytes(DType::F32) + batch_bytes(run);
  report_memory(console, plan, recompute_choices(run, model), run);
  if (run.plan) return 0;

  for (const std::string& line : prepare_checkpoint_dir(run.checkpoint.dir)) console.info("{}", line);
  if (!run.debug.dump_dir.empty()) FileSystem().check_writable(run.debug.dump_dir);
  const CompanionFiles companions = read_companion_files(model_path);
  const double peak_flops = measure_gemm_peak(device);
  Arena arena(device, plan.arena_bytes);
  TrainState state(arena, run, model, model_options(run, model), device);

  console.heading("Training");
  TrainerState trainer = resume_or_init(run, model, resumed, state, console);
  if (resumed) report_changes(console, trainer.run, to_json(run));
  console.info("weight decay on {} parameters, none on {} (optimizer.no_decay)", state.adamw.num_decayed(),
               state.adamw.num_not_decayed());
  if (trainer.step >= total_steps) console.info("all {} steps are done already", total_steps);
  trainer.run = to_json(run);
  console.info("device {}, {} threads, GEMM peak {:.1f} GFLOP/s", device.name(), num_threads(), peak_flops * 1e-9);
  MetricsLog log(log_path(run), trainer.step, console);
  const auto save = [&] {
    save_checkpoint(run.checkpoint.dir, state, model, companions, trainer);
    for (const std::string& line : remove_old_checkpoints(run.checkpoint.dir, run.checkpoint.keep, trainer.step)) {
      console.info("{}", line);
    }
    console.info("saved {}", checkpoint_path(run.checkpoint.dir, trainer.step).string());
  };

  StepRate rate;
  int64_t saved_step = resumed ? trainer.step : -1;
  while (trainer.step < total_steps && !stop.received()) {
    const auto start = Clock::now();
    const int64_t step = trainer.step + 1;
    const double lr = lr_at(run.schedule, run.optimizer.lr, trainer.step, total_steps);
    const int64_t rows = std::min(global, total_rows - trainer.next_sample);
    const auto batches = micro_batches(train_data, trainer.next_sample, rows, run.batch.micro_batch_size);
    std::optional<DumpedBatch> dump;
    if (!run.debug.dump_dir.empty() && step - done.step <= run.debug.dump_steps)
      dump.emplace(model.vocab_size, run.debug.dump_logits);

    const StepResult result = train_step(run, batches, step, lr, state, device, world, dump ? &*dump : nullptr);
    trainer.step = step, trainer.next_sample += rows, trainer.num_tokens += result.num_tokens;
    if (dump) write_dump(run.debug.dump_dir, step, result.loss, result.grad_norm, state, *dump);

    const double step_s = seconds_since(start);
    rate.add(step_s, static_cast<double>(result.num_tokens), result.flops);
    StepMetrics metrics;
    metrics.step = step, metrics.loss = result.loss, metrics.grad_norm = result.grad_norm, metrics.lr = lr;
    metrics.num_tokens = result.num_tokens, metrics.num_loss_tokens = result.num_loss_tokens;
    metrics.tokens_per_s = static_cast<double>(result.num_tokens) / step_s;
    metrics.mfu = result.flops / step_s / peak_flops;
    metrics.step_ms = 1e3 * step_s;
    metrics.mem_mib = static_cast<double>(read_process_memory().peak_bytes) / (1 << 20);
    const bool is_last = step == total_steps;
    if (eval_data && !stop.received() && (is_last || (run.train.eval_every > 0 && step % run.train.eval_every == 0))) {
      metrics.eval_loss = evaluate(*eval_data, run, state, world, stop, console);
    }
    if (is_logged_step(step, total_steps, run.log.every, metrics.eval_loss.has_value())) {
      log.write(metrics);
      console.info("{}", to_console_line(metrics, total_steps, rate.tokens_per_s(), rate.flops_per_s() / peak_flops,
                                         rate.eta_s(total_steps - step)));
    }
    if (is_last || (run.checkpoint.every > 0 && step % run.checkpoint.every == 0)) {
      save();
      saved_step = step;
    }
  }
  if (stop.received()) {
    if (trainer.step > 0 && saved_step != trainer.step) save();
    console.info("stopped by signal {} after step {}; start again to go on", stop.received(), trainer.step);
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
    std::fflush(stdout);
    std::fprintf(stderr, "[%s] error: %s\n", who.c_str(), e.what());
    abort_world(1);
  }
}
