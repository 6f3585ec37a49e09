// plan: what a config will do, told without a GPU, MPI or data; and the costs that make it tell milliseconds.
#include <cstdio>
#include <fstream>

#include "app/commands/commands.h"
#include "app/pipeline_plan.h"
#include "app/plan.h"
#include "app/plan_compare.h"
#include "app/plan_measure.h"
#include "core/error.h"
#include "schedules/csv.h"

namespace qe {
namespace {

void print(const std::string& text) {
  if (std::fputs(text.c_str(), stdout) < 0) throw Error(ExitCode::kRuntime, "Cannot write to standard output.");
}

void measure(const Config& config, const std::string& path) {
  const std::string text = costs_json(measure_costs(config), config);
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) throw UsageError("The cost file " + path + " cannot be written; name another by --measure-costs.");
  print(path + ": costs of this machine, for qeffect plan --costs\n");
}

std::string csv_text(const Config& config, const std::string& form) {
  const Schedule lists = make_lists(config);
  if (form == "lowered") return to_csv(make_rank_plan(config).schedule);
  if (is_lowered(lists)) {
    throw UsageError("The schedule of " + config.pipeline.schedule_csv +
                     " is lowered already, so there is no compute list to print; use --csv lowered.");
  }
  return to_csv(lists);
}

}  // namespace

int run_plan(const Config& config, const PlanOptions& options) {
  if (!options.measure_costs.empty()) {
    measure(config, options.measure_costs);
    return 0;
  }
  if (!options.csv.empty()) {
    print(csv_text(config, options.csv));
    return 0;
  }
  const PlanCosts costs = options.costs.empty() ? unit_costs() : read_costs(options.costs, config);
  if (options.compare) {
    const std::vector<Candidate> all = compare_schedules(config, costs);
    print(options.json ? compare_json(config, all, costs) : compare_text(config, all, costs));
    return 0;
  }
  const Plan plan = make_plan(config, costs);
  print(options.json ? plan_json(config, plan, costs) : plan_text(config, plan, costs));
  return 0;
}

}  // namespace qe
