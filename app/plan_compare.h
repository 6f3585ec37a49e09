// Every schedule for one model on one number of ranks, best first. Owns which candidates there are and their order;
// each is planned as a config of its own, by the same checks.
#pragma once

#include <string>
#include <vector>

#include "app/plan.h"

namespace qe {

struct Candidate {
  ScheduleKind kind = ScheduleKind::k1F1B;
  int chunks_per_rank = 1;
  Backward backward = Backward::kSplit;
  int microbatches = 0;   // the config's, or the nearest that the schedule can do
  std::string refusal;    // why it cannot run, or not with the config's microbatches; empty: it can
  bool possible = false;  // with the microbatches above
  double step = 0;        // milliseconds or units (PlanCosts)
  double bubble = 0;
  std::size_t most_bytes = 0;      // of any rank
  int peak_tapes = 0, graphs = 0;  // of any rank
  [[nodiscard]] double per_microbatch() const noexcept { return step / microbatches; }
};

// Fastest a microbatch first, less memory first among equals; what cannot run at all comes last.
std::vector<Candidate> compare_schedules(const Config&, const PlanCosts&);

std::string compare_text(const Config&, const std::vector<Candidate>&, const PlanCosts&);
std::string compare_json(const Config&, const std::vector<Candidate>&, const PlanCosts&);

}  // namespace qe
