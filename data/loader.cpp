// From files of documents to batches. Contract: loader.h.
#include "data/loader.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "layers/core/integer.h"

namespace {

// A batch touches two epochs at most times, and the rows of a global batch are asked for by their cost: its windows are
// kept, up to so many pieces (about 64 MiB), but at least two.
constexpr size_t kKeptEpochs = 2;
constexpr size_t kKeptPieces = size_t{1} << 21;

void check_options(const DataOptions& o) {
  CHECK(!o.sources.empty(), "there are no data: give data.train (or data.eval) at least one file");
  CHECK(o.vocab_size > 0, "vocab_size is {}", o.vocab_size);
  CHECK(o.pad_token >= 0 && o.pad_token < o.vocab_size, "the padding token {} is not in the vocabulary of {}",
        o.pad_token, o.vocab_size);
  CHECK(o.row_alignment >= 1 && o.row_alignment <= int64_t{1} << 20, "rows cannot be aligned to {} tokens",
        o.row_alignment);
  for (const SourceSpec& source : o.sources) {
    CHECK(source.weight > 0 && source.weight <= 1e6, "'{}' has weight {}, expected more than 0 and at most 1e6",
          source.path, source.weight);
  }
}

}  // namespace

Loader::Loader(const DataOptions& options, const DataProgress& progress)
    : options_(options),
      progress_(progress),
      pack_options_{options.seq_len, parse_packing(options.packing), parse_long_documents(options.long_documents)},
      cache_(options.cache_dir),
      packer_(pack_options_) {
  check_options(options_);
  if (options_.is_eval) options_.shuffle = false;
  open_sources();
  check_documents();
  summarize();
}

void Loader::open_sources() {
  first_document_ = {0};
  for (const SourceSpec& source : options_.sources) {
    SourceSummary found{source.path, source.weight};
    const int64_t first = first_document_.back();
    for (const TokenPath& path : find_token_files(source.path, options_.format)) {
      const TokenFile& file = files_.emplace_back(path, options_.vocab_size, cache_, progress_, options_.image_tokens);
      first_document_.push_back(first_document_.back() + file.num_documents());
      found.num_files++;
      found.size_bytes += file.size_bytes();
      found.num_tokens += file.stats().num_tokens;
      summary_.num_loss_tokens += file.stats().num_loss_tokens;
      summary_.num_empty_documents += file.stats().num_empty_documents;
      summary_.longest_document = std::max(summary_.longest_document, file.stats().longest_tokens);
    }
    found.num_documents = first_document_.back() - first;
    CHECK(static_cast<double>(found.num_documents) * source.weight >= 1,
          "'{}' has {} documents and weight {}, less than one document an epoch; raise the weight to {:.3g} or more",
          source.path, found.num_documents, source.weight, 1 / static_cast<double>(found.num_documents));
    ranges_.push_back({first, found.num_documents, source.weight});
    summary_.num_documents += found.num_documents;
    summary_.num_tokens += found.num_tokens;
    summary_.sources.push_back(std::move(found));
  }
  summary_.notices = cache_.notices();
}

void Loader::check_documents() const {
  CHECK(summary_.num_loss_tokens > 0,
        "no token of the data is trained on: the {} documents of '{}' have one token each, or every label is -100",
        summary_.num_documents, options_.sources.front().path);
  const bool is_refused =
      pack_options_.packing != Packing::Concat && pack_options_.long_documents == LongDocuments::Error;
  if (!is_refused || summary_.longest_document <= options_.seq_len) return;
  for (const TokenFile& file : files_) {
    CHECK(
        file.stats().longest_tokens <= options_.seq_len,
        "{} has {} tokens, more than data.seq_len {}; raise it, or set data.long_documents to split, truncate or drop",
        file.where(file.stats().longest_document), file.stats().longest_tokens, options_.seq_len);
  }
}

void Loader::summarize() {
  summary_.first_epoch = epoch(0).stats;
  const PackStats& s = summary_.first_epoch;
  summary_.packing_efficiency =
      static_cast<double>(s.num_tokens) / (static_cast<double>(s.num_rows) * static_cast<double>(options_.seq_len));
}

