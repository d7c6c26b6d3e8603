#include "data/packer.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "test/data_testing.h"

namespace {

std::vector<int64_t> random_lengths(int64_t count, int64_t longest, uint64_t seed) {
  const Philox rng(seed, 0);
  std::vector<int64_t> lengths;
  for (int64_t d = 0; d < count; d++) {
    const double u = rng.uniform(static_cast<uint64_t>(d));
    lengths.push_back(1 + static_cast<int64_t>(static_cast<double>(longest - 1) * u * u * u));
  }
  return lengths;
}

DocumentStream stream_of(const std::vector<int64_t>& lengths) {
  return {static_cast<int64_t>(lengths.size()), [&lengths](int64_t place, std::span<DocumentLength> documents) {
            for (DocumentLength& d : documents) d = {place, lengths[static_cast<size_t>(place)]}, place++;
          }};
}

struct Packed {
  std::vector<std::vector<Piece>> rows;
  std::vector<Cursor> cursors;
  std::vector<size_t> first_rows;  // of each window
  PackStats stats;
};

Packed pack_all(const std::vector<int64_t>& lengths, const PackOptions& options, Cursor cursor = {}) {
  Packer packer(options);
  const DocumentStream stream = stream_of(lengths);
  Packed packed;
  while (cursor.place < stream.size) {
    packed.cursors.push_back(cursor);
    packed.first_rows.push_back(packed.rows.size());
    const Rows& rows = packer.pack(stream, cursor, packed.stats);
    for (int64_t r = 0; r < rows.size(); r++) {
      packed.rows.emplace_back(rows.pieces.begin() + rows.row_begin[static_cast<size_t>(r)],
                               rows.pieces.begin() + rows.row_begin[static_cast<size_t>(r) + 1]);
    }
  }
  return packed;
}

int64_t tokens_of(const std::vector<Piece>& row) {
  int64_t n = 0;
  for (const Piece& piece : row) n += piece.count;
  return n;
}

const Packing kPackings[] = {Packing::BestFit, Packing::Concat, Packing::None};
const LongDocuments kLong[] = {LongDocuments::Split, LongDocuments::Truncate, LongDocuments::Drop};

TEST(Packer, every_token_comes_once_or_is_counted) {
  for (const int64_t seq_len : {2, 7, 64, 300}) {
    for (const int64_t count : {1, 5, 1000, 10000}) {
      const auto lengths = random_lengths(count, 200, static_cast<uint64_t>(count));
      for (const Packing packing : kPackings) {
        for (const LongDocuments mode : kLong) {
          const Packed packed = pack_all(lengths, {seq_len, packing, mode});
          std::vector<std::vector<Piece>> of(lengths.size());
          int64_t num_tokens = 0;
          for (const auto& row : packed.rows) {
            ASSERT_FALSE(row.empty());
            ASSERT_LE(tokens_of(row), seq_len);
            ASSERT_TRUE(packing != Packing::None || row.size() == 1);
            for (const Piece& piece : row) {
              ASSERT_GT(piece.count, 0);
              of[static_cast<size_t>(piece.document)].push_back(piece);
            }
            num_tokens += tokens_of(row);
          }
          PackStats expected;
          for (size_t d = 0; d < lengths.size(); d++) {
            std::sort(of[d].begin(), of[d].end(), [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
            const bool is_long = lengths[d] > seq_len && packing != Packing::Concat;
            int64_t kept = lengths[d];
            if (is_long && mode == LongDocuments::Drop) {
              kept = 0;
              expected.num_dropped_documents++, expected.num_dropped_tokens += lengths[d];
            } else if (is_long && mode == LongDocuments::Truncate) {
              kept = seq_len;
              expected.num_truncated_documents++, expected.num_truncated_tokens += lengths[d] - seq_len;
            }
            int64_t at = 0;
            for (const Piece& piece : of[d]) {
              ASSERT_EQ(piece.begin, at);
              at += piece.count;
              ASSERT_EQ(piece.has_next, at < kept);
            }
            ASSERT_EQ(at, kept);
            expected.num_cut_documents += of[d].size() > 1;
            expected.num_tokens += kept;
          }
          EXPECT_EQ(packed.stats.num_documents, count);
          EXPECT_EQ(packed.stats.num_tokens, num_tokens);
          EXPECT_EQ(packed.stats.num_tokens, expected.num_tokens);
          EXPECT_EQ(packed.stats.num_rows, static_cast<int64_t>(packed.rows.size()));
          EXPECT_EQ(packed.stats.num_cut_documents, expected.num_cut_documents);
          EXPECT_EQ(packed.stats.num_dropped_documents, expected.num_dropped_documents);
          EXPECT_EQ(packed.stats.num_dropped_tokens, expected.num_dropped_tokens);
          EXPECT_EQ(packed.stats.num_truncated_documents, expected.num_truncated_documents);
          EXPECT_EQ(packed.stats.num_truncated_tokens, expected.num_truncated_tokens);
        }
      }
    }
  }
}

TEST(Packer, a_window_needs_only_its_cursor) {
  const auto lengths = random_lengths(30000, 150, 3);
  for (const Packing packing : kPackings) {
    for (const LongDocuments mode : kLong) {
      const PackOptions options{100, packing, mode};
      const Packed all = pack_all(lengths, options);
      EXPECT_GT(all.cursors.size(), 3u);
      for (size_t w = 0; w < all.cursors.size(); w++) {
        const Packed rest = pack_all(lengths, options, all.cursors[w]);
        ASSERT_EQ(rest.rows.size(), all.rows.size() - all.first_rows[w]);
        ASSERT_TRUE(std::equal(rest.rows.begin(), rest.rows.end(), all.rows.begin() + all.first_rows[w]));
      }
    }
  }
}

TEST(Packer, a_huge_document_is_packed_in_windows) {
  const std::vector<int64_t> lengths = {5, 1'000'003, 7};
  for (const Packing packing : kPackings) {
    const Packed packed = pack_all(lengths, {10, packing, LongDocuments::Split});
    EXPECT_EQ(packed.stats.num_tokens, 1'000'015);
    EXPECT_GT(packed.cursors.size(), 20u);
    EXPECT_NE(packed.cursors[1].offset, 0);
    EXPECT_EQ(packed.stats.num_cut_documents, packing == Packing::Concat ? 2 : 1);
  }
}

TEST(Packer, concat_fills_every_row_but_the_last) {
  const auto lengths = random_lengths(20000, 500, 4);
  const Packed packed = pack_all(lengths, {128, Packing::Concat, LongDocuments::Error});
  for (size_t r = 0; r + 1 < packed.rows.size(); r++) ASSERT_EQ(tokens_of(packed.rows[r]), 128);
  // In order: the stream itself.
  int64_t place = 0, offset = 0;
  for (const auto& row : packed.rows) {
    for (const Piece& piece : row) {
      if (offset == lengths[static_cast<size_t>(place)]) place++, offset = 0;
      ASSERT_EQ(piece.document, place);
      ASSERT_EQ(piece.begin, offset);
      offset += piece.count;
    }
  }
}

// Best-fit decreasing as one would write it down.
std::vector<std::vector<Piece>> naive_best_fit(std::vector<Piece> pieces, int64_t seq_len) {
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.count > b.count; });
  std::vector<std::vector<Piece>> rows;
  for (const Piece& piece : pieces) {
    std::vector<Piece>* best = nullptr;
    for (auto& row : rows) {
      const int64_t room = seq_len - tokens_of(row);
      if (room >= piece.count && (!best || room < seq_len - tokens_of(*best))) best = &row;
    }
    if (!best) best = &rows.emplace_back();
    best->push_back(piece);
  }
  return rows;
}

TEST(Packer, best_fit_leaves_the_room_that_best_fit_decreasing_leaves) {
  for (uint64_t seed = 0; seed < 30; seed++) {
    for (const int64_t seq_len : {20, 63, 64, 65, 130, 5000}) {
      const auto lengths = random_lengths(300, seq_len, seed);
      const Packed packed = pack_all(lengths, {seq_len, Packing::BestFit, LongDocuments::Error});
      std::vector<Piece> pieces;
      for (size_t d = 0; d < lengths.size(); d++) pieces.push_back({static_cast<int64_t>(d), 0, lengths[d]});
      // Rows of equal room are interchangeable, so the multiset of fills is the same whichever is chosen.
      std::vector<int64_t> fills, expected;
      for (const auto& row : packed.rows) fills.push_back(tokens_of(row));
      for (const auto& row : naive_best_fit(pieces, seq_len)) expected.push_back(tokens_of(row));
      std::sort(fills.begin(), fills.end());
      std::sort(expected.begin(), expected.end());
      ASSERT_EQ(fills, expected) << seed << " " << seq_len;
    }
  }
}

TEST(Packer, best_fit_wastes_less_than_two_percent_of_skewed_lengths) {
  // Log-normal lengths, median 300, as documents of the web have; and the same with rows of 128k.
  for (const int64_t seq_len : {2048, 4096, 131072}) {
    const Philox rng(5, 0);
    std::vector<int64_t> lengths;
    for (uint64_t d = 0; d < 100000; d++) {
      lengths.push_back(1 + static_cast<int64_t>(300 * std::exp(1.2 * rng.normal(d))));
    }
    const Packed packed = pack_all(lengths, {seq_len, Packing::BestFit, LongDocuments::Split});
    const double efficiency =
        static_cast<double>(packed.stats.num_tokens) / static_cast<double>(packed.stats.num_rows * seq_len);
    EXPECT_GT(efficiency, 0.98) << seq_len;
  }
}

TEST(Packer, rows_come_in_the_order_of_their_first_piece) {
  const auto lengths = random_lengths(3000, 100, 6);
  for (const Packing packing : kPackings) {
    const Packed packed = pack_all(lengths, {128, packing, LongDocuments::Error});
    for (size_t r = 0; r < packed.rows.size(); r++) {
      const auto& row = packed.rows[r];
      const auto by_document = [](const Piece& a, const Piece& b) { return a.document < b.document; };
      ASSERT_TRUE(std::is_sorted(row.begin(), row.end(), by_document));
      ASSERT_TRUE(r == 0 || packed.rows[r - 1][0].document <= row[0].document);
    }
  }
}

TEST(Packer, a_long_document_can_be_an_error) {
  expect_error([] { pack_all({3, 11}, {10, Packing::BestFit, LongDocuments::Error}); }, {"document 1", "11", "10"});
  expect_error([] { Packer({1, Packing::BestFit, LongDocuments::Split}); }, {"seq_len is 1"});
  expect_error([] { parse_packing("bestfit"); }, {"'bestfit'", "best_fit, concat or none"});
  expect_error([] { parse_long_documents("cut"); }, {"'cut'", "split, truncate, drop or error"});
}

}  // namespace
