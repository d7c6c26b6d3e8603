#include "data/safetensors.h"

#include <sys/wait.h>

#include <bit>
#include <cmath>
#include <thread>

#include "test/files.h"
#include "test/testing.h"

namespace {

namespace fs = std::filesystem;
using std::string_literals::operator""s;

// What the Python package (safetensors 0.8.0, torch 2.15.0) wrote with safetensors.torch.save(tensors, {"format":
// "pt"}).
const std::string kPackageFile =
    " \002\000\000\000\000\000\000"s
    R"({"__metadata__":{"format":"pt"},"l":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},)"
    R"("d":{"dtype":"F64","shape":[],"data_offsets":[8,16]},"b":{"dtype":"F32","shape":[3],"data_offsets":[16,28]},)"
    R"("e":{"dtype":"F32","shape":[0,5],"data_offsets":[28,28]},)"
    "\"\303\251\\\"\\n\\u0001\177/\""
    R"(:{"dtype":"F32","shape":[1],"data_offsets":[28,32]},"i":{"dtype":"I32","shape":[1],"data_offsets":[32,36]},)"
    R"("a":{"dtype":"BF16","shape":[2,2],"data_offsets":[36,44]},"h":{"dtype":"F16","shape":[1],"data_offsets":[44,46]},)"
    R"("u":{"dtype":"U8","shape":[3],"data_offsets":[46,49]}}    )"
    "\000\000\000\000\000\001\000\000\232\231\231\231\231\231\271?\000\000\200?\000\000 \300\346\261a\177\000\000\000?"
    "\371\377\377\377\200?\000@@@\200@\000<\001\002\003"s;
const std::string kOddName = "\303\251\"\n\001\177/";

const std::vector<TensorToWrite> kPackageTensors = {
    {"b", DType::F32, {3}}, {"a", DType::BF16, {2, 2}}, {"h", DType::F16, {1}},
    {"u", DType::U8, {3}},  {"i", DType::I32, {1}},     {"l", DType::I64, {1}},
    {"d", DType::F64, {}},  {"e", DType::F32, {0, 5}},  {kOddName, DType::F32, {1}}};

/// A safetensors file: size field, header, data.
std::string raw_file(const std::string& header, const std::string& data) {
  const uint64_t size = header.size();
  return std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + header + data;
}

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

/// `values` as the only tensor, "t".
template <class T>
fs::path file_with(const TempDir& dir, const std::vector<T>& values, const std::string& dtype_name) {
  const std::string data = bytes_of(values);
  write_bytes(dir / "t.safetensors",
              raw_file(fmt::format(R"({{"t":{{"dtype":"{}","shape":[{}],"data_offsets":[0,{}]}}}})", dtype_name,
                                   values.size(), data.size()),
                       data));
  return dir / "t.safetensors";
}

template <class To, class From>
std::vector<To> read_as(const TempDir& dir, const std::vector<From>& values, const std::string& dtype_name) {
  std::vector<To> out(values.size());
  SafetensorsFile(file_with(dir, values, dtype_name))
      .read("t", 0, static_cast<int64_t>(values.size()), dtype_of<To>, out.data());
  return out;
}

TEST(Safetensors, reads_what_the_python_package_wrote) {
  TempDir dir;
  write_bytes(dir / "f", kPackageFile);
  const SafetensorsFile file(dir / "f");
  EXPECT_EQ(file.tensors().size(), kPackageTensors.size());
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}}));
  EXPECT_EQ(file.tensors().at("a").str(), "BF16 (2, 2)");
  EXPECT_EQ(file.tensors().at("d").str(), "F64 ()");
  EXPECT_EQ(file.tensors().at("e").numel(), 0);

  float b[3], a[4], h, odd, d32;
  double d, a64[4];
  int32_t i;
  int64_t l;
  uint8_t u[3];
  file.read("b", 0, 3, DType::F32, b);
  file.read("a", 0, 4, DType::F32, a);
  file.read("a", 0, 4, DType::F64, a64);
  file.read("h", 0, 1, DType::F32, &h);
  file.read(kOddName, 0, 1, DType::F32, &odd);
  file.read("d", 0, 1, DType::F64, &d);
  file.read("d", 0, 1, DType::F32, &d32);
  file.read("i", 0, 1, DType::I32, &i);
  file.read("l", 0, 1, DType::I64, &l);
  file.read("u", 0, 3, DType::U8, u);
  file.read("e", 0, 0, DType::F32, nullptr);
  EXPECT_EQ(std::vector(b, b + 3), (std::vector{1.0f, -2.5f, 3e38f}));
  EXPECT_EQ(std::vector(a, a + 4), (std::vector{1.0f, 2.0f, 3.0f, 4.0f}));
  EXPECT_EQ(std::vector(a64, a64 + 4), (std::vector{1.0, 2.0, 3.0, 4.0}));
  EXPECT_EQ(h, 1.0f);
  EXPECT_EQ(odd, 0.5f);
  EXPECT_EQ(d, 0.1);
  EXPECT_EQ(d32, 0.1f);
  EXPECT_EQ(i, -7);
  EXPECT_EQ(l, int64_t{1} << 40);
  EXPECT_EQ(std::vector(u, u + 3), (std::vector<uint8_t>{1, 2, 3}));
}

