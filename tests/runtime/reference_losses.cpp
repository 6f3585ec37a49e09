#include "tests/runtime/reference_losses.h"

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/runtime/training_run.h"

namespace qe::testing {
namespace {

std::string hex(double v) {
  char text[40];
  std::snprintf(text, sizeof text, "%a", v);
  return text;
}

}  // namespace

GoldenLosses read_golden_losses(const std::string& path) {
  std::ifstream in(path);
  const nlohmann::json golden = nlohmann::json::parse(in);
  return {parse_config(golden.at("config").dump(), path),
          {golden.at("losses").get<std::vector<std::string>>(),
           golden.at("gradient_norms").get<std::vector<std::string>>()}};
}

LossResults compute_losses(const Config& config) {
  const RunOutcome run = run_training(config, {.steps = static_cast<int>(config.training.train_iters), .trace = false});
  LossResults results;
  for (const double loss : run.losses) results.losses.push_back(hex(loss));
  for (const OptimizerScalars& s : run.scalars) results.gradient_norms.push_back(hex(static_cast<double>(s.norm)));
  return results;
}

}  // namespace qe::testing
