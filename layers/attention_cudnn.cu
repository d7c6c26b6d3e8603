// Attention by cuDNN's SDPA. Contract: attention_cudnn.h. The only file that includes cudnn_frontend.h; it holds no
// kernel, and a plain C++ compiler compiles it: nvcc would read that header once more for each architecture.
//
// A graph sees `slots` documents of up to `slot_length` tokens. Where a document lies, and how long it is, are tensors
// in device memory (ragged layout): q, k and v are read where they are, in qkv (T, NH + 2 NKV, HD). Offsets are 64-bit;
// as they count elements, 32 bits would overflow at 2^31 / HD / NH tokens.
//
// dq, dk and dv go to memory of their own and are joined afterwards: the frontend sizes its fp32 sums by the strides of
// these tensors, and inside dqkv they would be larger by (NH + 2 NKV) / NH and (NH + 2 NKV) / NKV.
//
// Workspace, for T tokens: dq, dk, dv in BF16, 2 T (NH + 2 NKV) HD; of the frontend: dq in fp32, 4 T NH HD; where heads
// share keys, dk and dv of each query head, 8 T NH HD; do . o, 4 T NH. The rest does not grow with T.
#include "layers/attention_cudnn.h"

#include <cuda_runtime_api.h>
#include <cudnn_frontend.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <compare>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>

#include "layers/attention_ragged.h"
#include "layers/core/integer.h"

namespace {

namespace fe = cudnn_frontend;
using Graph = fe::graph::Graph;
using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;

constexpr int64_t kMaxSlots = 4096;      // more documents: our own kernels, which have no slots to fill
constexpr int64_t kMinSlotLength = 128;  // a tile of the engines; a graph for one token has no backward
constexpr int64_t kTokenSteps = 8;       // num_tokens is rounded up by at most an eighth, or
constexpr int64_t kTokenMultiple = 64;   // to this: what lies behind a scratch of num_tokens is aligned to 256 bytes
constexpr size_t kMinVersion = 91800;    // before: the backward reads an uninitialised workspace on 9.x
constexpr int64_t kAlignment = 256;      // of the parts of the workspace, in bytes
// Of an engine's own scratch, at most: cuDNN 9.19 asks for 2 KiB and 896 bytes a slot.
constexpr int64_t kBytesPerEngine = 64 << 10, kBytesPerSlot = 1024;

enum Uid : int64_t {
  kQ = 1,
  kK,
  kV,
  kO,
  kLse,
  kDO,
  kDQ,
  kDK,
  kDV,
  kLengths,
  kOffsetsQkv,
  kOffsetsQ,
  kOffsetsKv,
  kOffsetsLse
};

/// What a pair of graphs is built for.
struct PlanKey {
  int sm;
  int64_t slots, slot_length, num_tokens;
  int64_t num_heads, num_kv_heads, head_dim, window;
  double scale;

  PlanKey(const AttentionShape& s, const AttentionCudnnBatch& b, int sm_)
      : sm(sm_),
        slots(b.slots),
        slot_length(b.slot_length),
        num_tokens(b.num_tokens),
        num_heads(s.num_heads),
        num_kv_heads(s.num_kv_heads),
        head_dim(s.head_dim),
        window(s.window < b.slot_length ? s.window : 0),  // 0, too, when it hides nothing
        scale(s.scale) {}
  auto operator<=>(const PlanKey&) const = default;

  int64_t qkv_heads() const { return num_heads + 2 * num_kv_heads; }
  int64_t engine_bytes() const { return kBytesPerEngine + kBytesPerSlot * slots; }
  /// Of the frontend and the engine, in the backward.
  int64_t scratch_bytes() const {
    const int64_t q_row = num_heads * head_dim;
    const int64_t of_token = 4 * q_row + (num_heads > num_kv_heads ? 8 * q_row : 0) + 4 * num_heads;
    return num_tokens * of_token + engine_bytes();
  }
};

/// The workspace in parts; `base` null only measures.
struct WorkspaceParts {
  RaggedDocuments documents;
  Tensor dq, dk, dv;
  void* scratch;
  int64_t size_bytes;

