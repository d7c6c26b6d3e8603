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
                       Device& device)
    : dtype_(dtype),
      grad_dtype_(accumulator_dtype(dtype)),
      shape_(shape),
      mesh_(mesh),
      device_(device),
      shard_rank_(mesh ? mesh->shard().rank() : 0) {
  CHECK(mesh || arena.measures_only() || shape.world == 1, "a store of {} ranks needs a mesh", shape.world);
  for (UnitSpec& spec : units) {
    FlatLayout layout(spec.tensors, shape.shards());
    units_.push_back({std::move(spec), std::move(layout), {}, {}, {}, slot_index(units_.size(), units.size())});
  }
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
  if (!is_sharded()) {
    for (Unit& unit : units_) {
      unit.slot = slots_.size();
      slots_.emplace_back();
      slots_.back().param_views = views_of(unit.param_shard, unit.spec, unit.layout);
      slots_.back().grad_views = views_of(unit.grad_shard, unit.spec, unit.layout);
    }
    return;
  }
  slots_.resize(4);
  int64_t largest = 0;
  for (Unit& unit : units_) {
    slots_[unit.slot].numel = std::max(slots_[unit.slot].numel, unit.layout.numel());
    largest = std::max(largest, unit.layout.numel());
  }
  arena.begin_section("full units in use");
  for (Slot& slot : slots_) {
    if (slot.numel == 0) continue;  // of a model of few units
    slot.params = arena.place(dtype, {slot.numel}, "weights");
    slot.grads = arena.place(grad_dtype_, {slot.numel}, "gradients");
  }
  received_ = arena.place(grad_dtype_, {largest}, "gradients of all ranks");
}

ParamStore::~ParamStore() {
  if (std::uncaught_exceptions() > 0) return;
  try {
    for (Slot& slot : slots_) {
      if (slot.gathering) slot.gathering->wait();
    }
    if (reducing_) reducing_->request->wait();
  } catch (const Error&) {  // whoever waits next will say it
  }
}

void ParamStore::gather(size_t u) {
  Unit& unit = units_.at(u);
  unit.users++;
  Slot& slot = slot_of(u);
  if (!is_sharded() || slot.unit == u) return;
  if (slot.unit) {
    CHECK(units_[*slot.unit].users == 0, "unit '{}' is gathered while '{}' is used", unit.spec.name,
          units_[*slot.unit].spec.name);
    if (slot.gathering) slot.gathering->wait();
  }
  Tensor full = slot.params.rows(0, unit.layout.numel());
  full.name = unit.spec.name.c_str();
  device_.copy(full.rows(shard_begin(u), unit.layout.shard_numel()).data, unit.param_shard.data,
               unit.param_shard.size_bytes());
  slot.unit = u;
  slot.gathering = mesh_->shard_tensors().start_all_gather(full);
  slot.param_views = views_of(full, unit.spec, unit.layout);
  traffic_.gathers.add((shape_.shards() - 1) * bytes_of(unit.param_shard));
}

const std::vector<Tensor>& ParamStore::use(size_t u) {
  CHECK(units_.at(u).users > 0, "unit '{}' is used before it is gathered", units_[u].spec.name);
  Slot& slot = slot_of(u);
  if (slot.gathering) {
    slot.gathering->wait();
    slot.gathering.reset();
  }
  return slot.param_views;
}

void ParamStore::release(size_t u) {
  CHECK(units_.at(u).users > 0, "unit '{}' is released more often than gathered", units_[u].spec.name);
  units_[u].users--;
}

const std::vector<Tensor>& ParamStore::grads(size_t u) {
  Unit& unit = units_.at(u);
  Slot& slot = slot_of(u);
  if (!is_sharded()) return slot.grad_views;
  if (reducing_ && unit.slot == units_[reducing_->unit].slot) finish_reduce();
  if (slot.grads_unit == u) return slot.grad_views;
  CHECK(!slot.grads_unit, "gradients of unit '{}' while those of '{}' are not reduced", unit.spec.name,
        units_[*slot.grads_unit].spec.name);
  Tensor full = slot.grads.rows(0, unit.layout.numel());
  full.name = unit.spec.name.c_str();
  fill_zero(device_, full);
  slot.grads_unit = u;
  slot.grad_views = views_of(full, unit.spec, unit.layout);
  return slot.grad_views;
}

void ParamStore::reduce(size_t u) {
  if (!is_sharded()) return;
  Unit& unit = units_.at(u);
  Slot& slot = slot_of(u);
  CHECK(slot.grads_unit == u, "unit '{}' has no gradients to reduce", unit.spec.name);
  finish_reduce();  // one at a time: there is one buffer for what comes
  Tensor full = slot.grads.rows(0, unit.layout.numel());
  full.name = unit.spec.name.c_str();
  reducing_ = {u, mesh_->shard_tensors().start_all_to_all(received_.rows(0, full.numel()), full)};
  traffic_.reduces.add((shape_.shards() - 1) * bytes_of(unit.grad_shard));
}

void ParamStore::finish_reduce() {
  if (!reducing_) return;
  reducing_->request->wait();
  Unit& unit = units_[reducing_->unit];
  add_parts(device_, unit.grad_shard, received_.rows(0, unit.layout.numel()), shape_.shards());
  slot_of(reducing_->unit).grads_unit.reset();
  reducing_.reset();
}

void ParamStore::finish_grads() {
  finish_reduce();
  for (const Slot& slot : slots_) {
    CHECK(!slot.grads_unit, "the gradients of unit '{}' were not reduced", units_[*slot.grads_unit].spec.name);
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
  for (Slot& slot : slots_) {
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
