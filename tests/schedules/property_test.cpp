// Seeded damage to schedule files: what is unsafe is refused by line and cell; what is accepted runs, and runs within
// the slots and rings that resources() gives it.
#include <map>

#include "core/error.h"
#include "schedules/csv.h"
#include "schedules/schedules.h"
#include "tests/catch.h"
#include "tests/schedules/list_runner.h"

using qe::Action;
using qe::ActionKind;
using qe::Schedule;
using qe::ScheduleKind;

namespace {

class Dice {  // own generator: the standard's distributions differ between libraries, seeds must not
 public:
  explicit Dice(std::uint64_t seed) : state_(seed * 2654435761U + 1) {}
  std::size_t below(std::size_t n) {
    state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<std::size_t>(state_ >> 33) % n;
  }

 private:
  std::uint64_t state_;
};

using Cells = std::vector<std::vector<std::string>>;  // [line][cell]

Cells cells_of(const Schedule& schedule) {
  Cells cells;
  for (const auto& list : schedule.actions) {
    auto& line = cells.emplace_back();
    for (const Action& action : list) line.push_back(to_string(action));
  }
  return cells;
}

std::string text_of(const Cells& cells) {
  std::string text;
  for (const auto& line : cells) {
    for (std::size_t i = 0; i < line.size(); ++i) text += (i == 0 ? "" : ",") + line[i];
    text += "\n";
  }
  return text;
}

enum class Damage { kDrop, kDuplicate, kSwap, kRetarget, kMove, kMoveMessage, kOtherLine, kCount_ };

bool is_message(const std::string& cell) {
  return cell.find("SEND") != std::string::npos || cell.find("RECV") != std::string::npos;
}

void damage(Cells& cells, Damage kind, Dice& dice) {
  auto& line = cells[dice.below(cells.size())];
  if (line.empty()) return;
  const auto at = [&](std::size_t i) { return line.begin() + static_cast<std::ptrdiff_t>(i); };
  std::size_t i = dice.below(line.size());
  if (kind == Damage::kMoveMessage) {
    for (std::size_t tries = 0; tries < line.size() && !is_message(line[i]); ++tries) i = (i + 1) % line.size();
  }
  const std::string cell = line[i];
  switch (kind) {
    case Damage::kDrop:
      line[i].clear();
      break;
    case Damage::kDuplicate:
      line.insert(at(dice.below(line.size() + 1)), cell);
      break;
    case Damage::kSwap:
      std::swap(line[i], line[dice.below(line.size())]);
      break;
    case Damage::kRetarget: {
      if (cell.empty()) break;
      Action action = qe::parse_action(cell);
      if (dice.below(2) == 0) {
        action.stage = qe::StageIndex{static_cast<int>(dice.below(5))};
      } else {
        action.microbatch = qe::MicrobatchIndex{static_cast<int>(dice.below(5))};
      }
      line[i] = to_string(action);
      break;
    }
    case Damage::kMove:
    case Damage::kMoveMessage: {
      line.erase(at(i));
      const std::size_t reach = 1 + dice.below(4);  // near moves are the ones that may be harmless
      line.insert(at(std::min(line.size(), dice.below(2) == 0 ? i + reach : i - std::min(i, reach))), cell);
      break;
    }
    case Damage::kOtherLine:
      line[i].clear();
      cells[dice.below(cells.size())].push_back(cell);
      break;
    case Damage::kCount_:
      break;
  }
}

// Runs every rank's list on slots and ring entries that hold the number of the microbatch in them. Empty, or the first
// value that was overwritten before it was read.
class Memory {
 public:
  explicit Memory(const Schedule& schedule) : schedule_(schedule), need_(qe::resources(schedule)) {}

  std::string run() {
    for (const auto& list : schedule_.actions) {
      for (const Action& action : list) step(action);
    }
    return fault_;
  }

