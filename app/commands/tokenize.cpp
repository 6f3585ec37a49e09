#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "app/commands/commands.h"
#include "app/config_faults.h"
#include "app/data/byte_tokenizer.h"
#include "app/data/token_dataset.h"
#include "app/regular_file.h"
#include "core/error.h"

namespace qe {
namespace {

std::string read_text(const std::string& path) {
  const RegularFile file(path);
  if (!file.failure().empty()) throw DataError("Input " + path + " " + file.failure() + "; wanted a text file.");
  std::optional<std::string> text = file.read_all();
  if (!text) throw DataError("Input " + path + " cannot be read: " + std::strerror(errno) + ".");
  return std::move(*text);
}

// Bytes are tokens whatever they mean, so these inputs are taken; but hardly anybody wants them.
void warn_about(const std::string& path, const std::string& text) {
  if (text.empty()) {
    std::fprintf(stderr, "qeffect: warning: Input %s is empty; its document is an end mark alone.\n", path.c_str());
  } else if (const std::size_t at = text.find('\0'); at != std::string::npos) {
    std::fprintf(stderr, "qeffect: warning: Input %s has a NUL at byte %zu; it may be no text.\n", path.c_str(), at);
  }
}

void check_output(const TokenizeOptions& options) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_status found = fs::status(options.output, error);
  if (!fs::exists(found)) return;
  if (!fs::is_regular_file(found)) {
    throw UsageError("Output " + options.output + " exists and is not a regular file; choose another name.");
  }
  if (!options.force) {
    throw UsageError("Output " + options.output + " exists; choose another name, or replace it with --force.");
  }
  for (const std::string& input : options.inputs) {
    if (fs::equivalent(input, options.output, error)) {
      throw UsageError("Output " + options.output + " is the input " + input + "; choose another name.");
    }
  }
}

}  // namespace

int run_tokenize(const TokenizeOptions& options) {
  check_output(options);
  std::vector<std::uint16_t> tokens;
  for (const std::string& path : options.inputs) {
    const std::string text = read_text(path);
    warn_about(path, text);
    append_document(text, tokens);
  }
  if (tokens.size() == options.inputs.size()) {
    throw DataError(counted(std::ssize(options.inputs), "input") + ", " + options.inputs.front() +
                    " first, without any text; nothing is written.");
  }
  write_token_file(options.output, tokens);
  std::printf("%s: %zu tokens of %zu document%s, model.vocab_size %d\n", options.output.c_str(), tokens.size(),
              options.inputs.size(), options.inputs.size() == 1 ? "" : "s", kByteVocabulary);
  return 0;
}

void check_data(const Config& c) {
  const auto check = [&](const std::vector<std::string>& patterns, const char* key) {
    TokenDataset(patterns, c.model.vocab_size, c.training.seq_length, key, c.data.format);
  };
  check(c.data.train, "data.train");
  if (!c.data.valid.empty()) check(c.data.valid, "data.valid");
  if (!c.data.out_of_domain.empty()) check(c.data.out_of_domain, "data.out_of_domain");
}

}  // namespace qe
