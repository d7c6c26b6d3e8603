#include "data/safetensors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <set>

#include "data/json.h"

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "the format and this code are little-endian");

constexpr int64_t kSizeFieldBytes = 8;
constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the limit of the reference implementation
constexpr int64_t kChunkBytes = 1 << 20;          // of a conversion; fits the cache

// ---- dtypes

struct DiskDType {
  const char* name;
  int bits;
  std::optional<DType> dtype;  // what it is here
};

// All of the format, by rising alignment: the order in which the Python package sorts (backwards).
const DiskDType kDiskDTypes[] = {
    {"BOOL", 8, {}},         {"F4", 4, {}},           {"F6_E2M3", 6, {}},        {"F6_E3M2", 6, {}},
    {"U8", 8, DType::U8},    {"I8", 8, {}},           {"F8_E5M2", 8, {}},        {"F8_E4M3", 8, {}},
    {"F8_E8M0", 8, {}},      {"F8_E4M3FNUZ", 8, {}},  {"F8_E5M2FNUZ", 8, {}},    {"I16", 16, {}},
    {"U16", 16, {}},         {"F16", 16, DType::F16}, {"BF16", 16, DType::BF16}, {"I32", 32, DType::I32},
    {"U32", 32, {}},         {"F32", 32, DType::F32}, {"C64", 64, {}},           {"F64", 64, DType::F64},
    {"I64", 64, DType::I64}, {"U64", 64, {}},
};

const DiskDType* find_disk_dtype(std::string_view name) {
  const auto* found = std::find_if(std::begin(kDiskDTypes), std::end(kDiskDTypes),
                                   [&](const DiskDType& candidate) { return name == candidate.name; });
  return found == std::end(kDiskDTypes) ? nullptr : found;
}

// ---- conversions

struct Half {
  uint16_t bits;
};

// Exponent and mantissa move to their place in fp32; 2^112 corrects the bias and makes subnormals normal, exactly.
float to_float(Half h) {
  const uint32_t magnitude = h.bits & 0x7fffu, sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
  const uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f);
  const uint32_t special = (magnitude << 13) | 0x7f800000u;  // infinity, NaN
  return std::bit_cast<float>((magnitude >= 0x7c00u ? special : finite) | sign);
}
float to_float(bf16 v) {
  return static_cast<float>(v);
}
float to_float(float v) {
  return v;
}
// Towards zero, the last bit set when that was not exact ("round to odd"): a second rounding, to bf16, is then the
// rounding of the double itself.
float to_float_odd(double v) {
  const float nearest = static_cast<float>(v);
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if (std::abs(static_cast<double>(nearest)) > std::abs(v)) bits--;
  if (static_cast<double>(nearest) != v) bits |= 1u;
  return std::bit_cast<float>(bits);
}

template <class To, class From>
To convert(From v) {
  if constexpr (std::is_same_v<From, double>) {
    if constexpr (std::is_same_v<To, bf16>)
      return bf16(to_float_odd(v));
    else
      return static_cast<To>(v);
  } else {
    return static_cast<To>(to_float(v));
  }
}

using Converter = void (*)(void* to, const void* from, int64_t count);

template <class From, class To>
void convert_all(void* to, const void* from, int64_t count) {
  const From* in = static_cast<const From*>(from);
  To* out = static_cast<To*>(to);
  for (int64_t i = 0; i < count; i++) out[i] = convert<To>(in[i]);
}

template <class From>
Converter converter_from(DType to) {
  switch (to) {
    case DType::F32:
      return convert_all<From, float>;
    case DType::F64:
      return convert_all<From, double>;
    case DType::BF16:
      return convert_all<From, bf16>;
    default:
      return nullptr;
  }
}

/// null: no such conversion. Not for from == to.
Converter converter(DType from, DType to) {
  switch (from) {
    case DType::F32:
      return converter_from<float>(to);
    case DType::F64:
      return converter_from<double>(to);
    case DType::BF16:
      return converter_from<bf16>(to);
    case DType::F16:
      return converter_from<Half>(to);
    default:
      return nullptr;
  }
}

