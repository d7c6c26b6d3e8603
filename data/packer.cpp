// Packing. Contract: packer.h.
#include "data/packer.h"

#include <algorithm>
#include <bit>

#include "layers/core/check.h"

namespace {

// A window ends when it has this many pieces and, for best fit, tokens for this many rows: the last row of a window is
// half empty on average, so that less than 1/500 of all room is lost there. Never more than kMaxPieces, about 90 MiB.
constexpr int64_t kMinPieces = 4096;
constexpr int64_t kMinRows = 256;
constexpr int64_t kMaxPieces = 1 << 20;

constexpr int64_t kAhead = 1024;  // documents read at once

}  // namespace

Packing parse_packing(const std::string& name) {
  if (name == "best_fit") return Packing::BestFit;
  if (name == "concat") return Packing::Concat;
  if (name == "none") return Packing::None;
  fail("data.packing is '{}', expected best_fit, concat or none", name);
}

LongDocuments parse_long_documents(const std::string& name) {
  if (name == "split") return LongDocuments::Split;
  if (name == "truncate") return LongDocuments::Truncate;
  if (name == "drop") return LongDocuments::Drop;
  if (name == "error") return LongDocuments::Error;
  fail("data.long_documents is '{}', expected split, truncate, drop or error", name);
}

// The set is a tree of bits, 64 children a node: 3 levels for 262144 tokens.
Packer::RoomSet::RoomSet(int64_t size) {
  do {
    size = (size + 63) / 64;
    levels_.emplace_back(static_cast<size_t>(size), uint64_t{0});
  } while (size > 1);
}

void Packer::RoomSet::insert(int64_t room) {
  for (auto& level : levels_) {
    level[static_cast<size_t>(room / 64)] |= uint64_t{1} << (room % 64);
    room /= 64;
  }
}

void Packer::RoomSet::erase(int64_t room) {
  for (auto& level : levels_) {
    uint64_t& word = level[static_cast<size_t>(room / 64)];
    word &= ~(uint64_t{1} << (room % 64));
    if (word != 0) return;
    room /= 64;
  }
}

int64_t Packer::RoomSet::at_least(int64_t room) const {
  // Up, to the first level where a member follows in the same word; then down to its least member.
  for (size_t k = 0; k < levels_.size(); k++) {
    const size_t word = static_cast<size_t>(room / 64);
    if (word >= levels_[k].size()) return -1;
    const uint64_t members = levels_[k][word] & (~uint64_t{0} << (room % 64));
    if (members != 0) {
      room = room / 64 * 64 + std::countr_zero(members);
      while (k-- > 0) room = room * 64 + std::countr_zero(levels_[k][static_cast<size_t>(room)]);
      return room;
    }
    room = room / 64 + 1;
  }
  return -1;
}

namespace {

int64_t checked_seq_len(int64_t seq_len) {
  CHECK(seq_len >= 2 && seq_len <= int64_t{1} << 30,
        "data.seq_len is {}, expected 2 to 2^30: a row of one token has no target", seq_len);
  return seq_len;
}

}  // namespace

Packer::Packer(const PackOptions& options) : options_(options), rooms_(checked_seq_len(options.seq_len) + 1) {
  newest_with_room_.assign(static_cast<size_t>(options.seq_len) + 1, -1);
}

bool Packer::is_full() const {
  const int64_t n = static_cast<int64_t>(pieces_.size());
  if (options_.packing != Packing::BestFit) return n >= kMinPieces;
  return n >= kMaxPieces || (n >= kMinPieces && num_tokens_ >= kMinRows * options_.seq_len);
}

const Rows& Packer::pack(const DocumentStream& stream, Cursor& cursor, PackStats& stats) {
  take_pieces(stream, cursor, stats);
  int64_t num_rows = 0;
  switch (options_.packing) {
    case Packing::BestFit:
      num_rows = assign_best_fit();
      break;
    case Packing::Concat:
      num_rows = assign_concat();
      break;
    case Packing::None:
      num_rows = static_cast<int64_t>(pieces_.size());
      row_of_.resize(pieces_.size());
      for (size_t i = 0; i < pieces_.size(); i++) row_of_[i] = static_cast<int64_t>(i);
      break;
  }
  arrange(num_rows);
  stats.num_tokens += num_tokens_;
  stats.num_rows += num_rows;
  return rows_;
}

// How many tokens of a document come into rows; counts what becomes of a long one.
int64_t Packer::admit(const DocumentLength& d, int64_t room, PackStats& stats) const {
  stats.num_documents++;
  if (d.num_tokens <= room) return d.num_tokens;
  switch (options_.packing == Packing::Concat ? LongDocuments::Split : options_.long_documents) {
    case LongDocuments::Split:
      stats.num_cut_documents++;
      return d.num_tokens;
    case LongDocuments::Truncate:
      stats.num_truncated_documents++;
      stats.num_truncated_tokens += d.num_tokens - room;
      return room;
    case LongDocuments::Drop:
      stats.num_dropped_documents++;
      stats.num_dropped_tokens += d.num_tokens;
      return 0;
    case LongDocuments::Error:
      break;
  }
  fail("document {} has {} tokens, more than data.seq_len {}", d.document, d.num_tokens, options_.seq_len);
}

