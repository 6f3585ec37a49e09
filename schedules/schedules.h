// Schedules as pure functions: a shape in, action lists out. No device, no contract.
// Makers emit compute actions only; lower() adds the communication; validate() proves a lowered list safe to run.
// Rules and golden lists: semantics.md section 3.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/schedule.h"

namespace qe {

// kCsv has no maker: its lists are read from a file (schedules/csv.h).
enum class ScheduleKind : std::uint8_t { k1F1B, kInterleaved1F1B, kZbv, kGpipe, kZb1p, kCsv };
// The config's spelling: "1f1b", "interleaved_1f1b", "zbv", "gpipe", "zb1p", "csv".
const char* name_of(ScheduleKind) noexcept;

enum class Backward : std::uint8_t { kSplit, kFull };

// Empty when the maker can do the shape; else one sentence that names what is wrong and the nearest allowed M (or V).
std::string why_not(ScheduleKind, const PipelineShape&);

// The shape's M where the maker can do it, else the nearest M that it can (the smaller of two); other faults of the
// shape are left as they are.
int nearest_microbatches(ScheduleKind, const PipelineShape&);

// Compute actions only. Each throws ScheduleError with why_not's sentence when the shape cannot be done.
Schedule make_1f1b(const PipelineShape&);              // semantics.md 3.2, classic order
Schedule make_interleaved_1f1b(const PipelineShape&);  // semantics.md 3.2
Schedule make_zbv(const PipelineShape&);               // semantics.md 3.3
Schedule make_gpipe(const PipelineShape&);             // semantics.md 3.1
Schedule make_zb1p(const PipelineShape&);              // semantics.md 3.5; V = 1 is ZB-H1
// Any of them, with_backward.
Schedule make_schedule(ScheduleKind, const PipelineShape&, Backward);
// kFull: every W is dropped and I becomes B at its place (design.md 5). kSplit: a B becomes I and W, one after the
// other.
Schedule with_backward(Schedule, Backward);

// Makes one W of every `group` consecutive microbatches {0..G-1}, {G..2G-1}, …, so that what a W sums does not depend
// on the schedule (design.md 4). It stands in the place of its last member's W; a stage's last one behind every I whose
// gradient another rank waits for. On a compute list whose Ws are single. Throws ScheduleError unless `group` divides
// M.
Schedule group_weight_grads(Schedule compute, int group);

// Adds SEND/RECV and REDUCE_GRAD so that order cannot deadlock (semantics.md 3.1). Throws ScheduleError when no rank
// can go on, with the grid.
Schedule lower(const Schedule& compute);
// Its first half: REDUCE_GRAD(stage) right after the action that completes the stage's M-th weight gradient.
Schedule with_reductions(const Schedule&);
// Does communication stand in the lists?
bool is_lowered(const Schedule&);

// Proves: every F, I, W (or F, B) exactly once per stage and microbatch, on the stage's rank; dependencies; F, I and W
// ascending per stage; messages matched, in one order at both ends of each directed edge; no cycle; one REDUCE_GRAD a
// stage after its last W. Throws ScheduleError naming rank, position and action, with the rank × step grid and the cell
// marked.
void validate(const Schedule& lowered);

// The rank × step grid; the cell (rank, position), if given, is followed by "<-- ERROR HERE".
std::string format_grid(const Schedule&, int error_rank = -1, int error_position = -1);

// What a lowered schedule needs before anything runs (design.md 4 and 6).
struct StageResources {
  int peak_tapes = 0;        // live from F until the last consumer
  int peak_pending_w = 0;    // I done, W not
  int peak_input_grads = 0;  // made by I or B, not yet sent or copied by the neighbour's; may outlive the tape
  int forward_ring = 0;      // depth of the receive ring of the stage's input; 0: no message
  int backward_ring = 0;     // the same of its output gradient
  int w_group = 1;           // microbatches of its largest W
  // Tape slots when they follow the peak: an input gradient stays in its slot until it is read, and a W's microbatches
  // are adjacent slots.
  [[nodiscard]] int peak_slots() const noexcept {
    const int live = peak_tapes > peak_input_grads ? peak_tapes : peak_input_grads;
    return (live + w_group - 1) / w_group * w_group;
  }
};
struct RankResources {
  int peak_tapes = 0;
  int peak_pending_w = 0;
  int messages_out = 0;
  int messages_in = 0;
};
struct Resources {
  std::vector<StageResources> stages;  // [S]
  std::vector<RankResources> ranks;    // [P]
};
Resources resources(const Schedule& lowered);

// Which actions are W not directly preceded in the list by their own I (the paper's "delayed dW"), per rank.
std::vector<int> delayed_weight_grads(const Schedule&);

// CUDA graphs of one rank (design.md 4): 3 (full: 2) per slot, 1 refresh a stage, and with peak slots 1 first-write a
// stage.
struct GraphCount {
  int compute = 0;
  int first_write = 0;
  int refresh = 0;
  [[nodiscard]] int total() const noexcept { return compute + first_write + refresh; }
};
GraphCount graph_count(const Schedule& lowered, int rank, bool peak_slots);

}  // namespace qe
