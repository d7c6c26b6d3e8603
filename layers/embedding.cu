// The token embedding on CUDA. Contract: embedding.h; the CPU loops that specify it: embedding.cpp.
//
// Forward: a warp copies a row. Bytes from DRAM: writes y, reads the rows of w that occur, once: the minimum.
//
// Backward without atomics. `order` lists the positions by token: the positions of a token are a run of it. It is cut
//   into chunks of equal length, whatever the runs. A warp walks a chunk and owns some columns of it:
//     - a run that begins in its chunk is added to dw itself, from the old value on, in the order of t: the CPU's bits;
//     - what is left of a run that began in an earlier chunk is summed into the chunk's row of `partial`.
//   A second kernel then adds the rows of `partial` that belong to one run to dw, chunk by chunk: eight groups of
//   threads sum every eighth, and their sums are added in order. So a token that is everywhere takes all warps like any
//   other text, and then one block a column tile. Chunks depend on T and C alone, and so do the bits.
//
// Bytes from DRAM: reads dy, reads and writes the rows of dw that occur: the minimum (order and tokens are 8 bytes a
//   row). One hot token adds a row of fp32 written and read a chunk of 32 rows: 2 / 32 rows for each of dy, 12% in
//   bf16; text whose runs are short adds nearly nothing.
#include <algorithm>
#include <limits>

#include "layers/core/cuda_util.cuh"
#include "layers/core/integer.h"
#include "layers/embedding.h"

namespace {

constexpr int kThreads = 256;  // of a block
constexpr int kWarps = kThreads / kWarpSize;
constexpr int64_t kMinChunk = 32;     // positions: a chunk is short, so that a small batch fills the GPU
constexpr int64_t kMaxChunks = 4096;  // then chunks get longer: 512 additions in a row for the hottest token
constexpr int kGroups = 8;            // that share the partial sums of a run
constexpr int kNoRun = -1;

// A warp a token: y[t] = scale * w[token[t]].
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    embedding_forward_kernel(T* y, const int32_t* tokens, const T* w, int64_t num_tokens, int C, float scale) {
  const int64_t t = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  if (t >= num_tokens) return;
  const T* row = w + int64_t{tokens[t]} * C;
#pragma unroll 4
  for (int c = threadIdx.x % kWarpSize * kWidth; c < C; c += kWarpSize * kWidth) {
    float value[kWidth];
    load_floats(value, row + c);
    for (int k = 0; k < kWidth; k++) value[k] *= scale;
    store_floats(y + t * C + c, value);
  }
}

/// How the positions are cut.
struct Chunks {
  int64_t size;  ///< positions of a chunk; the last may have fewer
  int64_t count;

  static Chunks of(int64_t num_tokens, int64_t C) {
    const int64_t bytes = C * static_cast<int64_t>(sizeof(float)) + static_cast<int64_t>(sizeof(int32_t));
    const int64_t fitting = std::max<int64_t>(1, static_cast<int64_t>(Device::kWorkspaceBytes) / bytes);
    const int64_t size = std::max(kMinChunk, ceil_div(num_tokens, std::min(kMaxChunks, fitting)));
    return {size, ceil_div(num_tokens, size)};
  }
};

// A warp a chunk and a tile of 32 kWidth columns. partial (chunks, C): the sum of the run that reaches into the chunk,
// whose token is in reaching (chunks), kNoRun if there is none.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    embedding_backward_kernel(float* dw, float* partial, int32_t* reaching, const T* dy, const int32_t* tokens,
                              const int32_t* order, int64_t num_tokens, int C, float scale, int pad_token_id,
                              Chunks chunks, int num_tiles) {
  const int64_t warp = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t chunk = warp / num_tiles;
  const int tile = static_cast<int>(warp % num_tiles), c = (tile * kWarpSize + lane) * kWidth;
  if (chunk >= chunks.count) return;
  const int64_t begin = chunk * chunks.size;
  const int64_t end = begin + chunks.size < num_tokens ? begin + chunks.size : num_tokens;
  int run = kNoRun;         // the token whose rows are being summed
  float* sum_of = nullptr;  // where their sum goes
  if (begin > 0) {
    const int first = tokens[order[begin]];
    if (first != pad_token_id && first == tokens[order[begin - 1]]) {
      run = first;
      sum_of = partial + chunk * C + c;
    }
  }
  if (tile == 0 && lane == 0) reaching[chunk] = run;
  if (c >= C) return;

  float sum[kWidth] = {};
  for (int64_t i = begin; i < end; i++) {
    const int64_t t = order[i];
    const int token = tokens[t];
    if (token == pad_token_id) continue;
    float dyt[kWidth];
    load_floats(dyt, dy + t * C + c);
    if (token != run) {
      if (sum_of) store_floats(sum_of, sum);
      run = token;
      sum_of = dw + int64_t{token} * C + c;
      load_floats(sum, sum_of);
    }
    for (int k = 0; k < kWidth; k++) sum[k] += scale * dyt[k];
  }
  if (sum_of) store_floats(sum_of, sum);
}