size_t Loader::file_of(int64_t document) const {
  const auto after = std::upper_bound(first_document_.begin(), first_document_.end(), document);
  return static_cast<size_t>(after - first_document_.begin()) - 1;
}

DocumentStream Loader::stream_of(const EpochOrder& order) const {
  return {order.size(), [this, &order](int64_t place, std::span<DocumentLength> documents) {
            // A length is a jump to anywhere in the index, a cache miss. In a loop of its own many are under way at
            // once.
            for (DocumentLength& d : documents) d.document = order.document(place++);
            for (DocumentLength& d : documents) {
              const size_t f = file_of(d.document);
              d.num_tokens = files_[f].num_tokens(d.document - first_document_[f]);
            }
          }};
}

const Loader::Epoch& Loader::epoch(int64_t index) {
  const auto kept = std::find_if(epochs_.begin(), epochs_.end(), [&](const Epoch& e) { return e.epoch == index; });
  if (kept != epochs_.end()) {
    epochs_.splice(epochs_.begin(), epochs_, kept);
    return epochs_.front();
  }
  Epoch e{index, EpochOrder(ranges_, options_.seed, index, options_.shuffle), {}, {}, {}};
  const DocumentStream stream = stream_of(e.order);
  for (Cursor cursor; cursor.place < stream.size;) {
    const Window window{cursor, e.stats.num_rows};
    const Rows& rows = packer_.pack(stream, cursor, e.stats);
    if (progress_) {
      progress_(cursor.place, stream.size, Progress::Unit::Count, fmt::format("packing epoch {}", index + 1));
    }
    if (rows.size() == 0) continue;
    const std::vector<int64_t> order = row_order(index, static_cast<int64_t>(e.windows.size()), rows.size());
    for (size_t place = 0; place < order.size(); place++) {
      const auto row = rows.row_begin.begin() + order[place];
      if (!has_target(rows.pieces.data() + row[0], rows.pieces.data() + row[1])) {
        e.doubtful.push_back(window.first_row + static_cast<int64_t>(place));
      }
    }
    e.windows.push_back(window);
  }
  CHECK(e.stats.num_rows > 0, "epoch {} is empty: all of its {} documents are longer than data.seq_len {} and dropped",
        index, e.stats.num_documents, options_.seq_len);
  if (index + 1 == static_cast<int64_t>(first_sample_.size())) {
    first_sample_.push_back(first_sample_.back() + e.stats.num_rows);
  }
  epochs_.push_front(std::move(e));
  if (epochs_.size() > kKeptEpochs) epochs_.pop_back();
  return epochs_.front();
}

const Loader::PackedWindow& Loader::packed_window(const Epoch& e, int64_t window) {
  const auto kept = std::find_if(windows_.begin(), windows_.end(),
                                 [&](const PackedWindow& w) { return w.epoch == e.epoch && w.window == window; });
  if (kept != windows_.end()) {
    windows_.splice(windows_.begin(), windows_, kept);
    return windows_.front();
  }
  Cursor cursor = e.windows[static_cast<size_t>(window)].cursor;
  PackStats ignored;
  PackedWindow packed{e.epoch, window, packer_.pack(stream_of(e.order), cursor, ignored), {}};
  packed.order = row_order(e.epoch, window, packed.rows.size());
  windows_.push_front(std::move(packed));
  size_t num_pieces = 0, num_kept = 0;
  for (const PackedWindow& w : windows_) {
    num_pieces += w.rows.pieces.size();
    if (num_kept < 2 || num_pieces <= kKeptPieces) num_kept++;
  }
  windows_.resize(num_kept);
  return windows_.front();
}