TEST(Safetensors, writes_the_bytes_of_the_python_package) {
  TempDir dir;
  SafetensorsWriter writer(dir / "f", kPackageTensors, {{"format", "pt"}});
  const float b[] = {1.0f, -2.5f, 3e38f}, a[] = {1, 2, 3, 4}, odd = 0.5f;
  const uint16_t h = 0x3c00;
  const uint8_t u[] = {1, 2, 3};
  const int32_t i = -7;
  const int64_t l = int64_t{1} << 40;
  const double d = 0.1;
  writer.write("a", 1, 3, DType::F32, a + 1);  // converted, in two parts
  writer.write("a", 0, 1, DType::F32, a);
  writer.write("b", 0, 3, DType::F32, b);
  writer.write("h", 0, 1, DType::F16, &h);
  writer.write("u", 0, 3, DType::U8, u);
  writer.write("i", 0, 1, DType::I32, &i);
  writer.write("l", 0, 1, DType::I64, &l);
  writer.write("d", 0, 1, DType::F64, &d);
  writer.write("e", 0, 0, DType::F32, nullptr);
  writer.write(kOddName, 0, 1, DType::F32, &odd);
  writer.finish();
  EXPECT_EQ(read_bytes(dir / "f"), kPackageFile);

  SafetensorsWriter(dir / "empty", {}).finish();
  EXPECT_EQ(read_bytes(dir / "empty"), raw_file("{}      ", ""));
  EXPECT_TRUE(SafetensorsFile(dir / "empty").tensors().empty());
}

// The definition of the format: sign, 5 exponent bits (bias 15), 10 mantissa bits.
double half_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

TEST(Safetensors, every_half_and_bfloat16_reads_as_its_value) {
  TempDir dir;
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); i++) all[i] = static_cast<uint16_t>(i);
  const auto half32 = read_as<float>(dir, all, "F16");
  const auto half64 = read_as<double>(dir, all, "F16");
  const auto brain32 = read_as<float>(dir, all, "BF16");
  const auto half_as_brain = read_as<bf16>(dir, all, "F16");
  for (size_t i = 0; i < all.size(); i++) {
    const double half = half_value(all[i]);
    if (std::isnan(half)) {
      ASSERT_TRUE(std::isnan(half32[i]) && std::isnan(half64[i])) << i;
      ASSERT_TRUE(std::isnan(static_cast<float>(half_as_brain[i]))) << i;
    } else {
      ASSERT_EQ(half32[i], half) << i;
      ASSERT_EQ(half64[i], half) << i;
      ASSERT_EQ(std::signbit(half32[i]), std::signbit(half)) << i;
      ASSERT_EQ(half_as_brain[i].bits, bf16(static_cast<float>(half)).bits) << i;
    }
    ASSERT_EQ(std::bit_cast<uint32_t>(brain32[i]), uint32_t{all[i]} << 16) << i;
  }
}

