// What a run measured, as two runs can be compared by it.
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

// The lines of a metrics.jsonl without times and rates.
inline std::vector<nlohmann::json> metrics_of(const std::string& path) {
  std::ifstream file(path);
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(file, line);) {
    nlohmann::json j = nlohmann::json::parse(line);
    for (const char* timed : {"ms", "tokens_per_second", "tokens_per_second_per_rank", "model_tflops_per_rank"}) {
      j.erase(timed);
    }
    lines.push_back(j);
  }
  return lines;
}