 private:
  using Place = std::tuple<std::string, int, int>;  // what, stage, entry
  const qe::StageResources& need(int stage) const { return need_.stages[static_cast<std::size_t>(stage)]; }
  bool local(int stage, int other) const {
    return other >= 0 && other < schedule_.shape.stages() &&
           schedule_.rank_of_stage[static_cast<std::size_t>(stage)] ==
               schedule_.rank_of_stage[static_cast<std::size_t>(other)];
  }
  void write(const char* what, int stage, int depth, int m) { holds_[{what, stage, m % std::max(1, depth)}] = m; }
  void read(const char* what, int stage, int depth, int m) {
    const Place place{what, stage, m % std::max(1, depth)};
    const bool there = holds_.contains(place) && holds_[place] == m;
    if (!there && fault_.empty()) {
      fault_ = std::string(what) + " of stage " + std::to_string(stage) + " microbatch " + std::to_string(m);
    }
  }

  void step(const Action& action) {
    const int s = to_int(action.stage), m = to_int(action.microbatch), slots = need(s).peak_slots();
    switch (action.kind) {
      case ActionKind::kForward:
        if (local(s, s - 1)) read("output", s - 1, need(s - 1).peak_slots(), m);
        if (s > 0 && !local(s, s - 1)) read("forward ring", s, need(s).forward_ring, m);
        write("tape", s, slots, m);
        write("output", s, slots, m);
        break;
      case ActionKind::kInputGrad:
      case ActionKind::kFullBackward:
        if (local(s, s + 1)) read("input gradient", s + 1, need(s + 1).peak_slots(), m);
        if (s + 1 < schedule_.shape.stages() && !local(s, s + 1)) {
          read("backward ring", s, need(s).backward_ring, m);
        }
        read("tape", s, slots, m);
        write("input gradient", s, slots, m);
        break;
      case ActionKind::kWeightGrad:
        for (int k = 0; k < action.count; ++k) read("tape", s, slots, m + k);
        break;
      case ActionKind::kSendF:
        read("output", s, slots, m);
        break;
      case ActionKind::kSendB:
        read("input gradient", s, slots, m);
        break;
      case ActionKind::kRecvF:
        write("forward ring", s, need(s).forward_ring, m);
        break;
      case ActionKind::kRecvB:
        write("backward ring", s, need(s).backward_ring, m);
        break;
      case ActionKind::kReduceGrad:
        break;
    }
  }

  const Schedule& schedule_;
  qe::Resources need_;
  std::map<Place, int> holds_;
  std::string fault_;
};

std::vector<Schedule> samples() {
  return {qe::make_1f1b({3, 1, 4}),  qe::make_interleaved_1f1b({2, 2, 4}),
          qe::make_zbv({2, 2, 4}),   qe::make_zb1p({2, 2, 4}),
          qe::make_gpipe({2, 1, 4}), qe::make_schedule(ScheduleKind::kZbv, {2, 2, 4}, qe::Backward::kFull)};
}

struct Tally {
  int refused = 0, accepted = 0;
};

// As a file with messages when the mutant's original had them; compute lists are lowered here.
void judge(const Cells& mutant, bool changed, Tally& tally) {
  const std::string text = text_of(mutant);
  Schedule schedule;
  try {
    schedule = qe::parse_schedule_csv(text, "mutant.csv");
  } catch (const qe::ScheduleError& e) {
    ++tally.refused;
    const std::string said = e.what();
    INFO(text << said);
    // A stage that is gone, or all of them, has no cell.
    const bool names_cell = said.starts_with("mutant.csv:") &&
                            (said.find(", cell ") < said.find('\n') || said.find(", end of line") < said.find('\n'));
    const bool has_no_cell = said.find("is missing; stages count") != std::string::npos ||
                             said.find("stages, line 1 has") != std::string::npos;
    REQUIRE((names_cell || has_no_cell));
    return;
  }
  tally.accepted += changed;
  const Schedule lowered = qe::is_lowered(schedule) ? schedule : qe::lower(schedule);
  INFO(text);
  REQUIRE(qe_test::run_lists(lowered) == "");
  REQUIRE(Memory(lowered).run() == "");
}

}  // namespace

