// Model flops: the multiplications and additions that the mathematics asks for, forward and backward, so that MFU
// compares runs honestly. Padding, recomputation and masked blocks count nothing.
#pragma once

#include <span>

#include "data/batch.h"
#include "llama/config.h"

/// Pairs (i, j) with j visible to i in this layer, over the documents of the batch.
double visible_pairs(const Batch& batch, const LayerConfig& layer);

/// Flops of one training step on `batch`, forward and backward:
///   6 P per token:  P = weights that multiply a token: qkv, o, gate, up and down of every block, of the experts those
///                   that a token goes to, and the router; a lookup is free
///   6 C V per token with a target: the head, tied or not (rows without a target are left out of it)
///   12 NH HD per visible pair and layer: q.k and p.v forward, twice that backward (6 NH (HD + dv) with latent
///   attention)
double batch_flops(const ModelConfig& model, const Batch& batch);

/// The same of one row, before its tokens are read: as if every token had a target.
double row_flops(const ModelConfig& model, std::span<const int64_t> document_lengths);
