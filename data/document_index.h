// DocumentIndex: where each document of a token file lies, and how long it is. It is made once, by reading the whole
// file, and kept in a cache file that every later run (and every process of a run) maps. Memory does not grow with the
// data. The format is described in FORMAT.md.
#pragma once

#include <algorithm>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "data/file.h"

/// How the tokens of a document are stored: a line of JSON, or an array of integers.
enum class Encoding : int64_t { Json, U8, I8, U16, I16, U32, I32, I64 };

constexpr int64_t bytes_per_token(Encoding encoding) {
  switch (encoding) {
    case Encoding::U8:
    case Encoding::I8:
      return 1;
    case Encoding::U16:
    case Encoding::I16:
      return 2;
    case Encoding::U32:
    case Encoding::I32:
      return 4;
    case Encoding::I64:
      return 8;
    case Encoding::Json:
      break;
  }
  return 0;
}

/// One document: bytes [offset, offset + size_bytes) of the data file.
struct DocumentEntry {
  int64_t offset = 0, size_bytes = 0, num_tokens = 0;
  int64_t num_loss_tokens = 0;  ///< tokens that are somebody's target: not the first, not masked
};

/// An entry whose every token but the first is a target.
constexpr DocumentEntry unmasked_document(int64_t offset, int64_t size_bytes, int64_t num_tokens) {
  return {offset, size_bytes, num_tokens, std::max<int64_t>(num_tokens - 1, 0)};
}

/// What is known of a whole file. Documents without tokens have no entry; they are counted here.
struct IndexStats {
  Encoding encoding = Encoding::Json;
  int64_t num_documents = 0;
  int64_t num_tokens = 0;
  int64_t num_loss_tokens = 0;
  int64_t num_empty_documents = 0;
  int64_t min_token = 0, max_token = 0;  ///< over tokens and labels
  int64_t longest_document = 0;          ///< the first of the longest
  int64_t longest_tokens = 0;

  void include_tokens(int64_t lowest, int64_t highest) {
    min_token = std::min(min_token, lowest);
    max_token = std::max(max_token, highest);
  }
};

/// Writes an index, entry by entry, to a file of its own. The reader of a format calls add() and fills the statistics
/// that add() does not: encoding, num_empty_documents, min_token, max_token.
class IndexWriter {
 public:
  explicit IndexWriter(std::filesystem::path path, FileHandle fd);

  void add(const DocumentEntry& entry);
  void add_empty() { stats.num_empty_documents++; }
  /// Writes the header, which makes the file valid, and returns the open file.
  FileHandle finish(const std::string& key);

  IndexStats stats;

 private:
  void flush();
  void write(int64_t offset, const void* data, size_t size_bytes);

  std::filesystem::path path_;
  FileHandle fd_;
  int64_t end_;
  uint64_t checksum_;
  std::vector<DocumentEntry> buffer_;
};

class DocumentIndex {
 public:
  /// The index in `fd` if it is whole, uncorrupted and made for `key`.
  static std::optional<DocumentIndex> load(const std::filesystem::path& path, const FileHandle& fd,
                                           const std::string& key);

  const IndexStats& stats() const { return stats_; }
  int64_t num_documents() const { return stats_.num_documents; }
  const DocumentEntry& operator[](int64_t document) const { return entries_[document]; }

 private:
  MappedFile file_;
  IndexStats stats_;
  const DocumentEntry* entries_ = nullptr;
};

/// The directory of indexes. Several processes may use it at once: an index is written under a name of its own and
/// renamed when it is whole.
class IndexCache {
 public:
  /// `directory` must be writable; empty means $XDG_CACHE_HOME/train_gpt or ~/.cache/train_gpt and, where that cannot
  /// be written, a directory below $TMPDIR, with a notice.
  explicit IndexCache(const std::string& directory);

  /// The index of `key` (paths, sizes, times; whatever the index depends on), from the cache or made by `build`.
  /// `name` is a file name that is the same for every state of the same data file.
  DocumentIndex open(const std::string& name, const std::string& key, const std::function<void(IndexWriter&)>& build);

  /// What the user should know: a fallback was taken.
  const std::vector<std::string>& notices() const { return notices_; }

 private:
  std::vector<std::filesystem::path> directories_;  // in order of preference
  std::vector<std::string> notices_;
};
