// Decoding of MXFP4 and FP8 weights, by their formulas, at any range; whole models: test/numerics.
#include "llama/quantized.h"

#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "test/testing.h"

namespace {

namespace fs = std::filesystem;

TEST(Quantized, any_range_of_mxfp4_is_the_formula) {
  const SafetensorsDirectory directory("test/fixtures/gpt_oss_mxfp4");
  const std::string name = "model.layers.1.mlp.experts.gate_up_proj";
  const Shape shape = {4, 64, 64};
  ASSERT_EQ(quantization_of(directory, name), Quantization::Mxfp4);
  std::vector<uint8_t> blocks(4 * 64 * 2 * 16), scales(4 * 64 * 2);
  directory.read(name + "_blocks", 0, static_cast<int64_t>(blocks.size()), DType::U8, blocks.data());
  directory.read(name + "_scales", 0, static_cast<int64_t>(scales.size()), DType::U8, scales.data());
  const double kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  const auto value = [&](int64_t i) {
    const int64_t e = i / 4096, k = i / 64 % 64, n = i % 64, block = (e * 64 + n) * 2 + k / 32;
    const int byte = blocks[static_cast<size_t>(block * 16 + k % 32 / 2)], bits = k % 2 ? byte / 16 : byte % 16;
    return (bits >= 8 ? -1 : 1) * kValues[bits % 8] * std::pow(2.0, scales[static_cast<size_t>(block)] - 127);
  };
  for (const auto& [begin, count] :
       {std::pair<int64_t, int64_t>{0, 16384}, {4000, 300}, {8191, 2}, {16383, 1}, {77, 0}}) {
    std::vector<float> read(static_cast<size_t>(count));
    read_weight(directory, name, shape, begin, count, DType::F32, read.data());
    for (int64_t i = 0; i < count; i++) ASSERT_EQ(read[static_cast<size_t>(i)], value(begin + i)) << begin + i;
  }
}

TEST(Quantized, every_fp8_number_is_what_its_bits_say_and_tiles_have_their_scale) {
  const fs::path dir = fs::temp_directory_path() / fmt::format("quantized_{}", getpid());
  fs::create_directories(dir);
  // A header by hand: the writer knows no F8_E4M3. 130 x 258: partial tiles on both sides.
  const std::string header = R"({"x":{"dtype":"F8_E4M3","shape":[130,258],"data_offsets":[24,33564]},)"
                             R"("x_scale_inv":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})";
  std::string file(8, 0);
  const uint64_t size = header.size();
  std::memcpy(file.data(), &size, 8);
  file += header;
  const float scales[] = {1, 2, 0.5f, -1, 8, 0.25f};
  file.append(reinterpret_cast<const char*>(scales), sizeof scales);
  for (int64_t i = 0; i < 130 * 258; i++) file += static_cast<char>(i % 256);
  std::ofstream(dir / "model.safetensors", std::ios::binary) << file;

  const SafetensorsDirectory directory(dir);
  ASSERT_EQ(quantization_of(directory, "x"), Quantization::Fp8);
  for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, 130 * 258}, {33000, 540}, {257, 3}}) {
    std::vector<double> read(static_cast<size_t>(count));
    read_weight(directory, "x", {130, 258}, begin, count, DType::F64, read.data());
    for (int64_t j = 0; j < count; j++) {
      const int64_t i = begin + j;
      const int bits = static_cast<int>(i % 256), exponent = bits / 8 % 16, mantissa = bits % 8;
      double expected = exponent == 0 ? mantissa * 0x1p-9 : (1 + mantissa / 8.0) * std::pow(2.0, exponent - 7);
      if (bits >= 128) expected = -expected;
      expected *= static_cast<double>(scales[i / 258 / 128 * 3 + i % 258 / 128]);
      const double found = read[static_cast<size_t>(j)];
      if (bits % 128 == 127) {
        ASSERT_TRUE(std::isnan(found)) << i;
      } else {
        ASSERT_EQ(found, expected) << i;
      }
    }
  }
  fs::remove_all(dir);
}

TEST(Quantized, a_missing_scale_is_named) {
  const SafetensorsDirectory directory("test/fixtures/gpt_oss_mxfp4");
  const auto tensors = quantized_tensors("w", {2, 64, 5}, Quantization::Mxfp4);
  ASSERT_EQ(tensors.size(), 2u);
  EXPECT_EQ(tensors[0].name, "w_blocks");
  EXPECT_EQ(tensors[0].shape, (std::vector<int64_t>{2, 5, 2, 16}));
  EXPECT_EQ(tensors[1].name, "w_scales");
  EXPECT_EQ(error_of([] {
              quantized_tensors("w", {2, 60, 5}, Quantization::Mxfp4);
            }),
            "w (2, 60, 5): MXFP4 has blocks of 32 numbers");
  EXPECT_EQ(quantized_tensors("w", {576, 130}, Quantization::Fp8)[1].shape, (std::vector<int64_t>{5, 2}));
}

}  // namespace
