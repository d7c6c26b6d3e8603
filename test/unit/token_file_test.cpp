#include "data/token_file.h"

#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>

#include "test/data_testing.h"

namespace {

constexpr int64_t kVocab = 60000;

struct Files {
  TempDir dir;
  IndexCache cache{dir / "cache"};

  TokenFile open(const std::string& name, int64_t vocab_size = kVocab, const std::string& format = "auto") {
    const auto paths = find_token_files(dir / name, format);
    CHECK(paths.size() == 1, "{} files", paths.size());
    return TokenFile(paths[0], vocab_size, cache, {});
  }
  void write(const std::string& name, const std::string& bytes) { write_file(dir / name, bytes); }
};

/// Every document, whole and in every range (of the first and last few tokens of long ones).
void expect_documents(TokenFile file, const TestDocuments& expected) {
  ASSERT_EQ(file.num_documents(), static_cast<int64_t>(expected.size()));
  TokenScratch scratch;
  for (size_t d = 0; d < expected.size(); d++) {
    const auto n = static_cast<int64_t>(expected[d].tokens.size());
    ASSERT_EQ(file.num_tokens(static_cast<int64_t>(d)), n);
    for (const int64_t begin : {int64_t{0}, n / 2, n - 1}) {
      for (const int64_t count : {int64_t{0}, int64_t{1}, (n - begin) / 2, n - begin}) {
        std::vector<int32_t> tokens(static_cast<size_t>(count)), labels(tokens);
        file.read(static_cast<int64_t>(d), begin, count, tokens.data(), labels.data(), scratch);
        ASSERT_TRUE(std::equal(tokens.begin(), tokens.end(), expected[d].tokens.begin() + begin)) << d;
        ASSERT_TRUE(std::equal(labels.begin(), labels.end(), expected[d].labels.begin() + begin)) << d;
      }
    }
  }
}

void read_all(TokenFile file) {
  TokenScratch scratch;
  for (int64_t d = 0; d < file.num_documents(); d++) {
    std::vector<int32_t> tokens(static_cast<size_t>(file.num_tokens(d))), labels(tokens);
    file.read(d, 0, file.num_tokens(d), tokens.data(), labels.data(), scratch);
  }
}

std::vector<int32_t> joined(const TestDocuments& documents) {
  std::vector<int32_t> tokens;
  for (const auto& d : documents) tokens.insert(tokens.end(), d.tokens.begin(), d.tokens.end());
  return tokens;
}

TEST(TokenFile, every_format_gives_the_documents_that_were_written) {
  Files f;
  const TestDocuments documents = make_documents(50, 300, 100, 1, false);
  f.write("a.jsonl", to_jsonl(documents));
  expect_documents(f.open("a.jsonl"), documents);
  const TestDocuments labelled = make_documents(50, 300, 50000);
  f.write("b.json", to_jsonl(labelled));
  expect_documents(f.open("b.json"), labelled);

  const MegatronFiles megatrons[] = {to_megatron<uint8_t>(documents, 1),    to_megatron<int8_t>(documents, 2),
                                     to_megatron<int16_t>(documents, 3),    to_megatron<int32_t>(documents, 4),
                                     to_megatron<int64_t>(documents, 5),    to_megatron<uint16_t>(documents, 8),
                                     to_megatron<uint16_t>(documents, 8, 7)};
  for (const auto& m : megatrons) {
    f.write("m.v1.idx", m.idx);
    f.write("m.v1.bin", m.bin);
    for (const char* name : {"m.v1", "m.v1.idx", "m.v1.bin"}) expect_documents(f.open(name), documents);
  }

  f.write("text.txt", "Hello\n\n\xff world");
  TestDocument text;
  for (const unsigned char c : std::string("Hello\n\n\xff world")) text.tokens.push_back(c);
  text.labels = text.tokens;
  expect_documents(f.open("text.txt"), {text});
  f.write("text.md", "Hello\n\n\xff world");
  expect_documents(f.open("text.md", kVocab, "bytes"), {text});
}

TEST(TokenFile, documents_of_llmc_begin_with_their_first_token) {
  Files f;
  for (const int32_t first : {50256, 128000}) {
    TestDocuments documents = make_documents(40, 200, 50000, 2, false);
    for (size_t d = 0; d < documents.size(); d++) {  // a shard may begin in the middle of a document
      if (d > 0) documents[d].tokens[0] = first;
      documents[d].labels = documents[d].tokens;
    }
    documents[0].tokens = documents[0].labels = {1, 2, 3};
    f.write("a.bin", first == 50256 ? to_llmc<uint16_t>(joined(documents), 20240520, 1)
                                    : to_llmc<uint32_t>(joined(documents), 20240801, 7));
    expect_documents(f.open("a.bin", 200000), documents);
    expect_documents(f.open("a.bin", 200000, "llmc"), documents);
  }
}

TEST(TokenFile, documents_without_tokens_are_counted_and_left_out) {
  Files f;
  TestDocuments documents = {{{}, {}}, {{1, 2}, {1, 2}}, {{}, {}}, {{3}, {3}}, {{}, {}}};
  const TestDocuments kept = {documents[1], documents[3]};
  f.write("a.jsonl", to_jsonl(documents));
  const auto m = to_megatron<uint16_t>(documents, 8);
  f.write("b.idx", m.idx), f.write("b.bin", m.bin);
  for (const char* name : {"a.jsonl", "b.idx"}) {
    expect_documents(f.open(name), kept);
    EXPECT_EQ(f.open(name).stats().num_empty_documents, 3);
    EXPECT_EQ(f.open(name).stats().num_loss_tokens, 1);
  }
  f.write("c.jsonl", "{\"input_ids\":[]}\n");
  expect_error([&] { f.open("c.jsonl"); }, {"c.jsonl", "no documents but 1 without tokens"});
  for (const char* name : {"d.jsonl", "d.txt"}) {
    f.write(name, "");
    expect_error([&] { f.open(name); }, {name, "no documents"});
  }
  f.write("e.bin", to_llmc<uint16_t>({}, 20240520, 1));
  expect_error([&] { f.open("e.bin"); }, {"e.bin", "no documents"});
}

TEST(TokenFile, a_token_that_stands_for_an_image_is_named_when_the_file_is_opened) {
  Files f;
  f.write("a.jsonl", "{\"input_ids\":[1,2,9]}\n{\"input_ids\":[1,7,9],\"labels\":[-100,-100,9]}\n");
  const auto open = [&](std::vector<int64_t> image_tokens) {
    TokenFile(find_token_files(f.dir / "a.jsonl", "auto").at(0), kVocab, f.cache, {}, std::move(image_tokens));
  };
  for (const int64_t absent : {0, 3, 10, 59999}) EXPECT_NO_THROW(open({absent, 70000})) << absent;
  expect_error([&] { open({70000, 7}); }, {"a.jsonl:2 (document 1)", "token 1 is 7", "features of an image"});
}

TEST(TokenFile, a_token_outside_the_vocabulary_is_named_with_document_and_place) {
  Files f;
  TestDocuments documents = make_documents(30, 50, 1000, 3, false);
  documents[17].tokens = documents[17].labels = {5, 6, 1000, 7};
  f.write("a.jsonl", "\n" + to_jsonl(documents));
  expect_error([&] { f.open("a.jsonl", 1000); },
               {"a.jsonl:19 (document 17)", "token 2 is 1000", "vocabulary of 1000", "tokenizer"});
  f.open("a.jsonl", 1001);
  const auto m = to_megatron<uint16_t>(documents, 8);
  f.write("m.idx", m.idx), f.write("m.bin", m.bin);
  expect_error([&] { f.open("m.idx", 1000); }, {"m.bin: document 17", "token 2 is 1000"});
  documents[17].tokens = {5, 6, 7, -3};
  const auto s = to_megatron<int16_t>(documents, 3);
  f.write("s.idx", s.idx), f.write("s.bin", s.bin);
  expect_error([&] { f.open("s.idx", 2000); }, {"s.bin: document 17", "token 3 is -3"});
  f.write("l.bin", to_llmc<uint16_t>({50256, 5, 50256, 7, 999, 8}, 20240520, 1));
  expect_error([&] { f.open("l.bin", 900); }, {"l.bin: document 0", "token 0 is 50256"});
  f.write("t.jsonl", "{\"input_ids\":[1,2],\"labels\":[1,77]}\n");
  expect_error([&] { f.open("t.jsonl", 50); }, {"t.jsonl:1", "the label of token 1 is 77"});
  f.write("b.txt", "abc");
  expect_error([&] { f.open("b.txt", 255); }, {"b.txt", "256 or more"});
}

TEST(TokenFile, a_format_is_told_by_extension_and_content_or_asked_for) {
  Files f;
  f.write("x.dat", "abc");
  expect_error([&] { f.open("x.dat"); }, {"x.dat", "'.dat'", "data.format", "jsonl", "megatron", "llmc", "bytes"});
  expect_error([&] { f.open("x.dat", kVocab, "parquet"); }, {"data.format is 'parquet'", "jsonl"});
  f.write("y.bin", "abcdefgh");
  expect_error([&] { f.open("y.bin"); }, {"y.bin", "20240520", "y.idx"});
  expect_error([&] { f.open("y.bin", kVocab, "llmc"); }, {"y.bin", "20240520"});
  f.write("z.idx", "abcdefgh");
  expect_error([&] { f.open("z.idx"); }, {"z.idx", "no '", "z.bin"});
  expect_error([&] { f.open("missing.jsonl"); }, {"there is no file", "missing.jsonl", "working directory"});
  expect_error([&] { f.open("missing*.jsonl"); }, {"there is no file", "missing*.jsonl"});
  expect_error([&] { f.open("."); }, {"is a directory", "*.jsonl"});
  expect_error([&] { find_token_files("", "auto"); }, {"empty"});
  expect_error([&] { f.open("x.dat", kVocab, "jsonl"); }, {"x.dat:1: column 1", "'a'"});
  ASSERT_EQ(mkfifo((f.dir / "pipe.jsonl").c_str(), 0600), 0);
  expect_error([&] { f.open("pipe.jsonl"); }, {"pipe.jsonl", "not a regular file"});
}

TEST(TokenFile, globs_are_sorted_and_name_a_pair_once) {
  Files f;
  for (const char* name : {"c.jsonl", "a.jsonl", "b.jsonl", "we[i]rd*.jsonl"}) f.write(name, "{\"input_ids\":[1]}\n");
  const auto names = [&](const std::string& pattern, const std::string& format = "auto") {
    std::vector<std::string> found;
    for (const auto& p : find_token_files(f.dir / pattern, format)) found.push_back(p.data.filename().string());
    return found;
  };
  EXPECT_EQ(names("?.jsonl"), (std::vector<std::string>{"a.jsonl", "b.jsonl", "c.jsonl"}));
  EXPECT_EQ(names("{c,a}.jsonl"), (std::vector<std::string>{"a.jsonl", "c.jsonl"}));
  EXPECT_EQ(names("we[i]rd*.jsonl"), (std::vector<std::string>{"we[i]rd*.jsonl"}));
  const auto m = to_megatron<uint16_t>(make_documents(3, 5, 100), 8);
  std::filesystem::create_directory(f.dir / "m");
  for (const char* name : {"m/2", "m/1"})
    f.write(std::string(name) + ".idx", m.idx), f.write(std::string(name) + ".bin", m.bin);
  EXPECT_EQ(names("m/*"), (std::vector<std::string>{"1.bin", "2.bin"}));
  EXPECT_EQ(names("m/*.bin"), (std::vector<std::string>{"1.bin", "2.bin"}));
  EXPECT_EQ(names("m/*", "megatron"), (std::vector<std::string>{"1.bin", "2.bin"}));
}

TEST(TokenFile, every_truncation_of_a_megatron_pair_is_an_error) {
  Files f;
  const auto m = to_megatron<uint16_t>(make_documents(5, 6, 100, 1, false), 8);
  f.write("m.bin", m.bin);
  for (size_t size = 0; size < m.idx.size(); size++) {
    f.write("m.idx", m.idx.substr(0, size));
    expect_error([&] { f.open("m.idx"); }, {"m.idx", size >= 9 ? "truncated" : "header"});
  }
  f.write("m.idx", m.idx + "x");
  expect_error([&] { f.open("m.idx"); }, {"m.idx", "need"});
  f.write("m.idx", m.idx + std::string(5, '\0'));
  expect_error([&] { f.open("m.idx"); }, {"m.idx", "multimodal"});
  f.write("m.idx", m.idx);
  for (size_t size = 0; size < m.bin.size(); size++) {
    f.write("m.bin", m.bin.substr(0, size));
    expect_error([&] { f.open("m.idx"); }, {"m.idx", "m.bin has", "truncated"});
  }
  f.write("m.bin", m.bin + "xy");
  expect_error([&] { f.open("m.idx"); }, {"do not belong together"});
}

TEST(TokenFile, damage_to_a_megatron_index_is_an_error_or_harmless) {
  Files f;
  const auto m = to_megatron<int32_t>(make_documents(5, 6, 100, 1, false), 4);
  f.write("m.bin", m.bin);
  for (size_t at = 0; at < m.idx.size(); at++) {
    for (const int value : {0x7f, 0xff}) {
      std::string idx = m.idx;
      idx[at] = static_cast<char>(value);
      f.write("m.idx", idx);
      try {
        read_all(f.open("m.idx"));
      } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find("m."), std::string::npos) << e.what();
      }
    }
  }
}