std::string join(const std::vector<int64_t>& numbers, const char* separator) {
  std::string text;
  for (const int64_t number : numbers) text += (text.empty() ? "" : separator) + std::to_string(number);
  return text;
}

int64_t bytes_of(DType dtype, int64_t count) {
  return count * static_cast<int64_t>(size_of(dtype));
}

// ---- the header

/// Product of the dimensions times `bits`, in bytes; none when it overflows or ends within a byte.
std::optional<int64_t> tensor_bytes(const std::vector<int64_t>& shape, int bits) {
  int64_t total = bits;
  for (const int64_t dim : shape) {
    if (__builtin_mul_overflow(total, dim, &total)) return std::nullopt;
  }
  if (total % 8 != 0) return std::nullopt;
  return total / 8;
}

/// entry[key], an array of integers >= 0.
std::vector<int64_t> read_integers(const json& entry, const char* key, const std::string& where) {
  const auto found = entry.find(key);
  CHECK(found != entry.end() && found->is_array(), "{} has no array '{}'", where, key);
  std::vector<int64_t> values;
  values.reserve(found->size());
  for (const json& value : *found) {
    CHECK(value.is_number_unsigned() && value.get<uint64_t>() <= INT64_MAX,
          "{}: '{}' holds {}, where an integer from 0 to 2^63 - 1 is expected", where, key,
          value.is_number() ? dump_json(value) : value.type_name());
    values.push_back(value.get<int64_t>());
  }
  return values;
}

TensorInfo parse_tensor(const json& entry, const std::string& where, int64_t data_begin, int64_t file_size) {
  CHECK(entry.is_object(), "{}: its header entry is no JSON object", where);
  const auto dtype = entry.find("dtype");
  CHECK(dtype != entry.end() && dtype->is_string(), "{} has no string 'dtype'", where);
  TensorInfo info;
  info.dtype_name = dtype->get<std::string>();
  const DiskDType* disk = find_disk_dtype(info.dtype_name);
  CHECK(disk, "{} has dtype '{}', which the safetensors format does not know", where, info.dtype_name);
  info.dtype = disk->dtype;
  info.shape = read_integers(entry, "shape", where);
  const std::optional<int64_t> size_bytes = tensor_bytes(info.shape, disk->bits);
  CHECK(size_bytes, "{} is {}: its size overflows, or is no whole number of bytes", where, info.str());

  const std::vector<int64_t> offsets = read_integers(entry, "data_offsets", where);
  CHECK(offsets.size() == 2 && offsets[0] <= offsets[1], "{}: data_offsets [{}] are not [begin, end]", where,
        join(offsets, ", "));
  CHECK(offsets[1] - offsets[0] == *size_bytes, "{} is {}, which takes {} bytes, but its data_offsets [{}] hold {}",
        where, info.str(), *size_bytes, join(offsets, ", "), offsets[1] - offsets[0]);
  CHECK(offsets[1] <= file_size - data_begin,
        "{} needs bytes up to {} of the data, but the file has only {}: it is truncated; copy or download it again",
        where, offsets[1], file_size - data_begin);
  info.file_begin = data_begin + offsets[0];
  info.file_end = data_begin + offsets[1];
  return info;
}

/// The tensors must tile [data_begin, file_size): no byte twice, no byte that belongs to none.
void check_tiling(const SafetensorsHeader& header, int64_t data_begin, int64_t file_size, const fs::path& path) {
  std::vector<std::pair<const std::string, TensorInfo> const*> sorted;
  for (const auto& entry : header.tensors) sorted.push_back(&entry);
  std::sort(sorted.begin(), sorted.end(), [](const auto* a, const auto* b) {
    return std::pair(a->second.file_begin, a->second.file_end) < std::pair(b->second.file_begin, b->second.file_end);
  });
  int64_t end = data_begin;
  const std::string* previous = nullptr;
  for (const auto* entry : sorted) {
    const auto& [name, info] = *entry;
    CHECK(info.file_begin >= end, "'{}': tensors '{}' and '{}' overlap in file bytes [{}, {})", path.string(),
          previous ? *previous : "", name, info.file_begin, end);
    CHECK(info.file_begin == end, "'{}': file bytes [{}, {}) before tensor '{}' belong to no tensor", path.string(),
          end, info.file_begin, name);
    end = info.file_end;
    previous = &name;
  }
  CHECK(end == file_size, "'{}' has {} bytes after its last tensor, which ends at byte {}: the header does not fit",
        path.string(), file_size - end, end);
}

