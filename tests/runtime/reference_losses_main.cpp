// Prints what golden loss files should hold, for scripts/make_goldens.py: per file one line of the losses and one of
// the gradient norms, as C hex floats.
#include <cstdio>
#include <exception>

#include "tests/runtime/reference_losses.h"

namespace {

void print_line(const std::vector<std::string>& values) {
  for (std::size_t i = 0; i < values.size(); ++i) std::printf("%s%s", i == 0 ? "" : " ", values[i].c_str());
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    for (int i = 1; i < argc; ++i) {
      const qe::testing::LossResults results =
          qe::testing::compute_losses(qe::testing::read_golden_losses(argv[i]).config);
      print_line(results.losses);
      print_line(results.gradient_norms);
    }
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "golden_losses: %s\n", e.what());
    return 1;
  }
}
