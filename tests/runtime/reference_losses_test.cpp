// The CPU backend against losses that it gave before, by bytes.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "tests/catch.h"
#include "tests/runtime/reference_losses.h"

namespace qe::testing {

TEST_CASE("golden configs give the stored losses and gradient norms to the last bit") {
  std::vector<std::string> paths;
  for (const auto& file : std::filesystem::directory_iterator(QE_GOLDEN_LOSSES)) paths.push_back(file.path().string());
  std::sort(paths.begin(), paths.end());
  REQUIRE(paths.size() >= 8);
  for (const std::string& path : paths) {
    const GoldenLosses golden = read_golden_losses(path);
    INFO(path << ": if the arithmetic was meant to change, run scripts/make_goldens.py and say why in the commit");
    REQUIRE(golden.results.losses.size() == static_cast<std::size_t>(golden.config.training.train_iters));
    const LossResults found = compute_losses(golden.config);
    CHECK(found.losses == golden.results.losses);
    CHECK(found.gradient_norms == golden.results.gradient_norms);
  }
}

}  // namespace qe::testing
