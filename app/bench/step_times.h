// What the pieces of one step say of where its time went: a Chrome trace of all ranks, and sums by kind for each.
// Owns no clock: core/runtime/step_timeline.h recorded the pieces.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/runtime/step_timeline.h"

namespace qe {

// [ranks], as every rank tells it with the same JSON.
std::string to_text(const std::vector<StepTimeline::Piece>&);
std::vector<StepTimeline::Piece> pieces_from(const std::string& text);

// {"traceEvents": [...]} for chrome://tracing and Perfetto: a process a rank, a thread a lane, microseconds from each
// rank's own step start (ranks meet at a barrier before).
nlohmann::ordered_json chrome_trace(const std::vector<std::vector<StepTimeline::Piece>>& ranks);

// For each kind of piece ("F", "I", "W", "refresh", "send", "AdamW", ...) its count, median and sum in ms; "span_ms",
// from the step's start to the end of its last piece; "compute_idle_ms": of the compute lane between its first and last
// piece.
nlohmann::ordered_json time_by_kind(const std::vector<StepTimeline::Piece>& rank);

}  // namespace qe
