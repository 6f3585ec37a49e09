#include "schedules/csv.h"

#include <algorithm>
#include <array>
#include <map>

#include "schedules/schedule_error.h"
#include "schedules/schedules.h"

namespace qe {
namespace {

std::string number(std::int64_t value) { return std::to_string(value); }

std::string_view trimmed(std::string_view text) {
  const std::size_t first = text.find_first_not_of(" \t\r");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r") - first + 1);
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (std::size_t at = 0;; at = text.find(separator, at) + 1) {
    parts.push_back(text.substr(at, text.find(separator, at) - at));
    if (text.find(separator, at) == std::string_view::npos) return parts;
  }
}

// "3UNSHARD", "3RESHARD": PyTorch gathers and drops sharded parameters there.
bool is_about_shards(std::string_view cell) {
  const std::size_t digits = std::min(cell.find_first_not_of("0123456789"), cell.size());
  const std::string_view kind = cell.substr(digits);
  return digits > 0 && (kind == "UNSHARD" || kind == "RESHARD");
}

// The actions of one cell.
std::vector<Action> actions_of(std::string_view cell) {
  constexpr std::string_view kOverlap = ")OVERLAP_F_B";
  if (cell.empty() || is_about_shards(cell)) return {};
  if (!cell.starts_with('(') || !cell.ends_with(kOverlap)) return {parse_action(cell)};
  std::vector<Action> actions;
  for (const std::string_view part : split(cell.substr(1, cell.size() - kOverlap.size() - 1), ';')) {
    actions.push_back(parse_action(part));
  }
  return actions;
}

// One file while it is being read: the lists and, beside every action, the cell that it came from.
class CsvReader {
 public:
  CsvReader(std::string_view text, const std::string& source) : source_(source) {
    std::vector<std::string_view> lines = split(text, '\n');
    while (!lines.empty() && trimmed(lines.back()).empty()) lines.pop_back();
    if (lines.empty()) throw ScheduleError(source + ": the file is empty; wanted one line a rank, like 0F0,0I0,0W0.");
    for (const std::string_view line : lines) read_line(line);
  }

  Schedule run() {
    place_stages();
    check_ascending();
    set_shape();
    check_complete();
    if (is_lowered(schedule_)) {
      if (!has_reductions()) return with_reductions_added();
      check(schedule_, [&] { validate(schedule_); });
    } else {
      check(schedule_, [&] { require_well_formed(schedule_); });
      Schedule lowered;
      check(with_reductions(schedule_), [&] { lowered = lower(schedule_); });
      check(lowered, [&] { validate(lowered); });
    }
    return schedule_;
  }

 private:
  struct Cell {
    int number;  // from 1
    std::string text;
  };

  void read_line(std::string_view line) {
    auto& list = schedule_.actions.emplace_back();
    auto& cells = cells_.emplace_back();
    int cell_number = 0;
    for (const std::string_view part : split(line, ',')) {
      const Cell cell{++cell_number, std::string(trimmed(part))};
      std::vector<Action> actions;
      try {
        actions = actions_of(cell.text);
      } catch (const ScheduleError& e) {
        throw ScheduleError(source_ + ":" + number(std::ssize(cells_)) + ", cell " + number(cell.number) + ": " +
                            e.what() + ".");
      }
      for (const Action& action : actions) {
        list.push_back(action);
        cells.push_back(cell);
      }
    }
  }

  [[nodiscard]] std::string place(int rank, std::size_t index) const {
    const auto& cells = cells_[static_cast<std::size_t>(rank)];
    const std::string line = source_ + ":" + number(rank + 1);
    if (index >= cells.size()) return line + ", end of line";
    return line + ", cell " + number(cells[index].number) + " \"" + cells[index].text + "\"";
  }
  [[noreturn]] void fail(int rank, std::size_t index, const std::string& what) const {
    throw ScheduleError(place(rank, index) + ": " + what + ".");
  }

  template <class Visit>  // (rank, index, action)
  void for_each(Visit visit) const {
    for (std::size_t rank = 0; rank < schedule_.actions.size(); ++rank) {
      for (std::size_t i = 0; i < schedule_.actions[rank].size(); ++i) {
        visit(static_cast<int>(rank), i, schedule_.actions[rank][i]);
      }
    }
  }

  void place_stages() {
    std::map<StageIndex, int> rank_of;
    for_each([&](int rank, std::size_t i, const Action& action) {
      const auto [found, fresh] = rank_of.emplace(action.stage, rank);
      if (found->second != rank) {
        fail(rank, i,
             "stage " + number(to_int(action.stage)) + " stands in line " + number(found->second + 1) +
                 " too; a stage lives on one rank");
      }
    });
    for (const auto& [stage, rank] : rank_of) {
      if (to_int(stage) != std::ssize(schedule_.rank_of_stage)) {
        throw ScheduleError(source_ + ": stage " + number(std::ssize(schedule_.rank_of_stage)) +
                            " is missing; stages count from 0 without a gap.");
      }
      schedule_.rank_of_stage.push_back(rank);
    }
  }

