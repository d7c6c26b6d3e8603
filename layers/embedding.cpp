// Front doors and the CPU loops that specify the token embedding. Contract: embedding.h.
#include "layers/embedding.h"

#include "layers/core/parallel.h"

namespace {

constexpr int64_t kGrainElements = 16384;
constexpr int64_t kColumnBlock = 64;  // columns that one thread owns: whole cache lines

void check_tokens(const char* who, const ConstTensor& tokens, int64_t V) {
  const int32_t* id = tokens.as<int32_t>();
  for (int64_t t = 0; t < tokens.numel(); t++) {
    CHECK(id[t] >= 0 && id[t] < V, "{}: token id {} at position {} is outside the vocabulary [0, {})", who, id[t], t,
          V);
  }
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

void embedding_forward(Device& device, Tensor y, ConstTensor tokens, ConstTensor w, double scale) {
  CHECK(w.shape.rank() == 2, "embedding_forward: w ('{}') is {}, expected (V, C)", w.name, w.shape.str());
  const int64_t T = tokens.numel(), V = w.shape[0], C = w.shape[1];
  check_tensor(w, "embedding_forward: w", {V, C}, w.dtype);
  check_tensor(tokens, "embedding_forward: tokens", {T}, DType::I32);
  check_tensor(y, "embedding_forward: y", {T, C}, w.dtype);
  require_cpu(device, "embedding_forward");
  check_tokens("embedding_forward", tokens, V);
  dispatch_float(w.dtype, "embedding_forward", [&]<class F>(F) {
    forward_cpu(y.as<F>(), tokens.as<int32_t>(), w.as<F>(), T, C, static_cast<F>(scale));
  });
}

void embedding_backward(Device& device, Tensor dw, ConstTensor dy, ConstTensor tokens, double scale,
                        int64_t pad_token_id) {
  CHECK(dw.shape.rank() == 2, "embedding_backward: dw ('{}') is {}, expected (V, C)", dw.name, dw.shape.str());
  const int64_t T = tokens.numel(), V = dw.shape[0], C = dw.shape[1];
  check_tensor(dw, "embedding_backward: dw", {V, C}, dy.dtype);
  check_tensor(tokens, "embedding_backward: tokens", {T}, DType::I32);
  check_tensor(dy, "embedding_backward: dy", {T, C}, dy.dtype);
  CHECK(pad_token_id >= -1 && pad_token_id < V,
        "embedding_backward: pad_token_id {} is outside the vocabulary [0, {}); -1 = none", pad_token_id, V);
  require_cpu(device, "embedding_backward");
  check_tokens("embedding_backward", tokens, V);
  dispatch_float(dy.dtype, "embedding_backward", [&]<class F>(F) {
    backward_cpu(dw.as<F>(), dy.as<F>(), tokens.as<int32_t>(), T, C, static_cast<F>(scale), pad_token_id);
  });
}
