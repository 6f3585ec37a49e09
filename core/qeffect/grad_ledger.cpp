// Destinations, ledger half: missing → open → written, once a step.
#include "core/qeffect/grad_ledger.h"

#include <algorithm>

namespace qe {

GradLedger::GradLedger(StageIndex stage, GradKind kind, int tensors, int microbatches)
    : stage_(stage),
      kind_(kind),
      tensors_(tensors),
      microbatches_(microbatches),
      cells_(static_cast<std::size_t>(tensors) * static_cast<std::size_t>(microbatches), Cell::kMissing) {}

std::size_t GradLedger::index_of(int tensor, int microbatch) const noexcept {
  return static_cast<std::size_t>(tensor) * static_cast<std::size_t>(microbatches_) +
         static_cast<std::size_t>(microbatch);
}

std::string GradLedger::name_of_cell(int tensor, int microbatch) const {
  return "stage " + std::to_string(to_int(stage_)) + (kind_ == GradKind::kMatrix ? ", matrix " : ", vector ") +
         std::to_string(tensor) + ", microbatch " + std::to_string(microbatch);
}

void GradLedger::require_usable(int tensor, const Action& action, const std::string& operation) const {
  if (!aborted_) return;
  throw ContractViolation({Violation::kRebuild, operation, name_of_cell(tensor, to_int(action.microbatch)), "",
                           "gradient memory rebuilt after the aborted write", "gradient memory of an aborted epoch"});
}

void GradLedger::check(int tensor, const Action& action) const {
  const int first = to_int(action.microbatch);
  if (aborted_) require_usable(tensor, action, operation_begin(action));
  const auto refuse = [&](int m, const char* found) {
    throw ContractViolation({Violation::kDestination, operation_begin(action), name_of_cell(tensor, m), "",
                             "one write per gradient and step", found});
  };
  if (tensor < 0 || tensor >= tensors_ || first < 0 || action.count < 1 || action.count > microbatches_ - first) {
    refuse(first, "a gradient that does not exist");
  }
  for (int m = first; m < first + action.count; ++m) {
    const Cell cell = cells_[index_of(tensor, m)];
    if (cell == Cell::kOpen) refuse(m, "a second write while the first is open");
    if (cell == Cell::kWritten) refuse(m, "a duplicate write");
  }
}

void GradLedger::check(const Action& action) const {
  for (int t = 0; t < tensors_; ++t) check(t, action);
}

void GradLedger::begin(int tensor, const Action& action) {
  check(tensor, action);
  const auto first = cells_.begin() + static_cast<std::ptrdiff_t>(index_of(tensor, to_int(action.microbatch)));
  std::fill_n(first, action.count, Cell::kOpen);
  open_ += action.count;
}

void GradLedger::begin(const Action& action) {
  check(action);
  for (int t = 0; t < tensors_; ++t) begin(t, action);
}

void GradLedger::commit(int tensor, const Action& action) {
  if (aborted_) require_usable(tensor, action, "commit(" + to_string(action) + ")");
  const int first = to_int(action.microbatch);
  for (int m = first; m < first + action.count; ++m) {
    if (cells_.at(index_of(tensor, m)) == Cell::kOpen) continue;
    throw ContractViolation({Violation::kDestination, "commit(" + to_string(action) + ")", name_of_cell(tensor, m), "",
                             "a write that has begun", "no open write"});
  }
  std::fill_n(cells_.begin() + static_cast<std::ptrdiff_t>(index_of(tensor, first)), action.count, Cell::kWritten);
  open_ -= action.count;
  written_ += action.count;
}

void GradLedger::commit(const Action& action) {
  for (int t = 0; t < tensors_; ++t) commit(t, action);
}

void GradLedger::start_epoch() noexcept {
  std::fill(cells_.begin(), cells_.end(), Cell::kMissing);
  open_ = 0;
  written_ = 0;
  aborted_ = false;
}

void GradLedger::require_complete(const std::string& operation, Violation relation) const {
  if (written_ == static_cast<int>(cells_.size())) return;
  for (int m = 0; m < microbatches_; ++m) {
    for (int t = 0; t < tensors_; ++t) {
      if (cells_[index_of(t, m)] == Cell::kWritten) continue;
      throw ContractViolation({relation, operation, name_of_cell(t, m), "", "every gradient written exactly once",
                               kind_ == GradKind::kMatrix ? "missing W" : "missing I"});
    }
  }
}

}  // namespace qe
