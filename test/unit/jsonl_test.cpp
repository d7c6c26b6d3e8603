#include "data/jsonl.h"

#include <fcntl.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "test/data_testing.h"

namespace {

JsonlDocument parse(const std::string& line) {
  JsonlDocument document;
  parse_jsonl_line(line, document);
  return document;
}

TEST(Jsonl, a_line_is_input_ids_and_labels) {
  const JsonlDocument plain = parse(R"({"input_ids":[1,22,0,2147483647]})");
  EXPECT_EQ(plain.input_ids, (std::vector<int32_t>{1, 22, 0, 2147483647}));
  EXPECT_FALSE(plain.has_labels);
  EXPECT_EQ(plain.num_loss_tokens(), 3);

  const JsonlDocument masked = parse(" { \"labels\" : [ -100 , -100,3 ], \"input_ids\"\t: [ 5,6 , 3 ] } \r");
  EXPECT_EQ(masked.input_ids, (std::vector<int32_t>{5, 6, 3}));
  EXPECT_EQ(masked.labels, (std::vector<int32_t>{-100, -100, 3}));
  EXPECT_EQ(masked.num_loss_tokens(), 1);

  EXPECT_EQ(parse(R"({"input_ids":[]})").num_loss_tokens(), 0);
  EXPECT_EQ(parse(R"({"input_ids":[7],"labels":[7]})").num_loss_tokens(), 0);  // the first is nobody's target
}

TEST(Jsonl, other_keys_are_skipped_whatever_they_hold) {
  const JsonlDocument d = parse(
      R"({"text":"a \"quoted\" \\ \u00e9 [1,2","meta":{"a":[1,-2.5e+10,{"b":null}],"input_ids":[9]},"x":true,"y":false,)"
      R"("z":0.0,"attention_mask":[1,1],"position_ids":[0,1],"input_ids":[1,2],"e":[],"o":{}})");
  EXPECT_EQ(d.input_ids, (std::vector<int32_t>{1, 2}));
  // Half a surrogate pair: JSON's grammar has it, and Python writes it for bytes that were not UTF-8.
  EXPECT_EQ(parse(R"({"text":"\uDD0D \ud83d","input_ids":[7]})").input_ids, std::vector<int32_t>{7});
}

