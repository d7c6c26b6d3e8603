#include "llama/model.h"

#include <algorithm>

#include "layers/embedding.h"
#include "layers/loss.h"
#include "layers/rmsnorm.h"
#include "layers/rope.h"

std::vector<UnitSpec> unit_specs(const std::vector<ParamUnit>& units) {
  std::vector<UnitSpec> specs;
  for (const ParamUnit& unit : units) {
    UnitSpec spec{unit.name, {}};
    for (const ParamSpec& param : unit.params) spec.tensors.push_back({param.name, param.shape});
    specs.push_back(std::move(spec));
  }
  return specs;
}

Llama::Llama(Arena& arena, const ModelConfig& config, const ModelOptions& options, Mesh* mesh, Device& device)
    : config_(config), options_(options), device_(device), units_(param_units(config)) {
  const int64_t T = options.max_tokens, C = config.hidden_size;
  const DType dtype = options.dtype, sums = accumulator_dtype(dtype);
  const size_t L = static_cast<size_t>(config.num_layers);
  const int64_t sp = options.mesh.sp;

  arena.begin_section("batch");
  tokens_ = arena.place(DType::I32, {T}, "tokens");
  targets_ = arena.place(DType::I32, {T}, "targets");
  positions_ = arena.place(DType::I32, {T}, "positions");
  loss_rows_ = arena.place(DType::I32, {T}, "loss rows");
  nll_ = arena.place(DType::F64, {1}, "nll");
  if (config.moe) {
    is_token_ = arena.place(DType::I32, {T}, "is token");
    router_load_.emplace(arena, config, dtype, options.mesh, mesh, device);
  }
  inputs_.select_bias.resize(L);
  for (size_t l = 0; config.moe.has_select_bias && l < L; l++) {
    if (config.layers[l].is_moe)
      inputs_.select_bias[l] = arena.place(sums, {config.moe.router.num_experts}, "select bias");
  }
  if (device.is_cuda()) token_order_ = arena.place(DType::I32, {T}, "token order");
  place_documents(documents_, arena);
  for (const LayerConfig& layer : config.layers) chunk_ = std::max(chunk_, layer.chunk);
  if (chunk_ > 0) place_documents(chunks_, arena);
  for (const RopeConfig& rope : config.ropes) {
    const int64_t half = rope.rotary_dim / 2;
    inv_freq_.push_back(arena.place(DType::F32, {half}, "inv_freq"));
    ropes_.push_back({arena.place(sums, {T, half}, "rope cos"), arena.place(sums, {T, half}, "rope sin")});
  }
  inv_freq_seqlen_.assign(config.ropes.size(), 0);
  attention_factor_.assign(config.ropes.size(), 1.0);

  arena.begin_section(options.offload_block_inputs ? "block inputs (of two blocks; the others are offloaded)"
                      : options.recompute_blocks   ? "block inputs (all else is recomputed)"
                                                   : "block inputs");
  h_.emplace(arena, dtype, T, C, config.num_layers, options.offload_block_inputs, device);
  arena.begin_section(options.recompute_blocks ? "activations of one block" : "activations of all blocks");
  for (size_t l = 0; l < (options.recompute_blocks ? 1 : L); l++) {
    const int layer = options.recompute_blocks ? -1 : static_cast<int>(l);
    saved_.push_back(place_block_activations(arena, config, layer, dtype, T, sp));
  }
  arena.begin_section("head");
  x_ = arena.place(dtype, {T, C}, "final norm");
  x_rstd_ = arena.place(sums, {T}, "final norm rstd");
  dh_ = arena.place(dtype, {T, C}, "dh");

  // The head runs when no block does: their buffers overlap.
  const size_t shared = arena.mark();
  arena.begin_section("scratch of a block");
  scratch_ = place_block_scratch(arena, config, dtype, T, sp, device.kind());
  if (sp > 1) ulysses_.emplace(arena, dtype, ulysses_shape(config, sp), T, mesh ? &mesh->sp_tensors() : nullptr);
  const size_t block_end = arena.mark();
  arena.rewind(shared);
  arena.begin_section("scratch of the loss (shares the block's)");
  const LossShape loss{config.final_softcap, options.loss_tile_tokens, config.logit_scale};
  loss_workspace_ = arena.place(
      DType::U8, {static_cast<int64_t>(loss_workspace_bytes(loss, dtype, T, C, config.vocab_size))}, "loss workspace");
  if (arena.mark() < block_end) arena.rewind(block_end);
}