TEST(Safetensors, bfloat16_is_the_nearest_even_one_from_fp32_and_from_fp64) {
  TempDir dir;
  std::vector<double> values = {0.0, -0.0, INFINITY, -INFINITY, 1e300, -1e300, 1e-300, -1e-300, 3.3e38, 3.4e38, 1e-40};
  for (int i = 0; i < 2000; i++) {
    const double step = std::ldexp(1.0, -7), base = 1 + (i % 128) * step;
    const double tie = base + step / 2;
    for (const double v :
         {base, tie, tie + std::ldexp(1.0, -40), tie - std::ldexp(1.0, -40), base + step * (i / 2000.0)}) {
      values.push_back(std::ldexp(i % 2 ? v : -v, i % 250 - 125));
    }
  }
  std::vector<float> values32(values.begin(), values.end());
  const auto from64 = read_as<bf16>(dir, values, "F64");
  const auto from32 = read_as<bf16>(dir, values32, "F32");
  // Nearest by definition: no neighbour is closer, and of two equally close ones the last bit is 0.
  const auto expect_nearest = [](double v, bf16 got) {
    const auto value = [](int bits) {
      return double{static_cast<float>(std::bit_cast<bf16>(static_cast<uint16_t>(bits)))};
    };
    ASSERT_EQ(std::signbit(value(got.bits)), std::signbit(v)) << v;
    if (std::isinf(value(got.bits))) {
      ASSERT_GE(std::abs(v), std::ldexp(511.0, 119)) << v;  // half-way from the largest to 2^128
      return;
    }
    const double distance = std::abs(value(got.bits) - v);
    for (const int neighbour : {got.bits - 1, got.bits + 1}) {
      if ((neighbour & 0x7fff) == 0x7fff || std::isnan(value(neighbour & 0xffff))) continue;
      const double other = std::abs(value(neighbour & 0xffff) - v);
      ASSERT_LE(distance, other) << v;
      ASSERT_TRUE(distance < other || got.bits % 2 == 0) << v;
    }
  };
  for (size_t i = 0; i < values.size(); i++) {
    expect_nearest(values[i], from64[i]);
    expect_nearest(values32[i], from32[i]);
  }
  EXPECT_TRUE(std::isnan(static_cast<float>(read_as<bf16>(dir, std::vector{double{NAN}}, "F64")[0])));
}

TEST(Safetensors, ranges_read_the_same_as_the_whole) {
  TempDir dir;
  const int64_t n = 700'001;  // more than one conversion chunk
  std::vector<uint16_t> values(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; i++) values[static_cast<size_t>(i)] = static_cast<uint16_t>(i * 7919 % 0x7f00);
  const SafetensorsFile file(file_with(dir, values, "BF16"));
  std::vector<float> whole(values.size()), part(values.size());
  file.read("t", 0, n, DType::F32, whole.data());
  for (int64_t i = 0; i < n; i++) {
    ASSERT_EQ(std::bit_cast<uint32_t>(whole[static_cast<size_t>(i)]), uint32_t{values[static_cast<size_t>(i)]} << 16);
  }
  const int64_t chunk = 524'288;
  for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, 1},
                                     {n - 1, 1},
                                     {1, n - 1},
                                     {chunk - 1, 2},
                                     {chunk, 1000},
                                     {12'345, chunk},
                                     {17, 0},
                                     {n, 0}}) {
    std::fill(part.begin(), part.end(), -1.0f);
    file.read("t", begin, count, DType::F32, part.data());
    for (int64_t i = 0; i < count; i++) {
      ASSERT_EQ(part[static_cast<size_t>(i)], whole[static_cast<size_t>(begin + i)]) << begin << " " << i;
    }
    ASSERT_TRUE(count == n || part[static_cast<size_t>(count)] == -1.0f) << "wrote beyond the range";
  }
  for (const auto& [begin, count] :
       {std::pair<int64_t, int64_t>{-1, 1}, {0, n + 1}, {n, 1}, {0, -1}, {INT64_MAX, 1}, {1, INT64_MAX}}) {
    EXPECT_EQ(
        error_of([&] { file.read("t", begin, count, DType::F32, part.data()); }, file.path()),
        fmt::format("'@': elements [{}, +{}) of tensor 't', which is BF16 ({}) with {} elements", begin, count, n, n));
  }
}

const char* const kOne = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";

struct BadFile {
  std::string bytes;
  const char* message;
};

