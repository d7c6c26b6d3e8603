// Where cudnn.h was not there at build time, cuDNN plans nothing: attention_cudnn.h without cuDNN.
#include "layers/attention_cudnn.h"

bool attention_cudnn_plans(const AttentionShape&, DType, int) {
  return false;
}

size_t attention_cudnn_workspace_bytes(const AttentionShape&, DType, int64_t) {
  return 0;
}

bool attention_cudnn_forward(Device&, Tensor, Tensor, ConstTensor, const Documents&, const AttentionShape&, Tensor) {
  return false;
}

bool attention_cudnn_backward(Device&, Tensor, ConstTensor, ConstTensor, ConstTensor, ConstTensor, const Documents&,
                              const AttentionShape&, Tensor) {
  return false;
}

void attention_cudnn_log(std::function<void(const std::string&)>) {}
