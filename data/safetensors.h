// The safetensors format: an 8-byte little-endian header size, a JSON header, then the data. Read and written by byte
// range, so that a rank touches only what it needs. Nothing here knows about models.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "layers/core/tensor.h"

/// Where a tensor lies.
struct TensorInfo {
  DType dtype = DType::F32;
  std::vector<int64_t> shape;            ///< any rank
  int64_t file_begin = 0, file_end = 0;  ///< bytes from the start of the file
  int64_t numel() const;
};

/// One open file; the whole header is checked when it is opened: size, JSON, dtypes, shapes against offsets, overlaps,
/// gaps, file length. An Error names the file, the tensor and the numbers.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);
  SafetensorsFile(SafetensorsFile&&) noexcept;
  ~SafetensorsFile();

  const std::filesystem::path& path() const { return path_; }
  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  /// Elements [begin, begin + count) of tensor `name`, converted from F32 / BF16 / F16 / F64 to `to` (F32, F64 or
  /// BF16); I32 / I64 / U8 only to themselves. Thread-safe (pread).
  void read(const std::string& name, int64_t begin, int64_t count, DType to, void* out) const;

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  std::map<std::string, TensorInfo> tensors_;
  std::map<std::string, std::string> metadata_;
};

/// A model directory: `model.safetensors`, or the shards that `model.safetensors.index.json` names.
class SafetensorsDirectory {
 public:
  /// `stem` is the file's name without extension: "model", "exp_avg".
  explicit SafetensorsDirectory(const std::filesystem::path& directory, const std::string& stem = "model");

  bool contains(const std::string& name) const { return where_.count(name) != 0; }
  const TensorInfo& info(const std::string& name) const;
  const std::filesystem::path& file_of(const std::string& name) const;
  std::vector<std::string> names() const;
  void read(const std::string& name, int64_t begin, int64_t count, DType to, void* out) const;

 private:
  std::vector<SafetensorsFile> files_;
  std::map<std::string, size_t> where_;
};

/// A tensor to be written: name, dtype on disk, shape. Offsets follow from the order.
struct TensorToWrite {
  std::string name;
  DType dtype = DType::F32;
  std::vector<int64_t> shape;
};

/// Writes one file: the header at once, the data by range, from any number of ranks (each opens it with create =
/// false). finish() fsyncs. A failed write (disk full) throws and names path, bytes and errno.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorToWrite> tensors,
                    std::map<std::string, std::string> metadata = {}, bool create = true);
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;

  /// Elements [begin, begin + count) of tensor `name` from `data`, which holds `from` (F32, F64, BF16, I32) elements.
  void write(const std::string& name, int64_t begin, int64_t count, DType from, const void* data);
  void finish();

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  std::map<std::string, TensorInfo> tensors_;
};
