// Finding, opening and reading token files. Contract: token_file.h; formats: FORMAT.md.
#include "data/token_file.h"

#include <glob.h>

#include <algorithm>

#include "data/binary_tokens.h"
#include "data/llmc.h"
#include "data/megatron.h"
#include "layers/core/rng.h"

namespace fs = std::filesystem;

namespace {

constexpr int64_t kCheckTokens = 1 << 20;
constexpr const char* kFormats =
    "jsonl (.jsonl, .json: one {\"input_ids\": [...]} a line), megatron (.bin and .idx), llmc (.bin of llm.c), bytes "
    "(.txt)";

fs::path with_extension(fs::path path, const char* extension) {
  return path.replace_extension(extension);
}

bool is_file(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

/// "x.idx" and "x.bin" for any of x.idx, x.bin, x. (A prefix may have dots: "x.v2".)
TokenPath megatron_pair(const fs::path& path) {
  const std::string extension = path.extension().string();
  const bool is_half = extension == ".idx" || extension == ".bin";
  TokenPath pair{TokenFormat::Megatron, is_half ? with_extension(path, ".bin") : fs::path(path.string() + ".bin"),
                 is_half ? with_extension(path, ".idx") : fs::path(path.string() + ".idx")};
  for (const auto& part : {pair.data, pair.index}) {
    CHECK(is_file(part), "{}: a Megatron dataset is two files, but there is no '{}'", path.string(), part.string());
  }
  return pair;
}

bool is_megatron_prefix(const std::string& path) {
  return is_file(path + ".idx") && is_file(path + ".bin");
}

TokenPath detect(const fs::path& path) {
  const std::string extension = path.extension().string();
  if (extension == ".jsonl" || extension == ".json") return {TokenFormat::Jsonl, path, {}};
  if (extension == ".txt") return {TokenFormat::Bytes, path, {}};
  if (extension == ".idx") return megatron_pair(path);
  if (extension == ".bin") {
    if (is_llmc(InputFile(path))) return {TokenFormat::Llmc, path, {}};
    CHECK(is_file(with_extension(path, ".idx")),
          "{}: neither a token file of llm.c (it does not begin with 20240520 or 20240801) nor Megatron's (there is no "
          "'{}'); set data.format to one of: {}",
          path.string(), with_extension(path, ".idx").string(), kFormats);
    return megatron_pair(path);
  }
  fail("{}: cannot tell the format from the extension '{}'; set data.format to one of: {}", path.string(), extension,
       kFormats);
}

TokenPath token_path(const fs::path& path, const std::string& format) {
  std::error_code ignored;
  CHECK(!fs::is_directory(path, ignored), "'{}' is a directory; name its files, for example '{}/*.jsonl'",
        path.string(), path.string());
  if (format == "auto") return detect(path);
  if (format == "jsonl") return {TokenFormat::Jsonl, path, {}};
  if (format == "megatron") return megatron_pair(path);
  if (format == "llmc") return {TokenFormat::Llmc, path, {}};
  if (format == "bytes") return {TokenFormat::Bytes, path, {}};
  fail("data.format is '{}', expected auto or one of: {}", format, kFormats);
}

std::vector<std::string> expand(const std::string& pattern) {
  glob_t found{};
  const int status = glob(pattern.c_str(), GLOB_BRACE | GLOB_TILDE | GLOB_ERR, nullptr, &found);
  std::vector<std::string> paths;
  for (size_t i = 0; status == 0 && i < found.gl_pathc; i++) paths.push_back(found.gl_pathv[i]);
  globfree(&found);
  CHECK(status != GLOB_ABORTED && status != GLOB_NOSPACE, "cannot list the files of '{}': a directory cannot be read",
        pattern);
  CHECK(!paths.empty(), "there is no file '{}'; relative paths begin at the working directory, '{}'", pattern,
        fs::current_path().string());
  std::sort(paths.begin(), paths.end());
  return paths;
}

const char* name_of(TokenFormat format) {
  switch (format) {
    case TokenFormat::Jsonl:
      return "jsonl";
    case TokenFormat::Megatron:
      return "megatron";
    case TokenFormat::Llmc:
      return "llmc";
    case TokenFormat::Bytes:
      return "bytes";
  }
  return "?";
}

/// A plain file is one document; a token is a byte.
void index_bytes(const InputFile& file, IndexWriter& writer) {
  writer.stats.encoding = Encoding::U8;
  if (file.size_bytes() == 0) return writer.add_empty();
  writer.add(unmasked_document(0, file.size_bytes(), file.size_bytes()));
  writer.stats.include_tokens(0, 255);
}

std::string key_line(const InputFile& file) {
  return fmt::format("{} bytes, modified {}: {}\n", file.size_bytes(), file.modified_ns(),
                     fs::absolute(file.path()).string());
}

DocumentIndex open_index(const TokenPath& path, const InputFile& file, IndexCache& cache,
                         const DataProgress& progress) {
  std::optional<InputFile> idx;
  if (path.format == TokenFormat::Megatron) idx.emplace(path.index);
  const std::string key =
      fmt::format("{}\n{}{}", name_of(path.format), key_line(file), idx ? key_line(*idx) : std::string());
  const std::string name =
      fmt::format("{}-{:016x}.index", path.data.filename().string(),
                  hash_name(fmt::format("{} {}", name_of(path.format), fs::absolute(path.data).string())));
  return cache.open(name, key, [&](IndexWriter& writer) {
    switch (path.format) {
      case TokenFormat::Jsonl:
        return index_jsonl(file, writer, progress);
      case TokenFormat::Megatron:
        return index_megatron(*idx, file, writer, progress);
      case TokenFormat::Llmc:
        return index_llmc(file, writer, progress);
      case TokenFormat::Bytes:
        return index_bytes(file, writer);
    }
  });
}

}  // namespace

std::vector<TokenPath> find_token_files(const std::string& pattern, const std::string& format) {
  CHECK(!pattern.empty(), "the path of a data source is empty");
  std::error_code ignored;
  if (fs::exists(pattern, ignored)) return {token_path(pattern, format)};  // also when its name has a '*' or a '['
  if ((format == "auto" || format == "megatron") && is_megatron_prefix(pattern)) return {megatron_pair(pattern)};
  std::vector<TokenPath> files;
  for (const std::string& path : expand(pattern)) {
    TokenPath file = token_path(path, format);
    // "shards/*" finds both halves of a Megatron pair.
    if (std::find(files.begin(), files.end(), file) == files.end()) files.push_back(std::move(file));
  }
  return files;
}

TokenFile::TokenFile(const TokenPath& path, int64_t vocab_size, IndexCache& cache, const DataProgress& progress,
                     std::vector<int64_t> image_tokens)
    : format_(path.format),
      file_(path.data),
      vocab_size_(vocab_size),
      image_tokens_(std::move(image_tokens)),
      index_(open_index(path, file_, cache, progress)) {
  CHECK(num_documents() > 0, "{}: holds no documents{}", file_.path().string(),
        stats().num_empty_documents > 0
            ? fmt::format(" but {} without tokens; check how it was written", stats().num_empty_documents)
            : "; remove it from the data, or write it again");
  check_tokens();
}

void TokenFile::check_tokens() const {
  const bool is_in_vocabulary = stats().min_token >= 0 && stats().max_token < vocab_size_;
  const bool may_hold_images = std::any_of(image_tokens_.begin(), image_tokens_.end(), [&](int64_t id) {
    return stats().min_token <= id && id <= stats().max_token;
  });
  if (is_in_vocabulary && !may_hold_images) return;
  CHECK(is_in_vocabulary || format_ != TokenFormat::Bytes,
        "{}: a file of bytes needs a vocabulary of 256 or more, the model has {}", file_.path().string(), vocab_size_);
  // The index says that there is, or may be, a bad id, not where. read() names it.
  std::vector<int32_t> tokens, labels;
  TokenScratch scratch;
  for (int64_t document = 0; document < num_documents(); document++) {
    for (int64_t begin = 0; begin < num_tokens(document); begin += kCheckTokens) {
      const int64_t count = std::min(kCheckTokens, num_tokens(document) - begin);
      tokens.resize(static_cast<size_t>(count));
      labels.resize(static_cast<size_t>(count));
      read(document, begin, count, tokens.data(), labels.data(), scratch);
    }
  }
  CHECK(is_in_vocabulary, "{}: holds token ids from {} to {}, the model's vocabulary is {}", file_.path().string(),
        stats().min_token, stats().max_token, vocab_size_);
}

void TokenFile::read(int64_t document, int64_t begin, int64_t count, int32_t* tokens, int32_t* labels,
                     TokenScratch& scratch) const {
  CHECK(begin >= 0 && count >= 0 && begin + count <= num_tokens(document), "{}: tokens [{}, {}) of {}", where(document),
        begin, begin + count, num_tokens(document));
  if (stats().encoding == Encoding::Json) {
    read_json(document, begin, count, tokens, labels, scratch);
  } else {
    read_binary(document, begin, count, tokens, labels, scratch);
  }
}

void TokenFile::read_json(int64_t document, int64_t begin, int64_t count, int32_t* tokens, int32_t* labels,
                          TokenScratch& scratch) const {
  if (scratch.file != this || scratch.document != document) parse(document, scratch);
  const JsonlDocument& parsed = scratch.parsed;
  for (int64_t i = 0; i < count; i++) {
    const size_t at = static_cast<size_t>(begin + i);
    tokens[i] = parsed.input_ids[at];
    labels[i] = parsed.has_labels ? parsed.labels[at] : tokens[i];
    check_token(document, begin + i, tokens[i]);
    if (labels[i] >= vocab_size_) bad_token(document, begin + i, "the label of token", labels[i]);
  }
}

void TokenFile::parse(int64_t document, TokenScratch& scratch) const {
  const DocumentEntry& entry = index_[document];
  scratch.file = nullptr;
  scratch.bytes.resize(static_cast<size_t>(entry.size_bytes));
  file_.read(entry.offset, entry.size_bytes, scratch.bytes.data());
  try {
    parse_jsonl_line({scratch.bytes.data(), scratch.bytes.size()}, scratch.parsed);
  } catch (const Error& e) {
    fail("{}: {}; the file was changed after it was indexed", where(document), e.what());
  }
  CHECK(scratch.parsed.num_tokens() == entry.num_tokens, "{}: {} tokens, {} when it was indexed; the file was changed",
        where(document), scratch.parsed.num_tokens(), entry.num_tokens);
  scratch.file = this;
  scratch.document = document;
}

void TokenFile::read_binary(int64_t document, int64_t begin, int64_t count, int32_t* tokens, int32_t* labels,
                            TokenScratch& scratch) const {
  scratch.ids.resize(static_cast<size_t>(count));
  read_binary_tokens(file_, index_[document].offset, stats().encoding, begin, count, scratch.bytes, scratch.ids.data());
  for (int64_t i = 0; i < count; i++) {
    const int64_t id = scratch.ids[static_cast<size_t>(i)];
    check_token(document, begin + i, id);
    labels[i] = tokens[i] = static_cast<int32_t>(id);
  }
}

void TokenFile::check_token(int64_t document, int64_t position, int64_t id) const {
  if (id < 0 || id >= vocab_size_) bad_token(document, position, "token", id);
  CHECK(std::find(image_tokens_.begin(), image_tokens_.end(), id) == image_tokens_.end(),
        "{}: token {} is {}, in whose place this model has features of an image or video; only its text is trained "
        "here: leave out the documents that have it",
        where(document), position, id);
}

void TokenFile::bad_token(int64_t document, int64_t position, const char* what, int64_t id) const {
  fail("{}: {} {} is {}, which is not in the model's vocabulary of {}; tokenize the data with this model's tokenizer",
       where(document), what, position, id, vocab_size_);
}

std::string TokenFile::where(int64_t document) const {
  const DocumentEntry& entry = index_[document];
  const std::string name = file_.path().string();
  if (format_ == TokenFormat::Jsonl) {
    return fmt::format("{}:{} (document {})", name, line_number(file_, entry.offset), document);
  }
  return fmt::format("{}: document {} (bytes {} to {})", name, document, entry.offset, entry.offset + entry.size_bytes);
}