TEST(Safetensors, every_fault_of_a_file_is_named) {
  const std::string eight(8, 'x'), twelve(12, 'x');
  const auto tensor = [&](const std::string& entry, const std::string& data) {
    return raw_file("{\"a\":" + entry + "}", data);
  };
  const BadFile kCases[] = {
      {"", "'@' has 0 bytes, too few for a safetensors file: it is empty or truncated"},
      {"\x02\0\0\0"s, "'@' has 4 bytes, too few for a safetensors file: it is empty or truncated"},
      {"\x20\0\0\0\0\0\0\0{}"s,
       "'@' says that its header has 32 bytes, but only 2 follow: it is truncated; copy or download it again"},
      {"\1\xe1\xf5\5\0\0\0\0"s + "{}",
       "'@' says that its header has 100000001 bytes, more than the 100000000 that are allowed: it is no safetensors "
       "file, or it is damaged"},
      {std::string(8, '\xff') + "{}",
       "'@' says that its header has 18446744073709551615 bytes, more than the 100000000 that are allowed: it is no "
       "safetensors file, or it is damaged"},
      {"version https://git-lfs.github.com/spec/v1\n",
       "'@' is a git-lfs pointer, not the file itself; fetch it with `git lfs pull`"},
      {raw_file("", ""), "'@': header: it does not begin with '{': this is no safetensors file"},
      {raw_file(" {}", ""), "'@': header: it does not begin with '{': this is no safetensors file"},
      {raw_file("{\"a\":", ""),
       "'@': header: not JSON: parse error at line 1, column 6: syntax error while "
       "parsing value - unexpected end of input; expected '[', '{', or a literal"},
      {raw_file("{}\0 x"s, ""), "'@': header: not JSON: a NUL byte at offset 2"},
      {raw_file("{"s + kOne + "," + kOne + "}", eight), "'@': header: 'a' is given twice"},
      {tensor(R"({"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]})", eight),
       "'@': header: 'a.dtype' is given twice"},
      {tensor(std::string(100, '['), ""), "'@': header: nested deeper than 64 levels"},
      {tensor("7", ""), "'@': tensor 'a': its header entry is no JSON object"},
      {raw_file(R"({"__metadata__":[]})", ""), "'@': header: __metadata__ is no JSON object"},
      {raw_file(R"({"__metadata__":{"format":1}})", ""), "'@': header: __metadata__ 'format' is no string"},

      {tensor(R"({"shape":[2],"data_offsets":[0,8]})", eight), "'@': tensor 'a' has no string 'dtype'"},
      {tensor(R"({"dtype":"float32","shape":[2],"data_offsets":[0,8]})", eight),
       "'@': tensor 'a' has dtype 'float32', which the safetensors format does not know"},
      {tensor(R"({"dtype":"F32","data_offsets":[0,8]})", eight), "'@': tensor 'a' has no array 'shape'"},
      {tensor(R"({"dtype":"F32","shape":2,"data_offsets":[0,8]})", eight), "'@': tensor 'a' has no array 'shape'"},
      {tensor(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})", eight),
       "'@': tensor 'a': 'shape' holds -2, where an integer from 0 to 2^63 - 1 is expected"},
      {tensor(R"({"dtype":"F32","shape":[2.0],"data_offsets":[0,8]})", eight),
       "'@': tensor 'a': 'shape' holds 2.0, where an integer from 0 to 2^63 - 1 is expected"},
      {tensor(R"({"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,8]})", eight),
       "'@': tensor 'a': 'shape' holds 9223372036854775808, where an integer from 0 to 2^63 - 1 is expected"},
      {tensor(R"({"dtype":"F32","shape":[4294967296,4294967298],"data_offsets":[0,8]})", eight),
       "'@': tensor 'a' is F32 (4294967296, 4294967298): its size overflows, or is no whole number of bytes"},
      {tensor(R"({"dtype":"F4","shape":[3],"data_offsets":[0,2]})", "xx"),
       "'@': tensor 'a' is F4 (3): its size overflows, or is no whole number of bytes"},
      {tensor(R"({"dtype":"F32","shape":[2]})", eight), "'@': tensor 'a' has no array 'data_offsets'"},
      {tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[0]})", eight),
       "'@': tensor 'a': data_offsets [0] are not [begin, end]"},
      {tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})", eight),
       "'@': tensor 'a': data_offsets [8, 0] are not [begin, end]"},
      {tensor(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})", eight),
       "'@': tensor 'a' is F32 (3), which takes 12 bytes, but its data_offsets [0, 8] hold 8"},

      {tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})", "seven b"),
       "'@': tensor 'a' needs bytes up to 8 of the data, but the file has only 7: it is truncated; copy or download it "
       "again"},
      {tensor(R"({"dtype":"U8","shape":[2],"data_offsets":[9223372036854775805,9223372036854775807]})", eight),
       "'@': tensor 'a' needs bytes up to 9223372036854775807 of the data, but the file has only 8: it is truncated; "
       "copy or download it again"},
      {tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})", eight + "y"),
       "'@' has 1 bytes after its last tensor, which ends at byte 70: the header does not fit"},
      {raw_file("{}", "y"), "'@' has 1 bytes after its last tensor, which ends at byte 10: the header does not fit"},
      {tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[4,12]})", twelve),
       "'@': file bytes [63, 67) before tensor 'a' belong to no tensor"},
      {raw_file("{"s + kOne + R"(,"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", twelve),
       "'@': tensors 'a' and 'b' overlap in file bytes [120, 124)"},
      {raw_file("{"s + kOne + R"(,"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", eight),
       "'@': tensors 'a' and 'b' overlap in file bytes [115, 123)"},
      {raw_file("{"s + kOne + R"(,"b":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}})", eight),
       "'@': tensors 'a' and 'b' overlap in file bytes [118, 122)"},
  };
  TempDir dir;
  for (const BadFile& bad : kCases) {
    write_bytes(dir / "f", bad.bytes);
    EXPECT_EQ(error_of([&] { SafetensorsFile file(dir / "f"); }, dir / "f"), bad.message);
  }
  EXPECT_EQ(error_of([&] { SafetensorsFile file(dir / "none"); }, dir / "none"),
            "cannot open '@': No such file or directory");
  EXPECT_EQ(error_of([&] { SafetensorsFile file(dir.path()); }, dir.path()), "'@' is a directory, not a file");
}