TEST_CASE("a damaged schedule file is refused by its cell, or runs within its slots and rings") {
  Tally compute, lowered;
  for (const Schedule& original : samples()) {
    for (const bool with_messages : {false, true}) {
      const Cells cells = cells_of(with_messages ? qe::lower(original) : original);
      Tally& tally = with_messages ? lowered : compute;
      for (int kind = 0; kind < static_cast<int>(Damage::kCount_); ++kind) {
        for (std::uint64_t seed = 0; seed < 100; ++seed) {
          Dice dice(seed * 31 + static_cast<std::uint64_t>(kind));
          Cells mutant = cells;
          for (std::size_t n = 0; n <= seed % 3; ++n) damage(mutant, static_cast<Damage>(kind), dice);
          judge(mutant, mutant != cells, tally);
        }
      }
    }
  }
  INFO(compute.refused << " " << compute.accepted << " " << lowered.refused << " " << lowered.accepted);
  CHECK(compute.refused > 1000);
  CHECK(lowered.refused > 1000);
  CHECK(compute.accepted > 100);
  CHECK(lowered.accepted > 100);
}

TEST_CASE("every maker's lists run within the slots and rings that resources() gives them") {
  const int ranks = GENERATE(1, 2, 3, 4);
  for (const ScheduleKind kind : {ScheduleKind::k1F1B, ScheduleKind::kInterleaved1F1B, ScheduleKind::kZbv,
                                  ScheduleKind::kGpipe, ScheduleKind::kZb1p}) {
    for (const int chunks : {1, 2, 3}) {
      for (int microbatches = 1; microbatches <= 3 * ranks; ++microbatches) {
        if (!qe::why_not(kind, {ranks, chunks, microbatches}).empty()) continue;
        for (const qe::Backward backward : {qe::Backward::kSplit, qe::Backward::kFull}) {
          const Schedule lowered = qe::lower(qe::make_schedule(kind, {ranks, chunks, microbatches}, backward));
          INFO(qe::name_of(kind) << " P=" << ranks << " V=" << chunks << " M=" << microbatches);
          REQUIRE(Memory(lowered).run() == "");
          // No maker's input gradient outlives its tape.
          for (const qe::StageResources& s : qe::resources(lowered).stages) {
            REQUIRE(s.peak_input_grads <= s.peak_tapes);
          }
        }
      }
    }
  }
}

TEST_CASE("an input gradient that is read after its tape is free keeps its slot") {
  // Both stages on one rank: stage 1 runs through before stage 0's backward reads what it left.
  const Schedule local = qe::lower(
      qe::parse_schedule_csv("0F0,0F1,0F2,1F0,1I0,1W0,1F1,1I1,1W1,1F2,1I2,1W2,0I0,0W0,0I1,0W1,0I2,0W2\n", "local.csv"));
  CHECK(qe::resources(local).stages[1].peak_tapes == 1);
  CHECK(qe::resources(local).stages[1].peak_slots() == 3);
  CHECK(Memory(local).run() == "");
  // Sent late instead.
  const Schedule late = qe::parse_schedule_csv(
      "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0I0,0W0,0RECV_B1,0I1,0W1,0REDUCE_GRAD\n"
      "1RECV_F0,1F0,1I0,1W0,1RECV_F1,1F1,1I1,1SEND_B0,1SEND_B1,1W1,1REDUCE_GRAD\n",
      "late.csv");
  CHECK(qe::resources(late).stages[1].peak_tapes == 1);
  CHECK(qe::resources(late).stages[1].peak_slots() == 2);
  CHECK(Memory(late).run() == "");
}