// Best fit sorts by length: without a shuffle of the rows, a batch would have the long documents and another the short
// ones.
std::vector<int64_t> Loader::row_order(int64_t epoch, int64_t window, int64_t num_rows) const {
  const Permutation shuffled(static_cast<uint64_t>(num_rows), options_.seed, "rows",
                             static_cast<uint64_t>(epoch) << 32 | static_cast<uint64_t>(window));
  std::vector<int64_t> order(static_cast<size_t>(num_rows));
  for (int64_t r = 0; r < num_rows; r++) {
    order[static_cast<size_t>(r)] = options_.shuffle ? static_cast<int64_t>(shuffled(static_cast<uint64_t>(r))) : r;
  }
  return order;
}

// Whether it is certain, from the counts of the index, that a token of the piece has a target.
bool Loader::has_target(const Piece& piece) const {
  const size_t f = file_of(piece.document);
  const int64_t document = piece.document - first_document_[f];
  const int64_t num_tokens = files_[f].num_tokens(document), num_loss_tokens = files_[f].num_loss_tokens(document);
  if (num_loss_tokens == num_tokens - 1) return piece.count > 1 || piece.has_next;  // nothing is masked
  return piece.count == num_tokens && num_loss_tokens > 0;
}

bool Loader::has_target(const Piece* begin, const Piece* end) const {
  return std::any_of(begin, end, [this](const Piece& piece) { return has_target(piece); });
}

bool Loader::row_has_target(int64_t sample) {
  const Epoch& e = epoch(epoch_of(sample));
  const int64_t row = sample - first_sample_[static_cast<size_t>(e.epoch)];
  return !std::binary_search(e.doubtful.begin(), e.doubtful.end(), row) || rows(sample, 1).num_loss_tokens > 0;
}

int64_t Loader::find_batch_without_target(int64_t begin, int64_t end, int64_t count) {
  CHECK(begin >= 0 && count > 0, "batches of {} rows from {}", count, begin);
  for (int64_t at = begin; at < end;) {
    // On to the next row in doubt, and the batch that it is in.
    const int64_t index = epoch_of(at);
    const int64_t first = first_sample_[static_cast<size_t>(index)];
    const std::vector<int64_t>& doubtful = epoch(index).doubtful;
    const auto next = std::lower_bound(doubtful.begin(), doubtful.end(), at - first);
    if (next == doubtful.end()) {
      at = first_sample_[static_cast<size_t>(index) + 1];
      continue;
    }
    const int64_t batch = (first + *next - begin) / count;
    const int64_t batch_begin = begin + batch * count, batch_end = std::min(batch_begin + count, end);
    int64_t sample = batch_begin;
    while (sample < batch_end && !row_has_target(sample)) sample++;
    if (batch_begin < end && sample == batch_end) return batch;
    at = batch_end;
    if (progress_) progress_(std::min(at, end) - begin, end - begin, Progress::Unit::Count, "looking for targets");
  }
  return -1;
}

int64_t Loader::rows_in_epoch(int64_t index) {
  CHECK(index >= 0 && (index == 0 || !options_.is_eval), "there is no epoch {} of the {} data", index,
        options_.is_eval ? "evaluation" : "training");
  while (static_cast<int64_t>(first_sample_.size()) <= index + 1) epoch(static_cast<int64_t>(first_sample_.size()) - 1);
  return first_sample_[static_cast<size_t>(index) + 1] - first_sample_[static_cast<size_t>(index)];
}

int64_t Loader::total_rows(double epochs) {
  CHECK(epochs > 0 && epochs <= 1e6, "{} epochs, expected more than 0 and at most 1e6", epochs);
  const double whole = std::floor(epochs);
  const auto num_whole = static_cast<int64_t>(whole);
  int64_t rows = 0;
  for (int64_t e = 0; e < num_whole; e++) rows += rows_in_epoch(e);
  if (epochs > whole) rows += std::llround((epochs - whole) * static_cast<double>(rows_in_epoch(num_whole)));
  return std::max<int64_t>(rows, 1);
}

int64_t Loader::epoch_of(int64_t sample) {
  while (first_sample_.back() <= sample) rows_in_epoch(static_cast<int64_t>(first_sample_.size()) - 1);
  return std::upper_bound(first_sample_.begin(), first_sample_.end(), sample) - first_sample_.begin() - 1;
}

