#include "comm/param_store.h"

#include <cmath>
#include <cstring>

#include "layers/core/parallel.h"
#include "layers/reduce.h"

namespace {

std::vector<Tensor> views_of(Tensor flat, const UnitSpec& spec, const FlatLayout& layout) {
  std::vector<Tensor> views;
  for (size_t i = 0; i < spec.tensors.size(); i++) {
    const TensorSpec& tensor = spec.tensors[i];
    Tensor view = flat.rows(layout.begin(i), tensor.shape.numel()).reshaped(tensor.shape);
    view.name = tensor.name.c_str();
    views.push_back(view);
  }
  return views;
}

}  // namespace

ParamStore::ParamStore(Arena& arena, std::vector<UnitSpec> units, DType dtype, Device& device)
    : dtype_(dtype), device_(device) {
  for (UnitSpec& spec : units) {
    FlatLayout layout(spec.tensors, 1);
    units_.push_back({std::move(spec), std::move(layout), {}, {}, {}, {}});
  }
  arena.begin_section("parameters");
  for (Unit& unit : units_) unit.param_flat = arena.place(dtype, {unit.layout.numel()}, unit.spec.name);
  arena.begin_section("gradients");
  for (Unit& unit : units_) unit.grad_flat = arena.place(dtype, {unit.layout.numel()}, unit.spec.name + " gradient");
  for (Unit& unit : units_) {
    unit.params = views_of(unit.param_flat, unit.spec, unit.layout);
    unit.grads = views_of(unit.grad_flat, unit.spec, unit.layout);
  }
}

void ParamStore::gather(size_t u) {
  units_.at(u).users++;
}

const std::vector<Tensor>& ParamStore::use(size_t u) {
  CHECK(units_.at(u).users > 0, "unit '{}' is used before it is gathered", units_[u].spec.name);
  return units_[u].params;
}

void ParamStore::release(size_t u) {
  CHECK(units_.at(u).users > 0, "unit '{}' is released more often than gathered", units_[u].spec.name);
  units_[u].users--;
}

const std::vector<Tensor>& ParamStore::grads(size_t u) {
  return units_.at(u).grads;
}

void ParamStore::reduce(size_t u) {
  CHECK(u < units_.size(), "there is no unit {}", u);
}

void ParamStore::zero_grads() {
  for (Unit& unit : units_) {
    const Tensor& flat = unit.grad_flat;
    if (device_.is_cuda()) {
      device_.fill_zero(flat.data, flat.size_bytes());
      continue;
    }
    parallel_for(static_cast<int64_t>(flat.size_bytes()), 1 << 20, [&](int64_t begin, int64_t end) {
      std::memset(static_cast<char*>(flat.data) + begin, 0, static_cast<size_t>(end - begin));
    });
  }
}

double ParamStore::grad_norm() {
  double sum = 0;
  for (Unit& unit : units_) sum += sum_of_squares(device_, unit.grad_flat);
  return std::sqrt(sum);
}
