#include "layers/mla.h"

#include "test/layer_cases.h"
#include "test/testing.h"

namespace {

struct Problem {
  MlaShape s;
  int64_t T;
  HostTensor q, kv, k_rope, qkv, dqkv, dq, dkv, dk_rope, narrow, wide;

  Problem(const MlaCase& c, DType dtype)
      : s(c.shape),
        T(c.T),
        q(dtype, {T, s.num_heads * s.head_dim()}, "q"),
        kv(dtype, {T, s.num_heads * (s.nope + s.v)}, "kv"),
        k_rope(dtype, {T, s.rope}, "k_rope"),
        qkv(dtype, {T, 3 * s.num_heads, s.head_dim()}, "qkv"),
        dqkv(dtype, qkv.shape(), "dqkv"),
        dq(dtype, q.shape(), "dq"),
        dkv(dtype, kv.shape(), "dkv"),
        dk_rope(dtype, k_rope.shape(), "dk_rope"),
        narrow(dtype, {T, s.num_heads * s.v}, "narrow"),
        wide(dtype, {T, s.num_heads, s.head_dim()}, "wide") {
    q.fill_normal(1), kv.fill_normal(2), k_rope.fill_normal(3), dqkv.fill_normal(4), narrow.fill_normal(5);
    for (HostTensor* t : {&qkv, &dq, &dkv, &dk_rope, &wide}) t->fill(NAN);  // whatever a call does not write shows
  }
  double at(int64_t t, int64_t head, int64_t c) const {
    return qkv.get((t * 3 * s.num_heads + head) * s.head_dim() + c);
  }
};

TEST(Mla, every_element_has_its_place) {
  Device device = Device::cpu();
  for (const MlaCase& c : kMlaCases) {
    Problem p(c, DType::F32);
    const auto [NH, dn, dr, dv] = p.s;
    mla_assemble(device, p.qkv, p.q, p.kv, p.k_rope, p.s);
    for (int64_t t = 0; t < p.T; t++) {
      for (int64_t h = 0; h < NH; h++) {
        const int64_t q_at = (t * NH + h) * (dn + dr), kv_at = (t * NH + h) * (dn + dv);
        for (int64_t i = 0; i < dr; i++) ASSERT_EQ(p.at(t, h, i), p.q.get(q_at + dn + i));
        for (int64_t i = 0; i < dn; i++) ASSERT_EQ(p.at(t, h, dr + i), p.q.get(q_at + i));
        for (int64_t i = 0; i < dr; i++) ASSERT_EQ(p.at(t, NH + h, i), p.k_rope.get(t * dr + i));
        for (int64_t i = 0; i < dn; i++) ASSERT_EQ(p.at(t, NH + h, dr + i), p.kv.get(kv_at + i));
        for (int64_t i = 0; i < dn + dr; i++) {
          ASSERT_EQ(p.at(t, 2 * NH + h, i), i < dv ? p.kv.get(kv_at + dn + i) : 0);
        }
      }
    }
  }
}

TEST(Mla, gradients_equal_central_differences) {
  Device device = Device::cpu();
  for (const MlaCase& c : kMlaCases) {
    Problem p(c, DType::F64);
    mla_assemble_backward(device, p.dq, p.dkv, p.dk_rope, p.dqkv, p.s);
    const auto loss = [&] {
      mla_assemble(device, p.qkv, p.q, p.kv, p.k_rope, p.s);
      return dot(p.dqkv, p.qkv);
    };
    expect_gradient(p.q, p.dq, loss, "dq", 1e-6, 40);
    expect_gradient(p.kv, p.dkv, loss, "dkv", 1e-6, 40);
    expect_gradient(p.k_rope, p.dk_rope, loss, "dk_rope", 1e-6, 40);
  }
}

TEST(Mla, wide_and_narrow_are_each_others_gradient) {
  Device device = Device::cpu();
  for (const MlaCase& c : kMlaCases) {
    Problem p(c, DType::F64);
    const HostTensor x = p.narrow;
    mla_widen(device, p.wide, p.narrow, p.s);
    for (int64_t i = 0; i < p.wide.numel(); i++) {
      const int64_t row = i / p.s.head_dim(), k = i % p.s.head_dim();
      ASSERT_EQ(p.wide.get(i), k < p.s.v ? x.get(row * p.s.v + k) : 0);
    }
    p.narrow.fill(NAN);
    mla_narrow(device, p.narrow, p.wide, p.s);
    EXPECT_TRUE(p.narrow.bit_equal(x));
  }
}

TEST(Mla, contract_violations_are_named) {
  Problem p({3, {2, 4, 2, 5}}, DType::F32);
  Device device = Device::cpu();
  EXPECT_EQ(error_of([&] { mla_assemble(device, p.qkv, p.kv, p.kv, p.k_rope, p.s); }),
            "mla_assemble: q ('kv') is F32 (3, 18), expected F32 (3, 12)");
  p.s.v = 7;
  EXPECT_EQ(error_of([&] { mla_assemble(device, p.qkv, p.q, p.kv, p.k_rope, p.s); }),
            "mla_assemble: 2 heads of 4 + 2, v of 7: all positive, and v no wider than q");
}

}  // namespace
