// Tiles of matrices in shared memory, for kernels that multiply: how they lie there, the ways in and out, and their
// fragments for the tensor cores.
#pragma once

#include "layers/core/cuda_util.cuh"

/// kRows rows of kWidth elements in shared memory, in chunks of 16 bytes. Chunk c of a row lies at c ^ swizzle: chunks
/// c of 8 neighbouring rows, which one instruction reads, lie in different banks.
template <class Element, int kWidth, int kRows_>
struct Tile {
  using T = Element;
  static constexpr int kRows = kRows_, kChunk = kPackWidth<T>, kChunks = kWidth / kChunk, kElements = kRows * kWidth;
  static_assert(kWidth % kChunk == 0 && kChunks % 4 == 0);
  T* data;

  __device__ __forceinline__ T* chunk(int row, int c) const {
    const int swizzle = kChunks % 8 == 0 ? row % 8 : row / 2 % 4;
    return data + row * kWidth + (c ^ swizzle) * kChunk;
  }
  __device__ __forceinline__ T& at(int row, int column) const { return chunk(row, column / kChunk)[column % kChunk]; }
};

/// Rows of `width` elements in global memory.
template <class T>
struct Rows {
  T* data;
  int64_t stride;  ///< elements from one row to the next
  int num_rows, width;
  bool is_packed;  ///< all of them can be read and written 128 bits at a time
};

/// Chunk c of a row of the tile = that of row `from` of `rows`, zero where there is no row and beyond the width. It is
/// there after cp_async_commit, a wait for that group, and a barrier.
template <class AnyTile, class T>
__device__ __forceinline__ void load_chunk(const AnyTile& tile, int row, int c, const Rows<const T>& rows, int from) {
  const int count = from < rows.num_rows ? rows.width - c * AnyTile::kChunk : 0;
  const T* data = rows.data + from * rows.stride + c * AnyTile::kChunk;
  T* to = tile.chunk(row, c);
  if (rows.is_packed && count > 0) {
    cp_async_16(to, data);
  } else {
    for (int k = 0; k < AnyTile::kChunk; k++) to[k] = k < count ? data[k] : T{};
  }
}

/// The same the other way round, as far as there is something.
template <class AnyTile, class T>
__device__ __forceinline__ void store_chunk(const Rows<T>& rows, int to, const AnyTile& tile, int row, int c) {
  const int count = to < rows.num_rows ? rows.width - c * AnyTile::kChunk : 0;
  T* data = rows.data + to * rows.stride + c * AnyTile::kChunk;
  const T* from = tile.chunk(row, c);
  if (rows.is_packed && count > 0) {  // as C++ stores, for attention has no register to spare
    *reinterpret_cast<int4*>(data) = std::bit_cast<int4>(load_pack<AnyTile::kChunk>(from));
  } else {
    for (int k = 0; k < AnyTile::kChunk && k < count; k++) data[k] = from[k];
  }
}

/// Two elements of a fragment, `low` at the lower column.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  return from_float<bf16>(low).bits | static_cast<unsigned>(from_float<bf16>(high).bits) << 16;
}

// ---- operands of mma_bf16_16x8x16, which multiplies (M, K) by (K, N); all lanes of a warp call these with their
// `lane`

/// The first operand: the 16 x 16 elements at (m, k) of a matrix that lies in the tile as it is, or transposed.
template <bool kTransposed, class AnyTile>
__device__ __forceinline__ void load_first_operand(unsigned (&a)[4], const AnyTile& tile, int m, int k, int lane) {
  if constexpr (kTransposed) {
    ldmatrix_x4_trans(a, tile.chunk(k + lane / 16 * 8 + lane % 8, m / 8 + lane / 8 % 2));
  } else {
    ldmatrix_x4(a, tile.chunk(m + lane % 16, k / 8 + lane / 16));
  }
}

/// Second operands: the 16 x 8 elements at (k, n), then those at (k, n + 8): b[0], b[1], and b[2], b[3].
template <bool kTransposed, class AnyTile>
__device__ __forceinline__ void load_second_operands(unsigned (&b)[4], const AnyTile& tile, int k, int n, int lane) {
  if constexpr (kTransposed) {
    ldmatrix_x4(b, tile.chunk(n + lane / 16 * 8 + lane % 8, k / 8 + lane / 8 % 2));
  } else {
    ldmatrix_x4_trans(b, tile.chunk(k + lane % 16, n / 8 + lane / 16));
  }
}