std::string read_header(const InputFile& file) {
  const fs::path& path = file.path();
  const int64_t file_size = file.size_bytes();
  CHECK(file_size >= kSizeFieldBytes, "'{}' has {} bytes, too few for a safetensors file: it is empty or truncated",
        path.string(), file_size);
  uint64_t size_field = 0;
  file.read(0, kSizeFieldBytes, &size_field);
  CHECK(std::memcmp(&size_field, "version ", sizeof(size_field)) != 0,
        "'{}' is a git-lfs pointer, not the file itself; fetch it with `git lfs pull`", path.string());
  CHECK(
      size_field <= static_cast<uint64_t>(kMaxHeaderBytes),
      "'{}' says that its header has {} bytes, more than the {} that are allowed: it is no safetensors file, or it is "
      "damaged",
      path.string(), size_field, kMaxHeaderBytes);
  CHECK(static_cast<int64_t>(size_field) <= file_size - kSizeFieldBytes,
        "'{}' says that its header has {} bytes, but only {} follow: it is truncated; copy or download it again",
        path.string(), size_field, file_size - kSizeFieldBytes);
  std::string text(size_field, '\0');
  file.read(kSizeFieldBytes, static_cast<int64_t>(size_field), text.data());
  return text;
}

const TensorInfo& find_tensor(const std::map<std::string, TensorInfo>& tensors, const std::string& name,
                              const fs::path& path) {
  const auto found = tensors.find(name);
  CHECK(found != tensors.end(), "'{}' has no tensor '{}' (it has {} others)", path.string(), name, tensors.size());
  return found->second;
}

void check_range(const TensorInfo& info, const std::string& name, int64_t begin, int64_t count, const fs::path& path) {
  CHECK(begin >= 0 && count >= 0 && begin <= info.numel() && count <= info.numel() - begin,
        "'{}': elements [{}, +{}) of tensor '{}', which is {} with {} elements", path.string(), begin, count, name,
        info.str(), info.numel());
}

// ---- writing

/// Offsets from the start of the file, in the order of the Python package.
struct WriteLayout {
  std::string header;  ///< with size field and padding
  std::map<std::string, TensorInfo> tensors;
  int64_t file_size = 0;
};