// dw += the partial sums of each run. A block looks at 32 chunks and 32 kWidth columns, thread (lane, group): it takes
// the runs that begin just before one of its chunks, and follows them as far as they reach. All its warps find the
// same runs; group g sums the chunks g, g + 8, ... of a run, then group 0 adds the eight sums in order.
template <int kWidth>
__global__ void __launch_bounds__(kWarpSize* kGroups)
    embedding_partials_kernel(float* dw, const float* partial, const int32_t* reaching, int64_t num_chunks, int C,
                              int num_tiles) {
  __shared__ float sums[kGroups][kWidth][kWarpSize];
  const int lane = threadIdx.x, group = threadIdx.y;
  const int64_t first = int64_t{blockIdx.x} / num_tiles * kWarpSize;
  const int c = (static_cast<int>(int64_t{blockIdx.x} % num_tiles) * kWarpSize + lane) * kWidth;
  const int64_t mine = first + lane;  // nothing reaches into chunk 0
  const bool begins = mine > 0 && mine < num_chunks && reaching[mine] != kNoRun && reaching[mine] != reaching[mine - 1];
  for (unsigned runs = __ballot_sync(kFullWarp, begins); runs != 0; runs &= runs - 1) {
    const int64_t begin = first + __ffs(static_cast<int>(runs)) - 1;
    const int token = reaching[begin];
    int64_t end = begin;  // the first chunk that the run does not reach
    unsigned ended = 0;
    while (ended == 0) {
      ended = __ballot_sync(kFullWarp, end + lane >= num_chunks || reaching[end + lane] != token);
      end += ended == 0 ? kWarpSize : __ffs(static_cast<int>(ended)) - 1;
    }
    float sum[kWidth] = {};
    if (c < C) {
#pragma unroll 4
      for (int64_t chunk = begin + group; chunk < end; chunk += kGroups) {
        float part[kWidth];
        load_floats(part, partial + chunk * C + c);
        for (int k = 0; k < kWidth; k++) sum[k] += part[k];
      }
    }
    for (int k = 0; k < kWidth; k++) sums[group][k][lane] = sum[k];
    __syncthreads();
    if (group == 0 && c < C) {
      for (int g = 1; g < kGroups; g++) {
        for (int k = 0; k < kWidth; k++) sum[k] += sums[g][k][lane];
      }
      float* row = dw + int64_t{token} * C + c;
      float old[kWidth];
      load_floats(old, row);
      for (int k = 0; k < kWidth; k++) old[k] += sum[k];
      store_floats(row, old);
    }
    __syncthreads();  // sums is free for the next run
  }
}

/// C, for kernels that count columns in 32 bits; offsets of rows take 64.
int row_length(ConstTensor x) {
  constexpr int64_t kMax = int64_t{1} << 30;
  CHECK(x.shape.last() <= kMax, "embedding: rows of {} elements, the CUDA kernels allow {}", x.shape.last(), kMax);
  return static_cast<int>(x.shape.last());
}

template <class T, int kWidth>
void forward(Device& device, Tensor y, ConstTensor tokens, ConstTensor w, double scale) {
  launch(device, {ceil_div(tokens.numel(), kWarps), kThreads}, embedding_forward_kernel<T, kWidth>, y.as<T>(),
         tokens.as<int32_t>(), w.as<T>(), tokens.numel(), row_length(w), static_cast<float>(scale));
}

template <class T, int kWidth>
void backward(Device& device, Tensor dw, ConstTensor dy, ConstTensor tokens, ConstTensor order, double scale,
              int64_t pad_token_id) {
  const int64_t num_tokens = tokens.numel();
  const int C = row_length(dw);
  if (num_tokens == 0 || C == 0) return;
  const Chunks chunks = Chunks::of(num_tokens, C);
  const size_t num_partials = static_cast<size_t>(chunks.count * C);
  float* partial = static_cast<float*>(
      device.workspace(num_partials * sizeof(float) + static_cast<size_t>(chunks.count) * sizeof(int32_t)));
  int32_t* reaching = reinterpret_cast<int32_t*>(partial + num_partials);
  const int tiles = static_cast<int>(ceil_div(C, kWarpSize * kWidth));
  launch(device, {ceil_div(chunks.count * tiles, kWarps), kThreads}, embedding_backward_kernel<T, kWidth>,
         dw.as<float>(), partial, reaching, dy.as<T>(), tokens.as<int32_t>(), order.as<int32_t>(), num_tokens, C,
         static_cast<float>(scale), static_cast<int>(pad_token_id), chunks, tiles);
  if (chunks.count == 1) return;
  constexpr int kSumWidth = std::min(kWidth, kPackWidth<float>);
  const int sum_tiles = static_cast<int>(ceil_div(C, kWarpSize * kSumWidth));
  launch(device, {ceil_div(chunks.count, kWarpSize) * sum_tiles, dim3(kWarpSize, kGroups)},
         embedding_partials_kernel<kSumWidth>, dw.as<float>(), partial, reaching, chunks.count, C, sum_tiles);
}

}  // namespace

void embedding_forward_cuda(Device& device, Tensor y, ConstTensor tokens, ConstTensor w, double scale) {
  dispatch_cuda(w.dtype, "embedding_forward", [&]<class T>(T) {
    const bool packed = is_packable<T>(w.shape.last(), {y.data, w.data});
    packed ? forward<T, kPackWidth<T>>(device, y, tokens, w, scale) : forward<T, 1>(device, y, tokens, w, scale);
  });
}

void embedding_backward_cuda(Device& device, Tensor dw, ConstTensor dy, ConstTensor tokens, ConstTensor order,
                             double scale, int64_t pad_token_id) {
  dispatch_cuda(dy.dtype, "embedding_backward", [&]<class T>(T) {
    const bool packed = is_packable<T>(dw.shape.last(), {dw.data, dy.data});
    packed ? backward<T, kPackWidth<T>>(device, dw, dy, tokens, order, scale, pad_token_id)
           : backward<T, 1>(device, dw, dy, tokens, order, scale, pad_token_id);
  });
}
