#include "llama/quantized.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "layers/core/integer.h"

namespace {

constexpr int64_t kMxBlock = 32, kMxBytes = kMxBlock / 2;  // numbers with one scale
constexpr int64_t kFp8Tile = 128;
constexpr float kE2m1[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
constexpr int64_t kPartBytes = int64_t{8} << 20;

/// Sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, NaN is all ones.
float from_e4m3(uint8_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                        : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return byte & 128 ? -magnitude : magnitude;
}

/// Stores numbers in the dtype that was asked for.
class Output {
 public:
  Output(DType to, void* out) : to_(to), out_(out) {
    CHECK(to == DType::F32 || to == DType::F64 || to == DType::BF16, "quantised weights cannot be read as {}",
          name_of(to));
  }
  void set(int64_t i, float value) {
    switch (to_) {
      case DType::F64:
        static_cast<double*>(out_)[i] = static_cast<double>(value);
        return;
      case DType::BF16:
        static_cast<bf16*>(out_)[i] = bf16(value);
        return;
      default:
        static_cast<float*>(out_)[i] = value;
    }
  }

 private:
  DType to_;
  void* out_;
};

/// 32 rows k of an expert at a time: the bytes of all its columns that hold them.
void read_mxfp4(const SafetensorsDirectory& directory, const std::string& name, const Shape& shape, int64_t begin,
                int64_t count, Output out) {
  const int64_t K = shape[1], N = shape[2], blocks = K / kMxBlock;
  const std::string blocks_name = name + "_blocks", scales_name = name + "_scales";
  std::vector<uint8_t> bytes(static_cast<size_t>(N * blocks * kMxBytes)), scales(static_cast<size_t>(N * blocks));
  for (int64_t at = begin; at < begin + count;) {
    const int64_t e = at / (K * N), end = std::min(begin + count, (e + 1) * K * N);
    directory.read(blocks_name, e * N * blocks * kMxBytes, N * blocks * kMxBytes, DType::U8, bytes.data());
    directory.read(scales_name, e * N * blocks, N * blocks, DType::U8, scales.data());
    for (; at < end; at++) {
      const int64_t k = at / N % K, n = at % N, block = n * blocks + k / kMxBlock;
      const uint8_t byte = bytes[static_cast<size_t>(block * kMxBytes + k % kMxBlock / 2)];
      const float number = kE2m1[k % 2 == 0 ? byte & 15 : byte >> 4];
      out.set(at - begin, std::ldexp(number, int{scales[static_cast<size_t>(block)]} - 127));
    }
  }
}

void read_fp8(const SafetensorsDirectory& directory, const std::string& name, const Shape& shape, int64_t begin,
              int64_t count, Output out) {
  static const auto table = [] {
    std::vector<float> values;
    for (int byte = 0; byte < 256; byte++) values.push_back(from_e4m3(static_cast<uint8_t>(byte)));
    return values;
  }();
  const int64_t R = shape[0], C = shape[1], tiles = ceil_div(C, kFp8Tile), scale_rows = ceil_div(R, kFp8Tile);
  std::vector<float> scales(static_cast<size_t>(scale_rows * tiles));
  directory.read(name + "_scale_inv", 0, scale_rows * tiles, DType::F32, scales.data());
  std::vector<uint8_t> bytes(static_cast<size_t>(std::min(count, kPartBytes)));
  for (int64_t done = 0; done < count; done += kPartBytes) {
    const int64_t n = std::min(kPartBytes, count - done);
    directory.read_bytes(name, begin + done, n, bytes.data());
    for (int64_t i = 0; i < n; i++) {
      const int64_t at = begin + done + i, tile = at / C / kFp8Tile * tiles + at % C / kFp8Tile;
      out.set(done + i, table[bytes[static_cast<size_t>(i)]] * scales[static_cast<size_t>(tile)]);
    }
  }
}

}  // namespace

Quantization quantization_of(const SafetensorsDirectory& directory, const std::string& name) {
  if (directory.contains(name + "_blocks")) return Quantization::Mxfp4;
  if (directory.contains(name) && directory.info(name).dtype_name == "F8_E4M3") return Quantization::Fp8;
  return Quantization::None;
}

std::vector<QuantizedTensor> quantized_tensors(const std::string& name, const Shape& shape, Quantization kind) {
  switch (kind) {
    case Quantization::None:
      return {{name, {shape.begin(), shape.end()}}};
    case Quantization::Mxfp4:
      CHECK(shape.rank() == 3 && shape[1] % kMxBlock == 0, "{} {}: MXFP4 has blocks of {} numbers", name, shape.str(),
            kMxBlock);
      return {{name + "_blocks", {shape[0], shape[2], shape[1] / kMxBlock, kMxBytes}},
              {name + "_scales", {shape[0], shape[2], shape[1] / kMxBlock}}};
    case Quantization::Fp8:
      CHECK(shape.rank() == 2, "{} {}: FP8 is for matrices", name, shape.str());
      return {{name, {shape[0], shape[1]}},
              {name + "_scale_inv", {ceil_div(shape[0], kFp8Tile), ceil_div(shape[1], kFp8Tile)}}};
  }
  return {};
}

void read_weight(const SafetensorsDirectory& directory, const std::string& name, const Shape& shape, int64_t begin,
                 int64_t count, DType to, void* out) {
  switch (quantization_of(directory, name)) {
    case Quantization::None:
      return directory.read(name, begin, count, to, out);
    case Quantization::Mxfp4:
      return read_mxfp4(directory, name, shape, begin, count, Output(to, out));
    case Quantization::Fp8:
      return read_fp8(directory, name, shape, begin, count, Output(to, out));
  }
}