WriteLayout plan_file(std::vector<TensorToWrite> tensors, const std::map<std::string, std::string>& metadata,
                      const fs::path& path) {
  std::sort(tensors.begin(), tensors.end(), [](const TensorToWrite& a, const TensorToWrite& b) {
    const DiskDType *da = find_disk_dtype(name_of(a.dtype)), *db = find_disk_dtype(name_of(b.dtype));
    return da != db ? da > db : a.name < b.name;
  });
  const auto quoted = [](const std::string& s) { return dump_json(s); };
  WriteLayout layout;
  std::string entries;
  if (!metadata.empty()) {
    for (const auto& [key, value] : metadata) {
      entries += fmt::format("{}{}:{}", entries.empty() ? "\"__metadata__\":{" : ",", quoted(key), quoted(value));
    }
    entries += "}";
  }
  int64_t end = 0;
  for (const TensorToWrite& tensor : tensors) {
    const std::string where = fmt::format("'{}': tensor '{}'", path.string(), tensor.name);
    CHECK(tensor.name != "__metadata__", "{}: the name is reserved", where);
    TensorInfo info{name_of(tensor.dtype), tensor.dtype, tensor.shape, end, end};
    for (const int64_t dim : info.shape) CHECK(dim >= 0, "{}: a dimension cannot be negative: {}", where, dim);
    const auto size_bytes = tensor_bytes(info.shape, static_cast<int>(8 * size_of(tensor.dtype)));
    CHECK(size_bytes && !__builtin_add_overflow(end, *size_bytes, &info.file_end), "{} is {}: its size overflows",
          where, info.str());
    entries +=
        fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}", entries.empty() ? "" : ",",
                    quoted(tensor.name), info.dtype_name, join(info.shape, ","), info.file_begin, info.file_end);
    end = info.file_end;
    CHECK(layout.tensors.emplace(tensor.name, std::move(info)).second, "{} is to be written twice", where);
  }
  std::string text = "{" + entries + "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t size_field = text.size();
  CHECK(text.size() <= kMaxHeaderBytes, "'{}': a header of {} bytes, more than the {} that readers accept; use shards",
        path.string(), text.size(), kMaxHeaderBytes);
  layout.header.assign(reinterpret_cast<const char*>(&size_field), sizeof(size_field));
  layout.header += text;
  const int64_t data_begin = static_cast<int64_t>(layout.header.size());
  for (auto& [name, info] : layout.tensors) info.file_begin += data_begin, info.file_end += data_begin;
  layout.file_size = data_begin + end;
  return layout;
}

}  // namespace

int64_t TensorInfo::numel() const {
  int64_t n = 1;
  for (const int64_t dim : shape) n *= dim;
  return n;
}

std::string TensorInfo::str() const {
  return fmt::format("{} ({})", dtype_name, join(shape, ", "));
}

SafetensorsHeader parse_safetensors_header(std::string_view text, int64_t file_size, const fs::path& path) {
  const std::string where = fmt::format("'{}': header", path.string());
  CHECK(text.starts_with('{'), "{}: it does not begin with '{{': this is no safetensors file", where);
  const int64_t data_begin = kSizeFieldBytes + static_cast<int64_t>(text.size());
  CHECK(data_begin <= file_size, "{} ends at byte {}, the file at byte {}: it is truncated", where, data_begin,
        file_size);
  const json parsed = parse_json(text, where);
  SafetensorsHeader header;
  for (const auto& [name, entry] : parsed.items()) {
    if (name == "__metadata__") {
      CHECK(entry.is_object(), "{}: __metadata__ is no JSON object", where);
      for (const auto& [key, value] : entry.items()) {
        CHECK(value.is_string(), "{}: __metadata__ '{}' is no string", where, key);
        header.metadata.emplace(key, value.get<std::string>());
      }
    } else {
      const std::string tensor = fmt::format("'{}': tensor '{}'", path.string(), name);
      header.tensors.emplace(name, parse_tensor(entry, tensor, data_begin, file_size));
    }
  }
  check_tiling(header, data_begin, file_size, path);
  return header;
}

SafetensorsFile::SafetensorsFile(const fs::path& file)
    : file_(file), header_(parse_safetensors_header(read_header(file_), file_.size_bytes(), file)) {}

void SafetensorsFile::read(const std::string& name, int64_t begin, int64_t count, DType to, void* out) const {
  const TensorInfo& info = find_tensor(tensors(), name, path());
  check_range(info, name, begin, count, path());
  CHECK(info.dtype, "'{}': tensor '{}' has dtype {}, which is not supported; convert the checkpoint to BF16 or F32",
        path().string(), name, info.dtype_name);
  const DType from = *info.dtype;
  if (from == to) {
    return file_.read(info.file_begin + bytes_of(from, begin), bytes_of(from, count), out);
  }
  const Converter convert_chunk = converter(from, to);
  CHECK(convert_chunk, "'{}': tensor '{}' has dtype {}, which cannot be read as {}", path().string(), name,
        info.dtype_name, name_of(to));
  const int64_t chunk = std::min(count, kChunkBytes / bytes_of(from, 1));
  std::vector<char> buffer(static_cast<size_t>(bytes_of(from, chunk)));
  for (int64_t done = 0; done < count; done += chunk) {
    const int64_t n = std::min(chunk, count - done);
    file_.read(info.file_begin + bytes_of(from, begin + done), bytes_of(from, n), buffer.data());
    convert_chunk(static_cast<char*>(out) + bytes_of(to, done), buffer.data(), n);
  }
}