TEST(Safetensors, every_truncation_of_a_good_file_is_refused) {
  TempDir dir;
  write_bytes(dir / "f", kPackageFile);
  for (size_t size = kPackageFile.size(); size-- > 0;) {
    fs::resize_file(dir / "f", size);
    ASSERT_NE(error_of([&] { SafetensorsFile file(dir / "f"); }), "") << size;
  }
}

TEST(Safetensors, a_dtype_that_cannot_be_converted_is_an_error_when_that_tensor_is_read) {
  TempDir dir;
  write_bytes(dir / "f", raw_file(R"({"q":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]},)"
                                  R"("s":{"dtype":"F6_E2M3","shape":[2,2],"data_offsets":[4,7]},)"
                                  R"("i":{"dtype":"I32","shape":[1],"data_offsets":[7,11]}})",
                                  "12345678901"));
  const SafetensorsFile file(dir / "f");
  char out[64];
  EXPECT_EQ(file.tensors().at("q").dtype, std::nullopt);
  EXPECT_EQ(error_of([&] { file.read("q", 0, 4, DType::F32, out); }, dir / "f"),
            "'@': tensor 'q' has dtype F8_E4M3, which is not supported; convert the checkpoint to BF16 or F32");
  EXPECT_EQ(error_of([&] { file.read("i", 0, 1, DType::F32, out); }, dir / "f"),
            "'@': tensor 'i' has dtype I32, which cannot be read as F32");
  EXPECT_EQ(error_of([&] { file.read("x", 0, 1, DType::F32, out); }, dir / "f"),
            "'@' has no tensor 'x' (it has 3 others)");
}

TEST(Safetensors, a_file_that_shrinks_while_open_is_an_error) {
  TempDir dir;
  const fs::path path = file_with(dir, std::vector<float>(1000, 1.0f), "F32");
  const SafetensorsFile file(path);
  fs::resize_file(path, fs::file_size(path) - 8);
  std::vector<float> out(1000);
  EXPECT_NE(error_of([&] { file.read("t", 0, 1000, DType::F32, out.data()); }, path).find("it was changed meanwhile"),
            std::string::npos);
}

// ---- directories

const char* const kOther = R"("b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]})";

struct Shards {
  TempDir dir;

  Shards() {
    write_bytes(dir / "model-1.safetensors", raw_file("{"s + kOne + "}", bytes_of<float>({1, 2})));
    write_bytes(dir / "model-2.safetensors", raw_file("{"s + kOther + "}", bytes_of<float>({3})));
    index(R"({"metadata":{"total_size":12},"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}})");
  }
  void index(const std::string& json) { write_bytes(dir / "model.safetensors.index.json", json); }
  std::string error() const {
    return error_of([&] { SafetensorsDirectory d(dir.path()); }, dir.path());
  }
};