TEST(Jsonl, what_is_wrong_is_said_with_its_column_and_remedy) {
  const struct {
    std::string line;
    std::vector<std::string> message;
  } kCases[] = {
      {"[1,2]", {"column 1", "expected an object", "'['"}},
      {"\xef\xbb\xbf{\"input_ids\":[1]}", {"column 1", "byte 0xef"}},
      {R"({"input_ids":[1,2)", {"column 18", "expected ',' or ']'", "the end of the line"}},
      {R"({"input_ids":[1,2]} x)", {"column 21", "expected the end of the line", "'x'"}},
      {R"({"input_ids":[1,2]}{"input_ids":[1]})", {"column 20", "expected the end"}},
      {R"({"input_ids":[1,,2]})", {"column 17", "integers only", "','"}},
      {R"({"input_ids":[1,]})", {"column 17", "integers only"}},
      {R"({"input_ids":[1 2]})", {"expected ',' or ']'"}},
      {R"({"input_ids":[1.0]})", {"integers only", "'1.'"}},
      {R"({"input_ids":[1e3]})", {"integers only", "'1e'"}},
      {R"({"input_ids":[01]})", {"integers only", "'01"}},
      {R"({"input_ids":[+1]})", {"integers only"}},
      {R"({"input_ids":[-]})", {"integers only"}},
      {R"({"input_ids":[[1]]})", {"integers only", "'['"}},
      {R"({"input_ids":["1"]})", {"integers only"}},
      {R"({"input_ids":[null]})", {"integers only", "'n'"}},
      {R"({"input_ids":[2147483648]})", {"does not fit in 32 bits"}},
      {R"({"input_ids":[99999999999999999999999999]})", {"does not fit in 32 bits"}},
      {R"({"input_ids":[-1]})", {"input_ids[0] is -1", "negative"}},
      {R"({"input_ids":"text"})", {"array of integers"}},
      {R"({"input_ids":[1],"labels":null})", {"array of integers", "leave the key out"}},
      {R"({"input_ids":[1],"labels":[]})", {"0 labels for 1 input_ids"}},
      {R"({"input_ids":[1,2],"labels":[1]})", {"1 labels for 2 input_ids"}},
      {R"({"input_ids":[1,2],"labels":[1,-1]})", {"labels[1] is -1", "-100"}},
      {R"({"input_ids":[1],"input_ids":[1]})", {"comes twice"}},
      {R"({"input_ids":[1],"labels":[1],"labels":[1]})", {"comes twice"}},
      {R"({"text":"hello"})", {"no \"input_ids\"", "tokenize_data.py"}},
      {R"({})", {"no \"input_ids\""}},
      {R"({"input_ids":[1,2],"attention_mask":[1,0]})", {"attention_mask[1] is 0", "leave padding out"}},
      {R"({"input_ids":[1,2],"attention_mask":[1]})", {"attention_mask of 1 for 2"}},
      {R"({"input_ids":[1,2,3],"position_ids":[0,1,0]})", {"position_ids[2] is 0", "a line of its own"}},
      {R"({"input_ids":[1],"loss_mask":[1]})", {"\"loss_mask\" is not read", "-100"}},
      {R"({"input_ids":[1],"assistant_masks":[1]})", {"\"assistant_masks\" is not read"}},
      {R"({"input_ids":[1],"completion_mask":[1]})", {"\"completion_mask\" is not read"}},
      {R"({"input_ids":[1],"l\u0061bels":[-100]})", {"escape"}},
      {R"({input_ids:[1]})", {"expected a string", "'i'"}},
      {R"({"input_ids" [1]})", {"expected ':'"}},
      {R"({"input_ids":[1],})", {"expected a string"}},
      {R"({"input_ids":[1])", {"expected '}'", "the end of the line"}},
      {R"({"input_ids":[1],"t":"\x"})", {"unknown escape"}},
      {R"({"input_ids":[1],"t":"\u12g4"})", {"hexadecimal"}},
      {R"({"input_ids":[1],"t":"abc)", {"does not end"}},
      {R"({"input_ids":[1],"t":tru})", {"expected a value"}},
      {R"({"input_ids":[1],"t":-})", {"expected a value"}},
      {R"({"input_ids":[1],"t":1.})", {"expected a value"}},
      {R"({"input_ids":[1],"t":})", {"expected a value"}},
      {R"({"input_ids":[1],"t":NaN})", {"expected a value", "'N'"}},
      {std::string("{\"input_ids\":[1\0]}", 18), {"byte 0x00"}},
      {std::string("{\"input_ids\":[1],\"t\":\"\0\"}", 26), {"byte 0x00"}},
      {std::string("{\"input_ids\":[1],\"t\":\"\\\0\"}", 27), {"unknown escape", "byte 0x00"}},
      {"{\"input_ids\":[1],\"t\":" + std::string(1000, '['), {"nested deeper"}},
      {"{\"input_ids\":[1],\"t\":" + std::string(100000, '{'), {"expected a string"}},
      {"", {"the end of the line"}},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.line.substr(0, 100));
    expect_error([&] { parse(c.line); }, c.message);
  }
}

