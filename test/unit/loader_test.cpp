#include "data/loader.h"

#include <algorithm>
#include <map>
#include <set>

#include "test/data_testing.h"

namespace {

constexpr int32_t kVocab = 100000;
constexpr int32_t kPad = 99999;

struct Corpus {
  TempDir dir;

  void write(const std::string& name, const TestDocuments& documents) { write_file(dir / name, to_jsonl(documents)); }
  DataOptions options(const std::vector<SourceSpec>& sources, int64_t seq_len = 64) const {
    DataOptions o;
    for (const SourceSpec& s : sources) o.sources.push_back({dir / s.path, s.weight});
    o.seq_len = seq_len;
    o.cache_dir = dir / "cache";
    o.vocab_size = kVocab;
    o.pad_token = kPad;
    return o;
  }
};

bool operator==(const Batch& a, const Batch& b) {
  return a.rows == b.rows && a.row_len == b.row_len && a.tokens == b.tokens && a.targets == b.targets &&
         a.positions == b.positions && a.document_ids == b.document_ids && a.cu_seqlens == b.cu_seqlens &&
         a.num_tokens == b.num_tokens && a.num_loss_tokens == b.num_loss_tokens;
}

/// One document of a row: its tokens and targets.
using Sequence = std::pair<std::vector<int32_t>, std::vector<int32_t>>;

/// Takes a batch apart, checking everything that its fields say about each other.
std::vector<Sequence> take_apart(const Batch& batch, int64_t seq_len, int64_t alignment) {
  std::vector<Sequence> sequences;
  const size_t T = static_cast<size_t>(batch.size());
  EXPECT_EQ(batch.tokens.size(), T);
  EXPECT_EQ(batch.targets.size(), T);
  EXPECT_EQ(batch.positions.size(), T);
  EXPECT_EQ(batch.document_ids.size(), T);
  EXPECT_EQ(batch.row_len % alignment, 0);
  EXPECT_EQ(batch.cu_seqlens.front(), 0);
  EXPECT_EQ(batch.cu_seqlens.back(), batch.size());
  int64_t num_tokens = 0, num_loss_tokens = 0, longest = 0;
  size_t s = 0;  // index in cu_seqlens
  for (int64_t row = 0; row < batch.rows; row++) {
    const int64_t begin = row * batch.row_len, end = begin + batch.row_len;
    int64_t at = begin;
    for (int32_t document_id = 0; at < end && batch.document_ids[static_cast<size_t>(at)] >= 0; document_id++) {
      EXPECT_EQ(batch.cu_seqlens[s], at);
      const int64_t next = batch.cu_seqlens[++s];
      EXPECT_GT(next, at);
      EXPECT_LE(next, end);
      Sequence& sequence = sequences.emplace_back();
      for (int64_t position = 0; at < next; at++, position++) {
        const size_t t = static_cast<size_t>(at);
        EXPECT_EQ(batch.document_ids[t], document_id);
        EXPECT_EQ(batch.positions[t], position);
        sequence.first.push_back(batch.tokens[t]);
        sequence.second.push_back(batch.targets[t]);
        num_tokens++;
        num_loss_tokens += batch.targets[t] != kIgnoreTarget;
      }
    }
    EXPECT_GT(at, begin) << "an empty row";
    EXPECT_LE(at - begin, seq_len);
    longest = std::max(longest, at - begin);
    if (at < end) {  // one tail
      EXPECT_EQ(batch.cu_seqlens[s], at);
      EXPECT_EQ(batch.cu_seqlens[++s], end);
    }
    for (; at < end; at++) {
      const size_t t = static_cast<size_t>(at);
      EXPECT_EQ(batch.tokens[t], kPad);
      EXPECT_EQ(batch.targets[t], kIgnoreTarget);
      EXPECT_EQ(batch.document_ids[t], -1);
      EXPECT_EQ(batch.positions[t], batch.positions[t - 1] + 1);
    }
  }
  EXPECT_EQ(s + 1, batch.cu_seqlens.size());
  EXPECT_EQ(batch.num_tokens, num_tokens);
  EXPECT_EQ(batch.num_loss_tokens, num_loss_tokens);
  EXPECT_EQ(batch.row_len, (longest + alignment - 1) / alignment * alignment) << "padded to the longest row";
  return sequences;
}

/// The pieces of an epoch as one would write them down: cut where `begins` says, targets from the labels.
Sequence piece_of(const TestDocument& d, size_t begin, size_t end, bool has_next) {
  Sequence s;
  for (size_t j = begin; j < end; j++) {
    s.first.push_back(d.tokens[j]);
    const bool has_target = j + 1 < end || has_next;
    s.second.push_back(has_target ? d.labels[j + 1] : kIgnoreTarget);
  }
  return s;
}

std::vector<Sequence> expected_pieces(const TestDocuments& documents, size_t seq_len,
                                      const std::string& long_documents) {
  std::vector<Sequence> pieces;
  for (const TestDocument& d : documents) {
    const size_t n = d.tokens.size();
    if (n > seq_len && long_documents == "drop") continue;
    if (n > seq_len && long_documents == "truncate") {
      pieces.push_back(piece_of(d, 0, seq_len, false));
      continue;
    }
    for (size_t begin = 0; begin < n; begin += seq_len) {
      const size_t end = std::min(begin + seq_len, n);
      pieces.push_back(piece_of(d, begin, end, end < n));
    }
  }
  return pieces;
}

std::vector<Sequence> read_epoch(Loader& loader, int64_t epoch, const DataOptions& o) {
  int64_t first = 0;
  for (int64_t e = 0; e < epoch; e++) first += loader.rows_in_epoch(e);
  std::vector<Sequence> sequences;
  const int64_t end = first + loader.rows_in_epoch(epoch);
  for (int64_t at = first; at < end;) {
    const int64_t count = std::min<int64_t>(1 + at % 5, end - at);
    for (auto& s : take_apart(loader.rows(at, count), o.seq_len, o.row_alignment)) sequences.push_back(std::move(s));
    at += count;
  }
  return sequences;
}

std::vector<Sequence> sorted(std::vector<Sequence> sequences) {
  std::sort(sequences.begin(), sequences.end());
  return sequences;
}

TEST(Loader, every_document_comes_once_an_epoch_with_its_own_targets) {
  Corpus corpus;
  const TestDocuments documents = make_documents(300, 200, kPad);
  corpus.write("a.jsonl", documents);
  for (const char* packing : {"best_fit", "none"}) {
    for (const char* long_documents : {"split", "truncate", "drop", "error"}) {
      for (const bool shuffle : {true, false}) {
        DataOptions o = corpus.options({{"a.jsonl"}}, std::string(long_documents) == "error" ? 200 : 64);
        o.packing = packing, o.long_documents = long_documents, o.shuffle = shuffle, o.row_alignment = 8;
        const auto expected = sorted(expected_pieces(documents, static_cast<size_t>(o.seq_len), long_documents));
        Loader loader(o);
        for (int64_t epoch = 0; epoch < 3; epoch++) EXPECT_EQ(sorted(read_epoch(loader, epoch, o)), expected);
      }
    }
  }
}

// Concat: sorted by sample the pieces follow each other; a piece cut by a row end keeps its next token as target, and
// joined again the pieces are the documents.
TEST(Loader, concat_loses_no_token_and_no_target) {
  Corpus corpus;
  const TestDocuments documents = make_documents(300, 200, kPad);
  corpus.write("a.jsonl", documents);
  std::map<int32_t, std::pair<size_t, size_t>> place_of;  // tokens are unique
  for (size_t d = 0; d < documents.size(); d++) {
    for (size_t j = 0; j < documents[d].tokens.size(); j++) place_of[documents[d].tokens[j]] = {d, j};
  }
  for (const bool shuffle : {true, false}) {
    DataOptions o = corpus.options({{"a.jsonl"}});
    o.packing = "concat", o.shuffle = shuffle;
    Loader loader(o);
    EXPECT_EQ(loader.rows_in_epoch(0), (loader.summary().num_tokens + 63) / 64);
    for (int64_t epoch = 0; epoch < 2; epoch++) {
      std::set<int32_t> seen;
      for (const auto& [tokens, targets] : read_epoch(loader, epoch, o)) {
        const auto [d, begin] = place_of.at(tokens[0]);
        const bool has_next = begin + tokens.size() < documents[d].tokens.size();
        ASSERT_EQ((Sequence{tokens, targets}), piece_of(documents[d], begin, begin + tokens.size(), has_next));
        for (const int32_t token : tokens) ASSERT_TRUE(seen.insert(token).second);
      }
      EXPECT_EQ(static_cast<int64_t>(seen.size()), loader.summary().num_tokens);
    }
    int64_t full = 0;
    for (int64_t r = 0; r < loader.rows_in_epoch(0); r++) full += loader.rows(r, 1).num_tokens == 64;
    EXPECT_GE(full, loader.rows_in_epoch(0) - 1);
  }
}

TEST(Loader, sources_come_as_often_as_their_weights_say) {
  Corpus corpus;
  const TestDocuments a = make_documents(40, 60, 10000, 1), b = make_documents(30, 60, 10000, 2);
  TestDocuments c = make_documents(20, 60, 10000, 3);
  for (auto* documents : {&c}) {
    for (auto& d : *documents) {
      for (auto& t : d.tokens) t += 20000;
      d.labels = d.tokens;
    }
  }
  corpus.write("a1.jsonl", TestDocuments(a.begin(), a.begin() + 15));
  corpus.write("a2.jsonl", TestDocuments(a.begin() + 15, a.end()));
  corpus.write("b.jsonl", b);
  corpus.write("c.jsonl", c);
  const DataOptions o = corpus.options({{"a?.jsonl", 1}, {"b.jsonl", 2}, {"c.jsonl", 0.5}});
  Loader loader(o);
  ASSERT_EQ(loader.summary().sources.size(), 3u);
  EXPECT_EQ(loader.summary().sources[0].num_files, 2);
  EXPECT_EQ(loader.summary().sources[0].num_documents, 40);
  EXPECT_EQ(loader.summary().num_documents, 90);
  EXPECT_EQ(loader.summary().first_epoch.num_documents, 40 + 60 + 10);
  std::vector<Sequence> of_c;
  for (int64_t epoch = 0; epoch < 2; epoch++) {
    auto expected = expected_pieces(a, 64, "split");
    for (int copy = 0; copy < 2; copy++) {
      for (auto& s : expected_pieces(b, 64, "split")) expected.push_back(s);
    }
    std::vector<Sequence> others;
    for (auto& s : read_epoch(loader, epoch, o)) (s.first[0] >= 20000 ? of_c : others).push_back(s);
    EXPECT_EQ(sorted(others), sorted(expected));
    EXPECT_EQ(of_c.size(), epoch == 0 ? 10u : 20u);
  }
  EXPECT_EQ(sorted(of_c), sorted(expected_pieces(c, 64, "split")));  // two halves
}

TEST(Loader, starting_at_any_sample_is_as_if_one_had_come_to_it) {
  Corpus corpus;
  corpus.write("a.jsonl", make_documents(60, 100, kPad));
  for (const char* packing : {"best_fit", "concat", "none"}) {
    DataOptions o = corpus.options({{"a.jsonl", 1.5}});
    o.packing = packing;
    Loader loader(o);
    const int64_t total = loader.rows_in_epoch(0) + loader.rows_in_epoch(1) + loader.rows_in_epoch(2);
    std::vector<Batch> batches;
    for (int64_t sample = 0; sample < total; sample++) batches.push_back(loader.rows(sample, 3));
    for (int64_t sample = total - 1; sample >= 0; sample--) {
      ASSERT_TRUE(loader.rows(sample, 3) == batches[static_cast<size_t>(sample)]) << packing << " " << sample;
      if (sample % 7 == 0) {
        Loader fresh(o);
        ASSERT_TRUE(fresh.rows(sample, 3) == batches[static_cast<size_t>(sample)]) << packing << " " << sample;
      }
    }
  }
}

// Epochs of many windows, each of which is packed and shuffled by itself.
TEST(Loader, windows_join_without_a_gap) {
  Corpus corpus;
  const TestDocuments documents = make_documents(9500, 40, kPad);
  corpus.write("a.jsonl", documents);
  for (const char* packing : {"best_fit", "concat", "none"}) {
    DataOptions o = corpus.options({{"a.jsonl"}}, 30);
    o.packing = packing;
    Loader loader(o);
    if (o.packing != "concat") {
      EXPECT_EQ(sorted(read_epoch(loader, 1, o)), sorted(expected_pieces(documents, 30, "split")));
    }
    const int64_t total = loader.rows_in_epoch(0) + 50;
    std::vector<Batch> batches;
    for (int64_t sample = 0; sample < total; sample++) batches.push_back(loader.rows(sample, 1));
    int64_t num_tokens = 0;
    for (int64_t r = 0; r < total - 50; r++) num_tokens += batches[static_cast<size_t>(r)].num_tokens;
    EXPECT_EQ(num_tokens, loader.summary().num_tokens);
    for (int64_t sample = total - 1; sample >= 0; sample -= 37) {
      ASSERT_TRUE(loader.rows(sample, 1) == batches[static_cast<size_t>(sample)]) << packing << " " << sample;
    }
  }
}

TEST(Loader, a_batch_is_its_rows_one_after_another) {
  Corpus corpus;
  corpus.write("a.jsonl", make_documents(60, 100, kPad));
  Loader loader(corpus.options({{"a.jsonl"}}));
  const int64_t first = loader.rows_in_epoch(0) - 3;  // over the end of an epoch
  const Batch batch = loader.rows(first, 6);
  for (int64_t r = 0; r < 6; r++) {
    const Batch row = loader.rows(first + r, 1);
    for (int64_t t = 0; t < row.row_len; t++) {
      const size_t at = static_cast<size_t>(r * batch.row_len + t);
      ASSERT_EQ(batch.tokens[at], row.tokens[static_cast<size_t>(t)]);
      ASSERT_EQ(batch.targets[at], row.targets[static_cast<size_t>(t)]);
    }
  }
}

std::vector<int32_t> tokens_of(Loader& loader, int64_t first, int64_t count) {
  return loader.rows(first, count).tokens;
}

TEST(Loader, order_depends_on_seed_and_epoch_only) {
  Corpus corpus;
  corpus.write("a.jsonl", make_documents(200, 30, kPad));
  DataOptions o = corpus.options({{"a.jsonl"}});
  Loader one(o), same(o);
  o.seed++;
  Loader other(o);
  EXPECT_EQ(tokens_of(one, 0, 10), tokens_of(same, 0, 10));
  EXPECT_NE(tokens_of(one, 0, 10), tokens_of(other, 0, 10));
  EXPECT_NE(tokens_of(one, 0, 10), tokens_of(one, one.rows_in_epoch(0), 10));
  o.shuffle = false;
  Loader plain(o);
  EXPECT_EQ(plain.rows_in_epoch(0), plain.rows_in_epoch(1));
  EXPECT_EQ(tokens_of(plain, 0, 10), tokens_of(plain, plain.rows_in_epoch(0), 10));
}

// Best fit opens rows with the longest documents; in that order a batch would be all long or all short ones.
TEST(Loader, rows_of_best_fit_are_not_sorted_by_length) {
  Corpus corpus;
  corpus.write("a.jsonl", make_documents(2000, 60, kPad, 1, false));
  DataOptions o = corpus.options({{"a.jsonl"}});
  Loader loader(o);
  double first_half = 0, second_half = 0;  // documents a row
  const int64_t n = loader.rows_in_epoch(0);
  for (int64_t r = 0; r < n; r++) {
    const Batch b = loader.rows(r, 1);
    (r < n / 2 ? first_half : second_half) += *std::max_element(b.document_ids.begin(), b.document_ids.end()) + 1;
  }
  EXPECT_NEAR(first_half / second_half, 1.0, 0.15);
}

TEST(Loader, fractions_of_an_epoch_are_counted_in_rows) {
  Corpus corpus;
  corpus.write("a.jsonl", make_documents(100, 60, kPad));
  Loader loader(corpus.options({{"a.jsonl"}}));
  const int64_t r0 = loader.rows_in_epoch(0), r1 = loader.rows_in_epoch(1), r2 = loader.rows_in_epoch(2);
  EXPECT_EQ(loader.total_rows(1), r0);
  EXPECT_EQ(loader.total_rows(3), r0 + r1 + r2);
  EXPECT_EQ(loader.total_rows(0.5), std::llround(0.5 * static_cast<double>(r0)));
  EXPECT_EQ(loader.total_rows(2.25), r0 + r1 + std::llround(0.25 * static_cast<double>(r2)));
  EXPECT_EQ(loader.total_rows(1e-9), 1);
  expect_error([&] { loader.total_rows(0); }, {"0 epochs"});
  expect_error([&] { loader.total_rows(std::nan("")); }, {"nan epochs"});
}

TEST(Loader, evaluation_is_one_epoch_in_order) {
  Corpus corpus;
  const TestDocuments documents = make_documents(50, 60, kPad);
  corpus.write("a.jsonl", documents);
  DataOptions o = corpus.options({{"a.jsonl"}});
  o.is_eval = true, o.packing = "none";
  Loader loader(o);
  EXPECT_EQ(loader.total_rows(1), 50);
  for (int64_t r = 0; r < 50; r++) {
    EXPECT_EQ(tokens_of(loader, r, 1), documents[static_cast<size_t>(r)].tokens);
  }
  expect_error([&] { loader.rows(49, 2); }, {"no epoch 1", "evaluation"});
}

TEST(Loader, summary_counts_everything) {
  Corpus corpus;
  TestDocuments documents = {{{1, 2, 3}, {1, -100, 3}}, {{}, {}}, {{4}, {4}}, {{5, 6, 7, 8, 9}, {5, 6, 7, 8, 9}}};
  corpus.write("a.jsonl", documents);
  DataOptions o = corpus.options({{"a.jsonl"}}, 4);
  o.long_documents = "truncate";
  const DataSummary s = Loader(o).summary();
  EXPECT_EQ(s.num_documents, 3);
  EXPECT_EQ(s.num_tokens, 9);
  EXPECT_EQ(s.num_loss_tokens, 1 + 0 + 4);
  EXPECT_EQ(s.num_empty_documents, 1);
  EXPECT_EQ(s.longest_document, 5);
  EXPECT_EQ(s.first_epoch.num_truncated_documents, 1);
  EXPECT_EQ(s.first_epoch.num_truncated_tokens, 1);
  EXPECT_EQ(s.first_epoch.num_tokens, 8);
  EXPECT_EQ(s.first_epoch.num_rows, 2);
  EXPECT_DOUBLE_EQ(s.packing_efficiency, 1.0);
  EXPECT_EQ(s.sources[0].size_bytes, static_cast<int64_t>(to_jsonl(documents).size()));
}

// The definition: the batches one by one, and count.
int64_t first_batch_without_target(Loader& loader, int64_t begin, int64_t end, int64_t count) {
  for (int64_t batch = 0; begin + batch * count < end; batch++) {
    const int64_t at = begin + batch * count;
    if (loader.rows(at, std::min(count, end - at)).num_loss_tokens == 0) return batch;
  }
  return -1;
}

TEST(Loader, a_batch_without_target_is_found_wherever_it_is) {
  Corpus corpus;
  // Most documents are masked whole, or after their first half, or have one token.
  TestDocuments documents = make_documents(600, 40, 1000, 3, false);
  for (size_t d = 0; d < documents.size(); d++) {
    auto& [tokens, labels] = documents[d];
    if (d % 4 == 0) std::fill(labels.begin(), labels.end(), kIgnoreTarget);
    if (d % 4 == 1) std::fill(labels.begin() + static_cast<int64_t>(labels.size()) / 2, labels.end(), kIgnoreTarget);
    if (d % 4 == 2) tokens.resize(1), labels.resize(1);
  }
  corpus.write("a.jsonl", documents);
  int num_found = 0, num_none = 0;
  for (const char* packing : {"best_fit", "concat", "none"}) {
    for (const char* long_documents : {"split", "truncate"}) {
      for (const int64_t seq_len : {5, 16, 64}) {
        DataOptions o = corpus.options({{"a.jsonl"}}, seq_len);
        o.packing = packing, o.long_documents = long_documents;
        Loader loader(o);
        const int64_t rows = loader.rows_in_epoch(0);
        for (const int64_t count : {1, 2, 3, 7}) {
          for (const int64_t begin : {int64_t{0}, rows / 2, rows - 1, rows + 3}) {
            const int64_t end = rows + rows / 2;
            const int64_t found = loader.find_batch_without_target(begin, end, count);
            EXPECT_EQ(found, first_batch_without_target(loader, begin, end, count))
                << packing << " " << long_documents << " " << seq_len << " " << begin << " " << count;
            (found < 0 ? num_none : num_found)++;
          }
        }
      }
    }
  }
  EXPECT_GT(num_found, 50);
  EXPECT_GT(num_none, 50);
  Loader loader(corpus.options({{"a.jsonl"}}));
  EXPECT_EQ(loader.find_batch_without_target(5, 5, 3), -1);  // no batch
}

TEST(Loader, a_last_batch_of_fewer_rows_may_have_no_target) {
  Corpus corpus;
  corpus.write("a.jsonl", {{{1, 2}, {1, 2}}, {{3, 4}, {3, 4}}, {{5, 6}, {5, -100}}});
  DataOptions o = corpus.options({{"a.jsonl"}}, 2);
  o.shuffle = false;
  Loader loader(o);
  EXPECT_EQ(loader.find_batch_without_target(0, 3, 2), 1);
  EXPECT_EQ(loader.find_batch_without_target(0, 4, 2), -1);  // row 3 is the first of the next epoch
  EXPECT_EQ(loader.find_batch_without_target(0, 2, 2), -1);
}

// The worked example of data/FORMAT.md.
TEST(Loader, worked_example) {
  Corpus corpus;
  write_file(corpus.dir / "a.jsonl",
             "{\"input_ids\":[1,10,11,12,2],\"labels\":[-100,-100,11,12,2]}\n{\"input_ids\":[1,20,2]}\n");
  DataOptions o = corpus.options({{"a.jsonl"}}, 10);
  o.shuffle = false, o.row_alignment = 4, o.pad_token = 0;
  const Batch b = Loader(o).rows(0, 1);
  const int32_t x = kIgnoreTarget;
  EXPECT_EQ(b.row_len, 8);
  EXPECT_EQ(b.tokens, (std::vector<int32_t>{1, 10, 11, 12, 2, 1, 20, 2}));
  o.row_alignment = 5;
  const Batch padded = Loader(o).rows(0, 1);
  EXPECT_EQ(padded.tokens, (std::vector<int32_t>{1, 10, 11, 12, 2, 1, 20, 2, 0, 0}));
  EXPECT_EQ(padded.targets, (std::vector<int32_t>{x, 11, 12, 2, x, 20, 2, x, x, x}));
  EXPECT_EQ(padded.positions, (std::vector<int32_t>{0, 1, 2, 3, 4, 0, 1, 2, 3, 4}));
  EXPECT_EQ(padded.document_ids, (std::vector<int32_t>{0, 0, 0, 0, 0, 1, 1, 1, -1, -1}));
  EXPECT_EQ(padded.cu_seqlens, (std::vector<int64_t>{0, 5, 8, 10}));
  EXPECT_EQ(padded.num_tokens, 8);
  EXPECT_EQ(padded.num_loss_tokens, 5);

  o.packing = "concat", o.seq_len = 4, o.row_alignment = 1;
  const Batch cut = Loader(o).rows(0, 2);
  EXPECT_EQ(cut.tokens, (std::vector<int32_t>{1, 10, 11, 12, 2, 1, 20, 2}));
  EXPECT_EQ(cut.targets, (std::vector<int32_t>{x, 11, 12, 2, x, 20, 2, x}));
  EXPECT_EQ(cut.positions, (std::vector<int32_t>{0, 1, 2, 3, 0, 0, 1, 2}));
  EXPECT_EQ(cut.document_ids, (std::vector<int32_t>{0, 0, 0, 0, 0, 1, 1, 1}));
  EXPECT_EQ(cut.cu_seqlens, (std::vector<int64_t>{0, 4, 5, 8}));
}

TEST(Loader, formats_mix) {
  Corpus corpus;
  corpus.write("a.jsonl", make_documents(20, 50, 1000));
  const auto m = to_megatron<uint16_t>(make_documents(20, 50, 1000, 2, false), 8);
  write_file(corpus.dir / "m.idx", m.idx);
  write_file(corpus.dir / "m.bin", m.bin);
  write_file(corpus.dir / "t.txt", std::string(1000, 'a'));
  Loader loader(corpus.options({{"a.jsonl"}, {"m"}, {"t.txt", 2}}));
  EXPECT_EQ(loader.summary().first_epoch.num_documents, 42);
  EXPECT_EQ(loader.summary().first_epoch.num_tokens, loader.summary().num_tokens + 1000);
}

TEST(Loader, bad_input_is_refused_with_a_remedy) {
  Corpus corpus;
  corpus.write("a.jsonl", make_documents(20, 50, 1000));
  TestDocuments with_long = make_documents(5, 10, 1000);
  with_long[3].tokens.assign(70, 1), with_long[3].labels = with_long[3].tokens;
  corpus.write("long.jsonl", with_long);
  corpus.write("masked.jsonl", {{{1, 2}, {1, -100}}, {{1}, {1}}});
  const auto refuse = [&](const std::function<void(DataOptions&)>& change, const std::vector<std::string>& message) {
    DataOptions o = corpus.options({{"a.jsonl"}});
    change(o);
    expect_error([&] { Loader loader(o); }, message);
  };
  refuse([](DataOptions& o) { o.sources.clear(); }, {"no data", "data.train"});
  refuse([](DataOptions& o) { o.sources[0].weight = 0; }, {"a.jsonl", "weight 0"});
  refuse([](DataOptions& o) { o.sources[0].weight = std::nan(""); }, {"weight nan"});
  refuse([](DataOptions& o) { o.sources[0].weight = 0.01; }, {"20 documents", "raise the weight to 0.05"});
  refuse([](DataOptions& o) { o.seq_len = 1; }, {"data.seq_len is 1"});
  refuse([](DataOptions& o) { o.packing = "fast"; }, {"data.packing is 'fast'"});
  refuse([](DataOptions& o) { o.long_documents = "cut"; }, {"data.long_documents is 'cut'"});
  refuse([](DataOptions& o) { o.pad_token = -1; }, {"padding token -1"});
  refuse([](DataOptions& o) { o.vocab_size = 0; }, {"vocab_size is 0"});
  refuse([](DataOptions& o) { o.vocab_size = 90, o.pad_token = 0; }, {"a.jsonl:", "vocabulary of 90"});
  refuse([](DataOptions& o) { o.row_alignment = 0; }, {"aligned to 0"});
  refuse(
      [&](DataOptions& o) {
        o.sources[0].path = corpus.dir / "long.jsonl";
        o.long_documents = "error";
      },
      {"long.jsonl:4 (document 3)", "70 tokens", "data.seq_len 64", "split, truncate or drop"});
  refuse([&](DataOptions& o) { o.sources[0].path = corpus.dir / "masked.jsonl"; }, {"no token", "-100"});
  refuse(
      [](DataOptions& o) {
        o.seq_len = 2, o.long_documents = "drop";
        o.sources[0].path += "x";
      },
      {"no file"});
  corpus.write("all_long.jsonl", {{{1, 2, 3}, {1, 2, 3}}});
  refuse(
      [&](DataOptions& o) {
        o.sources[0].path = corpus.dir / "all_long.jsonl";
        o.seq_len = 2, o.long_documents = "drop";
      },
      {"epoch 0 is empty", "longer than data.seq_len 2"});
}

TEST(Loader, progress_reaches_its_end) {
  Corpus corpus;
  corpus.write("a.jsonl", make_documents(100, 50, 1000));
  struct Seen {
    int64_t done = -1, total = 0;
    Progress::Unit unit;
  };
  std::map<std::string, Seen> seen;
  Loader loader(corpus.options({{"a.jsonl"}}),
                [&](int64_t done, int64_t total, Progress::Unit unit, const std::string& label) {
                  EXPECT_GT(done, seen[label].done);
                  seen[label] = {done, total, unit};
                });
  loader.rows_in_epoch(1);
  ASSERT_EQ(seen.size(), 3u);
  for (const auto& [label, s] : seen) {
    const bool is_index = label.find("a.jsonl") != std::string::npos;
    EXPECT_EQ(s.done, s.total) << label;
    EXPECT_EQ(s.total, is_index ? loader.summary().sources[0].size_bytes : 100) << label;
    EXPECT_EQ(s.unit, is_index ? Progress::Unit::Bytes : Progress::Unit::Count) << label;
  }
  EXPECT_TRUE(seen.contains("packing epoch 1") && seen.contains("packing epoch 2"));
}

}  // namespace
