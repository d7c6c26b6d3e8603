// Matrix products by cuBLASLt. Contract: blas.h. No kernel.
//
// cuBLASLt counts columns first: a row-major (M, N) is its (N, M). So D = A B is asked for as D^T = B^T A^T, b first,
// and a matrix is "transposed" for it exactly when it is for us.
#include "layers/core/blas.h"

#include <cublasLt.h>

#include <algorithm>
#include <compare>
#include <map>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "layers/core/cuda_util.cuh"
#include "layers/core/device_cuda.h"

namespace {

constexpr size_t kMaxWorkspaceBytes = size_t{32} << 20;  // what NVIDIA advises for Hopper; it lies in Device::workspace
static_assert(kMaxWorkspaceBytes <= Device::kWorkspaceBytes);

template <auto kDestroy>
struct Destroyer {
  template <class T>
  void operator()(T* object) const {
    kDestroy(object);
  }
};
template <class Pointer, auto kDestroy>
using Owned = std::unique_ptr<std::remove_pointer_t<Pointer>, Destroyer<kDestroy>>;

using Handle = Owned<cublasLtHandle_t, cublasLtDestroy>;
using Operation = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

/// What an algorithm is chosen by.
struct Problem {
  int64_t M, N, K;
  bool a_transposed, b_transposed, has_bias;
  DType in, out;
  uint32_t a_alignment, b_alignment, d_alignment, bias_alignment;  ///< bytes, at most 256

  auto operator<=>(const Problem&) const = default;
};

std::string describe(const Problem& p) {
  return fmt::format("{} ({}, {}){} x ({}, {}){} -> {}{}", name_of(p.in), p.M, p.K, p.a_transposed ? " transposed" : "",
                     p.K, p.N, p.b_transposed ? " transposed" : "", name_of(p.out), p.has_bias ? " + bias" : "");
}

void blas_check(cublasStatus_t status, const char* call) {
  CHECK(status == CUBLAS_STATUS_SUCCESS, "cuBLASLt: {}: {}", call, cublasLtGetStatusString(status));
}

cudaDataType_t cuda_type(DType dtype) {
  switch (dtype) {
    case DType::F32:
      return CUDA_R_32F;
    case DType::BF16:
      return CUDA_R_16BF;
    default:
      fail("a matrix product of dtype {} is not supported on the CUDA device, use F32 or BF16", name_of(dtype));
  }
}

/// The largest power of two, up to what cuBLASLt makes use of, that divides an address.
uint32_t alignment_of(const void* data) {
  constexpr uintptr_t kMost = 256;
  const uintptr_t address = reinterpret_cast<uintptr_t>(data) | kMost;
  return static_cast<uint32_t>(address & -address);
}

template <class T>
void set(const Operation& operation, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  blas_check(cublasLtMatmulDescSetAttribute(operation.get(), attribute, &value, sizeof value), "matmul attribute");
}
template <class T>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
  blas_check(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof value), "preference");
}

/// A row-major matrix (rows, columns), without gaps.
Layout make_layout(DType dtype, int64_t rows, int64_t columns) {
  cublasLtMatrixLayout_t layout = nullptr;
  blas_check(cublasLtMatrixLayoutCreate(&layout, cuda_type(dtype), static_cast<uint64_t>(columns),
                                        static_cast<uint64_t>(rows), columns),
             "matrix layout");
  return Layout(layout);
}

Operation make_operation(const Problem& p, const void* bias) {
  cublasLtMatmulDesc_t created = nullptr;
  blas_check(cublasLtMatmulDescCreate(&created, CUBLAS_COMPUTE_32F, CUDA_R_32F), "matmul descriptor");
  Operation operation(created);
  set(operation, CUBLASLT_MATMUL_DESC_TRANSA, p.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(operation, CUBLASLT_MATMUL_DESC_TRANSB, p.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (p.has_bias) {
    set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);  // the choice looks at its alignment
  }
  return operation;
}

Preference make_preference(const Problem& p) {
  cublasLtMatmulPreference_t created = nullptr;
  blas_check(cublasLtMatmulPreferenceCreate(&created), "preference");
  Preference preference(created);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kMaxWorkspaceBytes});
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, p.b_alignment);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, p.a_alignment);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, p.d_alignment);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, p.d_alignment);
  return preference;
}

/// Descriptors of a problem and the algorithm that was chosen for it.
struct Plan {
  Operation operation;
  Layout a, b, d;
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace_bytes;
};