void Llama::place_documents(DocumentBuffers& buffers, Arena& arena) {
  const int64_t all_T = options_.max_tokens * options_.mesh.sp;
  if (!device_.is_cuda()) return;
  buffers.bounds = arena.place(DType::I32, {all_T, 2}, "document bounds");
  buffers.cu_seqlens_device = arena.place(DType::I64, {all_T + 1}, "document ends");
}

Documents Llama::load_documents(DocumentBuffers& buffers, std::vector<int64_t> cu_seqlens) {
  buffers.cu_seqlens = std::move(cu_seqlens);
  Documents documents;
  documents.cu_seqlens = buffers.cu_seqlens;
  if (!device_.is_cuda()) return documents;
  const std::vector<int32_t> bounds = document_bounds(buffers.cu_seqlens);
  device_.upload(buffers.bounds.data, bounds.data(), bounds.size() * sizeof(int32_t));
  documents.bounds = buffers.bounds.rows(0, buffers.cu_seqlens.back());
  const Tensor cu = buffers.cu_seqlens_device.rows(0, static_cast<int64_t>(buffers.cu_seqlens.size()));
  device_.upload(cu.data, buffers.cu_seqlens.data(), cu.size_bytes());
  documents.cu_seqlens_device = cu;
  return documents;
}

Tensor Llama::at_tokens(Tensor buffer) const {
  return buffer.rows(0, inputs_.T);
}

void Llama::load_batch(const Batch& batch) {
  const int64_t T = batch.size();
  CHECK(T > 0 && T <= options_.max_tokens, "a batch of {} tokens does not fit the plan's {}", T, options_.max_tokens);
  const auto copy = [&](Tensor to, const std::vector<int32_t>& from) {
    CHECK(static_cast<int64_t>(from.size()) == T, "the batch has {} {}, expected {}", from.size(), to.name, T);
    device_.upload(to.data, from.data(), from.size() * sizeof(int32_t));
  };
  copy(tokens_, batch.tokens), copy(targets_, batch.targets), copy(positions_, batch.positions);
  if (device_.is_cuda()) copy(token_order_, embedding_order(batch.tokens, config_.vocab_size));
  copy(loss_rows_, loss_rows(batch.targets, config_.vocab_size, num_targets_));
  if (is_token_) {
    std::vector<int32_t> is_token;
    for (const int32_t document : batch.document_ids) is_token.push_back(document >= 0);
    copy(is_token_, is_token);
    inputs_.is_token = is_token_.rows(0, T);
  }
  inputs_.T = T;
  CHECK(batch.cu_seqlens.back() == T * options_.mesh.sp, "{} ranks have {} tokens each of a batch of {}",
        options_.mesh.sp, T, batch.cu_seqlens.back());
  inputs_.documents = load_documents(documents_, batch.cu_seqlens);
  if (chunk_ > 0) inputs_.chunks = load_documents(chunks_, cut_documents(batch.cu_seqlens, chunk_));
  inputs_.ulysses = ulysses_ ? &*ulysses_ : nullptr;
  inputs_.ropes.clear();
  const int64_t seqlen = batch.longest_document;
  for (size_t i = 0; i < config_.ropes.size(); i++) {
    const RopeConfig& rope = config_.ropes[i];
    if (inv_freq_seqlen_[i] == 0 || (rope.depends_on_length() && inv_freq_seqlen_[i] != seqlen)) {
      const RopeTable table = make_rope_table(rope, seqlen);
      device_.upload(inv_freq_[i].data, table.inv_freq.data(), table.inv_freq.size() * sizeof(float));
      attention_factor_[i] = table.attention_factor;
      inv_freq_seqlen_[i] = std::max<int64_t>(seqlen, 1);
    }
    inputs_.ropes.push_back({at_tokens(ropes_[i].cos), at_tokens(ropes_[i].sin)});
    rope_table(device_, inputs_.ropes[i].cos, inputs_.ropes[i].sin, at_tokens(positions_), inv_freq_[i],
               attention_factor_[i]);
  }
}

Tensor Llama::head_weight(ParamStore& params) {
  return config_.tie_word_embeddings ? params.use(0).at(0) : params.use(head_unit()).at(1);
}

Tensor Llama::head_grad(ParamStore& params) {
  return config_.tie_word_embeddings ? params.grads(0).at(0) : params.grads(head_unit()).at(1);
}

void Llama::forward(const Batch& batch, ParamStore& params) {
  run_forward(batch, params, true);
}

