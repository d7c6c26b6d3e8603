// Helpers of the data tests: a directory that goes away, documents, and writers of every format.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "data/batch.h"
#include "layers/core/check.h"
#include "layers/core/rng.h"

class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "train_gpt_test.XXXXXX").string();
    CHECK(mkdtemp(name.data()) != nullptr, "mkdtemp {}", name);
    path_ = name;
  }
  TempDir(const TempDir&) = delete;
  ~TempDir() { std::filesystem::remove_all(path_); }

  const std::filesystem::path& path() const { return path_; }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

inline void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <class T>
void append(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

/// Calls `op`, which must throw an Error whose message holds every part.
template <class Op>
void expect_error(Op&& op, const std::vector<std::string>& parts) {
  try {
    op();
    ADD_FAILURE() << "no error, expected one with: " << (parts.empty() ? "" : parts[0]);
  } catch (const Error& e) {
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << "'" << part << "' is not in: " << e.what();
    }
  }
}

struct TestDocument {
  std::vector<int32_t> tokens, labels;  // labels as in the file; equal to tokens where there are none
};
using TestDocuments = std::vector<TestDocument>;

/// Token j of document d is unique in the corpus (for small ones): nothing can be swapped unnoticed. Lengths from 1 to
/// `max_tokens`, many short and few long. Every third document has labels, some masked.
inline TestDocuments make_documents(int64_t count, int64_t max_tokens, int32_t vocab_size, uint64_t seed = 1,
                                    bool with_labels = true) {
  const Philox rng(seed, hash_name("test documents"));
  TestDocuments documents;
  int64_t token = 0;
  for (int64_t d = 0; d < count; d++) {
    const double u = rng.uniform(static_cast<uint64_t>(d));
    const auto length = 1 + static_cast<int64_t>(static_cast<double>(max_tokens - 1) * u * u);
    TestDocument document;
    for (int64_t j = 0; j < length; j++) document.tokens.push_back(static_cast<int32_t>(token++ % vocab_size));
    document.labels = document.tokens;
    if (with_labels && d % 3 == 0) {
      for (size_t j = 0; j < document.labels.size(); j++) {
        if (rng.below(static_cast<uint64_t>(d * 1000) + j + 1, 2) == 0) document.labels[j] = kIgnoreTarget;
      }
    }
    documents.push_back(document);
  }
  return documents;
}

inline std::string join(const std::vector<int32_t>& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); i++) text.append(i ? "," : "").append(std::to_string(values[i]));
  return text + "]";
}

inline std::string to_jsonl(const TestDocuments& documents) {
  std::string text;
  for (const TestDocument& d : documents) {
    text += "{\"input_ids\":" + join(d.tokens);
    if (d.labels != d.tokens) text += ",\"labels\":" + join(d.labels);
    text += "}\n";
  }
  return text;
}

/// The .idx and .bin of a Megatron dataset. Sequences of at most `max_sequence` tokens (a document may have several).
struct MegatronFiles {
  std::string idx, bin;
};
template <class T>
MegatronFiles to_megatron(const TestDocuments& documents, uint8_t dtype_code, size_t max_sequence = 1 << 30) {
  MegatronFiles files;
  std::vector<int32_t> lengths;
  std::vector<int64_t> pointers, boundaries = {0};
  for (const TestDocument& d : documents) {
    for (size_t begin = 0; begin < d.tokens.size(); begin += max_sequence) {
      const size_t end = std::min(begin + max_sequence, d.tokens.size());
      lengths.push_back(static_cast<int32_t>(end - begin));
      pointers.push_back(static_cast<int64_t>(files.bin.size()));
      for (size_t j = begin; j < end; j++) append(files.bin, static_cast<T>(d.tokens[j]));
    }
    boundaries.push_back(static_cast<int64_t>(lengths.size()));
  }
  files.idx.assign("MMIDIDX\0\0", 9);
  append(files.idx, uint64_t{1});
  append(files.idx, dtype_code);
  append(files.idx, static_cast<uint64_t>(lengths.size()));
  append(files.idx, static_cast<uint64_t>(boundaries.size()));
  for (const int32_t v : lengths) append(files.idx, v);
  for (const int64_t v : pointers) append(files.idx, v);
  for (const int64_t v : boundaries) append(files.idx, v);
  return files;
}

/// An llm.c file of the tokens as they are.
template <class T>
std::string to_llmc(const std::vector<int32_t>& tokens, int32_t magic, int32_t version) {
  std::string bytes;
  for (int i = 0; i < 256; i++) {
    append(bytes, i == 0 ? magic : i == 1 ? version : i == 2 ? static_cast<int32_t>(tokens.size()) : 0);
  }
  for (const int32_t t : tokens) append(bytes, static_cast<T>(t));
  return bytes;
}
