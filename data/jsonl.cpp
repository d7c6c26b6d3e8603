// The JSONL reader. Contract: jsonl.h; what a line may hold: FORMAT.md.
#include "data/jsonl.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "data/batch.h"
#include "layers/core/parallel.h"

namespace {

constexpr int64_t kBlockBytes = 4 << 20;      // read and parsed at once, by all threads
constexpr int64_t kMaxLineBytes = 256 << 20;  // one document: about 50 million tokens
constexpr int64_t kThreadGrainBytes = 64 << 10;
constexpr int kMaxDepth = 64;  // of values that are skipped

bool is_digit(char c) {
  return static_cast<unsigned char>(c - '0') < 10;
}

// Keys whose values would change what is trained on. They are named rather than ignored.
bool is_loss_mask(std::string_view key) {
  return key == "loss_mask" || key == "assistant_masks" || key == "completion_mask";
}

class LineParser {
 public:
  LineParser(std::string_view line, JsonlDocument& out)
      : begin_(line.data()), at_(line.data()), end_(line.data() + line.size()), out_(out) {}

  void parse() {
    out_.input_ids.clear();
    out_.labels.clear();
    out_.has_labels = false;
    skip_space();
    if (at_ == end_ || *at_ != '{') error("expected an object, {{\"input_ids\": [...]}}, found {}", found());
    parse_object([this](std::string_view key) { parse_member(key); }, 0);
    skip_space();
    if (at_ != end_) error("expected the end of the line after the object, found {}", found());
    check();
  }

 private:
  template <class... Args>
  [[noreturn]] void error(fmt::format_string<Args...> format, Args&&... args) const {
    fail("column {}: {}", at_ - begin_ + 1, fmt::format(format, std::forward<Args>(args)...));
  }

  std::string found() const {
    if (at_ == end_) return "the end of the line";
    const unsigned char c = static_cast<unsigned char>(*at_);
    return c >= 0x20 && c < 0x7f ? fmt::format("'{}'", *at_) : fmt::format("byte 0x{:02x}", c);
  }

