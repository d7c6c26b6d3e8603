#include "layers/core/gemm.h"

#include <omp.h>

#include "test/testing.h"

namespace {

struct Case {
  int64_t M, N, K;
};

// Tails in every direction, no depth at all, and more than one block of rows, of columns and of depth.
const Case kCases[] = {{1, 1, 1},    {5, 15, 4},    {6, 16, 0},     {7, 17, 33},    {12, 32, 64},
                       {3, 1100, 9}, {400, 20, 50}, {25, 70, 1000}, {200, 130, 390}};

template <class T>
struct Problem {
  Case c;
  HostTensor a, b, out;

  Problem(const Case& c_, bool a_transposed, bool b_transposed)
      : c(c_),
        a(dtype_of<T>, a_transposed ? Shape{c.K, c.M} : Shape{c.M, c.K}, "a"),
        b(dtype_of<T>, b_transposed ? Shape{c.N, c.K} : Shape{c.K, c.N}, "b"),
        out(dtype_of<T>, {c.M, c.N}, "c"),
        a_view{a.template as<T>(), a_transposed ? c.M : c.K, a_transposed},
        b_view{b.template as<T>(), b_transposed ? c.K : c.N, b_transposed} {
    a.fill_normal(1), b.fill_normal(2), out.fill(NAN);
  }
  void run(const T* addend = nullptr, int64_t addend_ld = 0) {
    gemm<T>(out.template as<T>(), c.M, c.N, c.K, a_view, b_view, addend, addend_ld);
  }
  double exact(int64_t i, int64_t j) const {
    double sum = 0;
    for (int64_t k = 0; k < c.K; k++) {
      sum +=
          a.get(a_view.transposed ? k * c.M + i : i * c.K + k) * b.get(b_view.transposed ? j * c.K + k : k * c.N + j);
    }
    return sum;
  }

  MatrixView<T> a_view, b_view;
};

template <class T>
void expect_product(const Case& c, bool a_transposed, bool b_transposed) {
  Problem<T> p(c, a_transposed, b_transposed);
  p.run();
  // K roundings of a sum that grows like sqrt(K): K * eps is safe, sqrt(K) * 8 * eps is closer to what happens.
  const double eps = sizeof(T) == 4 ? 0x1p-24 : 0x1p-53;
  const double tolerance = 8 * eps * std::sqrt(static_cast<double>(c.K)) * std::sqrt(static_cast<double>(c.K) + 1);
  for (int64_t i = 0; i < c.M; i++) {
    for (int64_t j = 0; j < c.N; j++) {
      ASSERT_NEAR(p.out.get(i * c.N + j), p.exact(i, j), tolerance)
          << c.M << "x" << c.N << "x" << c.K << " at " << i << "," << j << (a_transposed ? " T" : " N")
          << (b_transposed ? "T" : "N");
    }
  }
}

TEST(Gemm, every_form_and_tail_equals_the_plain_sum) {
  for (const Case& c : kCases) {
    for (const bool a_transposed : {false, true}) {
      for (const bool b_transposed : {false, true}) {
        expect_product<float>(c, a_transposed, b_transposed);
        expect_product<double>(c, a_transposed, b_transposed);
      }
    }
  }
}

TEST(Gemm, an_addend_is_added_once_whether_it_is_a_row_a_matrix_or_c_itself) {
  for (const Case& c : kCases) {
    Problem<double> plain(c, false, true), row(c, false, true), matrix(c, false, true), self(c, false, true);
    HostTensor d(DType::F64, {c.M, c.N}, "d");
    d.fill_normal(3);
    std::memcpy(self.out.view().data, d.view().data, d.view().size_bytes());
    plain.run();
    row.run(d.as<double>(), 0);
    matrix.run(d.as<double>(), c.N);
    self.run(self.out.as<double>(), c.N);
    for (int64_t i = 0; i < d.numel(); i++) {
      const double tolerance = 1e-14 * static_cast<double>(c.K + 8);
      ASSERT_NEAR(row.out.get(i), plain.out.get(i) + d.get(i % c.N), tolerance);
      ASSERT_NEAR(matrix.out.get(i), plain.out.get(i) + d.get(i), tolerance);
      ASSERT_EQ(self.out.get(i), matrix.out.get(i));
    }
  }
}

TEST(Gemm, nothing_is_written_beside_c_and_a_view_may_be_part_of_a_wider_matrix) {
  const int64_t M = 13, N = 21, K = 10, ld = 40;
  HostTensor a(DType::F32, {M, ld}, "a"), b(DType::F32, {K, ld}, "b"), padded(DType::F32, {M + 2, N}, "c");
  a.fill_normal(1), b.fill_normal(2), padded.fill(7);
  gemm<float>(padded.as<float>() + N, M, N, K, {a.as<float>() + 3, ld}, {b.as<float>() + 5, ld});
  for (int64_t i = 0; i < M; i++) {
    for (int64_t j = 0; j < N; j++) {
      double sum = 0;
      for (int64_t k = 0; k < K; k++) sum += a.get(i * ld + 3 + k) * b.get(k * ld + 5 + j);
      ASSERT_NEAR(padded.get((i + 1) * N + j), sum, 1e-5);
    }
  }
  for (int64_t j = 0; j < N; j++) {
    ASSERT_EQ(padded.get(j), 7);
    ASSERT_EQ(padded.get((M + 1) * N + j), 7);
  }
}

TEST(Gemm, bits_do_not_depend_on_the_number_of_threads_or_on_the_size_of_the_matrix) {
  const int threads = omp_get_max_threads();
  // Four threads share C by rows, by columns, and as 2 x 2.
  for (const Case& c : {Case{400, 20, 500}, Case{25, 1100, 800}, Case{130, 130, 130}, Case{36, 192, 200}}) {
    for (const bool a_transposed : {false, true}) {
      omp_set_num_threads(1);
      Problem<float> one(c, a_transposed, true);
      one.run();
      for (const int n : {2, 3, 4}) {
        omp_set_num_threads(n);
        Problem<float> many(c, a_transposed, true);
        many.run();
        EXPECT_TRUE(many.out.bit_equal(one.out)) << n << " threads";
      }
      // The last row and column alone.
      const float* a = one.a_view.data + (a_transposed ? c.M - 1 : (c.M - 1) * c.K);
      const float* b = one.b_view.data + (c.N - 1) * c.K;
      float corner = NAN;
      gemm<float>(&corner, 1, 1, c.K, {a, one.a_view.ld, a_transposed}, {b, c.K, true});
      EXPECT_EQ(corner, one.out.as<float>()[c.M * c.N - 1]);
    }
  }
  omp_set_num_threads(threads);
}

}  // namespace
