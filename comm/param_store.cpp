#include "comm/param_store.h"

#include <algorithm>
#include <cmath>
#include <exception>

#include "layers/core/integer.h"
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

constexpr size_t kNumSlots = 4;

/// The first unit, the last, and two for all between.
size_t slot_index(size_t u, size_t num_units) {
  if (u == 0) return 0;
  return u + 1 == num_units ? 1 : 2 + u % 2;
}

int64_t bytes_of(const Tensor& tensor) {
  return static_cast<int64_t>(tensor.size_bytes());
}

}  // namespace

ParamStore::ParamStore(Arena& arena, std::vector<UnitSpec> units, DType dtype, const MeshShape& shape, Mesh* mesh,
                       Device& device, std::optional<DType> grad_dtype)
    : dtype_(dtype),
      full_grad_dtype_(accumulator_dtype(dtype)),
      grad_dtype_(grad_dtype.value_or(full_grad_dtype_)),
      shape_(shape),
      mesh_(mesh),
      device_(device),
      shard_rank_(mesh ? mesh->shard().rank() : 0) {
  CHECK(mesh || arena.measures_only() || shape.world == 1, "a store of {} ranks needs a mesh", shape.world);
  for (UnitSpec& spec : units) {
    FlatLayout layout(spec.tensors, shape.shards());
    const size_t u = units_.size(), slot = slot_index(u, units.size());
    units_.push_back(
        {std::move(spec), std::move(layout), {}, {}, {}, is_sharded() ? slot : u, has_full_grads() ? slot : u});
  }
  CHECK(accumulator_dtype(grad_dtype_) == full_grad_dtype_, "gradients in {} of weights in {}", name_of(grad_dtype_),
        name_of(dtype_));
  arena.begin_section(is_sharded() ? "parameters (shards)" : "parameters");
  for (Unit& unit : units_) unit.param_shard = arena.place(dtype, {unit.layout.shard_numel()}, unit.spec.name);
  if (has_master()) {
    arena.begin_section(is_sharded() ? "master weights (shards)" : "master weights");
    for (Unit& unit : units_) {
      unit.master_shard = arena.place(DType::F32, {unit.layout.shard_numel()}, unit.spec.name + " master");
    }
  }
  arena.begin_section(is_sharded() ? "gradients (shards)" : "gradients");
  for (Unit& unit : units_) {
    unit.grad_shard = arena.place(grad_dtype_, {unit.layout.shard_numel()}, unit.spec.name + " gradient");
  }
  squares_ = arena.place(DType::F64, {1}, "gradient norm");
  const int64_t R = shape.dp_replicate;
  if (R > 1) {
    int64_t largest = 0;
    for (const Unit& unit : units_)
      largest = std::max(largest, replica_part(unit.layout.shard_numel(), shape.dp_replicate) * R);
    arena.begin_section("sums over the replicas");
    replica_scratch_ = arena.place(grad_dtype_, {2 * largest}, "gradients");
  }
  weight_slots_.resize(is_sharded() ? kNumSlots : units_.size());
  grad_slots_.resize(has_full_grads() ? kNumSlots : units_.size());
  int64_t largest = 0;
  for (size_t u = 0; u < units_.size(); u++) {
    const Unit& unit = units_[u];
    const auto grow = [&](auto& slot) { slot.numel = std::max(slot.numel, unit.layout.numel()); };
    grow(weight_slot(u)), grow(grad_slot(u));
    largest = std::max(largest, unit.layout.numel());
    if (!is_sharded()) weight_slot(u).views = views_of(unit.param_shard, unit.spec, unit.layout);
    if (!has_full_grads()) grad_slot(u).views = views_of(unit.grad_shard, unit.spec, unit.layout);
  }
  arena.begin_section("full units in use");
  for (WeightSlot& slot : weight_slots_) {  // of a model of few units some are empty
    if (is_sharded() && slot.numel > 0) slot.weights = arena.place(dtype, {slot.numel}, "weights");
  }
  for (GradSlot& slot : grad_slots_) {
    if (has_full_grads() && slot.numel > 0) slot.grads = arena.place(full_grad_dtype_, {slot.numel}, "gradients");
  }
  if (!is_sharded()) return;
  if (grad_dtype_ != full_grad_dtype_) sent_ = arena.place(grad_dtype_, {largest}, "gradients to send");
  received_ = arena.place(grad_dtype_, {largest}, "gradients of all ranks");
}

ParamStore::~ParamStore() {
  if (std::uncaught_exceptions() > 0) return;
  try {
    for (WeightSlot& slot : weight_slots_) {
      if (slot.gathering) slot.gathering->wait();
    }
    if (reducing_) reducing_->request->wait();
  } catch (const Error&) {  // whoever waits next will say it
  }
}

void ParamStore::gather(size_t u) {
  Unit& unit = units_.at(u);
  unit.users++;
  WeightSlot& slot = weight_slot(u);
  if (!is_sharded() || slot.unit == u) return;
  if (slot.unit) {
    CHECK(units_[*slot.unit].users == 0, "unit '{}' is gathered while '{}' is used", unit.spec.name,
          units_[*slot.unit].spec.name);
    if (slot.gathering) slot.gathering->wait();
  }
  Tensor full = slot.weights.rows(0, unit.layout.numel());
  full.name = unit.spec.name.c_str();
  device_.copy(full.rows(shard_begin(u), unit.layout.shard_numel()).data, unit.param_shard.data,
               unit.param_shard.size_bytes());
  slot.unit = u;
  slot.gathering = mesh_->shard_tensors().start_all_gather(full);
  slot.views = views_of(full, unit.spec, unit.layout);
  traffic_.gathers.add((shape_.shards() - 1) * bytes_of(unit.param_shard));
}