  // Before anything is sized by a number of the file: what ascends from 0 is no larger than the file.
  void check_ascending() {
    for_each([&](int rank, std::size_t i, const Action& action) {
      if (action.kind == ActionKind::kReduceGrad) return;
      advance(rank, i, action, action.kind);
      // B is an I and a W, so it ascends with both.
      if (action.kind != ActionKind::kFullBackward) return;
      advance(rank, i, action, ActionKind::kInputGrad);
      advance(rank, i, action, ActionKind::kWeightGrad);
    });
  }
  void advance(int rank, std::size_t i, const Action& action, ActionKind kind) {
    std::int64_t& due = due_[{action.stage, kind}];
    if (kind != ActionKind::kFullBackward && to_int(action.microbatch) != due) {
      fail(rank, i, "microbatches of one kind ascend on a stage, microbatch " + number(due) + " is due");
    }
    due += action.count;
  }

  void check_complete() {
    for (std::size_t s = 0; s < schedule_.rank_of_stage.size(); ++s) {
      for (const ActionKind kind : {ActionKind::kForward, ActionKind::kInputGrad, ActionKind::kWeightGrad}) {
        const Action first_lacking{kind, StageIndex{static_cast<int>(s)},
                                   MicrobatchIndex{static_cast<int>(due_[{StageIndex{static_cast<int>(s)}, kind}])}};
        if (to_int(first_lacking.microbatch) >= schedule_.shape.microbatches) continue;
        const int rank = schedule_.rank_of_stage[s];
        fail(rank, schedule_.actions[static_cast<std::size_t>(rank)].size(),
             to_string(first_lacking) + (kind == ActionKind::kForward ? "" : ", or a B in its place,") +
                 " is missing; every stage has an F, an I and a W (or a B) of each microbatch");
      }
    }
  }

  void set_shape() {
    const auto ranks = std::ssize(schedule_.actions);
    std::vector<std::int64_t> stages(static_cast<std::size_t>(ranks));
    for (const int rank : schedule_.rank_of_stage) ++stages[static_cast<std::size_t>(rank)];
    for (std::size_t rank = 0; rank < stages.size(); ++rank) {
      if (stages[rank] == stages[0] && stages[0] > 0) continue;
      throw ScheduleError(source_ + ":" + number(static_cast<std::int64_t>(rank) + 1) + ": found " +
                          number(stages[rank]) + " stages, line 1 has " + number(stages[0]) +
                          "; every rank holds the same number of stages, at least 1.");
    }
    std::int64_t microbatches = 0;
    for (const auto& [key, due] : due_) {
      if (key.second == ActionKind::kForward) microbatches = std::max(microbatches, due);
    }
    if (microbatches == 0) throw ScheduleError(source_ + ": there is no F in the file; wanted one line a rank.");
    schedule_.shape = {static_cast<int>(ranks), static_cast<int>(stages[0]), static_cast<int>(microbatches)};
  }

  [[nodiscard]] bool has_reductions() const {
    bool found = false;
    for_each([&](int, std::size_t, const Action& a) { found |= a.kind == ActionKind::kReduceGrad; });
    return found;
  }
  [[nodiscard]] Schedule with_reductions_added() const {
    check(schedule_, [&] { require_well_formed(schedule_); });
    Schedule result = with_reductions(schedule_);
    check(result, [&] { validate(result); });
    return result;
  }

  // Runs a check of `lists`, which hold the file's actions in its order among others, and names a fault by its cell.
  template <class Run>
  void check(const Schedule& lists, Run run) const {
    try {
      run();
    } catch (const CellError& e) {
      const std::string text = e.what();
      throw ScheduleError(place(e.rank, index_in_file(lists, e.rank, e.position)) + ": " + e.what_is_wrong + "." +
                          text.substr(text.find('\n')));
    }
  }

  // The file's action at a position of `lists`, or the last one before it.
  [[nodiscard]] std::size_t index_in_file(const Schedule& lists, int rank, int position) const {
    const auto& list = lists.actions.at(static_cast<std::size_t>(rank));
    const auto& own = schedule_.actions[static_cast<std::size_t>(rank)];
    if (position >= std::ssize(list)) return own.size();
    std::size_t index = 0, found = 0;
    for (int i = 0; i <= position && index < own.size(); ++i) {
      if (list[static_cast<std::size_t>(i)] == own[index]) found = index++;
    }
    return found;
  }

  std::string source_;
  Schedule schedule_;
  std::vector<std::vector<Cell>> cells_;                           // parallel to schedule_.actions
  std::map<std::pair<StageIndex, ActionKind>, std::int64_t> due_;  // the next microbatch of a stage's F, I, W, …
};

}  // namespace

Schedule parse_schedule_csv(std::string_view text, const std::string& source) { return CsvReader(text, source).run(); }

std::string to_csv(const Schedule& schedule) {
  std::string text;
  for (const auto& list : schedule.actions) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (list[i].count != 1) {
        throw ScheduleError("Action " + to_string(list[i]) +
                            " is a W over several microbatches, which PyTorch's CSV cannot say; set gradients.w_group "
                            "to 1 to write the file.");
      }
      if (i > 0) text += ',';
      text += to_string(list[i]);
    }
    text += "\n";
  }
  return text;
}

}  // namespace qe