  WorkspaceParts(const PlanKey& key, int64_t num_tokens, void* base) {
    int64_t at = 0;
    const auto take = [&](DType dtype, Shape shape, const char* name) -> Tensor {
      const Tensor t = {base ? static_cast<char*>(base) + at : nullptr, dtype, shape, name};
      at += round_up(static_cast<int64_t>(t.size_bytes()), kAlignment);
      return t;
    };
    documents.lengths = take(DType::I32, {key.slots}, "lengths");
    documents.offsets_qkv = take(DType::I64, {key.slots + 1}, "offsets of q, k and v");
    documents.offsets_q = take(DType::I64, {key.slots + 1}, "offsets of o");
    documents.offsets_kv = take(DType::I64, {key.slots + 1}, "offsets of dk and dv");
    documents.offsets_lse = take(DType::I64, {key.slots + 1}, "offsets of lse");
    dq = take(DType::BF16, {num_tokens, key.num_heads, key.head_dim}, "dq");
    dk = take(DType::BF16, {num_tokens, key.num_kv_heads, key.head_dim}, "dk");
    dv = take(DType::BF16, {num_tokens, key.num_kv_heads, key.head_dim}, "dv");
    scratch = base ? static_cast<char*>(base) + at : nullptr;
    size_bytes = at + key.scratch_bytes() + kAlignment;  // the caller's memory may begin anywhere
  }
};

void* aligned(void* p) {
  return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(p) + kAlignment - 1) / kAlignment * kAlignment);
}

// ---- graphs

/// Tensors of both directions, and the mask.
class GraphBuilder {
 public:
  GraphBuilder(const PlanKey& key, Graph& graph) : key_(key), graph_(graph) {
    graph.set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT)
        .set_sm_version(key.sm);
    lengths_ = index(kLengths, "lengths", key.slots, fe::DataType_t::INT32);
    offsets_qkv_ = index(kOffsetsQkv, "offsets_qkv", key.slots + 1, fe::DataType_t::INT64);
    offsets_q_ = index(kOffsetsQ, "offsets_q", key.slots + 1, fe::DataType_t::INT64);
    offsets_lse_ = index(kOffsetsLse, "offsets_lse", key.slots + 1, fe::DataType_t::INT64);
    q_ = input(kQ, "q", key.num_heads, key.qkv_heads(), offsets_qkv_);
    k_ = input(kK, "k", key.num_kv_heads, key.qkv_heads(), offsets_qkv_);
    v_ = input(kV, "v", key.num_kv_heads, key.qkv_heads(), offsets_qkv_);
  }

  void forward() {
    auto options = fe::graph::SDPA_attributes().set_name("attention_forward").set_generate_stats(true);
    mask(options);
    auto [o, lse] = graph_.sdpa(q_, k_, v_, options);
    output(o, kO, key_.num_heads, offsets_q_);
    place_lse(lse->set_output(true).set_uid(kLse).set_data_type(fe::DataType_t::FLOAT));
  }

  void backward() {
    const TensorPtr offsets_kv = index(kOffsetsKv, "offsets_kv", key_.slots + 1, fe::DataType_t::INT64);
    const TensorPtr o = input(kO, "o", key_.num_heads, key_.num_heads, offsets_q_);
    const TensorPtr d_o = input(kDO, "do", key_.num_heads, key_.num_heads, offsets_q_);
    fe::graph::Tensor_attributes lse;
    place_lse(lse.set_name("lse").set_uid(kLse).set_data_type(fe::DataType_t::FLOAT));
    auto options =
        fe::graph::SDPA_backward_attributes()
            .set_name("attention_backward")
            .set_max_total_seq_len_q(key_.num_tokens)
            .set_max_total_seq_len_kv(key_.num_tokens)
            .set_deterministic_algorithm(key_.sm / 10 == 10);  // elsewhere it takes memory S^2, or is not there
    mask(options);
    auto [dq, dk, dv] = graph_.sdpa_backward(q_, k_, v_, o, d_o, graph_.tensor(lse), options);
    output(dq, kDQ, key_.num_heads, offsets_q_);
    output(dk, kDK, key_.num_kv_heads, offsets_kv);
    output(dv, kDV, key_.num_kv_heads, offsets_kv);
  }

 private:
  TensorPtr index(Uid uid, const char* name, int64_t numel, fe::DataType_t type) {
    return graph_.tensor(fe::graph::Tensor_attributes()
                             .set_uid(uid)
                             .set_name(name)
                             .set_dim({numel, 1, 1, 1})
                             .set_stride({1, 1, 1, 1})
                             .set_data_type(type));
  }

  /// (slots, heads, slot_length, HD) in memory of `heads_of_token` heads a token.
  void place(fe::graph::Tensor_attributes& t, int64_t heads, int64_t heads_of_token, const TensorPtr& offsets) {
    const int64_t row = heads_of_token * key_.head_dim;
    t.set_dim({key_.slots, heads, key_.slot_length, key_.head_dim})
        .set_stride({key_.slot_length * row, key_.head_dim, row, 1})
        .set_ragged_offset(offsets);
  }
  TensorPtr input(Uid uid, const char* name, int64_t heads, int64_t heads_of_token, const TensorPtr& offsets) {
    fe::graph::Tensor_attributes t;
    place(t.set_uid(uid).set_name(name), heads, heads_of_token, offsets);
    return graph_.tensor(t);
  }
  void output(const TensorPtr& t, Uid uid, int64_t heads, const TensorPtr& offsets) {
    place(t->set_output(true).set_uid(uid), heads, heads, offsets);
  }
  /// By token: as (NH, T) its strides, and with them the plan, would change with every T.
  void place_lse(fe::graph::Tensor_attributes& t) {
    t.set_dim({key_.slots, key_.num_heads, key_.slot_length, 1})
        .set_stride({key_.slot_length * key_.num_heads, 1, key_.num_heads, 1})
        .set_ragged_offset(offsets_lse_);
  }

  /// j <= i, and j + window > i.
  template <class Options>
  void mask(Options& options) {
    options.set_padding_mask(true)
        .set_seq_len_q(lengths_)
        .set_seq_len_kv(lengths_)
        .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
        .set_diagonal_band_right_bound(0)
        .set_attn_scale(static_cast<float>(key_.scale));
    if (key_.window > 0) options.set_diagonal_band_left_bound(static_cast<int>(key_.window));
  }

  const PlanKey& key_;
  Graph& graph_;
  TensorPtr lengths_, offsets_qkv_, offsets_q_, offsets_lse_, q_, k_, v_;
};