TEST(SafetensorsDirectory, one_file_and_shards_read_alike) {
  Shards shards;
  TempDir single;
  write_bytes(
      single / "model.safetensors",
      raw_file("{"s + kOne + R"(,"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}})", bytes_of<float>({1, 2, 3})));
  for (const fs::path& path : {shards.dir.path(), single.path()}) {
    const SafetensorsDirectory directory(path);
    EXPECT_EQ(directory.names(), (std::vector<std::string>{"a", "b"}));
    EXPECT_TRUE(directory.contains("b") && !directory.contains("c"));
    float a = 0, b = 0;
    directory.read("a", 1, 1, DType::F32, &a);
    directory.read("b", 0, 1, DType::F32, &b);
    EXPECT_EQ(a, 2);
    EXPECT_EQ(b, 3);
    EXPECT_EQ(directory.info("a").shape, (std::vector<int64_t>{2}));
    EXPECT_EQ(error_of([&] { directory.info("c"); }, path), "'@' has no tensor 'c' (it has 2 others)");
  }
  EXPECT_EQ(SafetensorsDirectory(shards.dir.path()).file_of("b").filename(), "model-2.safetensors");
}

TEST(SafetensorsDirectory, another_stem_is_another_set) {
  TempDir dir;
  write_bytes(dir / "exp_avg.safetensors", raw_file("{"s + kOne + "}", bytes_of<float>({1, 2})));
  EXPECT_TRUE(SafetensorsDirectory(dir.path(), "exp_avg").contains("a"));
  EXPECT_EQ(error_of([&] { SafetensorsDirectory d(dir.path()); }, dir.path()),
            "'@' holds neither model.safetensors nor model.safetensors.index.json");
}

TEST(SafetensorsDirectory, index_and_shards_that_disagree_are_named) {
  const std::string where = "'@/model.safetensors.index.json'";
  {
    Shards s;
    s.index(R"({"weight_map":{"a":"model-1.safetensors","b":"model-3.safetensors"}})");
    EXPECT_EQ(s.error(), where + ": shard 'model-3.safetensors' is missing, which should hold tensor 'b'");
    s.index(R"({"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors","c":"model-2.safetensors"}})");
    EXPECT_EQ(s.error(), where + ": tensor 'c' should be in 'model-2.safetensors', which does not have it");
    s.index(R"({"weight_map":{"a":"model-1.safetensors","a":"model-2.safetensors"}})");
    EXPECT_EQ(s.error(), where + ": 'weight_map.a' is given twice");
    for (const char* escape : {"../model-1.safetensors", "/etc/passwd", "..", "", "sub/model-1.safetensors"}) {
      s.index(fmt::format(R"({{"weight_map":{{"a":"{}"}}}})", escape));
      EXPECT_EQ(s.error(), where + fmt::format(": tensor 'a' is said to be in '{}', which is no file name in this "
                                               "directory",
                                               escape));
    }
    s.index(R"({"weight_map":{"a":1}})");
    EXPECT_EQ(s.error(), where + ": the shard of tensor 'a' is no string");
    s.index(R"({"weight_map":[]})");
    EXPECT_EQ(s.error(), where + " has no object 'weight_map'");
    s.index("");
    EXPECT_EQ(s.error().find(where + ": not JSON: "), 0u);
  }
  {
    Shards s;
    write_bytes(
        s.dir / "model-2.safetensors",
        raw_file("{"s + kOther + R"(,"x":{"dtype":"F32","shape":[0],"data_offsets":[4,4]}})", bytes_of<float>({3})));
    EXPECT_EQ(s.error(), where + " does not list tensor 'x' of shard 'model-2.safetensors'");
    write_bytes(
        s.dir / "model-2.safetensors",
        raw_file("{"s + kOther + R"(,"a":{"dtype":"F32","shape":[0],"data_offsets":[4,4]}})", bytes_of<float>({3})));
    EXPECT_EQ(s.error(), where + ": tensor 'a' is in two shards, 'model-1.safetensors' and 'model-2.safetensors'");
  }
  {
    Shards s;
    write_bytes(s.dir / "model.safetensors", raw_file("{"s + kOther + "}", bytes_of<float>({3})));
    EXPECT_EQ(s.error(),
              "'@' holds both model.safetensors and model.safetensors.index.json, which does not name it; "
              "remove the one that is out of date");
    s.index(R"({"weight_map":{"b":"model.safetensors"}})");
    EXPECT_EQ(s.error(), "");
  }
  TempDir pickled;
  write_bytes(pickled / "pytorch_model.bin", "PK");
  EXPECT_EQ(error_of([&] { SafetensorsDirectory d(pickled.path()); }, pickled.path()),
            "'@' holds neither model.safetensors nor model.safetensors.index.json; it has pytorch_model.bin: convert "
            "it (transformers: from_pretrained, then save_pretrained)");
  EXPECT_EQ(error_of([&] { SafetensorsDirectory d(pickled / "none"); }, pickled.path()), "'@/none' is not a directory");
}

