#include "llama/optimizer.h"

#include "llama/model.h"

#include "test/testing.h"

namespace {

std::vector<ParamUnit> two_units() {
  ParamUnit first{"embedding", {}}, second{"block 0", {}};
  first.params.push_back({"embed_tokens.weight", {4, 3}, Init::Normal, {{"model.embed_tokens.weight", {4, 3}, 0}}});
  second.params.push_back({"norm.weight", {3}, Init::One, {{"model.layers.0.input_layernorm.weight", {3}, 0}}});
  second.params.push_back({"qkv.bias", {4}, Init::Zero, {{"q_proj.bias", {2}, 0}, {"k_proj.bias", {2}, 2}}});
  second.params.push_back(
      {"qkv.weight", {4, 3}, Init::Normal, {{"q_proj.weight", {2, 3}, 0}, {"k_proj.weight", {2, 3}, 6}}});
  return {first, second};
}

/// Two units and their store.
struct TwoUnits {
  explicit TwoUnits(DType dtype) : store(arena, unit_specs(units), dtype, MeshShape{}, nullptr, device) {}

  Device device = Device::cpu();
  Arena arena{device, 1 << 20};
  std::vector<ParamUnit> units = two_units();
  ParamStore store;
};

TEST(Optimizer, norms_and_biases_do_not_decay_by_default_and_patterns_are_obeyed) {
  for (const bool everything : {false, true}) {
    TwoUnits t(DType::F32);
    RunConfig::Optimizer options;
    options.weight_decay = 0.5;
    if (everything) options.no_decay = {"*"};
    AdamW adamw(t.arena, t.store, t.units, options);
    EXPECT_EQ(adamw.num_decayed(), everything ? 0 : 24);
    EXPECT_EQ(adamw.num_decayed() + adamw.num_not_decayed(), 31);
    for (size_t u = 0; u < 2; u++) {
      t.store.gather(u);
      for (const Tensor& w : t.store.use(u)) std::fill_n(w.as<float>(), w.numel(), 1.0f);
    }
    adamw.step(t.device, t.store, 0.1, 1.0, 1);  // no gradient: only decay moves a weight
    const auto value = [&](size_t u, size_t i) { return t.store.use(u)[i].as<float>()[1]; };
    EXPECT_FLOAT_EQ(value(0, 0), everything ? 1.0f : 0.95f);
    EXPECT_FLOAT_EQ(value(1, 0), 1.0f);
    EXPECT_FLOAT_EQ(value(1, 1), 1.0f);
    EXPECT_FLOAT_EQ(value(1, 2), everything ? 1.0f : 0.95f);
  }
}

TEST(Optimizer, a_pattern_may_name_one_of_the_tensors_that_make_a_parameter) {
  TwoUnits t(DType::F64);
  RunConfig::Optimizer options;
  options.weight_decay = 0.5, options.no_decay = {"*norm*", "*bias", "q_proj.weight"};
  AdamW adamw(t.arena, t.store, t.units, options);
  EXPECT_EQ(adamw.num_decayed(), 12 + 6);
  t.store.gather(1);
  const Tensor qk = t.store.use(1)[2];
  std::fill_n(qk.as<double>(), 12, 1.0);
  adamw.step(t.device, t.store, 0.1, 1.0, 1);
  for (int64_t i = 0; i < 12; i++) EXPECT_DOUBLE_EQ(qk.as<double>()[i], i < 6 ? 1.0 : 0.95);
}

TEST(Optimizer, a_step_clips_the_gradient_and_moves_the_moments_of_its_unit) {
  TwoUnits t(DType::F64);
  RunConfig::Optimizer options;
  options.beta1 = 0.75, options.beta2 = 0.5;
  AdamW adamw(t.arena, t.store, t.units, options);
  for (size_t u = 0; u < 2; u++) {
    for (const Tensor& w : t.store.grads(u)) std::fill_n(w.as<double>(), w.numel(), u == 0 ? 4.0 : -8.0);
  }
  adamw.step(t.device, t.store, 0.1, 0.25, 1);
  for (size_t u = 0; u < 2; u++) {
    const double clipped = u == 0 ? 1.0 : -2.0;
    EXPECT_DOUBLE_EQ(adamw.exp_avg(u).as<double>()[1], 0.25 * clipped);
    EXPECT_DOUBLE_EQ(adamw.exp_avg_sq(u).as<double>()[1], 0.5 * clipped * clipped);
    t.store.gather(u);
    for (const Tensor& w : t.store.use(u)) {
      for (int64_t i = 0; i < w.numel(); i++) {  // lr against the sign, less eps
        EXPECT_NEAR(w.as<double>()[i], u == 0 ? -0.1 : 0.1, 1e-8) << w.name << " " << i;
      }
    }
  }
}

TEST(Optimizer, what_does_not_fit_is_refused) {
  TwoUnits t(DType::F32);
  RunConfig::Optimizer options;
  options.name = "muon";
  EXPECT_EQ(error_of([&] { AdamW(t.arena, t.store, t.units, options); }),
            "optimizer.name = muon: the one optimizer is adamw");
  t.units.pop_back();
  EXPECT_EQ(error_of([&] { AdamW(t.arena, t.store, t.units, {}); }), "the store has 2 units, the model 1");
}

TEST(Optimizer, clipping_brings_the_norm_to_the_limit) {
  EXPECT_DOUBLE_EQ(clip_scale(0.5, 1.0), 1.0);
  EXPECT_DOUBLE_EQ(clip_scale(4.0, 1.0), 1.0 / (4.0 + 1e-6)) << "as torch";
  EXPECT_DOUBLE_EQ(clip_scale(4.0, 0.0), 1.0);
}

}  // namespace