void Llama::run_forward(const Batch& batch, ParamStore& params, bool keeps_inputs) {
  load_batch(batch);
  const int64_t T = inputs_.T;
  if (router_load_ && keeps_inputs) inputs_.statistics = router_load_->statistics();
  params.gather(0);
  params.gather(1);
  embedding_forward(device_, h_->write(0, T), at_tokens(tokens_), params.use(0).at(0), config_.stream_scale());
  params.release(0);
  for (int l = 0; l < config_.num_layers; l++) {
    const size_t i = static_cast<size_t>(l), unit = i + 1;
    params.gather(unit + 1);
    if (keeps_inputs) h_->keep(l, T);
    const BlockParams p = block_params(units_[unit], params.use(unit));
    block_forward(device_, config_, l, h_->write(l + 1, T), h_->written(l, T), p, inputs_,
                  saved_[options_.recompute_blocks ? 0 : i], scratch_);
    params.release(unit);
  }
  rmsnorm_forward(device_, at_tokens(x_), x_rstd_.rows(0, T), h_->written(config_.num_layers, T),
                  params.use(head_unit()).at(0), config_.stream_eps(), config_.norm);
  params.release(head_unit());
  inputs_.statistics.clear();
}

void Llama::backward(const Batch& batch, ParamStore& params, const MicroStep& step, Tensor logits) {
  CHECK(inputs_.T == batch.size(), "backward() of a batch of {} tokens after forward() of one of {}", batch.size(),
        inputs_.T);
  const LossShape loss{config_.final_softcap, options_.loss_tile_tokens, config_.logit_scale};
  const int64_t T = inputs_.T, L = config_.num_layers;
  const Tensor dh = at_tokens(dh_);
  if (router_load_) inputs_.balance_slope = router_load_->balance_slope(step.weight, step.num_tokens);
  params.gather(0);
  params.gather(head_unit());
  loss_forward_backward(device_, nll_, dh, head_grad(params), at_tokens(x_), head_weight(params), at_tokens(targets_),
                        {at_tokens(loss_rows_), num_targets_}, step.grad_scale, loss, loss_workspace_, logits);
  rmsnorm_backward(device_, dh, params.grads(head_unit()).at(0), dh, h_->written(L, T), x_rstd_.rows(0, T),
                   params.use(head_unit()).at(0), config_.norm);
  params.release(head_unit());
  params.reduce(head_unit());
  params.gather(static_cast<size_t>(L));
  h_->fetch(L - 1, T);
  for (int l = static_cast<int>(L) - 1; l >= 0; l--) {
    const size_t i = static_cast<size_t>(l), unit = i + 1;
    if (l > 0) params.gather(unit - 1);
    const BlockParams p = block_params(units_[unit], params.use(unit));
    const BlockParams g = block_params(units_[unit], params.grads(unit));
    BlockActivations& saved = saved_[options_.recompute_blocks ? 0 : i];
    const Tensor h = h_->fetched(l, T);
    if (l > 0) h_->fetch(l - 1, T);
    if (options_.recompute_blocks) block_forward(device_, config_, l, {}, h, p, inputs_, saved, scratch_);
    block_backward(device_, config_, l, dh, h, p, g, inputs_, saved, scratch_);
    params.release(unit);
    params.reduce(unit);
  }
  const Tensor order = token_order_ ? at_tokens(token_order_) : Tensor{};
  embedding_backward(device_, params.grads(0).at(0), dh, at_tokens(tokens_), order, config_.stream_scale(),
                     config_.pad_token_id);
  params.release(0);
  params.reduce(0);
}

void Llama::evaluate(const Batch& batch, ParamStore& params, Tensor logits) {
  run_forward(batch, params, false);
  params.gather(0);
  params.gather(head_unit());
  const LossShape loss{config_.final_softcap, options_.loss_tile_tokens, config_.logit_scale};
  loss_forward(device_, nll_, at_tokens(x_), head_weight(params), at_tokens(targets_),
               {at_tokens(loss_rows_), num_targets_}, loss, loss_workspace_, logits);
  params.release(0);
  params.release(head_unit());
}

void Llama::set_select_bias(size_t layer, const std::vector<double>& bias) {
  const Tensor to = inputs_.select_bias.at(layer);
  CHECK(to.numel() == static_cast<int64_t>(bias.size()), "a bias of {} for {} experts", bias.size(), to.numel());
  const std::vector<float> rounded(bias.begin(), bias.end());
  const void* from = to.dtype == DType::F64 ? static_cast<const void*>(bias.data()) : rounded.data();
  device_.copy_from_host(to.data, from, to.size_bytes());
}

double Llama::take_nll() {
  double nll = 0;
  device_.copy_to_host(&nll, nll_.data, sizeof nll);
  device_.fill_zero(nll_.data, nll_.size_bytes());
  return nll;
}
