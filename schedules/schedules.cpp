// Which schedules exist, which shapes they can do, and the one door that makes any of them.
// Owns no order of actions: each maker has its own file.
#include "schedules/schedules.h"

#include <algorithm>

#include "core/error.h"

namespace qe {
namespace {

int chunks_allowed(ScheduleKind kind) {  // 0: any
  switch (kind) {
    case ScheduleKind::k1F1B:
    case ScheduleKind::kGpipe:
      return 1;
    case ScheduleKind::kZbv:
      return 2;
    case ScheduleKind::kInterleaved1F1B:
    case ScheduleKind::kZb1p:
    case ScheduleKind::kCsv:
      return 0;
  }
  return 0;
}

bool is_looped(ScheduleKind kind) { return kind == ScheduleKind::kInterleaved1F1B || kind == ScheduleKind::kZb1p; }

bool has_equal_rounds(int ranks, int microbatches) { return microbatches % std::max(1, microbatches / ranks) == 0; }

// "4", or "4 or 6" when both are as near.
std::string nearest_with_equal_rounds(int ranks, int microbatches) {
  const int nearest = nearest_microbatches(ScheduleKind::kInterleaved1F1B, {ranks, 1, microbatches});
  const int above = 2 * microbatches - nearest;
  const bool two = above > nearest && has_equal_rounds(ranks, above);
  return std::to_string(nearest) + (two ? " or " + std::to_string(above) : "");
}

void fuse_backward(std::vector<Action>& list) {
  std::erase_if(list, [](const Action& a) { return a.kind == ActionKind::kWeightGrad; });
  for (Action& action : list) {
    if (action.kind == ActionKind::kInputGrad) action.kind = ActionKind::kFullBackward;
  }
}

void split_backward(std::vector<Action>& list) {
  std::vector<Action> result;
  for (const Action& action : list) {
    const bool full = action.kind == ActionKind::kFullBackward;
    result.push_back({full ? ActionKind::kInputGrad : action.kind, action.stage, action.microbatch, action.count});
    if (full) result.push_back({ActionKind::kWeightGrad, action.stage, action.microbatch});
  }
  list = std::move(result);
}

Schedule make_split(ScheduleKind kind, const PipelineShape& shape) {
  switch (kind) {
    case ScheduleKind::k1F1B:
      return make_1f1b(shape);
    case ScheduleKind::kInterleaved1F1B:
      return make_interleaved_1f1b(shape);
    case ScheduleKind::kZbv:
      return make_zbv(shape);
    case ScheduleKind::kGpipe:
      return make_gpipe(shape);
    case ScheduleKind::kZb1p:
      return make_zb1p(shape);
    case ScheduleKind::kCsv:
      throw ScheduleError("A csv schedule is read from a file, nothing can make it; name the file.");
  }
  throw ScheduleError("There is no schedule kind number " + std::to_string(static_cast<int>(kind)) + ".");
}

}  // namespace

const char* name_of(ScheduleKind kind) noexcept {
  switch (kind) {
    case ScheduleKind::k1F1B:
      return "1f1b";
    case ScheduleKind::kInterleaved1F1B:
      return "interleaved_1f1b";
    case ScheduleKind::kZbv:
      return "zbv";
    case ScheduleKind::kGpipe:
      return "gpipe";
    case ScheduleKind::kZb1p:
      return "zb1p";
    case ScheduleKind::kCsv:
      return "csv";
  }
  return "unknown";
}

int nearest_microbatches(ScheduleKind kind, const PipelineShape& shape) {
  const int wanted = std::max(1, shape.microbatches);
  if (!is_looped(kind)) return wanted;
  // M = 1 has equal rounds, so the search ends.
  for (int distance = 0;; ++distance) {
    if (wanted > distance && has_equal_rounds(shape.ranks, wanted - distance)) return wanted - distance;
    if (has_equal_rounds(shape.ranks, wanted + distance)) return wanted + distance;
  }
}

std::string why_not(ScheduleKind kind, const PipelineShape& shape) {
  const std::string name = name_of(kind);
  if (shape.ranks < 1)
    return name + " needs at least 1 rank, found " + std::to_string(shape.ranks) + "; use 1 or more.";
  if (shape.microbatches < 1) {
    return name + " needs at least 1 microbatch, found " + std::to_string(shape.microbatches) + "; use 1 or more.";
  }
  const int chunks = chunks_allowed(kind);
  if (shape.chunks_per_rank < 1 || (chunks != 0 && shape.chunks_per_rank != chunks)) {
    return name + " needs " + (chunks == 0 ? "at least 1 chunk" : "exactly " + std::to_string(chunks) + " chunk") +
           (chunks == 2 ? "s" : "") + " per rank, found " + std::to_string(shape.chunks_per_rank) + "; use " +
           std::to_string(std::max(1, chunks)) + ".";
  }
  if (is_looped(kind) && !has_equal_rounds(shape.ranks, shape.microbatches)) {
    return name + " cannot divide " + std::to_string(shape.microbatches) + " microbatches into " +
           std::to_string(shape.microbatches / shape.ranks) + " equal rounds on " + std::to_string(shape.ranks) +
           " ranks; use " + nearest_with_equal_rounds(shape.ranks, shape.microbatches) + " microbatches.";
  }
  return "";
}

Schedule make_schedule(ScheduleKind kind, const PipelineShape& shape, Backward backward) {
  return with_backward(make_split(kind, shape), backward);
}

Schedule with_backward(Schedule schedule, Backward backward) {
  for (auto& list : schedule.actions) backward == Backward::kFull ? fuse_backward(list) : split_backward(list);
  return schedule;
}

}  // namespace qe