  void skip_space() {
    while (at_ != end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\r' || *at_ == '\n')) at_++;
  }

  void expect(char c) {
    skip_space();
    if (at_ == end_ || *at_ != c) error("expected '{}', found {}", c, found());
    at_++;
  }

  /// Whether the next character is `c`, which is then consumed.
  bool accept(char c) {
    skip_space();
    if (at_ == end_ || *at_ != c) return false;
    at_++;
    return true;
  }

  template <class OnMember>
  void parse_object(OnMember&& on_member, int depth) {
    if (depth >= kMaxDepth) error("values are nested deeper than {}", kMaxDepth);
    expect('{');
    if (accept('}')) return;
    do {
      skip_space();
      const std::string_view key = parse_string();
      expect(':');
      skip_space();
      on_member(key);
    } while (accept(','));
    expect('}');
  }

  void parse_member(std::string_view key) {
    if (key == "input_ids") {
      if (has_input_ids_) error("\"input_ids\" comes twice");
      has_input_ids_ = true;
      parse_integers(key, out_.input_ids);
    } else if (key == "labels") {
      if (out_.has_labels) error("\"labels\" comes twice");
      out_.has_labels = true;
      parse_integers(key, out_.labels);
    } else if (key == "attention_mask") {
      if (has_mask_) error("\"attention_mask\" comes twice");
      has_mask_ = true;
      parse_integers(key, mask_);
    } else if (key == "position_ids") {
      if (has_positions_) error("\"position_ids\" comes twice");
      has_positions_ = true;
      parse_integers(key, positions_);
    } else if (is_loss_mask(key)) {
      error("\"{}\" is not read; give \"labels\" instead, with -100 where there is no loss", key);
    } else if (key.find('\\') != std::string_view::npos) {
      error("a key is written with an escape, \"{}\"; write it plainly", key);
    } else {
      skip_value(0);
    }
  }

  // [1, 22, 333]: strictly JSON integers that fit in 32 bits.
  void parse_integers(std::string_view key, std::vector<int32_t>& out) {
    if (at_ == end_ || *at_ != '[') {
      error("\"{}\" must be an array of integers, found {}{}", key, found(),
            key == "labels" ? "; leave the key out to train on every token" : "");
    }
    at_++;
    if (accept(']')) return;
    while (true) {
      at_ = parse_plain_integers(at_, end_, out);
      skip_space();
      out.push_back(parse_integer(key));
      if (accept(',')) continue;
      if (accept(']')) return;
      error("expected ',' or ']' in \"{}\", found {}", key, found());
    }
  }

  // The fast way, for what nearly all of a file is: digits and a comma, perhaps a space before. Stops before anything
  // else, which parse_integer() judges.
  static const char* parse_plain_integers(const char* at, const char* end, std::vector<int32_t>& out) {
    while (true) {
      const char* p = at != end && *at == ' ' ? at + 1 : at;
      const char* const digits = p;
      int32_t value = 0;
      while (p != end && is_digit(*p) && p - digits < 9) value = value * 10 + (*p++ - '0');
      const bool is_plain = p != digits && p != end && *p == ',' && (*digits != '0' || p - digits == 1);
      if (!is_plain) return at;
      out.push_back(value);
      at = p + 1;
    }
  }

  int32_t parse_integer(std::string_view key) {
    const char* const start = at_;
    const bool is_negative = at_ != end_ && *at_ == '-';
    if (is_negative) at_++;
    const char* const digits = at_;
    int64_t value = 0;
    while (at_ != end_ && is_digit(*at_) && at_ - digits < 11) value = value * 10 + (*at_++ - '0');
    const bool has_leading_zero = at_ - digits > 1 && *digits == '0';
    const bool has_fraction = at_ != end_ && (*at_ == '.' || *at_ == 'e' || *at_ == 'E');
    if (at_ == digits || has_leading_zero || has_fraction) {
      error("\"{}\" must hold integers only, found {}", key,
            at_ == digits ? found() : fmt::format("'{}'", std::string_view(start, std::min(end_, at_ + 1) - start)));
    }
    if (value > std::numeric_limits<int32_t>::max()) error("a number in \"{}\" does not fit in 32 bits", key);
    return static_cast<int32_t>(is_negative ? -value : value);
  }

  /// The string's content as written, escapes and all.
  std::string_view parse_string() {
    if (at_ == end_ || *at_ != '"') error("expected a string, found {}", found());
    const char* const start = ++at_;
    while (at_ != end_ && *at_ != '"') {
      if (static_cast<unsigned char>(*at_) < 0x20) error("a string holds {}", found());
      if (*at_++ == '\\') skip_escape();
    }
    if (at_ == end_) error("a string does not end");
    return std::string_view(start, static_cast<size_t>(at_++ - start));
  }

  void skip_escape() {
    if (at_ == end_) error("a string does not end");
    const char c = *at_++;
    if (c == 'u') {
      for (int i = 0; i < 4; i++, at_++) {
        const bool is_hex = at_ != end_ && (is_digit(*at_) || ((*at_ | 32) >= 'a' && (*at_ | 32) <= 'f'));
        if (!is_hex) error("\\u needs four hexadecimal digits, found {}", found());
      }
    } else if (std::strchr("\"\\/bfnrt", c) == nullptr || c == '\0') {
      at_--;
      error("a string holds an unknown escape, {}", found());
    }
  }

  void skip_value(int depth) {
    skip_space();
    if (at_ == end_) error("expected a value, found {}", found());
    switch (*at_) {
      case '"':
        parse_string();
        return;
      case '{':
        parse_object([&](std::string_view) { skip_value(depth + 1); }, depth);
        return;
      case '[':
        skip_array(depth);
        return;
      case 't':
        return skip_literal("true");
      case 'f':
        return skip_literal("false");
      case 'n':
        return skip_literal("null");
      default:
        skip_number();
    }
  }

  void skip_array(int depth) {
    if (depth >= kMaxDepth) error("values are nested deeper than {}", kMaxDepth);
    expect('[');
    if (accept(']')) return;
    do {
      skip_value(depth + 1);
    } while (accept(','));
    expect(']');
  }

  void skip_literal(std::string_view word) {
    if (std::string_view(at_, static_cast<size_t>(end_ - at_)).substr(0, word.size()) != word) {
      error("expected a value, found {}", found());
    }
    at_ += word.size();
  }

  void skip_digits() {
    if (at_ == end_ || !is_digit(*at_)) error("expected a value, found {}", found());
    while (at_ != end_ && is_digit(*at_)) at_++;
  }

  void skip_number() {
    if (*at_ == '-') at_++;
    if (at_ != end_ && *at_ == '0') {
      at_++;
    } else {
      skip_digits();
    }
    if (at_ != end_ && *at_ == '.') at_++, skip_digits();
    if (at_ != end_ && (*at_ == 'e' || *at_ == 'E')) {
      at_++;
      if (at_ != end_ && (*at_ == '+' || *at_ == '-')) at_++;
      skip_digits();
    }
  }

  // What only the whole line shows.
  void check() const {
    const size_t n = out_.input_ids.size();
    CHECK(has_input_ids_, "there is no \"input_ids\"; text must be tokenized first (scripts/tokenize_data.py)");
    for (size_t i = 0; i < n; i++) {
      CHECK(out_.input_ids[i] >= 0, "input_ids[{}] is {}; a token id cannot be negative", i, out_.input_ids[i]);
    }
    if (out_.has_labels) {
      CHECK(out_.labels.size() == n, "{} labels for {} input_ids; there must be one label a token, -100 for no loss",
            out_.labels.size(), n);
      for (size_t i = 0; i < n; i++) {
        CHECK(out_.labels[i] >= 0 || out_.labels[i] == kIgnoreTarget,
              "labels[{}] is {}; a label is a token id, or -100 for no loss", i, out_.labels[i]);
      }
    }
    if (has_mask_) {
      CHECK(mask_.size() == n, "an attention_mask of {} for {} input_ids", mask_.size(), n);
      const auto masked = std::find_if(mask_.begin(), mask_.end(), [](int32_t m) { return m != 1; });
      CHECK(masked == mask_.end(),
            "attention_mask[{}] is {}; leave padding out of input_ids, and set labels to -100 where there is no loss",
            masked - mask_.begin(), *masked);
    }
    if (has_positions_) {
      CHECK(positions_.size() == n, "{} position_ids for {} input_ids", positions_.size(), n);
      for (size_t i = 0; i < n; i++) {
        CHECK(positions_[i] == static_cast<int32_t>(i),
              "position_ids[{}] is {}, not {}; give each document a line of its own, they are packed while loading", i,
              positions_[i], i);
      }
    }
  }

  const char *begin_, *at_, *end_;
  JsonlDocument& out_;
  bool has_input_ids_ = false, has_mask_ = false, has_positions_ = false;
  std::vector<int32_t> mask_, positions_;
};

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r") == std::string_view::npos;
}

// What one thread found in its part of a block.
struct Part {
  std::vector<DocumentEntry> entries;
  IndexStats stats;
  int64_t num_lines = 0;
  std::string error;                 // of line num_lines, the first that is wrong
  bool error_is_unfinished = false;  // that line has no newline: it is the end of the file
  JsonlDocument document;
};

void add_document(Part& part, int64_t offset, int64_t size_bytes) {
  const JsonlDocument& document = part.document;
  part.entries.push_back({offset, size_bytes, document.num_tokens(), document.num_loss_tokens()});
  for (const auto* ids : {&document.input_ids, &document.labels}) {
    int32_t highest = 0;
    for (const int32_t id : *ids) highest = std::max(highest, id);
    part.stats.include_tokens(0, highest);
  }
}

void index_part(std::string_view text, int64_t offset, Part& part) {
  part.entries.clear();
  part.stats = {};
  part.num_lines = 0;
  part.error.clear();
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    part.num_lines++;
    if (!is_blank(line)) {
      try {
        parse_jsonl_line(line, part.document);
        add_document(part, offset + static_cast<int64_t>(begin), static_cast<int64_t>(line.size()));
      } catch (const std::exception& e) {  // an exception cannot leave a parallel loop
        part.error = e.what();
        part.error_is_unfinished = end == text.size();
        return;
      }
    }
    begin = end + 1;
  }
}

