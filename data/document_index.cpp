// The cached index of a token file. Contract: document_index.h; format: FORMAT.md.
#include "data/document_index.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>

#include "layers/core/rng.h"

namespace {

constexpr uint64_t kMagic = 0x3230584449504754;  // "TGPIDX02": the last two digits are the version
constexpr size_t kBufferEntries = 1 << 12;

struct Header {
  uint64_t magic = kMagic;
  int64_t key_bytes = 0;
  uint64_t checksum = 0;  // of entries, statistics and key
  IndexStats stats;
};
static_assert(sizeof(Header) == 12 * 8 && sizeof(DocumentEntry) == 4 * 8, "the format has no padding");

/// Continues a checksum over `size_bytes` (a multiple of 8): xor, multiply by an odd constant, fold.
uint64_t checksum_words(uint64_t h, const void* data, size_t size_bytes) {
  const char* p = static_cast<const char*>(data);
  for (size_t i = 0; i < size_bytes; i += 8) {
    uint64_t word;
    std::memcpy(&word, p + i, 8);
    h = (h ^ word) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 32;
  }
  return h;
}

uint64_t finish_checksum(uint64_t entries, const IndexStats& stats, const std::string& key) {
  return checksum_words(entries, &stats, sizeof(stats)) ^ hash_name(key);
}

const char* environment(const char* name) {
  const char* value = std::getenv(name);
  return value && *value ? value : nullptr;
}

uint64_t random_word() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

// What a process left that was killed while it wrote this index. A file that is still written to is not that old.
void remove_leftovers(const std::filesystem::path& directory, const std::string& name) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    const std::string other = entry.path().filename().string();
    if (!other.starts_with(name + ".") || !other.ends_with(".tmp")) continue;
    const auto written = entry.last_write_time(error);
    if (!error && std::filesystem::file_time_type::clock::now() - written > std::chrono::hours(24)) {
      std::filesystem::remove(entry.path(), error);
    }
  }
}

}  // namespace

IndexWriter::IndexWriter(std::filesystem::path path, FileHandle fd)
    : path_(std::move(path)), fd_(std::move(fd)), end_(sizeof(Header)), checksum_(kMagic) {
  buffer_.reserve(kBufferEntries);
}

void IndexWriter::add(const DocumentEntry& entry) {
  if (entry.num_tokens > stats.longest_tokens) {
    stats.longest_tokens = entry.num_tokens;
    stats.longest_document = stats.num_documents;
  }
  stats.num_documents++;
  stats.num_tokens += entry.num_tokens;
  stats.num_loss_tokens += entry.num_loss_tokens;
  buffer_.push_back(entry);
  if (buffer_.size() == kBufferEntries) flush();
}

void IndexWriter::flush() {
  const size_t size_bytes = buffer_.size() * sizeof(DocumentEntry);
  checksum_ = checksum_words(checksum_, buffer_.data(), size_bytes);
  write(end_, buffer_.data(), size_bytes);
  end_ += static_cast<int64_t>(size_bytes);
  buffer_.clear();
}

FileHandle IndexWriter::finish(const std::string& key) {
  flush();
  write(end_, key.data(), key.size());
  Header header;
  header.key_bytes = static_cast<int64_t>(key.size());
  header.checksum = finish_checksum(checksum_, stats, key);
  header.stats = stats;
  write(0, &header, sizeof(header));
  return std::move(fd_);
}

void IndexWriter::write(int64_t offset, const void* data, size_t size_bytes) {
  const char* p = static_cast<const char*>(data);
  size_t done = 0;
  while (done < size_bytes) {
    const ssize_t n = pwrite(fd_.fd(), p + done, size_bytes - done, offset + static_cast<int64_t>(done));
    if (n < 0 && errno == EINTR) continue;
    CHECK(n > 0, "cannot write the index '{}' at byte {}: {}; make room, or set data.cache_dir to another disk",
          path_.string(), offset + static_cast<int64_t>(done), n == 0 ? "no progress" : std::strerror(errno));
    done += static_cast<size_t>(n);
  }
}

