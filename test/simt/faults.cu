#include "test/simt/faults.h"

#include <cassert>
#include <utility>

#include "layers/core/cuda_util.cuh"
#include "test/simt/simt.h"

namespace {

constexpr int N = 256;

/// Device memory of `size` numbers, each `value(i)`, or undefined.
class Array {
 public:
  explicit Array(int size) : size_(size) { cuda_check(cudaMalloc(&memory_, bytes())); }
  template <class Value>
  Array(int size, Value value) : Array(size) {
    std::vector<float> host;
    for (int i = 0; i < size; i++) host.push_back(value(i));
    copy(memory_, host.data());
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { cudaFree(memory_); }
  float* data() const { return static_cast<float*>(memory_); }
  std::vector<float> to_host() const {
    std::vector<float> host(static_cast<size_t>(size_));
    copy(host.data(), memory_);
    return host;
  }

 private:
  size_t bytes() const { return static_cast<size_t>(size_) * sizeof(float); }
  void copy(void* to, const void* from) const {
    cuda_check(cudaMemcpyAsync(to, from, bytes(), cudaMemcpyDefault, nullptr));
  }
  int size_;
  void* memory_ = nullptr;
};

float input(int i) {
  return 1.0f + static_cast<float>(i * 7 % 31) * 0.25f;
}
float zero(int) {
  return 0.0f;
}

/// Opened once: a device has a large workspace.
Device& cuda() {
  static Device device = Device::cuda(0);
  return device;
}

/// Runs `kernel(out, in, more...)` and compares the first `checked` outputs.
template <class Kernel, class Expected, class... More>
void run(Kernel kernel, const Array& out, const LaunchShape& shape, int checked, Expected expected, More... more) {
  const Array in(N, input);
  launch(cuda(), shape, kernel, out.data(), in.data(), more...);
  const std::vector<float> result = out.to_host();
  for (int i = 0; i < checked; i++) {
    const float value = result[static_cast<size_t>(i)];
    CHECK(value == expected(i), "wrong result: out[{}] = {}, not {}", i, value, expected(i));
  }
}
/// One block of N threads, N outputs.
template <class Kernel, class Expected, class... More>
void run(Kernel kernel, Expected expected, More... more) {
  const Array out(N, zero);
  run(kernel, out, {1, N}, N, expected, more...);
}

// ---- barriers

__global__ void no_barrier_before_read(float* out, const float* in) {
  __shared__ float s[N];
  const int t = threadIdx.x;
  s[t] = in[t];
  out[t] = s[(t + 1) % N];
}

__global__ void no_barrier_before_write(float* out, const float* in) {
  __shared__ float s[N];
  const int t = threadIdx.x;
  float sum = 0;
  for (int i = 0; i < 4; i++) {
    s[t] = in[t] + static_cast<float>(i);
    __syncthreads();
    sum += s[(t + 33) % N];
  }
  out[t] = sum;
}

__global__ void barrier_in_both_branches(float* out, const float* in) {
  const int t = threadIdx.x;
  if (t < 64) {
    out[t] = in[t];
    __syncthreads();
  } else {
    __syncthreads();
    out[t] = in[t];
  }
}

__global__ void barrier_skipped_by_one(float* out, const float* in) {
  __shared__ float s[N];
  const int t = threadIdx.x;
  s[t] = in[t];
  if (t != 5) __syncthreads();
  out[t] = s[N - 1 - t];
  __syncthreads();
}

__global__ void barrier_against_warp(float* out, const float* in) {
  const int t = threadIdx.x;
  out[t] = in[t];
  t == 0 ? __syncthreads() : __syncwarp();
}

// ---- warps

__global__ void no_syncwarp(float* out, const float* in) {
  __shared__ float s[N];
  const int t = threadIdx.x;
  s[t] = in[t];
  out[t] = s[t ^ 1];
}

__global__ void shuffle_in_a_branch(float* out, const float* in) {
  const int t = threadIdx.x;
  float v = in[t];
  if (t % 2) v += __shfl_xor_sync(kFullWarp, v, 1);
  out[t] = v;
}

__global__ void shuffle_from_outside_the_mask(float* out, const float* in) {
  const int t = threadIdx.x;
  float v = in[t];
  if (t % 32 < 16) v += __shfl_xor_sync(0xffffu, v, 16);
  out[t] = v;
}

__global__ void shuffle_without_oneself(float* out, const float* in) {
  const int t = threadIdx.x;
  out[t] = __shfl_xor_sync(0xfffffffeu, in[t], 1);
}

__global__ void shuffles_at_two_lines(float* out, const float* in) {
  const int t = threadIdx.x;
  if (t % 2) {
    out[t] = __shfl_xor_sync(kFullWarp, in[t], 1);
  } else {
    out[t] = __shfl_xor_sync(kFullWarp, in[t], 1);
  }
}

// ---- bounds, alignment, address spaces

__global__ void write_one_past_the_end(float* out, const float* in, int size) {
  const int t = threadIdx.x;
  if (t <= size) out[t] = in[t % N];
}

__global__ void read_one_past_the_end(float* out, const float* in) {
  const int t = threadIdx.x;
  out[t] = in[t] + 0 * in[t + 1];
}

__global__ void read_before_the_start(float* out, const float* in) {
  const int t = threadIdx.x;
  out[t] = in[t] + 0 * in[t - 1];
}

__global__ void write_past_dynamic_shared(float* out, const float* in) {
  float* s = dynamic_shared<float>();
  const int t = threadIdx.x;
  s[t + 1] = in[t];
  __syncthreads();
  out[t] = s[t + 1];
}

__global__ void write_past_static_shared(float* out, const float* in, int past) {
  __shared__ float s[N];
  const int t = threadIdx.x;
  s[t + past] = in[t];
  __syncthreads();
  out[t] = s[t + past];
}

__global__ void write_past_local_array(float* out, const float* in, int size) {
  float local[8];
  const int t = threadIdx.x;
  for (int i = 0; i < size; i++) local[i] = in[(t + i) % N];
  float sum = 0;
  for (int i = 0; i < size; i++) sum += local[i];
  out[t] = sum;
}

__global__ void copy_packs(float* out, const float* in, int num_packs) {
  const int t = threadIdx.x;
  if (t < num_packs) store_pack<4>(out + 4 * t, load_pack<4>(in + 4 * t));
}

__global__ void copy(float* out, const float* in) {
  out[threadIdx.x] = in[threadIdx.x];
}

__global__ void index_in_32_bits(float* out, const float* in, int rows) {
  const int i = (rows * 4096 + static_cast<int>(threadIdx.x)) % N;
  out[threadIdx.x] = in[i < 0 ? 0 : i];
}

// ---- initialisation

__global__ void read_unwritten_shared(float* out, const float* in) {
  __shared__ float s[N];
  const int t = threadIdx.x;
  if (t > 0) s[t] = in[t];
  __syncthreads();
  out[t] = s[t];
}

__global__ void add_to_out(float* out, const float* in) {
  out[threadIdx.x] += in[threadIdx.x];
}

__global__ void leave_one_unwritten(float* out, const float* in) {
  const int t = threadIdx.x;
  if (t != 100) out[t] = in[t];
}

// ---- asynchronous copies

/// Four copies of 64 numbers by the first 16 threads each time, in two stages; then all threads read.
template <bool kWait, bool kBarrier, bool kLastBarrier>
__global__ void copy_in_stages(float* out, const float* in) {
  alignas(16) __shared__ float s[2][64];
  const int t = threadIdx.x;
  const auto start = [&](int i) {
    if (t < 16) cp_async_16(&s[i % 2][4 * t], in + 64 * i + 4 * t);
    cp_async_commit();
  };
  start(0);
  for (int i = 0; i < 4; i++) {
    if (i + 1 < 4) start(i + 1);
    if (kWait && i + 1 < 4) cp_async_wait<1>();
    if (kWait && i + 1 == 4) cp_async_wait<0>();
    if (kBarrier) __syncthreads();
    if (t < 64) out[64 * i + t] = s[i % 2][63 - t];
    if (kLastBarrier) __syncthreads();
  }
  cp_async_wait<0>();
}

__global__ void copy_without_end(float* out, const float* in) {
  alignas(16) __shared__ float s[N];
  const int t = threadIdx.x;
  if (t < N / 4) cp_async_16(s + 4 * t, in + 4 * t);
  out[t] = in[t];
}

__global__ void copy_misaligned(float* out, const float* in) {
  alignas(16) __shared__ float s[8];
  const int t = threadIdx.x;
  if (t == 0) cp_async_16(s, in + 1);
  cp_async_commit();
  cp_async_wait<0>();
  out[t] = in[t];
}

// ---- tensor cores

enum class MmaFault { None, SwappedA, SwappedB, NoTranspose, NoSyncwarp, HalfWarp };

/// One warp. With A (16, 16) = in: out = A A^T (16 rows, columns 0-7), and behind it A A (columns 8-15).
template <MmaFault kFault>
__global__ void multiply_matrices(float* out, const float* in) {
  alignas(16) __shared__ uint16_t s[16][16];  // bf16
  const int t = threadIdx.x;
  for (int i = t; i < N; i += kWarpSize) s[i / 16][i % 16] = from_float<bf16>(in[i]).bits;
  if (kFault != MmaFault::NoSyncwarp) __syncwarp();
  if (kFault == MmaFault::HalfWarp && t >= 16) return;
  unsigned a[4], b[4];
  ldmatrix_x4(a, &s[t % 16][t / 16 * 8]);
  if (kFault == MmaFault::SwappedA) std::swap(a[1], a[2]);
  float d[4] = {};
  ldmatrix_x4(b, &s[t % 8][t / 8 % 2 * 8]);
  kFault == MmaFault::SwappedB ? mma_bf16_16x8x16(d, a, b[1], b[0]) : mma_bf16_16x8x16(d, a, b[0], b[1]);
  for (int i = 0; i < 4; i++) out[(t / 4 + i / 2 * 8) * 8 + t % 4 * 2 + i % 2] = d[i];
  for (float& x : d) x = 0;
  const uint16_t* row = &s[t % 16][8];
  kFault == MmaFault::NoTranspose ? ldmatrix_x4(b, row) : ldmatrix_x4_trans(b, row);
  mma_bf16_16x8x16(d, a, b[0], b[1]);
  for (int i = 0; i < 4; i++) out[128 + (t / 4 + i / 2 * 8) * 8 + t % 4 * 2 + i % 2] = d[i];
}

// ---- between threads and blocks without barriers

__global__ void histogram_without_atomics(float* out, const float*) {
  __shared__ int count[4];
  const int t = threadIdx.x;
  if (t < 4) count[t] = 0;
  __syncthreads();
  count[t % 4]++;
  __syncthreads();
  out[t] = static_cast<float>(count[t % 4]);
}

__global__ void blocks_write_the_same(float* out, const float* in) {
  out[blockIdx.x * 32 + threadIdx.x] = in[blockIdx.x * 32 + threadIdx.x];
}

__global__ void read_of_another_block(float* out, const float* in) {
  const int t = threadIdx.x;
  if (blockIdx.x == 0) {
    out[t] = in[t];
  } else {
    out[t + 64] = out[t];
  }
}

__global__ void sum_by_float_atomics(float* out, const float* in) {
  atomicAdd(out, in[threadIdx.x] * 1e-3f);
}

/// The last block adds what all have left in `partial`.
template <bool kFence>
__global__ void last_block_sums(float* out, const float* in, float* partial, unsigned* ticket) {
  __shared__ int is_last;
  const int t = threadIdx.x;
  const float sum = warp_sum(in[blockIdx.x * 32 + t]);
  if (t == 0) {
    partial[blockIdx.x] = sum;
    if (kFence) __threadfence();
    is_last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last || t > 0) return;
  float total = 0;
  for (unsigned b = 0; b < gridDim.x; b++) total += partial[b];
  out[0] = total;
}

// ---- that never end, or end badly

__global__ void spin(float* out, const float*) {
  const volatile float* flag = out;
  while (flag[N - 1] != 12345.0f) {
  }
}

__global__ void divide(float* out, const float*, int divisor) {
  out[threadIdx.x] = static_cast<float>(100 / divisor);
}

__global__ void assert_in_kernel(float* out, const float* in) {
  assert(in[threadIdx.x] < 0);
  out[threadIdx.x] = 1;
}

// ---- legal

__global__ void syncwarp_exchange(float* out, const float* in) {
  __shared__ float s[N];
  const int t = threadIdx.x;
  for (int i = 0; i < 3; i++) {
    s[t] = in[t];
    __syncwarp();
    out[t] = s[t ^ 1];
    __syncwarp();
  }
}

__global__ void half_warps(float* out, const float* in) {
  const int t = threadIdx.x;
  const float v = in[t];
  if (t % 32 < 16) {
    out[t] = v + __shfl_xor_sync(0xffffu, v, 1);
  } else {
    out[t] = v + __shfl_xor_sync(0xffff0000u, v, 1);
  }
}

__global__ void shuffles_with_segments(float* out, const float* in) {
  const int t = threadIdx.x;
  const float v = in[t];
  out[t] = __shfl_sync(kFullWarp, v, 3, 8) + 100 * __shfl_up_sync(kFullWarp, v, 2, 16) +
           10000 * __shfl_down_sync(kFullWarp, v, 1);
}

__global__ void broadcast_again_and_again(float* out, const float* in) {
  __shared__ float s;
  const int t = threadIdx.x;
  for (int i = 0; i < 3; i++) {
    if (t == 0) s = in[i];
    __syncthreads();
    out[t] = s;
    __syncthreads();
  }
}

__global__ void votes(float* out, const float*) {
  const int t = threadIdx.x;
  int result = __syncthreads_count(t % 4 == 0);
  result += 1000 * __syncthreads_and(t < N);
  result += 2000 * __syncthreads_or(t == 9);
  result += __all_sync(kFullWarp, t >= 0) + __any_sync(kFullWarp, t % 32 == 7);
  result += __ballot_sync(kFullWarp, t % 32 < 3);
  result += 10000 * __ffs(static_cast<int>(__ballot_sync(kFullWarp, t % 32 > 30))) + __ffs(0);
  result += 1000000 * __popc(__ballot_sync(kFullWarp, t % 32 > 26));
  out[t] = static_cast<float>(result);
}

__global__ void some_return_before_the_barrier(float* out, const float* in) {
  const int t = threadIdx.x;
  out[t] = in[t];
  if (t >= 100) return;
  __syncthreads();
  if (t < 50) out[t] = out[99 - t];
}

__global__ void histogram_with_atomics(float* out, const float*, int* largest) {
  __shared__ int count[4];
  const int t = threadIdx.x;
  if (t < 4) count[t] = 0;
  __syncthreads();
  atomicAdd(&count[t % 4], 1);
  atomicMax(largest, t);
  atomicCAS(largest, N - 1, N);
  __syncthreads();
  out[t] = static_cast<float>(count[t % 4]);
}

template <bool kWait, bool kBarrier, bool kLastBarrier>
void run_copy_in_stages() {
  run(copy_in_stages<kWait, kBarrier, kLastBarrier>, [](int i) { return input(i / 64 * 64 + 63 - i % 64); });
}

template <MmaFault kFault>
void run_multiply_matrices() {
  const Array out(N, zero);
  run(multiply_matrices<kFault>, out, {1, kWarpSize}, N, [](int i) {  // exact: multiples of 1/16
    const int row = i / 8 % 16, column = i % 8;
    float sum = 0;
    for (int k = 0; k < 16; k++)
      sum += input(row * 16 + k) * (i < 128 ? input(column * 16 + k) : input(k * 16 + column + 8));
    return sum;
  });
}

/// Both versions of the last-block sum: 8 blocks of one warp.
template <bool kFence>
void run_last_block_sums() {
  const Array out(1, zero), partial(8), ticket(1, zero);
  float total = 0;
  for (int i = 0; i < N; i++) total += input(i);  // exact: multiples of 1/4
  run(
      last_block_sums<kFence>, out, {8, 32}, 1, [&](int) { return total; }, partial.data(),
      reinterpret_cast<unsigned*>(ticket.data()));
}

void run_atomics_in_two_orders() {
  std::vector<float> sums;
  for (const uint64_t order : {kSimtAscending, kSimtDescending}) {
    simt_options().schedule = order;
    const Array out(1, zero);
    run(sum_by_float_atomics, out, {1, N}, 0, input);
    sums.push_back(out.to_host()[0]);
  }
  CHECK(sums[0] == sums[1], "the result depends on the schedule: {} or {}", sums[0], sums[1]);
}

void run_use_after_free() {
  const Array in(N, input);
  float* freed = nullptr;
  {
    const Array out(N, zero);
    freed = out.data();
  }
  launch(cuda(), {1, N}, copy, freed, in.data());
}

void run_host_pointer() {
  const std::vector<float> in(N, 1.0f);
  const Array out(N, zero);
  launch(cuda(), {1, N}, copy, out.data(), in.data());
}

void run_copy_past_the_end() {
  const Array array(N, zero);
  std::vector<float> host(N + 1);
  cuda_check(cudaMemcpyAsync(host.data(), array.data(), (N + 1) * sizeof(float), cudaMemcpyDefault, nullptr));
}

}  // namespace

const std::vector<Fault>& faults() {
  static const char* const kWrong = "wrong result";
  static const char* const kDivergent = "divergent __syncthreads: .* is at faults.cu:[0-9]+, .* at faults.cu:[0-9]+";
  static const char* const kAbsent = "__shfl_xor_sync faults.cu:[0-9]+: .* which does not take part";
  static const char* const kNoEnd = "returned with a cp.async that it never waited for: .*faults.cu:[0-9]+";
  static const char* const kMisaligned = "cp.async: .* between misaligned addresses at .*faults.cu:[0-9]+";
  static const char* const kHalf = "ldmatrix by 16 of 32 lanes";
  static const std::vector<Fault> table = {
      {"no_barrier_before_read", [] { run(no_barrier_before_read, [](int i) { return input((i + 1) % N); }); }, kWrong,
       kWrong, "race \\(read after write\\) on static __shared__ byte .* faults.cu:[0-9]+"},
      {"no_barrier_before_write",
       [] { run(no_barrier_before_write, [](int i) { return 4 * input((i + 33) % N) + 6; }); }, kWrong, kWrong,
       "race \\(write after read\\)|race \\(read after write\\)"},
      {"barrier_in_both_branches", [] { run(barrier_in_both_branches, input); }, kDivergent, kDivergent, kDivergent},
      {"barrier_skipped_by_one", [] { run(barrier_skipped_by_one, [](int i) { return input(N - 1 - i); }); },
       kDivergent, kDivergent, kDivergent},
      {"barrier_against_warp", [] { run(barrier_against_warp, input); }, "deadlock", "deadlock", "deadlock"},

      {"no_syncwarp", [] { run(no_syncwarp, [](int i) { return input(i ^ 1); }); }, kWrong, kWrong,
       "race \\(read after write\\)"},
      {"shuffle_in_a_branch",
       [] { run(shuffle_in_a_branch, [](int i) { return i % 2 ? input(i) + input(i ^ 1) : input(i); }); }, kAbsent,
       kAbsent, kAbsent},
      {"shuffle_from_outside_the_mask",
       [] { run(shuffle_from_outside_the_mask, [](int i) { return input(i) + (i % 32 < 16 ? input(i ^ 16) : 0); }); },
       kAbsent, kAbsent, kAbsent},
      {"shuffle_without_oneself", [] { run(shuffle_without_oneself, [](int i) { return input(i ^ 1); }); },
       "is not in its own mask", "is not in its own mask", "is not in its own mask"},
      {"shuffles_at_two_lines", [] { run(shuffles_at_two_lines, [](int i) { return input(i ^ 1); }); },
       "divergent warp collective", "divergent warp collective", "divergent warp collective"},

      {"write_one_past_the_end",
       [] {
         const Array out(N - 4, zero);
         run(write_one_past_the_end, out, {1, N}, N - 4, input, N - 4);
       },
       "invalid access to byte 1008 of a global", "invalid access to byte 1008 of a global",
       "out-of-bounds write of byte 1008 of a global allocation of 1008 bytes"},
      {"write_one_past_an_odd_end",
       [] {
         const Array out(N - 3, zero);
         run(write_one_past_the_end, out, {1, N}, N - 3, input, N - 3);
       },
       "out-of-bounds write to byte 1012 of a global", "use-after-poison",
       "out-of-bounds write of byte 1012 of a global"},
      {"read_one_past_the_end", [] { run(read_one_past_the_end, input); }, "invalid access to byte 1024 of a global",
       "invalid access to byte 1024 of a global", "out-of-bounds read of byte 1024 of a global"},
      {"read_before_the_start", [] { run(read_before_the_start, input); }, kWrong, "use-after-poison",
       "out-of-bounds read of byte -4 of a global"},
      {"write_past_dynamic_shared",
       [] {
         const Array out(N, zero);
         run(write_past_dynamic_shared, out, {1, N, N * sizeof(float)}, N, input);
       },
       "invalid access to byte 1024 of a dynamic __shared__", "invalid access to byte 1024 of a dynamic __shared__",
       "out-of-bounds write of byte 1024 of a dynamic __shared__"},
      {"write_past_static_shared", [] { run(write_past_static_shared, input, 1); }, nullptr,
       "index 256 out of bounds|buffer-overflow", nullptr},
      {"write_past_local_array",
       [] {
         run(
             write_past_local_array,
             [](int i) {
               float sum = 0;
               for (int k = 0; k < 9; k++) sum += input((i + k) % N);
               return sum;
             },
             9);
       },
       nullptr, "index 8 out of bounds|stack-buffer-overflow", nullptr},
      {"misaligned_pack",
       [] {
         const Array out(N, zero);
         const Array in(N, input);
         launch(cuda(), {1, N}, copy_packs, out.data(), in.data() + 1, N / 4 - 1);
       },
       nullptr, "misaligned address", nullptr},
      {"use_after_free", run_use_after_free, "freed global allocation", "freed global allocation",
       "freed global allocation"},
      {"host_pointer", run_host_pointer, nullptr, nullptr, "kernel reads host memory"},
      {"index_in_32_bits",
       [] {
         run(
             index_in_32_bits, [](int i) { return input(i); }, 524288);
       },
       nullptr, "signed integer overflow", nullptr},
      {"copy_past_the_end", run_copy_past_the_end, "leaves its allocation", "leaves its allocation",
       "leaves its allocation"},

      {"read_unwritten_shared", [] { run(read_unwritten_shared, input); }, kWrong, kWrong,
       "read of uninitialised static __shared__"},
      {"read_unwritten_global",
       [] {
         const Array out(N);
         run(add_to_out, out, {1, N}, N, input);
       },
       kWrong, kWrong, "read of uninitialised byte 0 of a global"},
      {"leave_one_unwritten",
       [] {
         const Array out(N);
         run(leave_one_unwritten, out, {1, N}, N, input);
       },
       kWrong, kWrong, "the host reads uninitialised device memory"},

      {"histogram_without_atomics", [] { run(histogram_without_atomics, [](int) { return N / 4.0f; }); }, nullptr,
       nullptr, "race"},
      {"blocks_write_the_same",
       [] {
         const Array out(N, zero);
         run(blocks_write_the_same, out, {4, 64}, 160, input);
       },
       nullptr, nullptr, "race \\(write after write\\).* another block"},
      {"blocks_add_to_the_same",
       [] {
         const Array out(N, zero);
         run(add_to_out, out, {4, N}, N, [](int i) { return 4 * input(i); });
       },
       nullptr, nullptr, "race \\(read after write\\).* another block"},
      {"read_of_another_block",
       [] {
         const Array out(128, zero);
         run(read_of_another_block, out, {2, 64}, 128, [](int i) { return input(i % 64); });
       },
       nullptr, nullptr, "race \\(read after write\\).* another block"},
      {"last_block_sums_without_fence", run_last_block_sums<false>, nullptr, nullptr,
       "race \\(read after write\\).* another block"},
      {"sum_by_float_atomics", run_atomics_in_two_orders, "depends on the schedule", "depends on the schedule",
       "depends on the schedule"},

      {"copy_without_wait", run_copy_in_stages<false, true, true>, kWrong, kWrong, "read of uninitialised static"},
      {"copy_without_barrier", run_copy_in_stages<true, false, true>, kWrong, kWrong,
       "race \\(read after write\\)|read of uninitialised static"},
      {"copy_over_what_is_read", run_copy_in_stages<true, true, false>, kWrong, kWrong,
       "race \\(write after read\\)|race \\(read after write\\)"},
      {"copy_without_end", [] { run(copy_without_end, input); }, kNoEnd, kNoEnd, kNoEnd},
      {"copy_misaligned", [] { run(copy_misaligned, input); }, kMisaligned, kMisaligned, kMisaligned},
      {"mma_swapped_a", run_multiply_matrices<MmaFault::SwappedA>, kWrong, kWrong, kWrong},
      {"mma_swapped_b", run_multiply_matrices<MmaFault::SwappedB>, kWrong, kWrong, kWrong},
      {"ldmatrix_without_transpose", run_multiply_matrices<MmaFault::NoTranspose>, kWrong, kWrong, kWrong},
      {"ldmatrix_without_syncwarp", run_multiply_matrices<MmaFault::NoSyncwarp>, nullptr, nullptr,
       "race \\(read after write\\)"},
      {"mma_by_half_a_warp", run_multiply_matrices<MmaFault::HalfWarp>, kHalf, kHalf, kHalf},

      {"spin",
       [] {
         simt_options().watchdog_s = 0.2;
         run(spin, input);
       },
       "watchdog", "watchdog", "watchdog"},
      {"divide", [] { run(divide, input, 0); }, "integer division fault", "division by zero", "integer division fault"},
      {"assert_in_kernel", [] { run(assert_in_kernel, input); }, "assert or abort", "assert or abort",
       "assert or abort"},
  };
  return table;
}

const std::vector<Idiom>& idioms() {
  static const std::vector<Idiom> table = {
      {"syncwarp_exchange", [] { run(syncwarp_exchange, [](int i) { return input(i ^ 1); }); }},
      {"half_warps", [] { run(half_warps, [](int i) { return input(i) + input(i ^ 1); }); }},
      {"shuffles_with_segments",
       [] {
         run(shuffles_with_segments, [](int i) {
           const int up = i % 16 < 2 ? i : i - 2, down = i % 32 == 31 ? i : i + 1;
           return input(i / 8 * 8 + 3) + 100 * input(up) + 10000 * input(down);
         });
       }},
      {"broadcast_again_and_again", [] { run(broadcast_again_and_again, [](int) { return input(2); }); }},
      {"votes", [] { run(votes, [](int) { return 64.0f + 1000 + 2000 + 2 + 7 + 320000 + 5000000; }); }},
      {"some_return_before_the_barrier",
       [] { run(some_return_before_the_barrier, [](int i) { return input(i < 50 ? 99 - i : i); }); }},
      {"histogram_with_atomics",
       [] {
         const Array largest(1, zero);
         run(
             histogram_with_atomics, [](int) { return N / 4.0f; }, reinterpret_cast<int*>(largest.data()));
         CHECK(__float_as_uint(largest.to_host()[0]) == N, "wrong result: atomicCAS");
       }},
      {"last_block_sums", run_last_block_sums<true>},
      {"copy_in_stages", run_copy_in_stages<true, true, true>},
      {"multiply_matrices", run_multiply_matrices<MmaFault::None>},
  };
  return table;
}