TEST(TokenFile, a_megatron_document_must_lie_in_one_piece) {
  Files f;
  auto m = to_megatron<uint16_t>({{{1, 2, 3, 4}, {}}}, 8, 2);
  std::swap_ranges(&m.idx[34 + 8], &m.idx[34 + 16], &m.idx[34 + 16]);  // the two pointers
  f.write("m.idx", m.idx), f.write("m.bin", m.bin);
  expect_error([&] { f.open("m.idx"); }, {"m.idx", "document 0 is scattered", "byte 0 and not at 8"});
}

TEST(TokenFile, truncated_llmc_files_are_errors) {
  Files f;
  const std::string bytes = to_llmc<uint16_t>({50256, 1, 2}, 20240520, 1);
  for (const size_t size : {size_t{4}, size_t{1000}, size_t{1024}, bytes.size() - 1}) {
    f.write("a.bin", bytes.substr(0, size));
    expect_error([&] { f.open("a.bin"); }, {"a.bin", fmt::format("{} bytes", size), "truncated"});
  }
  f.write("a.bin", bytes + "x");
  expect_error([&] { f.open("a.bin"); }, {"a.bin", "need 1030"});
  f.write("a.bin", to_llmc<uint16_t>({1}, 20240520, 2));
  expect_error([&] { f.open("a.bin"); }, {"a.bin", "version 2"});
}