// Random damage to good lines: what the parser accepts, nlohmann::json accepts, with the same numbers; and what JSON
// is not, the parser refuses.
TEST(Jsonl, agrees_with_a_full_json_parser_on_damaged_lines) {
  const std::string kLines[] = {
      R"({"input_ids":[1,22,333],"labels":[-100,22,333],"n":{"a":[1.5e3,"x\n"]}})",
      R"({ "t" : "b\u0041" , "input_ids" : [ 0 ] , "attention_mask" : [ 1 ] , "z" : [ true , null ] })"};
  const std::string kBytes = "{}[]\",:-+.eE0123456789 \t\\untrflasx_";
  const Philox rng(1, 0);
  int num_accepted = 0, num_refused = 0;
  for (uint64_t i = 0; i < 30000; i++) {
    std::string line = kLines[i % 2];
    for (uint64_t k = 0; k <= rng.below(4 * i, 2); k++) {
      const auto w = rng.words(4 * i + 1 + k);
      const size_t at = w[0] % line.size();
      const char byte = kBytes[w[1] % kBytes.size()];
      if (w[2] % 3 == 0) line[at] = byte;
      if (w[2] % 3 == 1) line.insert(at, 1, byte);
      if (w[2] % 3 == 2) line.erase(at, 1);
    }
    const nlohmann::json json = nlohmann::json::parse(line, nullptr, false);
    try {
      const JsonlDocument d = parse(line);
      ASSERT_FALSE(json.is_discarded()) << line;
      ASSERT_EQ(json.at("input_ids").get<std::vector<int64_t>>(),
                std::vector<int64_t>(d.input_ids.begin(), d.input_ids.end()))
          << line;
      ASSERT_EQ(json.contains("labels"), d.has_labels) << line;
      num_accepted++;
    } catch (const Error&) {
      num_refused++;
    }
  }
  EXPECT_GT(num_accepted, 3000);
  EXPECT_GT(num_refused, 3000);
}

DocumentIndex build_index(const TempDir& dir, const std::string& path) {
  IndexCache cache(dir / "cache");
  std::filesystem::remove_all(dir / "cache");
  const InputFile file(path);
  return cache.open("index", "key", [&](IndexWriter& writer) { index_jsonl(file, writer, {}); });
}

TEST(Jsonl, index_finds_every_line_of_a_large_file) {
  const TempDir dir;
  // Longer than two blocks of reading, one line longer than a block; blank lines, CRLF, no newline at the end.
  std::string text;
  std::vector<DocumentEntry> expected;
  int64_t num_loss_tokens = 0, num_empty = 0;
  const Philox rng(1, 0);
  for (uint64_t d = 0; text.size() < (9u << 20); d++) {
    const int64_t n = d == 3000 ? 2'500'000 : static_cast<int64_t>(rng.below(d, 700));
    std::string line = "{\"input_ids\":[";
    for (int64_t j = 0; j < n; j++) line += std::to_string(j % 10) + (j + 1 < n ? "," : "");
    line += "]}";
    if (d % 5 == 1) line += "\r";
    if (d % 7 == 3) text += "\n  \n";
    if (n > 0) expected.push_back({static_cast<int64_t>(text.size()), static_cast<int64_t>(line.size()), n});
    if (n > 0) num_loss_tokens += n - 1;
    num_empty += n == 0;
    text += line + "\n";
  }
  text.pop_back();
  write_file(dir / "a.jsonl", text);
  const DocumentIndex index = build_index(dir, dir / "a.jsonl");
  ASSERT_EQ(index.num_documents(), static_cast<int64_t>(expected.size()));
  for (size_t d = 0; d < expected.size(); d++) {
    const DocumentEntry& entry = index[static_cast<int64_t>(d)];
    ASSERT_EQ(entry.offset, expected[d].offset) << d;
    ASSERT_EQ(entry.size_bytes, expected[d].size_bytes) << d;
    ASSERT_EQ(entry.num_tokens, expected[d].num_tokens) << d;
  }
  EXPECT_EQ(index.stats().num_loss_tokens, num_loss_tokens);
  EXPECT_EQ(index.stats().num_empty_documents, num_empty);
  EXPECT_EQ(index.stats().max_token, 9);
  EXPECT_EQ(index.stats().longest_tokens, 2'500'000);
  EXPECT_EQ(index[index.stats().longest_document].num_tokens, 2'500'000);
}

