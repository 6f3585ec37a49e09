// The tune file: which algorithm computes a matrix product, by card and library, as timed once by bench --tune.
// Owns the file's form and when a table applies; timing is bench/gemm_tune's.
#pragma once

#include <string>
#include <vector>

#include "kernels/backend.h"

namespace qe {

struct GemmTableEntry {
  std::string product;    // as a backend names it
  std::string algorithm;  // hexadecimal words, for the table's library alone
  double us = 0;          // one call, when it was tuned
  double first_us = 0;    // the same by the library's first proposal
  bool operator==(const GemmTableEntry&) const = default;
};

struct GemmTable {
  GemmPlatform platform;  // one table each
  std::vector<GemmTableEntry> entries;
  bool operator==(const GemmTable&) const = default;
};

// Throws ConfigError with one line for every fault found: an unknown, missing or doubled key, a value of another form,
// a platform or product that stands twice. `source` is the path that messages name.
std::vector<GemmTable> parse_gemm_tables(const std::string& text, const std::string& source);
// parse_gemm_tables of a file's text. Throws ConfigError when the file cannot be read.
std::vector<GemmTable> read_gemm_tables(const std::string& path);

// What parse_gemm_tables reads back to the same tables.
std::string gemm_tables_json(const std::vector<GemmTable>&);
// Puts the text in the file's place at once: a reader sees the old file or the new one. Throws UsageError.
void write_gemm_tables(const std::string& path, const std::vector<GemmTable>&);

// Adds the entry to its platform's table, or puts it in the place of the same product's.
void put_entry(std::vector<GemmTable>&, const GemmPlatform&, const GemmTableEntry&);

// Lets the backend compute by the file's table for its platform, if there is one. Returns a line for the log that says
// which it was; empty for an empty path.
std::string use_gemm_table(const std::string& path, Backend&);

}  // namespace qe
