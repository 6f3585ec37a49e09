// Writes report0.json, report1.json, … into the folder given: a full report, the emptiest one and a failed one.
// check_schemas.py holds them against the schema.
#include <filesystem>
#include <fstream>
#include <limits>

#include "tests/unit/sample_report.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  qe::RunReport minimal;
  minimal.config = qe::parse_config("{}", "tiny.json");
  qe::RunReport failed = qe::full_report();
  failed.status = "failed";
  failed.failure = qe::RunFailure{"Step 3: the global norm is not finite", 7, 3};
  failed.final_train_loss = std::numeric_limits<double>::quiet_NaN();
  int i = 0;
  for (const qe::RunReport& r : {qe::full_report(), minimal, failed}) {
    std::ofstream(std::filesystem::path(argv[1]) / ("report" + std::to_string(i++) + ".json")) << qe::report_json(r);
  }
  return 0;
}
