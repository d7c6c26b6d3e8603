// What people read about the options: --help, the README's table, and the resolved options at the start of a run.

#include <algorithm>

#include "layers/core/check.h"
#include "llama/run_options.h"

namespace {

constexpr size_t kHelpWidth = 100;

std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

/// The words in lines of at most `width` columns that start with `indent`; a longer word gets its own line.
std::string wrapped(const std::vector<std::string>& words, const std::string& indent, size_t width) {
  std::string out, line;
  for (const std::string& word : words) {
    if (!line.empty() && indent.size() + line.size() + 1 + word.size() > width) {
      out += indent + line + "\n";
      line.clear();
    }
    line += (line.empty() ? "" : " ") + word;
  }
  return out + indent + line + "\n";
}

/// As it is written on the command line.
std::string value_of(const Option& option) {
  const nlohmann::json value = write_option(option);
  return value.is_string() ? value.get<std::string>() : value.dump();
}

std::string default_of(const Option& option) {
  const std::string value = value_of(option);
  return value == "[]" ? "" : value;
}

}  // namespace

std::string usage_text() {
  return "Usage: train_gpt [CONFIG.json] [--section.key value ...] [--plan [--world N] | --selftest]\n"
         "       train_gpt --help | --version\n";
}

std::string help_text() {
  RunConfig run;
  std::string help = fmt::format(
      "train_gpt {}: trains decoder-only transformers from and to Hugging Face "
      "checkpoints.\n\n{}\n",
      kVersion, usage_text());
  help += wrapped(
      words_of("CONFIG.json holds an object a section; // and /* */ comments are allowed. The command line wins over "
               "the file, the file over the defaults in [brackets]. Numbers may be written for people: k, M, G, T "
               "are powers of 1000, Ki, Mi, Gi, Ti powers of 1024 (128k = 128000, 128Ki = 131072), 3.8M, "
               "1_000_000; in a file as a text. Lists take several values or JSON: --data.train a.jsonl 'b*.jsonl', "
               "--data.train '{\"path\": \"c.jsonl\", \"weight\": 2}', --optimizer.betas 0.9,0.95."),
      "", kHelpWidth);
  help +=
      "\n  --plan         print the configuration, the model, the data and the memory plan, and stop\n"
      "  --world N      with --plan: for N ranks\n"
      "  --selftest     compare every layer on this GPU with the CPU, print a table, and stop\n";
  for (const Section& section : option_sections()) {
    help += fmt::format("\n{}: {}\n", section.name, section.help);
    for (const Option& o : options_of(run)) {
      if (o.section() != section.name) continue;
      const std::string value = default_of(o);
      help += fmt::format("  --{}  {}{}\n", o.key, o.expected(), value.empty() ? "" : "  [" + value + "]");
      help += wrapped(words_of(o.help), "      ", kHelpWidth);
    }
  }
  return help;
}

std::string describe(const RunConfig& run, int width) {
  RunConfig copy = run;
  std::string text;
  for (const Section& section : option_sections()) {
    std::vector<std::string> pieces;
    for (const Option& o : options_of(copy)) {
      if (o.section() != section.name || o.unused(run) != nullptr) continue;
      if (!pieces.empty()) pieces.back() += ",";
      pieces.push_back(o.name() + " " + value_of(o));
    }
    const std::string indent(12, ' ');
    std::string lines = wrapped(pieces, indent, static_cast<size_t>(std::max(width, 40)));
    text += lines.replace(0, indent.size(), fmt::format("{:<12}", section.name));
  }
  return text;
}
