// CUDA's built-in variables and functions of a thread. Where one waits for others, the calling line comes along, so
// that threads that meet at different lines are found out.
#pragma once

#include <math.h>

#include <bit>
#include <cstring>
#include <type_traits>

#include "test/simt/device_side.h"

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

// ---- barriers

inline void __syncthreads(const SimtSite& site = SimtSite::current()) {
  simt_block_barrier(SimtVote::None, false, site);
}
inline int __syncthreads_count(int predicate, const SimtSite& site = SimtSite::current()) {
  return simt_block_barrier(SimtVote::Count, predicate != 0, site);
}
inline int __syncthreads_and(int predicate, const SimtSite& site = SimtSite::current()) {
  return simt_block_barrier(SimtVote::And, predicate != 0, site);
}
inline int __syncthreads_or(int predicate, const SimtSite& site = SimtSite::current()) {
  return simt_block_barrier(SimtVote::Or, predicate != 0, site);
}
inline void __syncwarp(unsigned mask = ~0u, const SimtSite& site = SimtSite::current()) {
  simt_warp_collective({"__syncwarp", nullptr, true}, mask, nullptr, site);
}
inline void __threadfence() {
  simt_fence();
}
inline void __threadfence_block() {}

// ---- exchange within a warp

template <class T>
T simt_shuffle_as(const char* name, unsigned mask, T value, int source, const SimtSite& site) {
  static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = simt_shuffle(name, mask, bits, source, site);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Lanes form segments of `width` (a power of two); a source outside the segment is the lane itself.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, const SimtSite& site = SimtSite::current()) {
  const int lane = static_cast<int>(simt_lane());
  return simt_shuffle_as("__shfl_sync", mask, value, (lane & ~(width - 1)) | (source & (width - 1)), site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, const SimtSite& site = SimtSite::current()) {
  const int lane = static_cast<int>(simt_lane()), source = lane ^ lane_mask;
  return simt_shuffle_as("__shfl_xor_sync", mask, value, source > (lane | (width - 1)) ? lane : source, site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, const SimtSite& site = SimtSite::current()) {
  const int lane = static_cast<int>(simt_lane()), source = lane - static_cast<int>(delta);
  return simt_shuffle_as("__shfl_up_sync", mask, value, source < (lane & ~(width - 1)) ? lane : source, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, const SimtSite& site = SimtSite::current()) {
  const int lane = static_cast<int>(simt_lane()), source = lane + static_cast<int>(delta);
  return simt_shuffle_as("__shfl_down_sync", mask, value, source > (lane | (width - 1)) ? lane : source, site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, const SimtSite& site = SimtSite::current()) {
  return simt_ballot("__ballot_sync", mask, predicate != 0, site);
}
inline int __any_sync(unsigned mask, int predicate, const SimtSite& site = SimtSite::current()) {
  return simt_ballot("__any_sync", mask, predicate != 0, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, const SimtSite& site = SimtSite::current()) {
  return simt_ballot("__all_sync", mask, predicate == 0, site) == 0;
}

// ---- atomics

template <class T, class Op>
__forceinline__ T simt_atomic(T* data, Op op) {
  simt_atomic_begin(data);
  const T old = *data;
  *data = op(old);
  simt_atomic_end();
  return old;
}

template <class T>
__forceinline__ T atomicAdd(T* data, std::type_identity_t<T> value) {
  return simt_atomic(data, [&](T old) { return old + value; });
}
template <class T>
__forceinline__ T atomicMax(T* data, std::type_identity_t<T> value) {
  return simt_atomic(data, [&](T old) { return old < value ? value : old; });
}
template <class T>
__forceinline__ T atomicCAS(T* data, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return simt_atomic(data, [&](T old) { return old == expected ? value : old; });
}
__forceinline__ unsigned atomicInc(unsigned* data, unsigned limit) {
  return simt_atomic(data, [&](unsigned old) { return old >= limit ? 0u : old + 1; });
}

// ---- arithmetic

inline float __uint_as_float(unsigned bits) {
  return std::bit_cast<float>(bits);
}
inline unsigned __float_as_uint(float value) {
  return std::bit_cast<unsigned>(value);
}
/// The position of the lowest bit that is set, counted from 1; 0 if none is.
inline int __ffs(int bits) {
  return __builtin_ffs(bits);
}
inline int __popc(unsigned bits) {
  return __builtin_popcount(bits);
}
inline float rsqrtf(float x) {
  return 1.0f / sqrtf(x);
}
