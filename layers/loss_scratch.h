// The scratch memory of the loss, laid out, for the CPU and for CUDA. Without memory it measures, so that sizes and
// pointers cannot drift.
#pragma once

#include <algorithm>

#include "layers/core/integer.h"
#include "layers/loss.h"

namespace detail {

struct LossScratch {
  Tensor logits;   ///< (tile, V), in accumulator_dtype
  Tensor dlogits;  ///< (tile, V), in the dtype of x; the memory of `logits` where that is the same
  Tensor x, dx;    ///< (tile, C)
  Tensor nll;      ///< (T) F64, in the order of LossRows
  int64_t tile;    ///< rows of a full tile
  size_t size_bytes = 0;

  LossScratch(void* memory, const LossShape& shape, DType dtype, int64_t T, int64_t C, int64_t V)
      : tile(std::min(shape.tile_tokens, T)) {
    const auto take = [&](DType element, Shape s, const char* name) -> Tensor {
      constexpr int64_t kAlignment = 256;
      void* at = memory ? static_cast<char*>(memory) + size_bytes : nullptr;
      size_bytes += static_cast<size_t>(round_up(s.numel() * static_cast<int64_t>(size_of(element)), kAlignment));
      return {at, element, s, name};
    };
    const DType sums = accumulator_dtype(dtype);
    logits = take(sums, {tile, V}, "loss: logits of a tile");
    dlogits = sums == dtype ? logits : take(dtype, {tile, V}, "loss: gradient of the logits of a tile");
    x = take(dtype, {tile, C}, "loss: x of a tile");
    dx = take(dtype, {tile, C}, "loss: dx of a tile");
    nll = take(DType::F64, {T}, "loss: nll of the rows");
  }
};

}  // namespace detail
