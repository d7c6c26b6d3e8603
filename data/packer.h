// Packing: documents of an epoch, in its order, become rows of at most seq_len tokens. A row is a list of pieces, a
// piece a range of a document. Here are lengths only; the loader reads the tokens.
//
// An epoch is packed in windows, each of which starts at a Cursor and needs nothing of the windows before it. So one
// can keep the cursors of an epoch (a few bytes for thousands of documents) and make any row again.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

enum class Packing { BestFit, Concat, None };
enum class LongDocuments { Split, Truncate, Drop, Error };

/// From the option's value; an Error lists what is legal.
Packing parse_packing(const std::string& name);
LongDocuments parse_long_documents(const std::string& name);

struct PackOptions {
  int64_t seq_len = 0;
  Packing packing = Packing::BestFit;
  LongDocuments long_documents = LongDocuments::Split;  ///< Concat cuts wherever a row ends and ignores it
};

struct DocumentLength {
  int64_t document = 0;  ///< its number in the corpus
  int64_t num_tokens = 0;
};

/// The documents of an epoch in order.
struct DocumentStream {
  int64_t size = 0;
  std::function<void(int64_t place, std::span<DocumentLength> documents)> read;  ///< those from `place`
};

/// Tokens [begin, begin + count) of a document.
struct Piece {
  int64_t document = 0, begin = 0, count = 0;
  bool has_next = false;  ///< the token after the piece is the target of its last one (a document cut by packing)

  bool operator==(const Piece&) const = default;
};

/// Where a window begins: the document, and how many of its tokens earlier windows have.
struct Cursor {
  int64_t place = 0, offset = 0;

  bool operator==(const Cursor&) const = default;
};

/// Row r is pieces [row_begin[r], row_begin[r + 1]).
struct Rows {
  std::vector<Piece> pieces;
  std::vector<int64_t> row_begin = {0};

  int64_t size() const { return static_cast<int64_t>(row_begin.size()) - 1; }
};

/// What became of the documents of an epoch.
struct PackStats {
  int64_t num_documents = 0;  ///< all that came, copies counted
  int64_t num_tokens = 0;     ///< in rows
  int64_t num_rows = 0;
  int64_t num_cut_documents = 0;  ///< in more than one piece
  int64_t num_truncated_documents = 0, num_truncated_tokens = 0;
  int64_t num_dropped_documents = 0, num_dropped_tokens = 0;
};

/// Packs windows; keeps memory between them.
class Packer {
 public:
  explicit Packer(const PackOptions& options);

  /// The window that begins at `cursor`, which is moved to where the next begins (place == stream.size: there is
  /// none). Rows are in the order of their first piece; pieces of a row in the order of the stream. A window may have
  /// no rows when all of its documents are dropped. Adds to `stats`.
  const Rows& pack(const DocumentStream& stream, Cursor& cursor, PackStats& stats);

 private:
  void take_pieces(const DocumentStream& stream, Cursor& cursor, PackStats& stats);
  int64_t admit(const DocumentLength& d, int64_t room, PackStats& stats) const;
  bool is_full() const;
  int64_t assign_best_fit();
  int64_t assign_concat();
  void arrange(int64_t num_rows);

  PackOptions options_;
  std::vector<DocumentLength> ahead_;  // of the stream, read together
  std::vector<Piece> pieces_;          // of the window, in the order of the stream
  int64_t num_tokens_ = 0;             // of pieces_
  std::vector<int64_t> row_of_;        // piece -> row
  Rows rows_;

  // Best fit: rows by the room that they have left, and which amounts of room there are.
  class RoomSet {
   public:
    explicit RoomSet(int64_t size);
    void insert(int64_t room);
    void erase(int64_t room);
    /// The least member >= room, or -1.
    int64_t at_least(int64_t room) const;

   private:
    std::vector<std::vector<uint64_t>> levels_;  // bit i of level k + 1: word i of level k is not zero
  };
  RoomSet rooms_;
  std::vector<int64_t> newest_with_room_;  // (seq_len + 1) row, or -1
  std::vector<int64_t> next_with_room_;    // (rows) the next row of the same room, or -1
  std::vector<int64_t> room_of_;           // (rows)
  std::vector<uint64_t> by_length_;        // sort keys
};
