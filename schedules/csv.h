// Schedules as PyTorch's CSV text: one line a rank, actions separated by commas, compute alone or with communication.
// Owns the text form and where a fault stands in it; what is safe to run is validate()'s to say.
#pragma once

#include <string>
#include <string_view>

#include "core/schedule.h"

namespace qe {

// The lists as they are written: compute actions only, or lowered. The shape follows from the text: P lines, V stages
// on each, in whatever placement; M microbatches. Left out: empty cells (PyTorch's bubbles), UNSHARD and RESHARD
// (nothing is sharded here). "(0F3;3B1)OVERLAP_F_B" is read as 0F3, 3B1. Messages without any REDUCE_GRAD, as older
// files have them, get one a stage, after its last W or B. Throws ScheduleError "source:line, cell N "text": fault"
// with the grid, unless F, I (or B) and W ascend on every stage and the lists, lowered if they were compute only, are
// valid.
Schedule parse_schedule_csv(std::string_view text, const std::string& source);

// Throws ScheduleError for a W over several microbatches: PyTorch has no text for it.
std::string to_csv(const Schedule&);

}  // namespace qe