/// Ends of parts of `text`, each after a newline (the last: the end).
std::vector<size_t> split_at_lines(std::string_view text) {
  const size_t n = text.size();
  const size_t parts = std::clamp<size_t>(n / kThreadGrainBytes, 1, static_cast<size_t>(num_threads()));
  std::vector<size_t> ends;
  for (size_t p = 1; p < parts; p++) {
    const size_t newline = text.find('\n', p * n / parts);
    if (newline == std::string_view::npos) break;
    if (ends.empty() || newline + 1 > ends.back()) ends.push_back(newline + 1);
  }
  if (ends.empty() || ends.back() < n) ends.push_back(n);
  return ends;
}

}  // namespace

int64_t JsonlDocument::num_loss_tokens() const {
  if (input_ids.empty()) return 0;
  if (!has_labels) return num_tokens() - 1;
  return num_tokens() - 1 - std::count(labels.begin() + 1, labels.end(), kIgnoreTarget);
}

void parse_jsonl_line(std::string_view line, JsonlDocument& out) {
  LineParser(line, out).parse();
}

void index_jsonl(const InputFile& file, IndexWriter& writer, const DataProgress& progress) {
  writer.stats.encoding = Encoding::Json;
  const std::string name = file.path().string();
  std::vector<char> buffer;
  std::vector<Part> parts(static_cast<size_t>(num_threads()));
  int64_t block_offset = 0, kept = 0, line = 0;  // kept: bytes of a line that began in an earlier block
  if (progress) progress(0, file.size_bytes(), Progress::Unit::Bytes, "indexing " + name);
  while (block_offset + kept < file.size_bytes()) {
    const int64_t n = std::min(kBlockBytes, file.size_bytes() - block_offset - kept);
    buffer.resize(static_cast<size_t>(std::max(kept + n, static_cast<int64_t>(buffer.size()))));
    file.read(block_offset + kept, n, buffer.data() + kept);
    const bool is_last = block_offset + kept + n == file.size_bytes();
    std::string_view text(buffer.data(), static_cast<size_t>(kept + n));
    if (!is_last) text = text.substr(0, text.rfind('\n') + 1);  // whole lines; none: npos + 1 = 0
    CHECK(!text.empty() || kept + n <= kMaxLineBytes, "{}:{}: a line is longer than {} MiB; split the document", name,
          line + 1, kMaxLineBytes >> 20);

    const std::vector<size_t> ends = split_at_lines(text);
    parallel_for(static_cast<int64_t>(ends.size()), 1, [&](int64_t first, int64_t last) {
      for (int64_t p = first; p < last; p++) {
        const size_t begin = p == 0 ? 0 : ends[static_cast<size_t>(p - 1)];
        index_part(text.substr(begin, ends[static_cast<size_t>(p)] - begin), block_offset + static_cast<int64_t>(begin),
                   parts[static_cast<size_t>(p)]);
      }
    });
    for (size_t p = 0; p < ends.size(); p++) {
      const Part& part = parts[p];
      line += part.num_lines;
      if (!part.error.empty()) {
        fail("{}:{}: {}{}", name, line, part.error, part.error_is_unfinished ? "; the file may be truncated" : "");
      }
      for (const DocumentEntry& entry : part.entries) entry.num_tokens > 0 ? writer.add(entry) : writer.add_empty();
      writer.stats.include_tokens(part.stats.min_token, part.stats.max_token);
    }
    kept += n - static_cast<int64_t>(text.size());
    block_offset += static_cast<int64_t>(text.size());
    if (!text.empty()) std::memmove(buffer.data(), buffer.data() + text.size(), static_cast<size_t>(kept));
    if (progress) progress(block_offset, file.size_bytes(), Progress::Unit::Bytes, "indexing " + name);
  }
}

int64_t line_number(const InputFile& file, int64_t offset) {
  int64_t line = 1;
  std::vector<char> buffer;
  for (int64_t at = 0; at < offset;) {
    const int64_t n = std::min(kBlockBytes, offset - at);
    buffer.resize(static_cast<size_t>(n));
    file.read(at, n, buffer.data());
    line += std::count(buffer.begin(), buffer.end(), '\n');
    at += n;
  }
  return line;
}