TEST(IndexCache, an_index_is_made_once_and_again_when_the_file_changes) {
  TempDir dir;
  IndexCache cache(dir / "cache");
  int builds = 0;
  const auto open = [&](const std::string& key, int64_t tokens) {
    return cache.open("a.index", key, [&](IndexWriter& writer) {
      builds++;
      writer.add({0, 10, tokens});
    });
  };
  EXPECT_EQ(open("1", 5)[0].num_tokens, 5);
  EXPECT_EQ(open("1", 6)[0].num_tokens, 5);
  EXPECT_EQ(builds, 1);
  EXPECT_EQ(open("2", 7)[0].num_tokens, 7);
  EXPECT_EQ(builds, 2);

  // Every damaged byte, every truncation and an empty file: made again.
  const std::string whole = read_file(dir / "cache/a.index");
  for (size_t at = 0; at <= whole.size(); at++) {
    std::string damaged = whole.substr(0, at);
    if (at < whole.size()) {
      write_file(dir / "cache/a.index", damaged);
      ASSERT_EQ(open("2", 8)[0].num_tokens, 8) << at;
      damaged = whole;
      damaged[at] ^= 0x10;
    } else {
      damaged += "x";
    }
    write_file(dir / "cache/a.index", damaged);
    ASSERT_EQ(open("2", 9)[0].num_tokens, 9) << at;
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir / "cache"), {}), 1) << "temporary files are left";
}

