// Front doors and the CPU loops that specify the token embedding. Contract: embedding.h.
#include "layers/embedding.h"

#include <algorithm>
#include <limits>

#include "layers/core/parallel.h"

namespace {

constexpr int64_t kGrainElements = 16384;
constexpr int64_t kColumnBlock = 64;  // columns that one thread owns: whole cache lines

void check_tokens(const char* who, std::span<const int32_t> tokens, int64_t V) {
  for (size_t t = 0; t < tokens.size(); t++) {
    CHECK(tokens[t] >= 0 && tokens[t] < V, "{}: token id {} at position {} is outside the vocabulary [0, {})", who,
          tokens[t], t, V);
  }
}

std::span<const int32_t> elements_of(ConstTensor tokens) {
  return {tokens.as<int32_t>(), static_cast<size_t>(tokens.numel())};
}

template <class T>
void forward_cpu(T* y, const int32_t* tokens, const T* w, int64_t num_tokens, int64_t C, T scale) {
  parallel_for(num_tokens, kGrainElements / std::max<int64_t>(C, 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const T* row = w + tokens[t] * C;
      T* yt = y + t * C;
#pragma omp simd
      for (int64_t c = 0; c < C; c++) yt[c] = scale * row[c];
    }
  });
}

// Every thread walks all tokens in their order and adds the columns that it owns: no two write the same element.
template <class T>
void backward_cpu(T* dw, const T* dy, const int32_t* tokens, int64_t num_tokens, int64_t C, T scale,
                  int64_t pad_token_id) {
  parallel_for((C + kColumnBlock - 1) / kColumnBlock, 1, [&](int64_t block_begin, int64_t block_end) {
    const int64_t begin = block_begin * kColumnBlock, end = std::min(block_end * kColumnBlock, C);
    for (int64_t t = 0; t < num_tokens; t++) {
      if (tokens[t] == pad_token_id) continue;
      T* row = dw + tokens[t] * C;
      const T* dyt = dy + t * C;
#pragma omp simd
      for (int64_t c = begin; c < end; c++) row[c] += scale * dyt[c];
    }
  });
}

}  // namespace

// A counting sort: where the positions of each token begin, then each position to the next place of its token.
std::vector<int32_t> embedding_order(std::span<const int32_t> tokens, int64_t V) {
  CHECK(tokens.size() <= static_cast<size_t>(std::numeric_limits<int32_t>::max()),
        "embedding_order: {} tokens, positions have 32 bits", tokens.size());
  check_tokens("embedding_order", tokens, V);
  std::vector<int32_t> next(static_cast<size_t>(V) + 1), order(tokens.size());
  for (const int32_t token : tokens) next[static_cast<size_t>(token) + 1]++;
  for (size_t v = 1; v < next.size(); v++) next[v] += next[v - 1];
  for (size_t t = 0; t < tokens.size(); t++) {
    const size_t place = static_cast<size_t>(next[static_cast<size_t>(tokens[t])]++);
    order[place] = static_cast<int32_t>(t);
  }
  return order;
}

void embedding_forward(Device& device, Tensor y, ConstTensor tokens, ConstTensor w, double scale) {
  CHECK(w.shape.rank() == 2, "embedding_forward: w ('{}') is {}, expected (V, C)", w.name, w.shape.str());
  const int64_t T = tokens.numel(), V = w.shape[0], C = w.shape[1];
  check_tensor(w, "embedding_forward: w", {V, C}, w.dtype);
  check_tensor(tokens, "embedding_forward: tokens", {T}, DType::I32);
  check_tensor(y, "embedding_forward: y", {T, C}, w.dtype);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return embedding_forward_cuda(device, y, tokens, w, scale);
  }
  check_tokens("embedding_forward", elements_of(tokens), V);
  dispatch_float(w.dtype, "embedding_forward", [&]<class F>(F) {
    forward_cpu(y.as<F>(), tokens.as<int32_t>(), w.as<F>(), T, C, static_cast<F>(scale));
  });
}

void embedding_backward(Device& device, Tensor dw, ConstTensor dy, ConstTensor tokens, ConstTensor order, double scale,
                        int64_t pad_token_id) {
  CHECK(dw.shape.rank() == 2, "embedding_backward: dw ('{}') is {}, expected (V, C)", dw.name, dw.shape.str());
  const int64_t T = tokens.numel(), V = dw.shape[0], C = dw.shape[1];
  check_tensor(dw, "embedding_backward: dw", {V, C}, accumulator_dtype(dy.dtype));
  check_tensor(tokens, "embedding_backward: tokens", {T}, DType::I32);
  check_tensor(dy, "embedding_backward: dy", {T, C}, dy.dtype);
  if (order || device.is_cuda()) check_tensor(order, "embedding_backward: order", {T}, DType::I32);
  CHECK(pad_token_id >= -1 && pad_token_id < V,
        "embedding_backward: pad_token_id {} is outside the vocabulary [0, {}); -1 = none", pad_token_id, V);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return embedding_backward_cuda(device, dw, dy, tokens, order, scale, pad_token_id);
  }
  check_tokens("embedding_backward", elements_of(tokens), V);
  dispatch_float(dy.dtype, "embedding_backward", [&]<class F>(F) {
    backward_cpu(dw.as<F>(), dy.as<F>(), tokens.as<int32_t>(), T, C, static_cast<F>(scale), pad_token_id);
  });
}
