// A double of cuDNN's attention: what a graph of the frontend says, by the plain formulas, on the emulated GPU's
// memory. As strict as the real one where a mistake would show late: addresses come from the strides, offsets and
// lengths that lie in device memory when the work runs; the whole workspace is NaN before and after; what cuDNN does
// not promise to write is left alone; dimensions, types and masks that it would refuse, or take for something else, are
// refused.
#include <cudnn_frontend.h>

#include <algorithm>
#include <cmath>

#include "layers/core/dtype.h"
#include "test/simt/machine.h"

struct cudnnContext {
  cudaStream_t stream = nullptr;
};

size_t cudnnGetVersion() {
  return 91900;
}

const char* cudnnGetErrorString(cudnnStatus_t) {
  return "no error";
}

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  *handle = new cudnnContext;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}

namespace cudnn_frontend::graph {

namespace {

/// A ragged tensor (slots, heads, slot_length, width) in memory.
struct View {
  const Tensor_attributes* t;
  char* data;
  const int64_t* offsets;

  size_t size() const { return t->type == DataType_t::FLOAT ? sizeof(float) : sizeof(bf16); }
  char* row(int64_t slot, int64_t head, int64_t s) const {
    return data + (offsets[slot] + head * t->stride[1] + s * t->stride[2]) * static_cast<int64_t>(size());
  }
  std::vector<double> read(int64_t slot, int64_t head, int64_t s) const {
    const char* from = row(slot, head, s);
    std::vector<double> values(static_cast<size_t>(t->dim[3]));
    check(from);
    checker_host_reads(from, values.size() * size());
    for (size_t i = 0; i < values.size(); i++) {
      values[i] = t->type == DataType_t::FLOAT ? reinterpret_cast<const float*>(from)[i]
                                               : static_cast<float>(reinterpret_cast<const bf16*>(from)[i]);
    }
    return values;
  }
  void write(int64_t slot, int64_t head, int64_t s, const std::vector<double>& values) const {
    char* to = row(slot, head, s);
    check(to);
    for (size_t i = 0; i < values.size(); i++) {
      const float value = static_cast<float>(values[i]);
      if (t->type == DataType_t::FLOAT) {
        reinterpret_cast<float*>(to)[i] = value;
      } else {
        reinterpret_cast<bf16*>(to)[i] = bf16(value);
      }
    }
    checker_host_writes(to, values.size() * size());
  }
  void check(const char* at) const {
    const size_t size_bytes = static_cast<size_t>(t->dim[3]) * size();
    CHECK(is_allocated(reinterpret_cast<uintptr_t>(at), size_bytes), "cuDNN: {} leaves its allocation: {}", t->name,
          describe_address(reinterpret_cast<uintptr_t>(at)));
  }
};

constexpr int64_t kEngineBytes = 2048, kEngineBytesPerSlot = 896;  // as cuDNN 9.19 asks for

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); i++) sum += a[i] * b[i];
  return sum;
}

void add(std::vector<double>& sum, double factor, const std::vector<double>& x) {
  for (size_t i = 0; i < sum.size(); i++) sum[i] += factor * x[i];
}

bool is_index(const TensorPtr& t, int64_t numel, DataType_t type) {
  return t && t->type == type && t->dim == Tensor_attributes::Dims{numel, 1, 1, 1};
}

}  // namespace

TensorPtr Graph::tensor(const Tensor_attributes& attributes) {
  auto t = std::make_shared<Tensor_attributes>(attributes);
  if (t->type == DataType_t::NOT_SET) t->type = io_type_;
  return t;
}

std::array<TensorPtr, 2> Graph::sdpa(TensorPtr q, TensorPtr k, TensorPtr v, SDPA_attributes options) {
  q_ = q, k_ = k, v_ = v, options_ = options, has_stats_ = options.has_stats;
  o_ = tensor(Tensor_attributes().set_name("o")), lse_ = tensor(Tensor_attributes().set_name("lse"));
  return {o_, lse_};
}

std::array<TensorPtr, 3> Graph::sdpa_backward(TensorPtr q, TensorPtr k, TensorPtr v, TensorPtr o, TensorPtr d_o,
                                              TensorPtr lse, SDPA_backward_attributes options) {
  q_ = q, k_ = k, v_ = v, o_ = o, d_o_ = d_o, lse_ = lse;
  is_deterministic_ = options.is_deterministic;
  is_backward_ = true, max_tokens_q_ = options.max_tokens_q, max_tokens_kv_ = options.max_tokens_kv;
  AttentionAttributes<SDPA_attributes>& common = options_;
  common.has_padding_mask = options.has_padding_mask;
  common.lengths_q = options.lengths_q, common.lengths_kv = options.lengths_kv;
  common.alignment = options.alignment, common.scale = options.scale;
  common.left_bound = options.left_bound, common.right_bound = options.right_bound;
  dq_ = tensor(Tensor_attributes().set_name("dq"));
  dk_ = tensor(Tensor_attributes().set_name("dk")), dv_ = tensor(Tensor_attributes().set_name("dv"));
  return {dq_, dk_, dv_};
}