/// None where cuBLASLt has no algorithm.
std::optional<Plan> make_plan(const Handle& handle, const Problem& p, const void* bias) {
  const auto stored = [](DType dtype, int64_t rows, int64_t columns, bool transposed) {
    return transposed ? make_layout(dtype, columns, rows) : make_layout(dtype, rows, columns);
  };
  Plan plan = {make_operation(p, bias),
               stored(p.in, p.M, p.K, p.a_transposed),
               stored(p.in, p.K, p.N, p.b_transposed),
               make_layout(p.out, p.M, p.N),
               {},
               0};
  const Preference preference = make_preference(p);
  cublasLtMatmulHeuristicResult_t chosen = {};
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle.get(), plan.operation.get(), plan.b.get(), plan.a.get(), plan.d.get(),
                                     plan.d.get(), preference.get(), 1, &chosen, &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return std::nullopt;
  CHECK(status == CUBLAS_STATUS_SUCCESS, "cuBLASLt: no choice for {}: {}", describe(p),
        cublasLtGetStatusString(status));
  if (count == 0 || chosen.state != CUBLAS_STATUS_SUCCESS) return std::nullopt;
  plan.algorithm = chosen.algo, plan.workspace_bytes = chosen.workspaceSize;
  return plan;
}

}  // namespace

struct Blas {
  Handle handle;
  std::map<Problem, std::optional<Plan>> plans;
};

namespace {

Problem make_problem(const Tensor& d, const BlasOperand& a, const BlasOperand& b, const ConstTensor& bias) {
  const auto shape = [](const BlasOperand& o) {
    const Shape& s = o.matrix.shape;
    return o.transposed ? Shape{s[1], s[0]} : Shape{s[0], s[1]};
  };
  const Shape a_shape = shape(a), b_shape = shape(b);
  CHECK(a_shape[1] == b_shape[0] && d.shape == Shape({a_shape[0], b_shape[1]}) && a.matrix.dtype == b.matrix.dtype,
        "matrix product: {} {} '{}' x {} {} '{}' does not give {} '{}'", name_of(a.matrix.dtype), a_shape.str(),
        a.matrix.name, name_of(b.matrix.dtype), b_shape.str(), b.matrix.name, d.shape.str(), d.name);
  return {a_shape[0],
          b_shape[1],
          a_shape[1],
          a.transposed,
          b.transposed,
          static_cast<bool>(bias),
          a.matrix.dtype,
          d.dtype,
          alignment_of(a.matrix.data),
          alignment_of(b.matrix.data),
          alignment_of(d.data),
          alignment_of(bias.data)};
}

/// False where there is no algorithm.
bool run(Device& device, Tensor d, const BlasOperand& a, const BlasOperand& b, bool accumulate, ConstTensor bias) {
  const Problem problem = make_problem(d, a, b, bias);
  Blas& blas = device.blas();
  auto found = blas.plans.find(problem);
  if (found == blas.plans.end()) {
    found = blas.plans.emplace(problem, make_plan(blas.handle, problem, bias.data)).first;
  }
  if (!found->second) return false;
  const Plan& plan = *found->second;
  if (bias) set(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.data);
  const float alpha = 1, beta = accumulate ? 1 : 0;
  const cublasStatus_t status = cublasLtMatmul(
      blas.handle.get(), plan.operation.get(), &alpha, b.matrix.data, plan.b.get(), a.matrix.data, plan.a.get(), &beta,
      d.data, plan.d.get(), d.data, plan.d.get(), &plan.algorithm, device.workspace(plan.workspace_bytes),
      plan.workspace_bytes, static_cast<cudaStream_t>(device.stream()));
  CHECK(status == CUBLAS_STATUS_SUCCESS, "cuBLASLt: the product {} failed: {}", describe(problem),
        cublasLtGetStatusString(status));
  return true;
}

}  // namespace

Blas* cuda_open_blas() {
  cublasLtHandle_t handle = nullptr;
  blas_check(cublasLtCreate(&handle), "create");
  return new Blas{Handle(handle), {}};
}

void cuda_close_blas(Blas* blas) noexcept {
  delete blas;
}

void blas_gemm(Device& device, Tensor d, BlasOperand a, BlasOperand b, bool accumulate) {
  if (d.numel() == 0) return;
  if (a.matrix.numel() == 0) {  // a sum of no products
    if (!accumulate) device.fill_zero(d.data, d.size_bytes());
    return;
  }
  CHECK(run(device, d, a, b, accumulate, {}), "cuBLASLt has no algorithm for {}", describe(make_problem(d, a, b, {})));
}

bool blas_gemm_bias(Device& device, Tensor d, BlasOperand a, BlasOperand b, ConstTensor bias) {
  check_tensor(bias, "matrix product: bias", {d.shape.last()}, d.dtype);
  return run(device, d, a, b, false, bias);
}