std::optional<DocumentIndex> DocumentIndex::load(const std::filesystem::path& path, const FileHandle& fd,
                                                 const std::string& key) {
  struct stat info {};
  if (fstat(fd.fd(), &info) != 0 || !S_ISREG(info.st_mode) || info.st_size < static_cast<off_t>(sizeof(Header))) {
    return std::nullopt;
  }
  DocumentIndex index;
  index.file_ = MappedFile(fd, info.st_size, path);
  Header header;
  std::memcpy(&header, index.file_.data(), sizeof(header));
  const int64_t n = header.stats.num_documents;
  const int64_t room = info.st_size - static_cast<int64_t>(sizeof(Header));
  if (header.magic != kMagic || header.key_bytes != static_cast<int64_t>(key.size()) || n < 0 ||
      n > room / static_cast<int64_t>(sizeof(DocumentEntry)) ||
      n * static_cast<int64_t>(sizeof(DocumentEntry)) + header.key_bytes != room) {
    return std::nullopt;
  }
  const char* entries = index.file_.data() + sizeof(Header);
  const size_t entries_bytes = static_cast<size_t>(n) * sizeof(DocumentEntry);
  if (std::memcmp(entries + entries_bytes, key.data(), key.size()) != 0) return std::nullopt;
  const uint64_t checksum = checksum_words(kMagic, entries, entries_bytes);
  if (finish_checksum(checksum, header.stats, key) != header.checksum) return std::nullopt;
  index.stats_ = header.stats;
  index.entries_ = reinterpret_cast<const DocumentEntry*>(entries);
  return index;
}

IndexCache::IndexCache(const std::string& directory) {
  if (!directory.empty()) {
    directories_.push_back(directory);
    return;
  }
  if (const char* xdg = environment("XDG_CACHE_HOME")) {
    directories_.push_back(std::filesystem::path(xdg) / "train_gpt");
  } else if (const char* home = environment("HOME")) {
    directories_.push_back(std::filesystem::path(home) / ".cache" / "train_gpt");
  }
  const char* temporary = environment("TMPDIR");
  directories_.push_back(std::filesystem::path(temporary ? temporary : "/tmp") / fmt::format("train_gpt-{}", getuid()));
}

DocumentIndex IndexCache::open(const std::string& name, const std::string& key,
                               const std::function<void(IndexWriter&)>& build) {
  for (const auto& directory : directories_) {
    const auto path = directory / name;
    const FileHandle fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (!fd) continue;
    if (auto index = DocumentIndex::load(path, fd, key)) return std::move(*index);
  }
  std::string refused;
  for (const auto& directory : directories_) {
    std::error_code ignored;
    std::filesystem::create_directories(directory, ignored);
    remove_leftovers(directory, name);
    const std::string temporary = (directory / fmt::format("{}.{:016x}.tmp", name, random_word())).string();
    FileHandle fd(::open(temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!fd) {
      refused += fmt::format("{}'{}' ({})", refused.empty() ? "" : ", ", directory.string(), std::strerror(errno));
      continue;
    }
    if (!refused.empty() && notices_.empty()) {
      notices_.push_back(fmt::format("cannot keep indexes of the data in {}; keeping them in '{}' (data.cache_dir)",
                                     refused, directory.string()));
    }
    const auto path = directory / name;
    try {
      IndexWriter writer(temporary, std::move(fd));
      build(writer);
      fd = writer.finish(key);
      CHECK(std::rename(temporary.c_str(), path.c_str()) == 0, "cannot rename '{}' to '{}': {}", temporary,
            path.string(), std::strerror(errno));
    } catch (...) {
      unlink(temporary.c_str());
      throw;
    }
    auto index = DocumentIndex::load(path, fd, key);
    CHECK(index, "the index '{}' cannot be read back; set data.cache_dir to another disk", path.string());
    return std::move(*index);
  }
  fail("cannot keep an index of the data in {}; set data.cache_dir to a directory that can be written", refused);
}
