#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "app/commands/commands.h"
#include "app/data/byte_tokenizer.h"
#include "app/data/token_dataset.h"
#include "core/error.h"

namespace qe {
namespace {

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file || std::filesystem::is_directory(path)) {
    throw DataError("Input " + path + " cannot be read; wanted a text file.");
  }
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace

int run_tokenize(const TokenizeOptions& options) {
  if (!options.force && std::filesystem::exists(options.output)) {
    throw UsageError("Output " + options.output + " exists; choose another name, or replace it with --force.");
  }
  std::vector<std::uint16_t> tokens;
  for (const std::string& path : options.inputs) append_document(read_text(path), tokens);
  write_token_file(options.output, tokens);
  std::printf("%s: %zu tokens of %zu document(s), model.vocab_size %d\n", options.output.c_str(), tokens.size(),
              options.inputs.size(), kByteVocabulary);
  return 0;
}

void check_data(const Config& c) {
  TokenDataset(c.data.train, c.model.vocab_size, c.training.seq_length, "data.train");
  if (!c.data.valid.empty()) TokenDataset(c.data.valid, c.model.vocab_size, c.training.seq_length, "data.valid");
  if (!c.data.out_of_domain.empty()) {
    TokenDataset(c.data.out_of_domain, c.model.vocab_size, c.training.seq_length, "data.out_of_domain");
  }
}

}  // namespace qe
