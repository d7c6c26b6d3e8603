// What debug.dump_dir writes of a step, read back and compared.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "data/safetensors.h"

struct Dump {
  std::map<std::string, std::vector<double>> tensors;
  int64_t row_len = 0;
};

inline Dump read_dump(const std::filesystem::path& path) {
  const SafetensorsFile file(path);
  Dump dump;
  dump.row_len = file.tensors().at("batch/document_ids").shape.at(1);
  for (const auto& [name, info] : file.tensors()) {
    auto& values = dump.tensors[name];
    if (info.dtype == DType::F32) {
      values.resize(static_cast<size_t>(info.numel()));
      file.read(name, 0, info.numel(), DType::F64, values.data());
    } else {
      std::vector<int32_t> ids(static_cast<size_t>(info.numel()));
      file.read(name, 0, info.numel(), DType::I32, ids.data());
      values.assign(ids.begin(), ids.end());
    }
  }
  return dump;
}

/// ||a - b|| / ||a||
inline double relative_error(const std::vector<double>& a, const std::vector<double>& b) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < a.size(); i++) error += (a[i] - b[i]) * (a[i] - b[i]), norm += a[i] * a[i];
  return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}

/// Loss, gradient norm, logits, every gradient and every updated weight: ||one - many|| / ||one|| of each tensor.
inline void expect_same_step(const Dump& one, const Dump& many, double bound, const std::string& what) {
  ASSERT_FALSE(one.tensors.empty() || many.tensors.empty()) << what;
  const auto &documents = one.tensors.at("batch/document_ids"), &theirs = many.tensors.at("batch/document_ids");
  const size_t rows = documents.size() / static_cast<size_t>(one.row_len);
  ASSERT_EQ(rows, theirs.size() / static_cast<size_t>(many.row_len)) << what;
  for (const auto& [name, expected] : one.tensors) {
    const auto found = many.tensors.find(name);
    ASSERT_TRUE(found != many.tensors.end()) << name;
    if (name.starts_with("batch/")) continue;  // padded to another multiple
    if (name != "logits") {
      ASSERT_EQ(expected.size(), found->second.size()) << name;
      EXPECT_LE(relative_error(expected, found->second), bound) << name << ", " << what;
    } else {  // of all tokens but padding, which is of another length
      const auto V = static_cast<int64_t>(expected.size() / documents.size());
      std::vector<double> a, b;
      for (int64_t t = 0; t < static_cast<int64_t>(documents.size()); t++) {
        if (documents[static_cast<size_t>(t)] < 0) continue;
        const int64_t at = t / one.row_len * many.row_len + t % one.row_len;
        a.insert(a.end(), expected.begin() + t * V, expected.begin() + (t + 1) * V);
        b.insert(b.end(), found->second.begin() + at * V, found->second.begin() + (at + 1) * V);
      }
      EXPECT_GT(a.size(), 0u) << what;
      EXPECT_LE(relative_error(a, b), bound) << name << ", " << what;
    }
  }
}
