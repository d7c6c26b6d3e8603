// The table: every option of a run, declared once.

#include "llama/run_options.h"

namespace {

constexpr double kLargestSize = std::numeric_limits<int32_t>::max();  // rows and tokens are counted in products of two

Range at_least(double min) {
  return {.min = min};
}
Range above(double min) {
  return {.min = min, .min_is_legal = false};
}

const char* unless(bool used, const char* why) {
  return used ? nullptr : why;
}

}  // namespace

const std::vector<Section>& option_sections() {
  static const std::vector<Section> sections = {
      {"model", "what is trained"},
      {"data", "the documents, and how they fill rows"},
      {"batch", "rows a step"},
      {"optimizer", "how weights move"},
      {"schedule", "the learning rate over the steps"},
      {"train", "how long, and on what"},
      {"parallel", "how ranks share the work"},
      {"memory", "time against memory"},
      {"checkpoint", "Hugging Face model directories that a run can continue from"},
      {"log", "one JSON object a line for every step"},
      {"debug", "what a step computed, for comparison with other trainers"},
  };
  return sections;
}

std::vector<Option> options_of(RunConfig& r) {
  return {
      // model
      {.key = "model.path",
       .value = NullableText{&r.model.path},
       .help = "Hugging Face model directory; config.json alone is enough for random weights. Required."},
      {.key = "model.init",
       .value = &r.model.init,
       .help = "weights from the checkpoint, or drawn at random (pre-training).",
       .choices = {"pretrained", "random"}},
      {.key = "model.seed",
       .value = &r.model.seed,
       .help = "seed of random weights.",
       .unused = [](const RunConfig& run) { return unless(run.model.init == "random", "model.init is pretrained"); }},

      // data
      {.key = "data.train",
       .value = &r.data.train,
       .help = "training documents: files or globs; weight 2 = every document twice an epoch, 0.5 = every other one. "
               "Required."},
      {.key = "data.eval", .value = &r.data.eval, .help = "evaluation documents, like data.train."},
      {.key = "data.format",
       .value = &r.data.format,
       .help = "what the files hold; auto looks at the name and the first bytes.",
       .choices = {"auto", "jsonl", "megatron", "llmc", "bytes"}},
      {.key = "data.seq_len", .value = &r.data.seq_len, .help = "tokens a row.", .range = {.min = 2, .max = 1 << 30}},
      {.key = "data.packing",
       .value = &r.data.packing,
       .help = "best_fit puts whole documents into rows, concat cuts the stream of documents at seq_len, none gives "
               "each document its row.",
       .choices = {"best_fit", "concat", "none"}},
      {.key = "data.long_documents",
       .value = &r.data.long_documents,
       .help = "what happens to a document longer than seq_len.",
       .choices = {"split", "truncate", "drop", "error"},
       .unused =
           [](const RunConfig& run) {
             return unless(run.data.packing != "concat", "data.packing is concat, which cuts every document");
           }},
      {.key = "data.shuffle", .value = &r.data.shuffle, .help = "another order of documents in every epoch."},
      {.key = "data.seed",
       .value = &r.data.seed,
       .help = "seed of the order of documents.",
       .unused = [](const RunConfig& run) { return unless(run.data.shuffle, "data.shuffle is false"); }},
      {.key = "data.cache_dir",
       .value = NullableText{&r.data.cache_dir},
       .help = "where indexes of JSONL files are kept; null = the user's cache directory."},

      // batch
      {.key = "batch.micro_batch_size",
       .value = &r.batch.micro_batch_size,
       .help = "rows of seq_len tokens that a rank computes at once.",
       .range = {.min = 1, .max = kLargestSize}},
      {.key = "batch.global_batch_size",
       .value = &r.batch.global_batch_size,
       .help = "rows of an optimizer step, over all ranks; the rest is gradient accumulation.",
       .range = {.min = 1, .max = kLargestSize}},

      // optimizer
      {.key = "optimizer.name",
       .value = &r.optimizer.name,
       .help = "AdamW: Adam with decoupled weight decay.",
       .choices = {"adamw"}},
      {.key = "optimizer.lr", .value = &r.optimizer.lr, .help = "peak learning rate.", .range = above(0)},
      {.key = "optimizer.betas",
       .value = BetaPair{&r.optimizer.beta1, &r.optimizer.beta2},
       .help = "decay of the averages of the gradient and of its square.",
       .range = {.min = 0, .max = 1, .max_is_legal = false}},
      {.key = "optimizer.eps",
       .value = &r.optimizer.eps,
       .help = "added to the root of the averaged square.",
       .range = above(0)},
      {.key = "optimizer.weight_decay",
       .value = &r.optimizer.weight_decay,
       .help = "every step takes lr * weight_decay of the weight off.",
       .range = at_least(0)},
      {.key = "optimizer.max_grad_norm",
       .value = &r.optimizer.max_grad_norm,
       .help = "gradients are scaled down to this global norm; 0 = never.",
       .range = at_least(0)},
      {.key = "optimizer.no_decay",
       .value = &r.optimizer.no_decay,
       .help = "globs on Hugging Face parameter names that weight decay leaves alone.",
       .unused =
           [](const RunConfig& run) { return unless(run.optimizer.weight_decay != 0, "optimizer.weight_decay is 0"); }},

      // schedule
      {.key = "schedule.name",
       .value = &r.schedule.name,
       .help = "after the warm-up: stay, fall linearly, fall along half a cosine, or stay and fall at the end (wsd).",
       .choices = {"constant", "linear", "cosine", "wsd"}},
      {.key = "schedule.warmup_steps",
       .value = &r.schedule.warmup_steps,
       .help = "the first steps climb linearly: lr/n, 2 lr/n, ..., lr.",
       .range = at_least(0)},
      {.key = "schedule.min_lr_ratio",
       .value = &r.schedule.min_lr_ratio,
       .help = "the last step trains at this share of optimizer.lr.",
       .range = {.min = 0, .max = 1},
       .unused =
           [](const RunConfig& run) { return unless(run.schedule.name != "constant", "schedule.name is constant"); }},
      {.key = "schedule.decay_ratio",
       .value = &r.schedule.decay_ratio,
       .help = "wsd: the last share of all steps that falls.",
       .range = {.min = 0, .max = 1, .min_is_legal = false},
       .unused = [](const RunConfig& run) { return unless(run.schedule.name == "wsd", "schedule.name is not wsd"); }},

      // train
      {.key = "train.steps",
       .value = &r.train.steps,
       .help = "optimizer steps of the whole run, also of a resumed one. Either this or train.epochs.",
       .range = at_least(1)},
      {.key = "train.epochs",
       .value = &r.train.epochs,
       .help = "passes over the documents instead of train.steps; 0.5 is half a pass.",
       .range = {.min = 0, .max = 1e6, .min_is_legal = false}},
      {.key = "train.device",
       .value = &r.train.device,
       .help = "auto = cuda where there is a GPU.",
       .choices = {"auto", "cpu", "cuda"}},
      {.key = "train.dtype",
       .value = &r.train.dtype,
       .help = "of parameters and activations; auto = fp32 on the cpu, bf16 on cuda.",
       .choices = {"auto", "fp32", "bf16"}},
      {.key = "train.grad_dtype",
       .value = &r.train.grad_dtype,
       .help = "in which gradients are summed over micro-batches and sent; those of one micro-batch are fp32.",
       .choices = {"fp32", "bf16"}},
      {.key = "train.eval_every",
       .value = &r.train.eval_every,
       .help = "evaluate every N steps and after the last one; 0 = only after the last one.",
       .range = at_least(0),
       .unused = [](const RunConfig& run) { return unless(!run.data.eval.empty(), "data.eval is empty"); }},

      // parallel
      {.key = "parallel.sp_size",
       .value = &r.parallel.sp_size,
       .help = "ranks that share each row by heads (Ulysses).",
       .range = at_least(1)},
      {.key = "parallel.cp_size",
       .value = &r.parallel.cp_size,
       .help = "ranks that share each row as a ring.",
       .range = at_least(1)},
      {.key = "parallel.dp_replicate_size",
       .value = &r.parallel.dp_replicate_size,
       .help = "whole copies of the sharded state.",
       .range = at_least(1)},
      {.key = "parallel.timeout_s",
       .value = &r.parallel.timeout_s,
       .help = "seconds in which no rank moves, after which the run ends with an error; above the time that mpirun "
               "needs to "
               "notice a lost host (scripts/launch).",
       .range = {.min = 1, .max = 1e6}},

      // memory
      {.key = "memory.recompute",
       .value = &r.memory.recompute,
       .help = "block: keep only the inputs of blocks and compute the rest again in the backward pass; the same bits.",
       .choices = {"none", "block"}},
      {.key = "memory.offload",
       .value = &r.memory.offload,
       .help = "block_inputs: on cuda, keep the inputs of blocks in the memory of the host; the same bits.",
       .choices = {"none", "block_inputs"}},
      {.key = "memory.loss_tile_tokens",
       .value = &r.memory.loss_tile_tokens,
       .help = "rows of logits that exist at once; 0 = chosen by the plan.",
       .range = at_least(0)},

      // checkpoint
      {.key = "checkpoint.dir", .value = &r.checkpoint.dir, .help = "holds step_000100/ and so on."},
      {.key = "checkpoint.every",
       .value = &r.checkpoint.every,
       .help = "save every N steps and at the end; 0 = only at the end.",
       .range = at_least(0)},
      {.key = "checkpoint.keep",
       .value = &r.checkpoint.keep,
       .help = "newest checkpoints that are kept.",
       .range = at_least(1)},
      {.key = "checkpoint.resume",
       .value = &r.checkpoint.resume,
       .help = "auto = from the newest complete checkpoint in checkpoint.dir, if any; never; or the path of a "
               "checkpoint."},

      // log
      {.key = "log.file",
       .value = NullableText{&r.log.file},
       .help = "JSONL file; null = log.jsonl in checkpoint.dir."},
      {.key = "log.every",
       .value = &r.log.every,
       .help = "log every N steps, and the first, the last and every evaluated one.",
       .range = at_least(1)},
      {.key = "log.traffic",
       .value = &r.log.traffic,
       .help = "log what rank 0 sends in a step, by kind, and how long it waits for collectives."},

      // debug
      {.key = "debug.check_collectives",
       .value = &r.debug.check_collectives,
       .help = "compare every collective of every rank before it starts: ranks that differ are an error, not a hang."},
      {.key = "debug.dump_dir",
       .value = NullableText{&r.debug.dump_dir},
       .help = "directory for step_000001.safetensors: loss, gradients, parameters and batch of a step; null = none."},
      {.key = "debug.dump_steps",
       .value = &r.debug.dump_steps,
       .help = "how many steps of this process are dumped.",
       .range = at_least(1),
       .unused = [](const RunConfig& run) { return unless(!run.debug.dump_dir.empty(), "debug.dump_dir is null"); }},
      {.key = "debug.dump_logits",
       .value = &r.debug.dump_logits,
       .help = "dump the logits too.",
       .unused = [](const RunConfig& run) { return unless(!run.debug.dump_dir.empty(), "debug.dump_dir is null"); }},
  };
}
