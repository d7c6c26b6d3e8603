// What must not change a number: packing, order, neighbours, accumulation, recompute, tiles, threads.
#include <omp.h>

#include "test/model_testing.h"

namespace {

const char* const kFamilies[] = {"mistral", "gemma2",  "qwen3",         "smollm3",   "cohere2",
                                 "glm4",    "granite", "mixtral_fused", "qwen2_moe", "deepseek_v3"};
// A load-balancing loss is of a whole micro-step: these two are no sums over documents.
const char* const kBalanced[] = {"qwen3_moe", "gpt_oss"};

std::vector<const char*> all_families() {
  std::vector<const char*> all(std::begin(kFamilies), std::end(kFamilies));
  all.insert(all.end(), std::begin(kBalanced), std::end(kBalanced));
  return all;
}

const std::vector<int64_t> kLengths = {5, 1, 2, 70, 33, 64, 65};

bool bit_equal(const std::map<std::string, HostTensor>& a, const std::map<std::string, HostTensor>& b) {
  for (const auto& [name, gradient] : a) {
    if (!gradient.bit_equal(b.at(name))) return false;
  }
  return a.size() == b.size();
}

ModelOptions roomy(bool recompute = false) {
  return {DType::F32, 512, 64, recompute};
}

TEST(Invariance, a_document_has_the_same_loss_packed_or_alone) {
  for (const char* family : kFamilies) {
    const auto model = TestModel::load(fixture_path(family), roomy());
    const auto documents = random_documents(kLengths, 97, 1);
    double alone = 0;
    for (const auto& d : documents) {
      if (d.size() > 1) alone += model->run({make_batch({d})}) * static_cast<double>(d.size() - 1);
    }
    const Batch batch = make_batch(documents);
    const double packed = model->run({batch}) * static_cast<double>(batch.num_loss_tokens);
    // Only the order of the double sum of nll, and of the GEMM's row blocks, differs.
    EXPECT_NEAR(packed, alone, 1e-6 * alone) << family;
  }
}

TEST(Invariance, changing_one_document_leaves_the_logits_of_another_bit_equal) {
  for (const char* family : kFamilies) {
    const auto model = TestModel::load(fixture_path(family), roomy());
    auto documents = random_documents(kLengths, 97, 1);
    const int64_t T = make_batch(documents).size(), V = 97;
    HostTensor before(DType::F32, {T, V}), after(DType::F32, {T, V});
    model->run({make_batch(documents)}, before);
    for (int32_t& token : documents[3]) token = (token + 13) % 97;
    model->run({make_batch(documents)}, after);
    int64_t changed = 0;
    for (int64_t t = 0; t < T; t++) {
      const bool inside = t >= 8 && t < 78;
      for (int64_t v = 0; v < V; v++) {
        const bool equal = before.get(t * V + v) == after.get(t * V + v);
        ASSERT_TRUE(equal || inside) << family << " token " << t;
        changed += !equal;
      }
    }
    EXPECT_GT(changed, 70 * V / 2) << family;
  }
}

TEST(Invariance, accumulation_gives_the_gradients_of_one_batch) {
  for (const char* family : kFamilies) {
    const auto model = TestModel::load(fixture_path(family), roomy());
    auto documents = random_documents(kLengths, 97, 2);
    Batch masked = make_batch({documents[3]});  // a micro-batch without any target
    std::fill(masked.targets.begin(), masked.targets.end(), kIgnoreTarget);
    masked.num_loss_tokens = 0;
    const double whole = model->run({make_batch({documents[0], documents[1], documents[2]}), masked,
                                     make_batch({documents[4], documents[5], documents[6]})});
    const auto accumulated = model->gradients();
    Batch one = make_batch(documents);
    for (size_t t = 8; t < 78; t++) one.targets[t] = kIgnoreTarget;
    one.num_loss_tokens -= 69;
    EXPECT_NEAR(model->run({one}), whole, 1e-6 * whole) << family;
    for (const auto& [name, gradient] : model->gradients()) {
      EXPECT_LE(relative_l2(accumulated.at(name), gradient), 1e-5) << family << " " << name;
    }
  }
}

TEST(Invariance, recompute_changes_no_bit) {
  for (const char* family : all_families()) {
    const auto kept = TestModel::load(fixture_path(family), roomy(false));
    const auto recomputed = TestModel::load(fixture_path(family), roomy(true));
    const Batch batch = make_batch(random_documents(kLengths, 97, 3));
    EXPECT_EQ(kept->run({batch}), recomputed->run({batch})) << family;
    EXPECT_TRUE(bit_equal(kept->gradients(), recomputed->gradients())) << family;
  }
}

TEST(Invariance, a_second_run_and_another_number_of_threads_change_no_bit) {
  const int threads = omp_get_max_threads();
  for (const char* family : all_families()) {
    omp_set_num_threads(3);  // scratch is planned for the most threads
    const auto model = TestModel::load(fixture_path(family), roomy());
    const Batch batch = make_batch(random_documents(kLengths, 97, 4));
    const double loss = model->run({batch});
    const auto gradients = model->gradients();
    for (const int n : {3, 2, 1}) {
      omp_set_num_threads(n);
      EXPECT_EQ(model->run({batch}), loss) << family << " with " << n << " threads";
      EXPECT_TRUE(bit_equal(gradients, model->gradients())) << family << " with " << n << " threads";
    }
  }
  omp_set_num_threads(threads);
}

TEST(Invariance, loss_tiles_change_nothing_but_rounding) {
  const Batch batch = make_batch(random_documents(kLengths, 97, 5));
  ModelOptions small = roomy(), large = roomy();
  small.loss_tile_tokens = 7, large.loss_tile_tokens = 1000;
  const auto a = TestModel::load(fixture_path("gemma2"), small), b = TestModel::load(fixture_path("gemma2"), large);
  const double loss = b->run({batch});
  EXPECT_NEAR(a->run({batch}), loss, 1e-6 * loss);
  const auto expected = b->gradients();
  for (const auto& [name, gradient] : a->gradients()) EXPECT_LE(relative_l2(gradient, expected.at(name)), 1e-5) << name;
}

TEST(Invariance, random_weights_depend_on_seed_and_name_only) {
  ModelConfig config = load_model_config(fixture_path("qwen2"));
  TestModel a(config, roomy()), b(config, roomy()), c(config, roomy());
  init_random(a.params(), a.config(), a.units(), 1);
  init_random(b.params(), b.config(), b.units(), 1);
  init_random(c.params(), c.config(), c.units(), 2);
  const auto bytes = [](TestModel& m, const ShardPiece& piece) {
    const Tensor t = piece_of(m.params().param_shard(piece.unit), piece);
    return std::vector<float>(t.as<float>(), t.as<float>() + piece.count);
  };
  for (const ShardPiece& piece : a.pieces()) {
    EXPECT_EQ(bytes(a, piece), bytes(b, piece)) << piece.disk->hf_name;
    EXPECT_EQ(bytes(a, piece) != bytes(c, piece), piece.param->init == Init::Normal) << piece.disk->hf_name;
  }
}

}  // namespace