// ---- writing

TEST(SafetensorsWriter, round_trip_changes_no_bit) {
  TempDir dir;
  const int64_t n = 300'007;
  std::vector<float> values(static_cast<size_t>(n)), back(values.size());
  const Philox rng(1, 2);
  for (int64_t i = 0; i < n; i++) {  // any bits: subnormals, infinities and NaNs too
    values[static_cast<size_t>(i)] = std::bit_cast<float>(rng.words(static_cast<uint64_t>(i))[0]);
  }
  SafetensorsWriter writer(dir / "f", {{"x", DType::F32, {n}}, {"y", DType::BF16, {1, n}}, {"z", DType::F64, {n, 1}}});
  for (const char* name : {"x", "y", "z"}) writer.write(name, 0, n, DType::F32, values.data());
  writer.finish();
  const SafetensorsFile file(dir / "f");
  file.read("x", 0, n, DType::F32, back.data());
  EXPECT_EQ(std::memcmp(back.data(), values.data(), back.size() * sizeof(float)), 0);
  std::vector<bf16> low(values.size());
  file.read("y", 0, n, DType::BF16, low.data());
  std::vector<double> high(values.size());
  file.read("z", 0, n, DType::F64, high.data());
  for (size_t i = 0; i < values.size(); i++) {
    ASSERT_EQ(low[i].bits, bf16(values[i]).bits) << i;
    ASSERT_TRUE(high[i] == values[i] || std::isnan(values[i])) << i;
  }
}

/// Rank `rank` of `ranks` writes its share of the file, in small uneven pieces.
void write_share(const fs::path& path, const std::vector<TensorToWrite>& tensors, int rank, int ranks) {
  SafetensorsWriter writer(path, tensors, {}, false);
  for (const TensorToWrite& tensor : tensors) {
    const int64_t n = tensor.shape[0], end = n * (rank + 1) / ranks;
    for (int64_t begin = n * rank / ranks; begin < end; begin += 997) {
      std::vector<float> piece(static_cast<size_t>(std::min<int64_t>(997, end - begin)));
      for (size_t i = 0; i < piece.size(); i++) piece[i] = static_cast<float>(begin) + static_cast<float>(i);
      writer.write(tensor.name, begin, static_cast<int64_t>(piece.size()), DType::F32, piece.data());
    }
  }
  writer.finish();
}