void SafetensorsFile::read_bytes(const std::string& name, int64_t begin, int64_t count, void* out) const {
  const TensorInfo& info = find_tensor(tensors(), name, path());
  CHECK(begin >= 0 && count >= 0 && begin + count <= info.file_end - info.file_begin,
        "'{}': bytes [{}, {}) of tensor '{}', which has {}", path().string(), begin, begin + count, name,
        info.file_end - info.file_begin);
  file_.read(info.file_begin + begin, count, out);
}

SafetensorsDirectory::SafetensorsDirectory(const fs::path& directory, const std::string& stem) : directory_(directory) {
  CHECK(fs::is_directory(directory), "'{}' is not a directory", directory.string());
  const fs::path single = directory / (stem + ".safetensors"), index = directory / (stem + ".safetensors.index.json");
  if (fs::exists(index)) {
    open_shards(index);
    CHECK(!fs::exists(single) || std::any_of(files_.begin(), files_.end(),
                                             [&](const SafetensorsFile& file) { return file.path() == single; }),
          "'{}' holds both {} and {}, which does not name it; remove the one that is out of date", directory.string(),
          single.filename().string(), index.filename().string());
    return;
  }
  if (!fs::exists(single)) {
    const bool has_pickle =
        fs::exists(directory / "pytorch_model.bin") || fs::exists(directory / "pytorch_model.bin.index.json");
    fail("'{}' holds neither {} nor {}{}", directory.string(), single.filename().string(), index.filename().string(),
         has_pickle ? "; it has pytorch_model.bin: convert it (transformers: from_pretrained, then save_pretrained)"
                    : "");
  }
  files_.emplace_back(single);
  for (const auto& [name, info] : files_.front().tensors()) where_.emplace(name, 0);
}

void SafetensorsDirectory::open_shards(const fs::path& index) {
  const std::string where = fmt::format("'{}'", index.string());
  const json parsed = parse_json(read_file(index), where);
  CHECK(parsed.is_object() && parsed.contains("weight_map") && parsed["weight_map"].is_object(),
        "{} has no object 'weight_map'", where);
  std::map<std::string, size_t> shards;  // file name -> index into files_
  for (const auto& [name, value] : parsed["weight_map"].items()) {
    CHECK(value.is_string(), "{}: the shard of tensor '{}' is no string", where, name);
    const std::string shard = value.get<std::string>();
    CHECK(!shard.empty() && shard != "." && shard != ".." && shard.find('/') == std::string::npos,
          "{}: tensor '{}' is said to be in '{}', which is no file name in this directory", where, name, shard);
    const auto [found, is_new] = shards.emplace(shard, files_.size());
    if (is_new) {
      std::error_code ignored;  // a name that is too long for a file
      CHECK(fs::exists(directory_ / shard, ignored), "{}: shard '{}' is missing, which should hold tensor '{}'", where,
            shard, name);
      files_.emplace_back(directory_ / shard);
    }
    CHECK(files_[found->second].tensors().count(name), "{}: tensor '{}' should be in '{}', which does not have it",
          where, name, shard);
    where_.emplace(name, found->second);
  }
  for (size_t i = 0; i < files_.size(); i++) {
    for (const auto& [name, info] : files_[i].tensors()) {
      const auto listed = where_.find(name);
      CHECK(listed != where_.end(), "{} does not list tensor '{}' of shard '{}'", where, name,
            files_[i].path().filename().string());
      CHECK(listed->second == i, "{}: tensor '{}' is in two shards, '{}' and '{}'", where, name,
            files_[listed->second].path().filename().string(), files_[i].path().filename().string());
    }
  }
}