TEST(Jsonl, a_bad_line_is_named_wherever_it_is) {
  const TempDir dir;
  for (const int64_t bad : {1, 2, 4999, 30000, 49999, 50000}) {
    std::string text;
    for (int64_t line = 1; line <= 50000; line++) {
      text += line == bad ? R"({"input_ids":[1,2,x]})" : R"({"input_ids":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]})";
      text += line % 10 == 0 ? "\r\n" : "\n";
    }
    write_file(dir / "a.jsonl", text);
    expect_error([&] { build_index(dir, dir / "a.jsonl"); }, {fmt::format("a.jsonl:{}: column 19", bad)});
  }
  // The first of several, though threads find them in any order.
  std::string text;
  for (int64_t line = 1; line <= 50000; line++) text += line >= 20000 ? "{}\n" : "{\"input_ids\":[1,2,3,4,5,6,7,8]}\n";
  write_file(dir / "a.jsonl", text);
  expect_error([&] { build_index(dir, dir / "a.jsonl"); }, {"a.jsonl:20000: there is no \"input_ids\""});
  write_file(dir / "a.jsonl", "{\"input_ids\":[1,2]}\n{\"input_ids\":[1,2");
  expect_error([&] { build_index(dir, dir / "a.jsonl"); }, {"a.jsonl:2:", "may be truncated"});
}

TEST(Jsonl, line_numbers_count_newlines) {
  const TempDir dir;
  write_file(dir / "a.jsonl", "\n\nabc\nd");
  const InputFile file(dir / "a.jsonl");
  EXPECT_EQ(line_number(file, 0), 1);
  EXPECT_EQ(line_number(file, 2), 3);
  EXPECT_EQ(line_number(file, 6), 4);
}

int64_t anonymous_memory_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("RssAnon:", 0) == 0) return std::stoll(line.substr(8));
  }
  return 0;
}

TEST(Jsonl, memory_does_not_grow_with_the_file) {
  const TempDir dir;
  constexpr int64_t kLines = 200'000;
  {
    std::ofstream file(dir / "a.jsonl");
    std::string line = "{\"input_ids\":[1";
    for (int j = 0; j < 100; j++) line += fmt::format(",{}", j * 7 % 512);
    line += "]}\n";
    for (int64_t i = 0; i < kLines; i++) file << line;
  }
  const int64_t size_kib = static_cast<int64_t>(std::filesystem::file_size(dir / "a.jsonl") >> 10);
  IndexCache cache(dir / "cache");
  const InputFile file(dir / "a.jsonl");
  const int64_t before = anonymous_memory_kib();
  int64_t most = 0;
  const auto watch = [&](int64_t, int64_t, Progress::Unit, const std::string&) {
    most = std::max(most, anonymous_memory_kib());
  };
  const DocumentIndex index =
      cache.open("index", "key", [&](IndexWriter& writer) { index_jsonl(file, writer, watch); });
  EXPECT_EQ(index.num_documents(), kLines);
  EXPECT_GT(size_kib, 60 << 10);
  // One block of 4 MiB and what it holds. With the address sanitizer everything takes several times as much.
  EXPECT_LT(most - before, 24 << 10);
}

TEST(Jsonl, numbers_of_ten_digits_are_read_as_exactly_before_a_comma_as_at_the_end) {
  const JsonlDocument d = parse(R"({"input_ids":[999999999,1000000000,2147483647,3]})");
  EXPECT_EQ(d.input_ids, (std::vector<int32_t>{999999999, 1000000000, 2147483647, 3}));
  for (const char* large : {"2147483648", "4294967297", "9999999999"}) {
    const std::string line = fmt::format(R"({{"input_ids":[{},1]}})", large);
    expect_error([&] { parse(line); }, {"does not fit in 32 bits"});
  }
}

}  // namespace
