// EpochOrder: which documents an epoch has, and in which order. It takes no memory per document.
//
// A source of n documents with weight w gives floor(w) copies of each and, for the fraction f of w, a share of about
// f n documents. The shares of successive epochs follow each other in one fixed shuffled order of the source, so that
// f = 0.5 is one half, then the other.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "data/shuffle.h"

/// Documents [first_document, first_document + num_documents) of the corpus.
struct DocumentRange {
  int64_t first_document = 0, num_documents = 0;
  double weight = 1;
};

class EpochOrder {
 public:
  /// Every source must give at least one document an epoch: num_documents * weight >= 1.
  EpochOrder(const std::vector<DocumentRange>& sources, uint64_t seed, int64_t epoch, bool shuffle);

  int64_t size() const { return size_; }
  /// The document at place i of the epoch.
  int64_t document(int64_t i) const;

 private:
  struct Source {
    DocumentRange range;
    int64_t begin;            // first place of the source, before the shuffle
    int64_t num_whole;        // places of whole copies
    int64_t share_begin;      // where this epoch's share begins in the source's order
    Permutation share_order;  // the source's order
  };

  bool shuffle_;
  std::vector<Source> sources_;
  int64_t size_ = 0;
  std::optional<Permutation> order_;
};
