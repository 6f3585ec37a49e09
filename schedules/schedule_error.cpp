// Refusals. Owns their wording where several files share it, and the checks that make indexing safe.
#include "schedules/schedule_error.h"

#include "core/error.h"

namespace qe {
namespace {

void require_sizes(const Schedule& schedule) {
  const PipelineShape& shape = schedule.shape;
  if (shape.ranks < 1 || shape.chunks_per_rank < 1 || shape.microbatches < 1) {
    throw ScheduleError("The schedule's shape is " + std::to_string(shape.ranks) + " ranks x " +
                        std::to_string(shape.chunks_per_rank) + " chunks x " + std::to_string(shape.microbatches) +
                        " microbatches; each must be at least 1.");
  }
  if (schedule.actions.size() != static_cast<std::size_t>(shape.ranks)) {
    throw ScheduleError("The schedule has " + std::to_string(schedule.actions.size()) + " action lists for " +
                        std::to_string(shape.ranks) + " ranks; give one list a rank.");
  }
  if (schedule.rank_of_stage.size() != static_cast<std::size_t>(shape.stages())) {
    throw ScheduleError("The schedule places " + std::to_string(schedule.rank_of_stage.size()) +
                        " stages, its shape has " + std::to_string(shape.stages()) + "; give each stage one rank.");
  }
  for (const int rank : schedule.rank_of_stage) {
    if (rank < 0 || rank >= shape.ranks) {
      throw ScheduleError("The schedule places a stage on rank " + std::to_string(rank) + ", ranks are 0 to " +
                          std::to_string(shape.ranks - 1) + ".");
    }
  }
}

std::string cell_fault(const Schedule& schedule, int rank, const Action& action) {
  const int stage = to_int(action.stage);
  const int microbatch = to_int(action.microbatch);
  if (stage < 0 || stage >= schedule.shape.stages()) {
    return "there is no such stage, stages are 0 to " + std::to_string(schedule.shape.stages() - 1);
  }
  if (schedule.rank_of(action.stage) != rank) {
    return "stage " + std::to_string(stage) + " lives on rank " + std::to_string(schedule.rank_of(action.stage));
  }
  if (action.count < 1 || (action.count > 1 && action.kind != ActionKind::kWeightGrad)) {
    return "its count is " + std::to_string(action.count) + ", only a W may cover more than one microbatch";
  }
  if (action.kind == ActionKind::kReduceGrad && microbatch != 0) return "REDUCE_GRAD has no microbatch";
  // Not microbatch + count > M: the sum may overflow.
  if (microbatch < 0 || microbatch >= schedule.shape.microbatches ||
      action.count > schedule.shape.microbatches - microbatch) {
    return "there is no such microbatch, microbatches are 0 to " + std::to_string(schedule.shape.microbatches - 1);
  }
  return "";
}

}  // namespace

void require_possible(ScheduleKind kind, const PipelineShape& shape) {
  if (const std::string fault = why_not(kind, shape); !fault.empty()) throw ScheduleError(fault);
}

void fail_at(const Schedule& schedule, int rank, int position, const std::string& what) {
  const auto& list = schedule.actions.at(static_cast<std::size_t>(rank));
  const bool at_end = position >= static_cast<int>(list.size());
  throw CellError(rank, position, what,
                  "Rank " + std::to_string(rank) + ", position " + std::to_string(position) + ", " +
                      (at_end ? "end of list" : "action " + to_string(list[static_cast<std::size_t>(position)])) +
                      ": " + what + ".\n" + format_grid(schedule, rank, position));
}

void require_well_formed(const Schedule& schedule) {
  require_sizes(schedule);
  for (int rank = 0; rank < schedule.shape.ranks; ++rank) {
    const auto& list = schedule.actions[static_cast<std::size_t>(rank)];
    for (std::size_t i = 0; i < list.size(); ++i) {
      const std::string fault = cell_fault(schedule, rank, list[i]);
      if (!fault.empty()) fail_at(schedule, rank, static_cast<int>(i), fault);
    }
  }
}

}  // namespace qe