struct Outcome {
  std::unique_ptr<Graph> graph;  ///< null: refused
  std::string reason;
};

/// A graph for which cuDNN has an engine within the workspace. Without `handle`, for the GPU of `properties`.
Outcome supported_graph(const PlanKey& key, bool is_backward, cudnnHandle_t handle,
                        const std::shared_ptr<fe::DeviceProperties>& properties) {
  auto graph = std::make_unique<Graph>();
  if (properties) graph->set_device_properties(properties);
  GraphBuilder builder(key, *graph);
  is_backward ? builder.backward() : builder.forward();
  fe::error_t error = graph->validate();
  if (error.is_good()) error = handle ? graph->build_operation_graph(handle) : graph->build_operation_graph();
  if (error.is_good()) error = graph->create_execution_plans({fe::HeurMode_t::A});
  if (error.is_good()) {
    graph->deselect_workspace_greater_than(key.engine_bytes());
    error = graph->check_support();
  }
  if (error.is_bad()) return {nullptr, error.get_message()};
  const int64_t of_frontend = graph->get_autotune_workspace_size();  // no plan is built yet
  if (of_frontend > key.scratch_bytes() - key.engine_bytes()) {
    return {nullptr, fmt::format("the frontend needs {} bytes of workspace, {} are foreseen", of_frontend,
                                 key.scratch_bytes() - key.engine_bytes())};
  }
  return {std::move(graph), ""};
}

// ---- plans

std::function<void(const std::string&)>& log_sink() {
  static std::function<void(const std::string&)> sink;
  return sink;
}

void log(const PlanKey& key, const std::string& what) {
  if (!log_sink()) return;
  log_sink()(fmt::format("attention, {} heads on {} of width {}{}, up to {} documents of {} tokens, {} in all: {}",
                         key.num_heads, key.num_kv_heads, key.head_dim,
                         key.window > 0 ? fmt::format(", window {}", key.window) : "", key.slots, key.slot_length,
                         key.num_tokens, what));
}

void cudnn_check(cudnnStatus_t status, const char* what) {
  CHECK(status == CUDNN_STATUS_SUCCESS, "cuDNN: {}: {}", what, cudnnGetErrorString(status));
}