const std::vector<Tensor>& ParamStore::use(size_t u) {
  CHECK(units_.at(u).users > 0, "unit '{}' is used before it is gathered", units_[u].spec.name);
  WeightSlot& slot = weight_slot(u);
  if (slot.gathering) {
    slot.gathering->wait();
    slot.gathering.reset();
  }
  return slot.views;
}

void ParamStore::release(size_t u) {
  CHECK(units_.at(u).users > 0, "unit '{}' is released more often than gathered", units_[u].spec.name);
  units_[u].users--;
}

const std::vector<Tensor>& ParamStore::grads(size_t u) {
  Unit& unit = units_.at(u);
  GradSlot& slot = grad_slot(u);
  if (!has_full_grads()) return slot.views;
  if (reducing_ && unit.grad_slot == units_[reducing_->unit].grad_slot) finish_reduce();
  if (slot.unit == u) return slot.views;
  CHECK(!slot.unit, "gradients of unit '{}' while those of '{}' are not reduced", unit.spec.name,
        units_[*slot.unit].spec.name);
  Tensor full = slot.grads.rows(0, unit.layout.numel());
  full.name = unit.spec.name.c_str();
  fill_zero(device_, full);
  slot.unit = u;
  slot.views = views_of(full, unit.spec, unit.layout);
  return slot.views;
}

void ParamStore::reduce(size_t u) {
  if (!has_full_grads()) return;
  Unit& unit = units_.at(u);
  GradSlot& slot = grad_slot(u);
  CHECK(slot.unit == u, "unit '{}' has no gradients to reduce", unit.spec.name);
  finish_reduce();  // one at a time: there is one buffer for what comes
  Tensor full = slot.grads.rows(0, unit.layout.numel());
  full.name = unit.spec.name.c_str();
  if (!is_sharded()) {
    add_parts(device_, unit.grad_shard, full, 1);
    slot.unit.reset();
    return;
  }
  if (sent_) {
    Tensor rounded = sent_.rows(0, full.numel());
    rounded.name = full.name;
    convert(device_, rounded, full);
    full = rounded;
  }
  reducing_ = {u, mesh_->shard_tensors().start_all_to_all(received_.rows(0, full.numel()), full)};
  traffic_.reduces.add((shape_.shards() - 1) * bytes_of(unit.grad_shard));
}

void ParamStore::finish_reduce() {
  if (!reducing_) return;
  reducing_->request->wait();
  Unit& unit = units_[reducing_->unit];
  add_parts(device_, unit.grad_shard, received_.rows(0, unit.layout.numel()), shape_.shards());
  grad_slot(reducing_->unit).unit.reset();
  reducing_.reset();
}

void ParamStore::finish_grads() {
  finish_reduce();
  for (const GradSlot& slot : grad_slots_) {
    CHECK(!slot.unit, "the gradients of unit '{}' were not reduced", units_[*slot.unit].spec.name);
  }
  if (shape_.dp_replicate == 1) return;
  for (Unit& unit : units_) sum_replicas(unit.grad_shard);
}

// What each replica sums of n elements.
int64_t ParamStore::replica_part(int64_t n, int replicas) {
  return round_up(ceil_div(n, replicas), FlatLayout::kAlignment);
}

// All-reduce: each replica sums one part in the order of replicas, and gives it to the others.
void ParamStore::sum_replicas(Tensor grads) {
  Communicator& replicas = mesh_->replicate_tensors();
  const int64_t R = replicas.size(), n = grads.numel();
  const int64_t part = replica_part(n, replicas.size());
  Tensor all = replica_scratch_.rows(0, part * R), received = replica_scratch_.rows(part * R, part * R);
  all.name = received.name = grads.name;
  device_.copy(all.data, grads.data, grads.size_bytes());
  fill_zero(device_, all.rows(n, part * R - n));
  replicas.all_to_all(received, all);
  Tensor mine = all.rows(part * replicas.rank(), part);
  fill_zero(device_, mine);
  add_parts(device_, mine, received, static_cast<int>(R));
  replicas.all_gather(all);
  device_.copy(grads.data, all.data, grads.size_bytes());
  traffic_.replica_sums.add(2 * (R - 1) * bytes_of(mine));
}

void ParamStore::round_weights() {
  if (!has_master()) return;
  for (Unit& unit : units_) convert(device_, unit.param_shard, unit.master_shard);
}

void ParamStore::weights_changed() {
  if (!is_sharded()) return;
  for (WeightSlot& slot : weight_slots_) {
    if (slot.gathering) slot.gathering->wait(), slot.gathering.reset();
    CHECK(!slot.unit || units_[*slot.unit].users == 0, "the weights of '{}' change while they are used",
          units_[*slot.unit].spec.name);
    slot.unit.reset();
  }
}

void ParamStore::zero_grads() {
  for (Unit& unit : units_) fill_zero(device_, unit.grad_shard);
}

double ParamStore::grad_norm() {
  fill_zero(device_, squares_);
  for (Unit& unit : units_) add_sum_of_squares(device_, squares_, unit.grad_shard);
  double sum = 0;
  device_.copy_to_host(&sum, squares_.data, sizeof sum);
  if (mesh_) sum = mesh_->shard().sum(sum);
  return std::sqrt(sum);
}