TEST(IndexCache, a_failed_build_leaves_nothing) {
  TempDir dir;
  IndexCache cache(dir / "cache");
  expect_error([&] { cache.open("a", "k", [](IndexWriter&) { fail("bad line"); }); }, {"bad line"});
  EXPECT_TRUE(std::filesystem::is_empty(dir / "cache"));
}

TEST(IndexCache, changed_data_are_indexed_again) {
  Files f;
  f.write("a.jsonl", "{\"input_ids\":[1,2]}\n");
  TokenFile old = f.open("a.jsonl");
  EXPECT_EQ(old.num_tokens(0), 2);
  f.write("a.jsonl", "{\"input_ids\":[1,2,3]}\n");
  EXPECT_EQ(f.open("a.jsonl").num_tokens(0), 3);
  // The same size, another time.
  f.write("a.jsonl", "{\"input_ids\":[1,234]}\n");
  std::filesystem::last_write_time(f.dir / "a.jsonl",
                                   std::filesystem::file_time_type::clock::now() + std::chrono::seconds(5));
  EXPECT_EQ(f.open("a.jsonl").num_tokens(0), 2);
  // The file that was open is not what was indexed any more; that is an error and not another document.
  f.write("a.jsonl", "{\"input_ids\":[9]}\n ");
  expect_error([&] { read_all(std::move(old)); }, {"a.jsonl"});
}