error_t Graph::validate() {
  const auto refuse = [](const std::string& why) { return error_t("the double of cuDNN: " + why); };
  if (io_type_ != DataType_t::BFLOAT16 || compute_type_ != DataType_t::FLOAT) return refuse("types");
  if (!q_ || q_->dim.size() != 4) return refuse("q has no dimensions");
  const int64_t B = q_->dim[0], H = q_->dim[1], S = q_->dim[2], D = q_->dim[3];
  const int64_t kv_heads = k_->dim.size() == 4 ? k_->dim[1] : 0;
  if (kv_heads <= 0 || H % kv_heads != 0) return refuse("heads");
  const auto is_sound = [&](const TensorPtr& t, int64_t heads, int64_t width, DataType_t type, bool is_output) {
    return t->dim == Tensor_attributes::Dims{B, heads, S, width} && t->stride.size() == 4 && t->stride[3] == 1 &&
           t->type == type && t->is_output == is_output && is_index(t->ragged_offset, B + 1, DataType_t::INT64);
  };
  constexpr DataType_t kBf16 = DataType_t::BFLOAT16, kFloat = DataType_t::FLOAT;
  if (!is_sound(q_, H, D, kBf16, false) || !is_sound(k_, kv_heads, D, kBf16, false) ||
      !is_sound(v_, kv_heads, D, kBf16, false) || !is_sound(o_, H, D, kBf16, !is_backward_) ||
      !is_sound(lse_, H, 1, kFloat, !is_backward_)) {
    return refuse("q, k, v, o or lse");
  }
  if (lse_->stride[1] != 1) return refuse("lse must be by token");  // by head it is taken for padded
  if (is_backward_ && (!is_sound(d_o_, H, D, kBf16, false) || !is_sound(dq_, H, D, kBf16, true) ||
                       !is_sound(dk_, kv_heads, D, kBf16, true) || !is_sound(dv_, kv_heads, D, kBf16, true))) {
    return refuse("do, dq, dk or dv");
  }
  if (!is_backward_ && !has_stats_) return refuse("a forward without stats");
  const auto& o = options_;
  if (!o.has_padding_mask || !is_index(o.lengths_q, B, DataType_t::INT32) ||
      !is_index(o.lengths_kv, B, DataType_t::INT32)) {
    return refuse("ragged tensors need lengths");
  }
  if (o.alignment != DiagonalAlignment_t::TOP_LEFT || o.right_bound != 0) return refuse("not causal");
  if (o.left_bound && *o.left_bound <= 0) return refuse("a window of nothing");
  if (!o.scale) return refuse("no scale");
  if (is_backward_ && (max_tokens_q_ <= 0 || max_tokens_kv_ <= 0)) return refuse("no number of tokens");
  if (is_backward_ && S == 1) return refuse("no backward for one token");
  if (is_backward_ && !simt_options().cudnn_has_backward) return refuse("no backward, as the test wants it");
  // It would do that; but then the last bits of dq differ from run to run where they need not.
  if (is_backward_ && sm_ / 10 == 10 && !is_deterministic_) return refuse("any order of sums");
  return {};
}

error_t Graph::check_support() {
  return kEngineBytes + kEngineBytesPerSlot * q_->dim[0] <= most_of_engine_
             ? error_t()
             : error_t("the double of cuDNN: no engine in this workspace");
}

int64_t Graph::get_autotune_workspace_size() const {
  if (!is_backward_) return 0;
  if (is_deterministic_ && sm_ / 10 != 10) return q_->dim[0] * q_->dim[1] * q_->dim[2] * q_->dim[2] * 4;
  const int64_t row = q_->dim[1] * q_->dim[3];
  return max_tokens_q_ * (4 * row + 4 * q_->dim[1]) + (q_->dim[1] > k_->dim[1] ? max_tokens_kv_ * 8 * row : 0);
}

int64_t Graph::get_workspace_size() const {
  return get_autotune_workspace_size() + most_of_engine_;  // an engine may take all that it was allowed
}

/// One execution: pointers and what to do with them.
struct Graph::Call {
  const Graph& g;
  std::unordered_map<int64_t, void*> pointers;

  void* at(const TensorPtr& t) const {
    const auto found = pointers.find(t->uid);
    CHECK(found != pointers.end() && found->second, "cuDNN: no memory for {} (uid {})", t->name, t->uid);
    return found->second;
  }
  View view(const TensorPtr& t) const {
    return {t.get(), static_cast<char*>(at(t)), static_cast<const int64_t*>(at(t->ragged_offset))};
  }

