// How the rooms of schedules/ refuse: impossible shapes, malformed cells, and an error that shows its cell in the grid.
#pragma once

#include <string>

#include "core/error.h"
#include "schedules/schedules.h"

namespace qe {

// Throws ScheduleError with why_not's sentence when it has one.
void require_possible(ScheduleKind, const PipelineShape&);

// A fault with a place in the lists, so that whoever read them from a file can name the file's.
struct CellError : ScheduleError {
  CellError(int at_rank, int at_position, std::string fault, const std::string& message)
      : ScheduleError(message), rank(at_rank), position(at_position), what_is_wrong(std::move(fault)) {}
  int rank;
  int position;               // one past the end: the list's end
  std::string what_is_wrong;  // the sentence without place and grid
};

// Throws CellError: "Rank R, position P, action A: <what>", then the grid with that cell marked. A position one past
// the end stands for the list's end.
[[noreturn]] void fail_at(const Schedule&, int rank, int position, const std::string& what);

// Throws ScheduleError unless sizes agree and every action names a stage on its rank and microbatches below M, so that
// later checks can index by them.
void require_well_formed(const Schedule&);

}  // namespace qe