TEST(SafetensorsWriter, processes_and_threads_that_write_by_range_make_the_file_of_one) {
  TempDir dir;
  const std::vector<TensorToWrite> tensors = {{"p", DType::F32, {100'001}}, {"q", DType::BF16, {54'321}}};
  for (const char* name : {"one", "threads", "processes"}) SafetensorsWriter(dir / name, tensors).finish();
  write_share(dir / "one", tensors, 0, 1);

  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; rank++) {
    threads.emplace_back([&, rank] { write_share(dir / "threads", tensors, rank, 3); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(read_bytes(dir / "one"), read_bytes(dir / "threads"));

  std::vector<pid_t> children;
  for (int rank = 0; rank < 2; rank++) {
    children.push_back(fork());
    if (children.back() == 0) {
      const std::string error = error_of([&] { write_share(dir / "processes", tensors, rank, 2); });
      _exit(error.empty() ? 0 : 1);
    }
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(read_bytes(dir / "one"), read_bytes(dir / "processes"));
}

TEST(SafetensorsWriter, ranks_that_do_not_agree_are_told) {
  TempDir dir;
  SafetensorsWriter(dir / "f", {{"p", DType::F32, {10}}}).finish();
  EXPECT_EQ(error_of(
                [&] {
                  SafetensorsWriter w(dir / "f", {{"p", DType::F32, {11}}}, {}, false);
                },
                dir / "f"),
            "'@' has 104 bytes, but this rank expects 108: the ranks do not write the same");
  EXPECT_EQ(error_of(
                [&] {
                  SafetensorsWriter w(dir / "f", {{"q", DType::F32, {10}}}, {}, false);
                },
                dir / "f"),
            "'@' has another header than this rank expects: the ranks do not write the same");
  EXPECT_EQ(error_of([&] { SafetensorsWriter w(dir / "none", {}, {}, false); }, dir / "none"),
            "cannot open for writing '@': No such file or directory");
}

TEST(SafetensorsWriter, misuse_is_an_error) {
  TempDir dir;
  EXPECT_EQ(error_of(
                [&] {
                  SafetensorsWriter w(dir / "f", {{"p", DType::F32, {1}}, {"p", DType::F32, {1}}});
                },
                dir / "f"),
            "'@': tensor 'p' is to be written twice");
  EXPECT_EQ(error_of(
                [&] {
                  SafetensorsWriter w(dir / "f", {{"p", DType::F32, {-1}}});
                },
                dir / "f"),
            "'@': tensor 'p': a dimension cannot be negative: -1");
  EXPECT_EQ(error_of(
                [&] {
                  SafetensorsWriter w(dir / "f", {{"p", DType::F32, {int64_t{1} << 62, 8}}});
                },
                dir / "f"),
            "'@': tensor 'p' is F32 (4611686018427387904, 8): its size overflows");
  EXPECT_EQ(error_of([&] { SafetensorsWriter w(dir / "no/f", {}); }, dir.path()),
            "cannot create '@/no/f': No such file or directory");
  EXPECT_FALSE(fs::exists(dir / "f"));

  SafetensorsWriter writer(dir / "f", {{"p", DType::I32, {3}}});
  const float x[3] = {};
  EXPECT_EQ(error_of([&] { writer.write("p", 0, 3, DType::F32, x); }, dir / "f"),
            "'@': F32 cannot be written to tensor 'p', which is I32 (3)");
  EXPECT_EQ(error_of([&] { writer.write("p", 2, 2, DType::I32, x); }, dir / "f"),
            "'@': elements [2, +2) of tensor 'p', which is I32 (3) with 3 elements");
  EXPECT_EQ(error_of([&] { writer.write("q", 0, 1, DType::I32, x); }, dir / "f"),
            "'@' has no tensor 'q' (it has 1 others)");
  writer.finish();
  EXPECT_EQ(error_of([&] { writer.write("p", 0, 1, DType::I32, x); }, dir / "f"),
            "'@' is finished; tensor 'p' cannot be written any more");
}

TEST(SafetensorsWriter, a_disk_that_is_too_small_is_seen_at_creation_with_numbers) {
  TempDir dir;
  const int64_t petabytes = int64_t{1} << 52;  // more than any disk here
  const std::string error = error_of(
      [&] {
        SafetensorsWriter w(dir / "f", {{"p", DType::U8, {petabytes}}});
      },
      dir / "f");
  EXPECT_EQ(error.find("cannot allocate '@' (4503599627370592 bytes; "), 0u) << error;
  EXPECT_NE(error.find(" free on its disk): No space left on device; free space, or choose"), std::string::npos)
      << error;
}

TEST(SafetensorsWriter, every_operation_that_fails_is_an_error) {
  TempDir dir;
  const auto save = [&](int fail_at, int& operations) {
    const FileSystem file_system([&](const char*, const fs::path&) { return operations++ == fail_at ? ENOSPC : 0; });
    SafetensorsWriter writer(dir / "f", {{"p", DType::BF16, {2}}}, {}, true, file_system);
    const float x[2] = {1, 2};
    writer.write("p", 0, 2, DType::F32, x);
    writer.finish();
  };
  int total = 0;
  save(-1, total);
  EXPECT_EQ(total, 7);  // create, allocate, write the header, sync, write the data, sync, close
  for (int i = 0; i < total; i++) {
    int operations = 0;
    const std::string error = error_of([&] { save(i, operations); }, dir / "f");
    EXPECT_NE(error.find("'@'"), std::string::npos) << i << ": " << error;
    EXPECT_NE(error.find("No space left on device; free space"), std::string::npos) << i << ": " << error;
  }
}

}  // namespace