// Cuts documents into pieces until the window is full. Concat: a piece ends where the row does, and a window only
// between rows.
void Packer::take_pieces(const DocumentStream& stream, Cursor& cursor, PackStats& stats) {
  const int64_t L = options_.seq_len;
  pieces_.clear();
  num_tokens_ = 0;
  int64_t room = L;  // in the row that Concat fills; otherwise a piece may always be L long
  int64_t ahead_begin = cursor.place;
  ahead_.clear();
  while (cursor.place < stream.size && !(room == L && is_full())) {
    if (cursor.place == ahead_begin + static_cast<int64_t>(ahead_.size())) {
      ahead_begin = cursor.place;
      ahead_.resize(static_cast<size_t>(std::min(kAhead, stream.size - ahead_begin)));
      stream.read(ahead_begin, ahead_);
    }
    const DocumentLength d = ahead_[static_cast<size_t>(cursor.place - ahead_begin)];
    const int64_t end = cursor.offset == 0 ? admit(d, room, stats) : d.num_tokens;
    const int64_t count = std::min(end - cursor.offset, room);
    if (count > 0) pieces_.push_back({d.document, cursor.offset, count, cursor.offset + count < end});
    num_tokens_ += count;
    if (options_.packing == Packing::Concat) room = room == count ? L : room - count;
    cursor.offset += count;
    if (cursor.offset == end) cursor = {cursor.place + 1, 0};
  }
}

int64_t Packer::assign_concat() {
  row_of_.resize(pieces_.size());
  int64_t row = 0, filled = 0;
  for (size_t i = 0; i < pieces_.size(); i++) {
    row_of_[i] = row;
    filled += pieces_[i].count;
    if (filled == options_.seq_len) row++, filled = 0;
  }
  return row + (filled > 0 ? 1 : 0);
}

// Best-fit decreasing: longest piece first, each into the row that it leaves the least room in. Equal choices go by
// the order of the stream, then to the row that changed last.
int64_t Packer::assign_best_fit() {
  const int64_t L = options_.seq_len;
  by_length_.resize(pieces_.size());
  for (size_t i = 0; i < pieces_.size(); i++) by_length_[i] = static_cast<uint64_t>(L - pieces_[i].count) << 32 | i;
  std::sort(by_length_.begin(), by_length_.end());
  row_of_.resize(pieces_.size());
  room_of_.clear();
  next_with_room_.clear();
  for (const uint64_t key : by_length_) {
    const size_t piece = key & 0xFFFFFFFFu;
    const int64_t count = pieces_[piece].count;
    const int64_t room = rooms_.at_least(count);
    int64_t row;
    if (room < 0) {
      row = static_cast<int64_t>(room_of_.size());
      room_of_.push_back(L);
      next_with_room_.push_back(-1);
    } else {
      int64_t& newest = newest_with_room_[static_cast<size_t>(room)];
      row = newest;
      newest = next_with_room_[static_cast<size_t>(row)];
      if (newest < 0) rooms_.erase(room);
    }
    row_of_[piece] = row;
    const int64_t left = room_of_[static_cast<size_t>(row)] -= count;
    next_with_room_[static_cast<size_t>(row)] = newest_with_room_[static_cast<size_t>(left)];
    newest_with_room_[static_cast<size_t>(left)] = row;
    rooms_.insert(left);
  }
  for (const int64_t room : room_of_) {  // leave the structure empty for the next window
    newest_with_room_[static_cast<size_t>(room)] = -1;
    rooms_.erase(room);
  }
  return static_cast<int64_t>(room_of_.size());
}

// rows_ from pieces_ and row_of_: rows by their first piece, pieces in the order of the stream.
void Packer::arrange(int64_t num_rows) {
  std::vector<int64_t> rank(static_cast<size_t>(num_rows), -1);
  rows_.row_begin.assign(static_cast<size_t>(num_rows) + 1, 0);
  int64_t next_rank = 0;
  for (int64_t& row : row_of_) {
    int64_t& r = rank[static_cast<size_t>(row)];
    if (r < 0) r = next_rank++;
    row = r;
    rows_.row_begin[static_cast<size_t>(r) + 1]++;
  }
  for (size_t r = 0; r < static_cast<size_t>(num_rows); r++) rows_.row_begin[r + 1] += rows_.row_begin[r];
  std::vector<int64_t> at(rows_.row_begin.begin(), rows_.row_begin.end() - 1);
  rows_.pieces.resize(pieces_.size());
  for (size_t i = 0; i < pieces_.size(); i++) {
    rows_.pieces[static_cast<size_t>(at[static_cast<size_t>(row_of_[i])]++)] = pieces_[i];
  }
}