/// One of this process, on its one device. Never destroyed: at exit the driver may be gone before us.
cudnnHandle_t handle_on(const Device& device) {
  static cudnnHandle_t handle = [] {
    cudnnHandle_t h = nullptr;
    cudnn_check(cudnnCreate(&h), "cudnnCreate");
    return h;
  }();
  cudnn_check(cudnnSetStream(handle, static_cast<cudaStream_t>(device.stream())), "cudnnSetStream");
  return handle;
}

struct Plans {
  std::unique_ptr<Graph> forward, backward;  ///< both or neither
};

Plans build_plans(const PlanKey& key, cudnnHandle_t handle) {
  const auto start = std::chrono::steady_clock::now();
  Plans plans;
  for (const bool is_backward : {false, true}) {
    Outcome outcome = supported_graph(key, is_backward, handle, nullptr);
    if (outcome.graph) {
      fe::error_t error = outcome.graph->build_plans();
      if (error.is_bad()) outcome = {nullptr, error.get_message()};
    }
    if (outcome.graph && outcome.graph->get_workspace_size() > key.scratch_bytes()) {
      outcome = {nullptr, fmt::format("the plan needs {} bytes of workspace, {} are foreseen",
                                      outcome.graph->get_workspace_size(), key.scratch_bytes())};
    }
    if (!outcome.graph) {
      log(key, fmt::format("our own kernels, as cuDNN {} has no {} ({})", cudnnGetVersion(),
                           is_backward ? "backward" : "forward", outcome.reason));
      return {};
    }
    (is_backward ? plans.backward : plans.forward) = std::move(outcome.graph);
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  log(key, fmt::format("cuDNN {}, planned in {:.1f} s", cudnnGetVersion(), seconds.count()));
  return plans;
}

/// Compute capability of the current device, 90 for 9.0; 0 without one.
int current_sm() {
  static const int sm = [] {
    int device = 0, major = 0, minor = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
      return 0;
    }
    return 10 * major + minor;
  }();
  return sm;
}

/// The batch's plans and key; null when our own kernels are to do it.
struct Planned {
  const Plans* plans = nullptr;
  std::optional<PlanKey> key;
};

Planned find_plans(const Device& device, const AttentionShape& shape, DType dtype, const Documents& documents) {
  static auto& cache = *new std::map<PlanKey, Plans>;  // never destroyed, like the handle
  if (!documents.cu_seqlens_device || !attention_cudnn_plans(shape, dtype, current_sm())) return {};
  const AttentionCudnnBatch batch = attention_cudnn_batch(documents.cu_seqlens);
  if (batch.slots == 0 || batch.slots > kMaxSlots) return {};
  const PlanKey key(shape, batch, current_sm());
  auto found = cache.find(key);
  if (found == cache.end()) found = cache.emplace(key, build_plans(key, handle_on(device))).first;
  if (!found->second.forward) return {};
  return {&found->second, key};
}

using Pointers = std::unordered_map<int64_t, void*>;

/// The inputs of both directions.
Pointers common_pointers(const PlanKey& key, const ConstTensor& qkv, const RaggedDocuments& documents) {
  char* q = const_cast<char*>(static_cast<const char*>(qkv.data));
  const int64_t head_bytes = key.head_dim * static_cast<int64_t>(sizeof(bf16));
  return {{kQ, q},
          {kK, q + key.num_heads * head_bytes},
          {kV, q + (key.num_heads + key.num_kv_heads) * head_bytes},
          {kLengths, documents.lengths.data},
          {kOffsetsQkv, documents.offsets_qkv.data},
          {kOffsetsQ, documents.offsets_q.data},
          {kOffsetsLse, documents.offsets_lse.data}};
}

void execute(const Device& device, const Graph& graph, Pointers& pointers, void* scratch) {
  fe::error_t error = graph.execute(handle_on(device), pointers, scratch);
  CHECK(error.is_good(), "attention by cuDNN: {}", error.get_message());
}

void* writable(const ConstTensor& t) {
  return const_cast<void*>(t.data);  // cuDNN's pointers are all alike
}

}  // namespace

