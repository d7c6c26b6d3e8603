// The double of cuBLASLt: loops over device memory, sums in fp64 rounded once to fp32. It is as strict as the library
// may be: an attribute that it does not know is an Error, an algorithm belongs to the problem and the alignment that it
// was chosen for, what the workspace held is lost, and every matrix must lie in one live allocation.
#include <cublasLt.h>

#include <algorithm>
#include <vector>

#include "layers/core/dtype.h"
#include "test/simt/machine.h"

struct cublasLtContext {};

struct cublasLtMatmulDescOpaque_t {
  cublasComputeType_t compute;
  cudaDataType_t scale;
  cublasOperation_t transa = CUBLAS_OP_N, transb = CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
};

/// Element (r, c) is data[c ld + r].
struct cublasLtMatrixLayoutOpaque_t {
  cudaDataType type;
  uint64_t rows, cols;
  int64_t ld;

  size_t element_bytes() const { return type == CUDA_R_16BF ? 2 : 4; }
  size_t column_bytes() const { return rows * element_bytes(); }
  size_t stride_bytes() const { return static_cast<size_t>(ld) * element_bytes(); }
  size_t size_bytes() const { return (cols - 1) * stride_bytes() + column_bytes(); }
};

struct cublasLtMatmulPreferenceOpaque_t {
  uint64_t max_workspace_bytes = 0;
  uint32_t reductions = 7;
  uint32_t alignment_a = 256, alignment_b = 256, alignment_c = 256, alignment_d = 256;
};

namespace {

constexpr size_t kWorkspaceBytes = 1024;  // of an algorithm here, where the caller allows so much

template <class T>
cublasStatus_t store(T& to, const void* value, size_t size_bytes) {
  CHECK(size_bytes == sizeof(T), "cuBLASLt: an attribute of {} bytes was given {}", sizeof(T), size_bytes);
  std::copy_n(static_cast<const char*>(value), size_bytes, reinterpret_cast<char*>(&to));
  return CUBLAS_STATUS_SUCCESS;
}

/// M, N, K as cuBLASLt counts, and whether shapes and dtypes are of a product that the library has.
struct Product {
  uint64_t M, N, K;
  bool is_valid;
};

Product product_of(const cublasLtMatmulDescOpaque_t& desc, const cublasLtMatrixLayoutOpaque_t& a,
                   const cublasLtMatrixLayoutOpaque_t& b, const cublasLtMatrixLayoutOpaque_t& c,
                   const cublasLtMatrixLayoutOpaque_t& d) {
  const bool ta = desc.transa == CUBLAS_OP_T, tb = desc.transb == CUBLAS_OP_T;
  const uint64_t K = ta ? a.rows : a.cols;
  const bool shapes = (ta ? a.cols : a.rows) == d.rows && (tb ? b.rows : b.cols) == d.cols &&
                      (tb ? b.cols : b.rows) == K && c.rows == d.rows && c.cols == d.cols && c.ld == d.ld;
  const bool types = a.type == b.type && c.type == d.type && (d.type == CUDA_R_32F || d.type == a.type) &&
                     desc.compute == CUBLAS_COMPUTE_32F && desc.scale == CUDA_R_32F;
  return {d.rows, d.cols, K, shapes && types && d.rows > 0 && d.cols > 0 && K > 0};
}

/// What an algorithm remembers of the problem that it was chosen for, before the alignments.
uint64_t kind_of(const cublasLtMatmulDescOpaque_t& desc, const cublasLtMatrixLayoutOpaque_t& a,
                 const cublasLtMatrixLayoutOpaque_t& d) {
  uint64_t kind = 0;
  for (const int part : {int{desc.transa}, int{desc.transb}, int{desc.epilogue}, int{a.type}, int{d.type}}) {
    kind = kind << 8 | static_cast<uint64_t>(part);
  }
  return kind;
}

bool is_aligned(const void* data, uint64_t alignment) {
  return reinterpret_cast<uintptr_t>(data) % alignment == 0;
}

void check_memory(const char* what, const void* data, size_t size_bytes) {
  CHECK(is_allocated(reinterpret_cast<uintptr_t>(data), size_bytes), "cuBLASLt: {} of {} bytes leaves its memory: {}",
        what, size_bytes, describe_address(reinterpret_cast<uintptr_t>(data)));
}

bool overlaps(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  const uintptr_t p = reinterpret_cast<uintptr_t>(a), q = reinterpret_cast<uintptr_t>(b);
  return p < q + b_bytes && q < p + a_bytes;
}

double element(const void* data, cudaDataType type, size_t i) {
  if (type == CUDA_R_32F) return static_cast<const float*>(data)[i];
  return static_cast<float>(static_cast<const bf16*>(data)[i]);
}

/// Row-major (lines, length): line i is row i of the matrix, or column i with `of_columns`.
std::vector<double> lines(const void* data, const cublasLtMatrixLayoutOpaque_t& m, bool of_columns) {
  for (uint64_t c = 0; c < m.cols; c++) {
    checker_host_reads(static_cast<const char*>(data) + c * m.stride_bytes(), m.column_bytes());
  }
  const uint64_t count = of_columns ? m.cols : m.rows, length = of_columns ? m.rows : m.cols;
  std::vector<double> out(count * length);
  for (uint64_t i = 0; i < count; i++) {
    for (uint64_t k = 0; k < length; k++) {
      const uint64_t r = of_columns ? k : i, c = of_columns ? i : k;
      out[i * length + k] = element(data, m.type, c * static_cast<uint64_t>(m.ld) + r);
    }
  }
  return out;
}

}  // namespace