const SafetensorsFile& SafetensorsDirectory::file_with(const std::string& name) const {
  const auto found = where_.find(name);
  CHECK(found != where_.end(), "'{}' has no tensor '{}' (it has {} others)", directory_.string(), name, where_.size());
  return files_[found->second];
}

const TensorInfo& SafetensorsDirectory::info(const std::string& name) const {
  return file_with(name).tensors().at(name);
}

const fs::path& SafetensorsDirectory::file_of(const std::string& name) const {
  return file_with(name).path();
}

std::vector<std::string> SafetensorsDirectory::names() const {
  std::vector<std::string> names;
  names.reserve(where_.size());
  for (const auto& [name, file] : where_) names.push_back(name);
  return names;
}

void SafetensorsDirectory::read(const std::string& name, int64_t begin, int64_t count, DType to, void* out) const {
  file_with(name).read(name, begin, count, to, out);
}

void SafetensorsDirectory::read_bytes(const std::string& name, int64_t begin, int64_t count, void* out) const {
  file_with(name).read_bytes(name, begin, count, out);
}

SafetensorsWriter::SafetensorsWriter(const fs::path& path, const std::vector<TensorToWrite>& tensors,
                                     const std::map<std::string, std::string>& metadata, bool create,
                                     FileSystem file_system)
    : path_(path), file_system_(std::move(file_system)) {
  WriteLayout layout = plan_file(tensors, metadata, path);
  tensors_ = std::move(layout.tensors);
  if (create) {
    file_ = file_system_.create(path_);
    file_system_.allocate(file_, path_, layout.file_size);
    file_system_.write(file_, path_, 0, layout.header);
    file_system_.sync(file_, path_);  // for the other hosts, which read it next
    return;
  }
  file_ = file_system_.open(path_);
  const InputFile written(path_);
  CHECK(written.size_bytes() == layout.file_size,
        "'{}' has {} bytes, but this rank expects {}: the ranks do not write the same", path.string(),
        written.size_bytes(), layout.file_size);
  std::string header(layout.header.size(), '\0');
  written.read(0, static_cast<int64_t>(header.size()), header.data());
  written.forget_cached();  // see FileSystem::create
  CHECK(header == layout.header, "'{}' has another header than this rank expects: the ranks do not write the same",
        path.string());
}

void SafetensorsWriter::write(const std::string& name, int64_t begin, int64_t count, DType from, const void* data) {
  CHECK(file_, "'{}' is finished; tensor '{}' cannot be written any more", path_.string(), name);
  const TensorInfo& info = find_tensor(tensors_, name, path_);
  check_range(info, name, begin, count, path_);
  const DType to = *info.dtype;
  const int64_t offset = info.file_begin + bytes_of(to, begin);
  const char* bytes = static_cast<const char*>(data);
  if (from == to) {
    return file_system_.write(file_, path_, offset, {bytes, static_cast<size_t>(bytes_of(to, count))});
  }
  const Converter convert_chunk = converter(from, to);
  CHECK(convert_chunk, "'{}': {} cannot be written to tensor '{}', which is {}", path_.string(), name_of(from), name,
        info.str());
  const int64_t chunk = std::min(count, kChunkBytes / bytes_of(to, 1));
  std::vector<char> buffer(static_cast<size_t>(bytes_of(to, chunk)));
  for (int64_t done = 0; done < count; done += chunk) {
    const int64_t n = std::min(chunk, count - done);
    convert_chunk(buffer.data(), bytes + bytes_of(from, done), n);
    file_system_.write(file_, path_, offset + bytes_of(to, done),
                       {buffer.data(), static_cast<size_t>(bytes_of(to, n))});
  }
}

void SafetensorsWriter::finish() {
  CHECK(file_, "'{}' is finished already", path_.string());
  file_system_.sync(file_, path_);
  file_system_.close(file_, path_);
}
