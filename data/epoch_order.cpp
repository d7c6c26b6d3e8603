// The documents of an epoch. Contract: epoch_order.h.
#include "data/epoch_order.h"

#include <algorithm>
#include <cmath>

#include "layers/core/check.h"

EpochOrder::EpochOrder(const std::vector<DocumentRange>& sources, uint64_t seed, int64_t epoch, bool shuffle)
    : shuffle_(shuffle) {
  for (size_t s = 0; s < sources.size(); s++) {
    const DocumentRange& range = sources[s];
    const double whole = std::floor(range.weight), fraction = range.weight - whole;
    // Shares end at multiples of fraction * n, rounded up: every epoch's is fraction * n to within one.
    const double share = fraction * static_cast<double>(range.num_documents);
    const auto share_begin = static_cast<int64_t>(std::ceil(share * static_cast<double>(epoch)));
    const auto share_end = static_cast<int64_t>(std::ceil(share * static_cast<double>(epoch + 1)));
    const int64_t num_whole = static_cast<int64_t>(whole) * range.num_documents;
    sources_.push_back({range, size_, num_whole, share_begin,
                        Permutation(static_cast<uint64_t>(range.num_documents), seed, "share", s)});
    size_ += num_whole + share_end - share_begin;
  }
  order_.emplace(static_cast<uint64_t>(size_), seed, "documents", static_cast<uint64_t>(epoch));
}

int64_t EpochOrder::document(int64_t i) const {
  CHECK(i >= 0 && i < size_, "document {} of an epoch of {}", i, size_);
  if (shuffle_) i = static_cast<int64_t>((*order_)(static_cast<uint64_t>(i)));
  const auto next = std::find_if(sources_.begin() + 1, sources_.end(), [i](const Source& s) { return s.begin > i; });
  const Source& source = *(next - 1);
  const int64_t n = source.range.num_documents, place = i - source.begin;
  if (place < source.num_whole) return source.range.first_document + place % n;
  const int64_t in_share = (source.share_begin + place - source.num_whole) % n;
  const int64_t document =
      shuffle_ ? static_cast<int64_t>(source.share_order(static_cast<uint64_t>(in_share))) : in_share;
  return source.range.first_document + document;
}
