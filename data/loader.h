// Loader: from files of documents to batches. Rows ("samples") are numbered through the epochs without a gap, and the
// rows of any range of samples are a pure function of the files, the options and the range. So there is no state to
// save: a run that stopped at sample k continues at sample k, on any number of ranks.
//
// FORMAT.md says what the files look like and what becomes of a document; README.md how the loader works.
#pragma once

#include <list>
#include <string>
#include <vector>

#include "data/batch.h"
#include "data/epoch_order.h"
#include "data/packer.h"
#include "data/token_file.h"

struct SourceSpec {
  std::string path;   ///< a file, a glob, or the prefix of a Megatron pair
  double weight = 1;  ///< how often its documents come in an epoch
};

struct DataOptions {
  std::vector<SourceSpec> sources;
  std::string format = "auto";  ///< auto | jsonl | megatron | llmc | bytes
  int64_t seq_len = 4096;
  std::string packing = "best_fit";      ///< best_fit | concat | none
  std::string long_documents = "split";  ///< split | truncate | drop | error
  bool shuffle = true;                   ///< false: the order of the files
  uint64_t seed = 42;
  std::string cache_dir;  ///< of indexes; empty = the user's cache directory
  int64_t vocab_size = 0;
  std::vector<int64_t> image_tokens;  ///< ids that no document may hold
  int32_t pad_token = 0;
  int64_t row_alignment = 1;  ///< a row is padded to a multiple of this
  bool is_eval = false;       ///< one epoch, not shuffled
};

struct SourceSummary {
  std::string path;  ///< as given
  double weight = 1;
  int64_t num_files = 0, size_bytes = 0, num_documents = 0, num_tokens = 0;
};

/// What was found. Nothing is dropped that is not counted here.
struct DataSummary {
  std::vector<SourceSummary> sources;
  // The files, each document once.
  int64_t num_documents = 0, num_tokens = 0;
  int64_t num_loss_tokens = 0;      ///< tokens that are a target; cutting keeps all, truncating and dropping do not
  int64_t num_empty_documents = 0;  ///< without tokens; not used
  int64_t longest_document = 0;     ///< tokens
  PackStats first_epoch;
  double packing_efficiency = 0;  ///< of the first epoch: tokens / (rows * seq_len)
  std::vector<std::string> notices;
};

class Loader {
 public:
  /// Opens, indexes and checks every file, and packs the first epoch. Errors name file, place, numbers and remedy.
  /// When many processes of a machine load the same files, let one go first: the others find its indexes.
  explicit Loader(const DataOptions& options, const DataProgress& progress = {});

  const DataSummary& summary() const { return summary_; }

  /// Rows of one epoch. It differs from epoch to epoch: another order packs differently.
  int64_t rows_in_epoch(int64_t epoch);
  /// Rows of so many epochs: 2.5 is all of the first two and half of the third. At least 1.
  int64_t total_rows(double epochs);

  /// The first of the batches of `count` samples that [begin, end) is cut into (the last may hold fewer) in which no
  /// token has a target, by its number from 0; or -1. Exact, and reads only rows that the index leaves in doubt.
  int64_t find_batch_without_target(int64_t begin, int64_t end, int64_t count);

  /// Samples [sample, sample + count) as one batch; they may lie in several epochs. Rows are padded to the longest of
  /// them, rounded up to row_alignment. Any order of calls gives the same rows; going forward is cheapest.
  Batch rows(int64_t sample, int64_t count);
  /// Any samples, as the rows of a batch. None: a row of padding, for a rank that has to take part in a micro-step
  /// without work.
  Batch rows(const std::vector<int64_t>& samples);

  /// Tokens of each document (or piece of one) of a row: what it costs, without reading it.
  std::vector<int64_t> document_lengths(int64_t sample);

 private:
  struct Window {
    Cursor cursor;
    int64_t first_row = 0;
  };
  /// An epoch without its rows: where each window begins.
  struct Epoch {
    int64_t epoch = 0;
    EpochOrder order;
    std::vector<Window> windows;
    std::vector<int64_t> doubtful;  ///< rows that may have no target, ascending
    PackStats stats;
  };
  struct PackedWindow {
    int64_t epoch = 0, window = 0;
    Rows rows;
    std::vector<int64_t> order;  ///< shuffled place -> row
  };
  using Row = std::vector<Piece>;

  void open_sources();
  void check_documents() const;
  void summarize();
  const Epoch& epoch(int64_t index);
  int64_t epoch_of(int64_t sample);
  std::vector<int64_t> row_order(int64_t epoch, int64_t window, int64_t num_rows) const;
  bool has_target(const Piece& piece) const;
  bool has_target(const Piece* begin, const Piece* end) const;
  bool row_has_target(int64_t sample);
  const PackedWindow& packed_window(const Epoch& epoch, int64_t window);
  DocumentStream stream_of(const EpochOrder& order) const;
  Row row(int64_t sample);
  void fill_row(const Row& pieces, int64_t row, Batch& batch);

  size_t file_of(int64_t document) const;

  DataOptions options_;
  DataProgress progress_;
  PackOptions pack_options_;
  IndexCache cache_;
  std::vector<TokenFile> files_;
  std::vector<int64_t> first_document_;  // of each file, and the total
  std::vector<DocumentRange> ranges_;    // of each source
  DataSummary summary_;
  Packer packer_;
  std::vector<int64_t> first_sample_ = {0};  // of each epoch that was packed, and of the one after
  std::list<Epoch> epochs_;                  // the last ones used, newest first
  std::list<PackedWindow> windows_;          // likewise
  TokenScratch scratch_;
  std::vector<int32_t> labels_;
};