TEST(IndexCache, processes_may_race) {
  Files f;
  const TestDocuments documents = make_documents(2000, 100, 500);
  f.write("a.jsonl", to_jsonl(documents));
  std::vector<pid_t> children;
  for (int i = 0; i < 6; i++) {
    const pid_t child = fork();
    if (child == 0) {
      bool is_right = false;
      try {
        TokenFile file = f.open("a.jsonl");
        is_right = file.num_documents() == 2000 &&
                   file.num_tokens(1999) == static_cast<int64_t>(documents[1999].tokens.size());
      } catch (...) {
      }
      _exit(is_right ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = -1;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
}

TEST(IndexCache, an_index_is_for_every_user_and_what_killed_processes_left_goes_away) {
  TempDir dir;
  const auto old = std::filesystem::file_time_type::clock::now() - std::chrono::hours(48);
  for (const char* name : {"a.0123.tmp", "a.4567.tmp", "b.0123.tmp", "a"}) write_file(dir / name, "x");
  for (const char* name : {"a.0123.tmp", "b.0123.tmp", "a"}) std::filesystem::last_write_time(dir / name, old);
  const mode_t before = umask(022);
  IndexCache(dir.path()).open("a", "k", [](IndexWriter& writer) { writer.add({0, 1, 1}); });
  umask(before);
  EXPECT_FALSE(std::filesystem::exists(dir / "a.0123.tmp"));
  EXPECT_TRUE(std::filesystem::exists(dir / "a.4567.tmp"));  // another process may be writing it
  EXPECT_TRUE(std::filesystem::exists(dir / "b.0123.tmp"));
  struct stat info {};
  ASSERT_EQ(stat((dir / "a").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777u, 0644u);
}

TEST(IndexCache, where_it_cannot_write_it_says_so) {
  TempDir dir;
  write_file(dir / "file", "x");
  IndexCache explicit_cache(dir / "file/cache");
  expect_error([&] { explicit_cache.open("a", "k", [](IndexWriter&) {}); }, {"file/cache", "data.cache_dir"});

  setenv("XDG_CACHE_HOME", (dir / "file").c_str(), 1);
  setenv("TMPDIR", dir.path().c_str(), 1);
  IndexCache fallback("");
  fallback.open("a", "k", [](IndexWriter& writer) { writer.add({0, 1, 1}); });
  ASSERT_EQ(fallback.notices().size(), 1u);
  EXPECT_NE(fallback.notices()[0].find(dir / "file/train_gpt"), std::string::npos) << fallback.notices()[0];
  EXPECT_TRUE(std::filesystem::exists(dir / fmt::format("train_gpt-{}/a", getuid())));

  setenv("XDG_CACHE_HOME", (dir / "xdg").c_str(), 1);
  IndexCache standard("");
  standard.open("a", "k2", [](IndexWriter& writer) { writer.add({0, 1, 1}); });
  EXPECT_TRUE(standard.notices().empty());
  EXPECT_TRUE(std::filesystem::exists(dir / "xdg/train_gpt/a"));
  unsetenv("XDG_CACHE_HOME");
  unsetenv("TMPDIR");
}

TEST(TokenFile, each_number_of_a_megatron_index_that_is_wrong_is_named) {
  Files f;
  const auto m = to_megatron<uint16_t>({{{1, 2}, {}}, {{3, 4}, {}}}, 8);
  f.write("m.bin", m.bin);
  const auto expect_damage = [&](const std::vector<std::pair<size_t, char>>& changes, const std::string& part) {
    auto idx = m.idx;
    for (const auto& [at, value] : changes) idx[at] = value;
    f.write("m.idx", idx);
    expect_error([&] { f.open("m.idx"); }, {"m.idx", part});
  };
  constexpr size_t kPointers = 34 + 2 * 4, kBoundaries = kPointers + 2 * 8;  // after the header and two lengths
  expect_damage({{kPointers + 8, 3}}, "sequence 1 begins at byte 3, inside a token of 2 bytes");
  expect_damage({{kBoundaries, 1}}, "the first document begins at sequence 1, not 0");
  expect_damage({{kBoundaries + 8, 2}, {kBoundaries + 16, 1}}, "document 1 is sequences 2 to 1 of 2");
  expect_damage({{kBoundaries + 16, 1}}, "the documents end at sequence 1 of 2");
}

TEST(TokenFile, every_token_but_the_first_of_a_document_is_a_target) {
  Files f;
  f.write("a.bin", to_llmc<uint16_t>({50256, 1, 2, 50256, 3}, 20240520, 1));
  EXPECT_EQ(f.open("a.bin").stats().num_loss_tokens, 3);
  const auto m = to_megatron<uint16_t>({{{1, 2, 3}, {}}, {{3, 4}, {}}}, 8);
  f.write("m.idx", m.idx), f.write("m.bin", m.bin);
  EXPECT_EQ(f.open("m.idx").stats().num_loss_tokens, 3);
}

TEST(TokenFile, a_line_that_cannot_be_read_does_not_spoil_the_one_before) {
  Files f;
  f.write("a.jsonl", "{\"input_ids\":[1,2,3]}\n{\"input_ids\":[4,5,6]}\n");
  TokenFile file = f.open("a.jsonl");
  std::vector<int32_t> tokens(3), labels(3);
  TokenScratch scratch;
  file.read(0, 0, 3, tokens.data(), labels.data(), scratch);
  f.write("a.jsonl", "{\"input_ids\":[1,2,3]}\n{\"input_ids\":[4,5,x]}\n");
  expect_error([&] { file.read(1, 0, 3, tokens.data(), labels.data(), scratch); },
               {"a.jsonl:2", "changed after it was indexed"});
  file.read(0, 0, 3, tokens.data(), labels.data(), scratch);
  EXPECT_EQ(tokens, (std::vector<int32_t>{1, 2, 3}));
}

}  // namespace