Loader::Row Loader::row(int64_t sample) {
  const Epoch& e = epoch(epoch_of(sample));
  const int64_t in_epoch = sample - first_sample_[static_cast<size_t>(e.epoch)];
  const auto next_window = std::upper_bound(e.windows.begin(), e.windows.end(), in_epoch,
                                            [](int64_t r, const Window& w) { return r < w.first_row; });
  const PackedWindow& packed = packed_window(e, next_window - e.windows.begin() - 1);
  const size_t r = static_cast<size_t>(packed.order[static_cast<size_t>(in_epoch - (next_window - 1)->first_row)]);
  const auto pieces = packed.rows.pieces.begin();
  return Row(pieces + packed.rows.row_begin[r], pieces + packed.rows.row_begin[r + 1]);
}

std::vector<int64_t> Loader::document_lengths(int64_t sample) {
  std::vector<int64_t> lengths;
  for (const Piece& piece : row(sample)) lengths.push_back(piece.count);
  return lengths;
}

Batch Loader::rows(int64_t sample, int64_t count) {
  CHECK(sample >= 0 && count > 0, "rows [{}, {}) of the data", sample, sample + count);
  std::vector<int64_t> samples(static_cast<size_t>(count));
  std::iota(samples.begin(), samples.end(), sample);
  return rows(samples);
}

Batch Loader::rows(const std::vector<int64_t>& samples) {
  std::vector<Row> rows;
  int64_t longest = 0;
  for (const int64_t sample : samples) {
    rows.push_back(row(sample));
    int64_t length = 0;
    for (const Piece& piece : rows.back()) length += piece.count;
    longest = std::max(longest, length);
  }
  if (rows.empty()) rows.emplace_back();
  const int64_t count = static_cast<int64_t>(rows.size());
  Batch batch;
  batch.rows = count;
  batch.row_len = round_up(std::max<int64_t>(longest, 1), options_.row_alignment);
  const size_t T = static_cast<size_t>(count * batch.row_len);
  batch.tokens.assign(T, options_.pad_token);
  batch.targets.assign(T, kIgnoreTarget);
  batch.positions.assign(T, 0);
  batch.document_ids.assign(T, -1);
  batch.cu_seqlens = {0};
  for (int64_t r = 0; r < count; r++) fill_row(rows[static_cast<size_t>(r)], r, batch);
  return batch;
}

void Loader::fill_row(const Row& pieces, int64_t row, Batch& batch) {
  int64_t at = row * batch.row_len;
  const int64_t row_end = at + batch.row_len;
  int32_t document_id = 0, position = 0;
  for (const Piece& piece : pieces) {
    const size_t f = file_of(piece.document);
    const int64_t document = piece.document - first_document_[f];
    labels_.resize(static_cast<size_t>(piece.count));
    files_[f].read(document, piece.begin, piece.count, &batch.tokens[static_cast<size_t>(at)], labels_.data(),
                   scratch_);
    int32_t next_token, next_label = kIgnoreTarget;
    if (piece.has_next) files_[f].read(document, piece.begin + piece.count, 1, &next_token, &next_label, scratch_);
    for (position = 0; position < piece.count; position++) {
      const size_t t = static_cast<size_t>(at + position);
      // The target of token t is the label of token t + 1.
      const bool is_last = position + 1 == piece.count;
      batch.targets[t] = is_last ? next_label : labels_[static_cast<size_t>(position) + 1];
      batch.positions[t] = position;
      batch.document_ids[t] = document_id;
      batch.num_loss_tokens += batch.targets[t] != kIgnoreTarget;
    }
    document_id++;
    batch.longest_document = std::max(batch.longest_document, piece.count);
    at += piece.count;
    batch.num_tokens += piece.count;
    batch.cu_seqlens.push_back(at);
  }
  if (at < row_end) batch.cu_seqlens.push_back(row_end);
  for (; at < row_end; at++) batch.positions[static_cast<size_t>(at)] = position++;
}