bool attention_cudnn_plans(const AttentionShape& shape, DType dtype, int sm) {
  const int64_t max_head_dim = sm / 10 == 9 ? 256 : 128;
  return !shape.own_kernels && dtype == DType::BF16 && shape.softcap == 0 && !shape.has_sinks &&
         cudnnGetVersion() >= kMinVersion &&
         // 8.x and 12.x have no backward that reads lse packed; padded, it and the scratch grow with slots *
         // slot_length
         (sm / 10 == 9 || sm / 10 == 10) &&
         // widths that are no multiple of 16 have scratch of that size, too
         shape.head_dim % 16 == 0 && shape.head_dim <= max_head_dim;
}

AttentionCudnnBatch attention_cudnn_batch(std::span<const int64_t> cu_seqlens) {
  if (cu_seqlens.size() < 2) return {};
  int64_t longest = 0;
  for (size_t i = 1; i < cu_seqlens.size(); i++) longest = std::max(longest, cu_seqlens[i] - cu_seqlens[i - 1]);
  const auto power_of_two = [](int64_t n) { return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n))); };
  const int64_t T = std::max(cu_seqlens.back(), kMinSlotLength);
  return {power_of_two(static_cast<int64_t>(cu_seqlens.size()) - 1), std::max(kMinSlotLength, power_of_two(longest)),
          round_up(T, std::max(kTokenMultiple, power_of_two(T) / (2 * kTokenSteps)))};
}

size_t attention_cudnn_workspace_bytes(const AttentionShape& shape, DType dtype, int64_t T) {
  if (T == 0 || !attention_cudnn_plans(shape, dtype, current_sm() > 0 ? current_sm() : 90)) return 0;
  AttentionCudnnBatch batch = attention_cudnn_batch(std::array{int64_t{0}, T});
  batch.slots = kMaxSlots;
  return static_cast<size_t>(WorkspaceParts(PlanKey(shape, batch, 90), T, nullptr).size_bytes);
}

bool attention_cudnn_forward(Device& device, Tensor o, Tensor lse, ConstTensor qkv, const Documents& documents,
                             const AttentionShape& shape, Tensor workspace) {
  const Planned planned = find_plans(device, shape, qkv.dtype, documents);
  if (!planned.plans) return false;
  const WorkspaceParts parts(*planned.key, qkv.shape[0], aligned(workspace.data));
  ragged_documents_cuda(device, parts.documents, documents.cu_seqlens_device, shape.num_heads, shape.num_kv_heads,
                        shape.head_dim);
  Pointers pointers = common_pointers(*planned.key, qkv, parts.documents);
  pointers[kO] = o.data;
  pointers[kLse] = lse.data;
  execute(device, *planned.plans->forward, pointers, parts.scratch);
  return true;
}

bool attention_cudnn_backward(Device& device, Tensor dqkv, ConstTensor d_o, ConstTensor qkv, ConstTensor o,
                              ConstTensor lse, const Documents& documents, const AttentionShape& shape,
                              Tensor workspace) {
  const Planned planned = find_plans(device, shape, qkv.dtype, documents);
  if (!planned.plans) return false;
  const WorkspaceParts parts(*planned.key, qkv.shape[0], aligned(workspace.data));
  ragged_documents_cuda(device, parts.documents, documents.cu_seqlens_device, shape.num_heads, shape.num_kv_heads,
                        shape.head_dim);
  Pointers pointers = common_pointers(*planned.key, qkv, parts.documents);
  pointers[kO] = writable(o);
  pointers[kLse] = writable(lse);
  pointers[kDO] = writable(d_o);
  pointers[kDQ] = parts.dq.data;
  pointers[kDK] = parts.dk.data;
  pointers[kDV] = parts.dv.data;
  pointers[kOffsetsKv] = parts.documents.offsets_kv.data;
  execute(device, *planned.plans->backward, pointers, parts.scratch);
  join_qkv_cuda(device, dqkv, parts.dq, parts.dk, parts.dv);
  return true;
}

void attention_cudnn_log(std::function<void(const std::string&)> log) {
  log_sink() = std::move(log);
}

std::string attention_cudnn_support(const AttentionShape& shape, const AttentionCudnnBatch& batch, bool is_backward,
                                    int sm, const std::string& device_properties) {
  const auto properties = std::make_shared<fe::DeviceProperties>();
  fe::error_t error = properties->deserialize({device_properties.begin(), device_properties.end()});
  CHECK(error.is_good(), "cuDNN does not take these device properties: {}", error.get_message());
  return supported_graph(PlanKey(shape, batch, sm), is_backward, nullptr, properties).reason;
}
