// The safetensors format: an 8-byte little-endian header size, a JSON header, then the data. Read and written by byte
// range, so that a rank touches only what it needs. Nothing here knows about models.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/file_system.h"
#include "layers/core/tensor.h"

/// Where a tensor lies.
struct TensorInfo {
  std::string dtype_name;                ///< as on disk: "BF16", "F8_E4M3"
  std::optional<DType> dtype;            ///< none: a dtype of the format that nothing here computes with
  std::vector<int64_t> shape;            ///< any rank
  int64_t file_begin = 0, file_end = 0;  ///< bytes from the start of the file

  int64_t numel() const;
  /// "F32 (2, 3)"
  std::string str() const;
};

struct SafetensorsHeader {
  std::map<std::string, TensorInfo> tensors;
  std::map<std::string, std::string> metadata;  ///< `__metadata__`
};

/// Checks everything that a header can get wrong, for a file of `file_size` bytes that begins with the 8 size bytes and
/// `json`: JSON (duplicate keys too), dtypes, shapes against offsets, overlaps, gaps, length. `path` is for messages.
SafetensorsHeader parse_safetensors_header(std::string_view json, int64_t file_size, const std::filesystem::path& path);

/// One open file. An Error of the constructor names the file, the tensor and the numbers. A dtype that cannot be
/// converted is an error only when that tensor is read.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return file_.path(); }
  const std::map<std::string, TensorInfo>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }

  /// Elements [begin, begin + count) of tensor `name`, converted from F32 / BF16 / F16 / F64 to `to` (F32, F64 or
  /// BF16; to nearest even); every dtype to itself. Thread-safe (pread).
  void read(const std::string& name, int64_t begin, int64_t count, DType to, void* out) const;
  /// Bytes [begin, begin + count) of the tensor, of any dtype.
  void read_bytes(const std::string& name, int64_t begin, int64_t count, void* out) const;

 private:
  InputFile file_;
  SafetensorsHeader header_;
};

/// A model directory: `model.safetensors`, or the shards that `model.safetensors.index.json` names. The index and the
/// shards must agree both ways.
class SafetensorsDirectory {
 public:
  /// `stem` is the file's name without extension: "model", "exp_avg".
  explicit SafetensorsDirectory(const std::filesystem::path& directory, const std::string& stem = "model");

  bool contains(const std::string& name) const { return where_.count(name) != 0; }
  const TensorInfo& info(const std::string& name) const;
  const std::filesystem::path& file_of(const std::string& name) const;
  std::vector<std::string> names() const;
  /// As those of SafetensorsFile.
  void read(const std::string& name, int64_t begin, int64_t count, DType to, void* out) const;
  void read_bytes(const std::string& name, int64_t begin, int64_t count, void* out) const;

 private:
  void open_shards(const std::filesystem::path& index);
  const SafetensorsFile& file_with(const std::string& name) const;

  std::filesystem::path directory_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, size_t> where_;  // tensor -> index into files_
};

/// A tensor to be written: name, dtype on disk, shape.
struct TensorToWrite {
  std::string name;
  DType dtype = DType::F32;
  std::vector<int64_t> shape;
};

/// Writes one file: the header at once, the data by range, from any number of ranks: one creates the file, then the
/// others open it with create = false, which checks that it has the header that they expect. The bytes are those of the
/// `safetensors` Python package: tensors by falling alignment, then by name. The whole file is allocated at creation,
/// so that a full disk is seen before anything is written. Who does not call finish() leaves a file not to be trusted.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::filesystem::path& path, const std::vector<TensorToWrite>& tensors,
                    const std::map<std::string, std::string>& metadata = {}, bool create = true,
                    FileSystem file_system = {});

  /// Elements [begin, begin + count) of tensor `name` from `data`, which holds `from` elements. Conversions as in
  /// SafetensorsFile::read. Thread-safe (pwrite).
  void write(const std::string& name, int64_t begin, int64_t count, DType from, const void* data);
  /// fsync and close; every rank calls it after its last write.
  void finish();

 private:
  std::filesystem::path path_;
  FileSystem file_system_;
  FileHandle file_;
  std::map<std::string, TensorInfo> tensors_;
};