const char* cublasLtGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "success";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "an invalid value";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "not supported";
  }
  return "unknown status";
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = new cublasLtContext;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute, cudaDataType_t scale) {
  *desc = new cublasLtMatmulDescOpaque_t{compute, scale};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  delete desc;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t size_bytes) {
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return store(desc->transa, value, size_bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return store(desc->transb, value, size_bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return store(desc->epilogue, value, size_bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return store(desc->bias, value, size_bytes);
  }
  fail("cuBLASLt: the double does not know attribute {} of a product", static_cast<int>(attribute));
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                                          uint64_t cols, int64_t ld) {
  if (ld < static_cast<int64_t>(rows)) return CUBLAS_STATUS_INVALID_VALUE;
  *layout = new cublasLtMatrixLayoutOpaque_t{type, rows, cols, ld};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = new cublasLtMatmulPreferenceOpaque_t;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t size_bytes) {
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return store(preference->max_workspace_bytes, value, size_bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
      return store(preference->reductions, value, size_bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
      return store(preference->alignment_a, value, size_bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
      return store(preference->alignment_b, value, size_bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
      return store(preference->alignment_c, value, size_bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return store(preference->alignment_d, value, size_bytes);
  }
  fail("cuBLASLt: the double does not know preference {}", static_cast<int>(attribute));
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference,
                                              int requested, cublasLtMatmulHeuristicResult_t results[], int* returned) {
  *returned = 0;
  const Product p = product_of(*desc, *a, *b, *c, *d);
  if (!p.is_valid || requested < 1) return CUBLAS_STATUS_INVALID_VALUE;
  CHECK(preference->reductions == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE,
        "cuBLASLt: reductions {} may round parts of a sum to the result's dtype", preference->reductions);
  const bool has_bias = desc->epilogue == CUBLASLT_EPILOGUE_BIAS;
  if (has_bias && !machine.options.blas_adds_bias) return CUBLAS_STATUS_NOT_SUPPORTED;
  results[0] = {};
  const uint64_t of_bias = has_bias && is_aligned(desc->bias, 16) ? 16 : 1;
  results[0].algo = {{p.M, p.N, p.K, kind_of(*desc, *a, *d), preference->alignment_a, preference->alignment_b,
                      std::min(preference->alignment_c, preference->alignment_d), of_bias}};
  results[0].workspaceSize = std::min<uint64_t>(preference->max_workspace_bytes, kWorkspaceBytes);
  results[0].state = CUBLAS_STATUS_SUCCESS;
  *returned = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
  const Product p = product_of(*desc, *a_layout, *b_layout, *c_layout, *d_layout);
  const bool has_bias = desc->epilogue == CUBLASLT_EPILOGUE_BIAS;
  const uint64_t* chosen = algo->data;
  const bool is_chosen_for_it = chosen[0] == p.M && chosen[1] == p.N && chosen[2] == p.K &&
                                chosen[3] == kind_of(*desc, *a_layout, *d_layout) && is_aligned(a, chosen[4]) &&
                                is_aligned(b, chosen[5]) && is_aligned(c, chosen[6]) && is_aligned(d, chosen[6]) &&
                                (!has_bias || is_aligned(desc->bias, chosen[7]));
  if (!p.is_valid || !is_chosen_for_it || workspace_bytes < kWorkspaceBytes || !is_aligned(workspace, 256)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  check_memory("A", a, a_layout->size_bytes());
  check_memory("B", b, b_layout->size_bytes());
  check_memory("C", c, c_layout->size_bytes());
  check_memory("D", d, d_layout->size_bytes());
  check_memory("the workspace", workspace, workspace_bytes);
  CHECK(!overlaps(d, d_layout->size_bytes(), a, a_layout->size_bytes()) &&
            !overlaps(d, d_layout->size_bytes(), b, b_layout->size_bytes()),
        "cuBLASLt: the result lies over an operand");
  if (has_bias) check_memory("the bias", desc->bias, d_layout->column_bytes());
  const double scale = *static_cast<const float*>(alpha), scale_c = *static_cast<const float*>(beta);
  enqueue(stream, [=, how = *desc, in_a = *a_layout, in_b = *b_layout, in_c = *c_layout, out = *d_layout] {
    simt_poison(workspace, workspace_bytes);

    const std::vector<double> rows = lines(a, in_a, how.transa == CUBLAS_OP_T);
    const std::vector<double> columns = lines(b, in_b, how.transb == CUBLAS_OP_N);
    const std::vector<double> addend = scale_c == 0 ? std::vector<double>() : lines(c, in_c, true);
    if (has_bias) {
      checker_host_reads(how.bias, out.column_bytes());
    }
    for (uint64_t n = 0; n < p.N; n++) {
      for (uint64_t m = 0; m < p.M; m++) {
        double sum = 0;
        for (uint64_t k = 0; k < p.K; k++) sum += rows[m * p.K + k] * columns[n * p.K + k];
        sum *= scale;
        if (scale_c != 0) sum += scale_c * addend[n * p.M + m];
        if (has_bias) sum += element(how.bias, out.type, m);
        const size_t i = n * static_cast<size_t>(out.ld) + m;
        const float rounded = static_cast<float>(sum);
        if (out.type == CUDA_R_32F) {
          static_cast<float*>(d)[i] = rounded;
        } else {
          static_cast<bf16*>(d)[i] = bf16(rounded);
        }
      }
      checker_host_writes(static_cast<char*>(d) + n * out.stride_bytes(), out.column_bytes());
    }
    return true;
  });
  return CUBLAS_STATUS_SUCCESS;
}