  void run() const {
    const int64_t B = g.q_->dim[0], S = g.q_->dim[2];
    const auto* lengths_q = static_cast<const int32_t*>(at(g.options_.lengths_q));
    const auto* lengths_kv = static_cast<const int32_t*>(at(g.options_.lengths_kv));
    checker_host_reads(lengths_q, static_cast<size_t>(B) * sizeof(int32_t));
    for (const TensorPtr& t : {g.q_, g.k_, g.v_, g.o_, g.lse_, g.d_o_, g.dq_, g.dk_, g.dv_}) {
      if (t) checker_host_reads(at(t->ragged_offset), static_cast<size_t>(B + 1) * sizeof(int64_t));
    }
    int64_t tokens = 0;
    for (int64_t b = 0; b < B; b++) {
      CHECK(lengths_q[b] >= 0 && lengths_q[b] <= S && lengths_q[b] == lengths_kv[b],
            "cuDNN: slot {} of {} tokens has a document of {} and {}", b, S, lengths_q[b], lengths_kv[b]);
      tokens += lengths_q[b];
      for (int64_t h = 0; h < g.k_->dim[1]; h++)
        g.is_backward_ ? backward(b, h, lengths_q[b]) : forward(b, h, lengths_q[b]);
    }
    CHECK(!g.is_backward_ || (tokens <= g.max_tokens_q_ && tokens <= g.max_tokens_kv_),
          "cuDNN: {} tokens, {} were announced", tokens, g.max_tokens_q_);
  }

  int64_t group() const { return g.q_->dim[1] / g.k_->dim[1]; }
  int64_t first_key(int64_t i) const {
    return g.options_.left_bound ? std::max<int64_t>(0, i - *g.options_.left_bound + 1) : 0;
  }

  void forward(int64_t b, int64_t kv_head, int64_t length) const {
    const View q = view(g.q_), k = view(g.k_), v = view(g.v_), o = view(g.o_), lse = view(g.lse_);
    for (int64_t h = kv_head * group(); h < (kv_head + 1) * group(); h++) {
      for (int64_t i = 0; i < length; i++) {
        const auto qi = q.read(b, h, i);
        std::vector<double> s;
        for (int64_t j = first_key(i); j <= i; j++) s.push_back(*g.options_.scale * dot(qi, k.read(b, kv_head, j)));
        const double max = *std::max_element(s.begin(), s.end());
        double total = 0;
        for (const double x : s) total += std::exp(x - max);
        std::vector<double> out(qi.size());
        for (int64_t j = first_key(i); j <= i; j++) {
          add(out, std::exp(s[static_cast<size_t>(j - first_key(i))] - max) / total, v.read(b, kv_head, j));
        }
        o.write(b, h, i, out);
        lse.write(b, h, i, {max + std::log(total)});
      }
    }
  }

  void backward(int64_t b, int64_t kv_head, int64_t length) const {
    const View q = view(g.q_), k = view(g.k_), v = view(g.v_), o = view(g.o_), d_o = view(g.d_o_), lse = view(g.lse_);
    const View dq = view(g.dq_), dk = view(g.dk_), dv = view(g.dv_);
    const size_t D = static_cast<size_t>(g.q_->dim[3]);
    std::vector<std::vector<double>> dk_sum(static_cast<size_t>(length), std::vector<double>(D)), dv_sum = dk_sum;
    for (int64_t h = kv_head * group(); h < (kv_head + 1) * group(); h++) {
      for (int64_t i = 0; i < length; i++) {
        const auto qi = q.read(b, h, i), d_oi = d_o.read(b, h, i);
        const double of_row = dot(d_oi, o.read(b, h, i)), log_sum = lse.read(b, h, i)[0];
        std::vector<double> dq_sum(D);
        for (int64_t j = first_key(i); j <= i; j++) {
          const auto kj = k.read(b, kv_head, j);
          const double w = std::exp(*g.options_.scale * dot(qi, kj) - log_sum);
          const double ds = *g.options_.scale * w * (dot(d_oi, v.read(b, kv_head, j)) - of_row);
          add(dq_sum, ds, kj);
          add(dk_sum[static_cast<size_t>(j)], ds, qi);
          add(dv_sum[static_cast<size_t>(j)], w, d_oi);
        }
        dq.write(b, h, i, dq_sum);
      }
    }
    for (int64_t j = 0; j < length; j++) {
      dk.write(b, kv_head, j, dk_sum[static_cast<size_t>(j)]);
      dv.write(b, kv_head, j, dv_sum[static_cast<size_t>(j)]);
    }
  }
};

error_t Graph::execute(cudnnHandle_t handle, std::unordered_map<int64_t, void*>& pointers, void* workspace) const {
  const size_t size_bytes = static_cast<size_t>(get_workspace_size());
  if (reinterpret_cast<uintptr_t>(workspace) % 16 != 0 ||
      !is_allocated(reinterpret_cast<uintptr_t>(workspace), size_bytes)) {
    return error_t("the double of cuDNN: the workspace");
  }
  enqueue(handle->stream, [call = Call{*this, pointers}, workspace, size_bytes] {
    simt_poison(workspace, size_bytes);
    call.run();
    simt_poison(workspace, size_bytes);  // the real one writes there until it is done
    return true;
  });
  return {};
}

}  // namespace cudnn_frontend::graph
