// TokenFile: one file (or .bin/.idx pair) of documents, whatever its format: how many, how long, and any range of the
// tokens of any of them.
#pragma once

#include <string>
#include <vector>

#include "data/document_index.h"
#include "data/jsonl.h"

enum class TokenFormat { Jsonl, Megatron, Llmc, Bytes };

struct TokenPath {
  TokenFormat format = TokenFormat::Jsonl;
  std::filesystem::path data;   ///< what holds the tokens
  std::filesystem::path index;  ///< Megatron's .idx

  bool operator==(const TokenPath&) const = default;
};

/// The files that `pattern` names, sorted: a file, a glob, or the common prefix of a Megatron pair. `format` is auto,
/// jsonl, megatron, llmc or bytes. A pattern without files, a directory, and a format that cannot be told are Errors.
std::vector<TokenPath> find_token_files(const std::string& pattern, const std::string& format);

class TokenFile;

/// Memory that reading needs: one for all files of a reader, however many there are.
struct TokenScratch {
  std::vector<char> bytes;
  std::vector<int64_t> ids;
  // The line parsed last. It is kept: the pieces of a long document are asked for one by one.
  const TokenFile* file = nullptr;
  int64_t document = -1;
  JsonlDocument parsed;
};

class TokenFile {
 public:
  /// Opens, indexes (or finds the index in `cache`) and checks. Token ids must be below `vocab_size`. One of
  /// `image_tokens` is an Error, too: it stands for an image, which no file of tokens holds.
  TokenFile(const TokenPath& path, int64_t vocab_size, IndexCache& cache, const DataProgress& progress,
            std::vector<int64_t> image_tokens = {});

  const std::filesystem::path& path() const { return file_.path(); }
  int64_t size_bytes() const { return file_.size_bytes(); }
  const IndexStats& stats() const { return index_.stats(); }
  int64_t num_documents() const { return index_.num_documents(); }
  int64_t num_tokens(int64_t document) const { return index_[document].num_tokens; }
  int64_t num_loss_tokens(int64_t document) const { return index_[document].num_loss_tokens; }

  /// Tokens [begin, begin + count) of a document, and their labels: the label of a token is the id that is to be
  /// predicted in its place, or kIgnoreTarget. Where the format has no labels, the token itself.
  void read(int64_t document, int64_t begin, int64_t count, int32_t* tokens, int32_t* labels,
            TokenScratch& scratch) const;

  /// For messages: "train.jsonl:17 (document 16)".
  std::string where(int64_t document) const;

 private:
  void check_tokens() const;
  void check_token(int64_t document, int64_t position, int64_t id) const;
  [[noreturn]] void bad_token(int64_t document, int64_t position, const char* what, int64_t id) const;
  void read_json(int64_t document, int64_t begin, int64_t count, int32_t* tokens, int32_t* labels,
                 TokenScratch& scratch) const;
  void read_binary(int64_t document, int64_t begin, int64_t count, int32_t* tokens, int32_t* labels,
                   TokenScratch& scratch) const;
  void parse(int64_t document, TokenScratch& scratch) const;

  TokenFormat format_;
  InputFile file_;
  int64_t vocab_size_;
  std::vector<int64_t> image_tokens_;
  DocumentIndex index_;
};
