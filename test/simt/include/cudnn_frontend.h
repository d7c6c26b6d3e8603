// The part of cuDNN and of its frontend that layers/attention_cudnn.cu uses, served by the double in
// test/simt/cudnn.cpp.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

struct cudnnContext;
using cudnnHandle_t = cudnnContext*;
enum cudnnStatus_t { CUDNN_STATUS_SUCCESS = 0 };
size_t cudnnGetVersion();
const char* cudnnGetErrorString(cudnnStatus_t status);
cudnnStatus_t cudnnCreate(cudnnHandle_t* handle);
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream);

namespace cudnn_frontend {

enum class DataType_t { NOT_SET, BFLOAT16, FLOAT, INT32, INT64 };
enum class HeurMode_t { A };
enum class DiagonalAlignment_t { TOP_LEFT, BOTTOM_RIGHT };

class error_t {
 public:
  error_t() = default;
  explicit error_t(std::string message) : message_(std::move(message)) {}
  bool is_good() const { return message_.empty(); }
  bool is_bad() const { return !is_good(); }
  const std::string& get_message() const { return message_; }

 private:
  std::string message_;
};

class DeviceProperties {
 public:
  error_t deserialize(const std::vector<uint8_t>&) { return {}; }
};

namespace graph {

class Tensor_attributes {
 public:
  using Dims = std::vector<int64_t>;
  Tensor_attributes& set_uid(int64_t value) { return uid = value, *this; }
  Tensor_attributes& set_name(const std::string& value) { return name = value, *this; }
  Tensor_attributes& set_dim(const Dims& value) { return dim = value, *this; }
  Tensor_attributes& set_stride(const Dims& value) { return stride = value, *this; }
  Tensor_attributes& set_data_type(DataType_t value) { return type = value, *this; }
  Tensor_attributes& set_output(bool value) { return is_output = value, *this; }
  Tensor_attributes& set_ragged_offset(const std::shared_ptr<Tensor_attributes>& value) {
    return ragged_offset = value, *this;
  }

  int64_t uid = 0;
  std::string name;
  Dims dim, stride;
  DataType_t type = DataType_t::NOT_SET;
  bool is_output = false;
  std::shared_ptr<Tensor_attributes> ragged_offset;
};
using TensorPtr = std::shared_ptr<Tensor_attributes>;

/// What both directions have; `Self` is returned by the setters.
template <class Self>
class AttentionAttributes {
 public:
  Self& set_name(const std::string&) { return self(); }
  Self& set_padding_mask(bool value) { return has_padding_mask = value, self(); }
  Self& set_seq_len_q(const TensorPtr& value) { return lengths_q = value, self(); }
  Self& set_seq_len_kv(const TensorPtr& value) { return lengths_kv = value, self(); }
  Self& set_diagonal_alignment(DiagonalAlignment_t value) { return alignment = value, self(); }
  Self& set_diagonal_band_right_bound(int value) { return right_bound = value, self(); }
  Self& set_diagonal_band_left_bound(int value) { return left_bound = value, self(); }
  Self& set_attn_scale(float value) { return scale = value, self(); }

  bool has_padding_mask = false;
  TensorPtr lengths_q, lengths_kv;
  std::optional<DiagonalAlignment_t> alignment;
  std::optional<int> left_bound, right_bound;
  std::optional<float> scale;

 private:
  Self& self() { return static_cast<Self&>(*this); }
};

class SDPA_attributes : public AttentionAttributes<SDPA_attributes> {
 public:
  SDPA_attributes& set_generate_stats(bool value) { return has_stats = value, *this; }
  bool has_stats = false;
};

class SDPA_backward_attributes : public AttentionAttributes<SDPA_backward_attributes> {
 public:
  SDPA_backward_attributes& set_max_total_seq_len_q(int64_t value) { return max_tokens_q = value, *this; }
  SDPA_backward_attributes& set_max_total_seq_len_kv(int64_t value) { return max_tokens_kv = value, *this; }
  SDPA_backward_attributes& set_deterministic_algorithm(bool value) { return is_deterministic = value, *this; }
  int64_t max_tokens_q = 0, max_tokens_kv = 0;
  bool is_deterministic = false;
};

/// One attention, forward or backward.
class Graph {
 public:
  Graph& set_io_data_type(DataType_t value) { return io_type_ = value, *this; }
  Graph& set_intermediate_data_type(DataType_t) { return *this; }
  Graph& set_compute_data_type(DataType_t value) { return compute_type_ = value, *this; }
  Graph& set_sm_version(int value) { return sm_ = value, *this; }
  Graph& set_device_properties(const std::shared_ptr<DeviceProperties>&) { return *this; }

  TensorPtr tensor(const Tensor_attributes& attributes);
  std::array<TensorPtr, 2> sdpa(TensorPtr q, TensorPtr k, TensorPtr v, SDPA_attributes options);
  std::array<TensorPtr, 3> sdpa_backward(TensorPtr q, TensorPtr k, TensorPtr v, TensorPtr o, TensorPtr d_o,
                                         TensorPtr lse, SDPA_backward_attributes options);

  error_t validate();
  error_t build_operation_graph() { return {}; }
  error_t build_operation_graph(cudnnHandle_t) { return {}; }
  error_t create_execution_plans(const std::vector<HeurMode_t>&) { return {}; }
  void deselect_workspace_greater_than(int64_t size_bytes) { most_of_engine_ = size_bytes; }
  error_t check_support();
  error_t build_plans() { return {}; }
  int64_t get_autotune_workspace_size() const;
  int64_t get_workspace_size() const;
  error_t execute(cudnnHandle_t handle, std::unordered_map<int64_t, void*>& pointers, void* workspace) const;

 private:
  struct Call;

  DataType_t io_type_ = DataType_t::NOT_SET, compute_type_ = DataType_t::NOT_SET;
  bool is_backward_ = false, has_stats_ = false, is_deterministic_ = false;
  int sm_ = 0;
  int64_t most_of_engine_ = 0, max_tokens_q_ = 0, max_tokens_kv_ = 0;
  AttentionAttributes<SDPA_attributes> options_;
  TensorPtr q_, k_, v_, o_, lse_, d_o_, dq_, dk_, dv_;
};

}  // namespace graph
}  // namespace cudnn_frontend
