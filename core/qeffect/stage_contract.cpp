// One stage of the contract: checks before an action, transitions after it.
#include "core/qeffect/stage_contract.h"

#include <algorithm>

namespace qe {

StageContract::StageContract(const StageShape& shape, int microbatches)
    : shape_(shape),
      microbatches_(microbatches),
      version_(shape.stage),
      tapes_(shape.stage, shape.slots),
      forward_(shape.stage, ChainDirection::kForward, microbatches),
      backward_(shape.stage, ChainDirection::kBackward, microbatches),
      matrices_(shape.stage, GradKind::kMatrix, shape.matrices, microbatches),
      vectors_(shape.stage, GradKind::kVector, shape.vectors, microbatches),
      bound_(static_cast<std::size_t>(microbatches)) {}

TapeKey StageContract::key_of(MicrobatchIndex m) const noexcept {
  return {version_.weight_epoch(), shape_.stage, m, 0, 0};
}

TapeRef StageContract::ref_of(MicrobatchIndex m, const Action& action) const {
  const int index = to_int(m);
  const bool exists = index >= 0 && index < microbatches_;
  if (exists && bound_[static_cast<std::size_t>(index)].generation != 0) return bound_[static_cast<std::size_t>(index)];
  throw ContractViolation(
      {Violation::kLookup, operation_begin(action), to_string(key_of(m)), "",
       "a tape bound by " + to_string(Action{ActionKind::kForward, shape_.stage, m}),
       exists ? "no such forward in this step" : "a step of " + std::to_string(microbatches_) + " microbatches"});
}

std::vector<SlotIndex> StageContract::slots_of(const Action& action) const {
  std::vector<SlotIndex> slots(static_cast<std::size_t>(action.count));
  for (int i = 0; i < action.count; ++i) {
    slots[static_cast<std::size_t>(i)] = tapes_.slot_of(MicrobatchIndex{to_int(action.microbatch) + i});
  }
  return slots;
}

void StageContract::check(const Action& action, const BoundaryOwner& boundary) const {
  if (open_) {
    throw ContractViolation({Violation::kOrder, operation_begin(action), to_string(key_of(action.microbatch)), "",
                             "no action of the stage in progress",
                             to_string(open_->action) + " begun and not committed"});
  }
  switch (action.kind) {
    case ActionKind::kForward:
      return check_forward(action, boundary);
    case ActionKind::kInputGrad:
      return check_input_grad(action, boundary);
    case ActionKind::kWeightGrad:
      return check_weight_grad(action);
    case ActionKind::kFullBackward:
      check_input_grad(action, boundary);
      check_accumulation_order(action);
      return matrices_.check(action);
    default:
      QE_EXPECTS(false, "only compute actions begin");
  }
}

void StageContract::check_forward(const Action& action, const BoundaryOwner& boundary) const {
  const TapeKey key = key_of(action.microbatch);
  version_.check_fresh(action);
  forward_.check(action, key);
  tapes_.require_free(key, action);
  boundary.require_free({shape_.stage, BoundaryKind::kOutput, to_int(tapes_.slot_of(action.microbatch))}, action);
}

void StageContract::check_input_grad(const Action& action, const BoundaryOwner& boundary) const {
  const TapeKey key = key_of(action.microbatch);
  const TapeRef ref = ref_of(action.microbatch, action);
  tapes_.check(key, ref, Consumer::kInputGrad, action);
  backward_.check(action, key);
  version_.check_fresh(action);
  boundary.require_free({shape_.stage, BoundaryKind::kInputGrad, to_int(ref.slot)}, action);
  vectors_.check(action);
}

void StageContract::check_weight_grad(const Action& action) const {
  for (int i = 0; i < action.count; ++i) {
    const MicrobatchIndex m{to_int(action.microbatch) + i};
    tapes_.check(key_of(m), ref_of(m, action), Consumer::kWeightGrad, action);
  }
  check_accumulation_order(action);
  matrices_.check(action);
}

void StageContract::check_accumulation_order(const Action& action) const {
  if (action.count >= 1 && to_int(action.microbatch) == next_weight_grad_) return;
  throw ContractViolation({Violation::kOrder, operation_begin(action), to_string(key_of(action.microbatch)), "",
                           "microbatch " + std::to_string(next_weight_grad_) + " next in the stage's weight gradients",
                           to_string(action)});
}

void StageContract::open(const Action& action, std::uint64_t ticket) {
  const bool input_grad = action.kind == ActionKind::kInputGrad || action.kind == ActionKind::kFullBackward;
  const bool weight_grad = action.kind == ActionKind::kWeightGrad || action.kind == ActionKind::kFullBackward;
  if (action.kind == ActionKind::kForward) {
    bound_[static_cast<std::size_t>(to_int(action.microbatch))] = tapes_.bind(key_of(action.microbatch), action);
  }
  if (input_grad) vectors_.begin(action);
  if (weight_grad) matrices_.begin(action);
  open_ = Open{action, ticket};
}

void StageContract::complete(const Action& action, Consumer consumer) {
  for (int i = 0; i < action.count; ++i) {
    const MicrobatchIndex m{to_int(action.microbatch) + i};
    tapes_.complete(key_of(m), bound_[static_cast<std::size_t>(to_int(m))], consumer);
  }
}

void StageContract::commit() {
  QE_EXPECTS(open_.has_value(), "an open action commits");
  const Action action = open_->action;
  if (action.kind == ActionKind::kForward) forward_.advance(action, key_of(action.microbatch));
  if (action.kind == ActionKind::kInputGrad || action.kind == ActionKind::kFullBackward) {
    backward_.advance(action, key_of(action.microbatch));
    vectors_.commit(action);
    complete(action, Consumer::kInputGrad);
  }
  if (action.kind == ActionKind::kWeightGrad || action.kind == ActionKind::kFullBackward) {
    matrices_.commit(action);
    complete(action, Consumer::kWeightGrad);
    next_weight_grad_ += action.count;
  }
  open_.reset();
}

void StageContract::begin_reduction() {
  const std::string key = "stage " + std::to_string(to_int(shape_.stage));
  if (reduction_ != Reduction::kNone) {
    throw ContractViolation({Violation::kOrder, "begin_reduction", key, "", "one reduction a step",
                             reduction_ == Reduction::kDone ? "a second one" : "one in flight"});
  }
  vectors_.require_complete("begin_reduction", Violation::kDestination);
  matrices_.require_complete("begin_reduction", Violation::kDestination);
  reduction_ = Reduction::kInFlight;
}

void StageContract::complete_reduction() {
  if (reduction_ != Reduction::kInFlight) {
    throw ContractViolation({Violation::kOrder, "complete_reduction", "stage " + std::to_string(to_int(shape_.stage)),
                             "", "a reduction in flight",
                             reduction_ == Reduction::kDone ? "one that has completed" : "none begun in this step"});
  }
  reduction_ = Reduction::kDone;
}

void StageContract::require_complete(bool reduced) const {
  const auto withhold = [](const std::string& key, const std::string& ref, const std::string& expected,
                           const std::string& found) {
    throw ContractViolation({Violation::kCommit, "finalize_step", key, ref, expected, found});
  };
  if (open_) {
    withhold(to_string(key_of(open_->action.microbatch)), "", "no action in progress",
             to_string(open_->action) + " begun and not committed");
  }
  vectors_.require_complete("finalize_step", Violation::kCommit);
  matrices_.require_complete("finalize_step", Violation::kCommit);
  if (const auto tape = tapes_.first_live()) {
    withhold(to_string(tape->key), to_string(tape->ref), "no live tape", "a tape whose I and W are not both done");
  }
  const bool unreduced = reduction_ == Reduction::kNone && reduced;
  if (reduction_ == Reduction::kInFlight || unreduced) {
    withhold("stage " + std::to_string(to_int(shape_.stage)), "", "completed gradient reductions",
             unreduced ? "none begun in this step" : "a reduction in flight");
  }
}

void StageContract::require_moved(std::uint64_t forward, std::uint64_t backward) const {
  forward_.require_complete(forward);
  backward_.require_complete(backward);
}

void StageContract::require_nothing_in_flight(const std::string& operation) const {
  const auto withhold = [&](const std::string& key, const std::string& ref, const std::string& expected,
                            const std::string& found) {
    throw ContractViolation({Violation::kQuiescence, operation, key, ref, expected, found});
  };
  if (open_) {
    const int writes = matrices_.open() + vectors_.open();
    withhold(
        to_string(key_of(open_->action.microbatch)), "", "no action in progress",
        to_string(open_->action) + " begun and not committed, " + std::to_string(writes) + " gradient writes open");
  }
  if (const auto tape = tapes_.first_live()) {
    withhold(to_string(tape->key), to_string(tape->ref), "no live tape", "a live tape");
  }
  if (reduction_ == Reduction::kInFlight) {
    withhold("stage " + std::to_string(to_int(shape_.stage)), "", "no reduction in flight", "a reduction in flight");
  }
}

void StageContract::require_step_boundary(const std::string& operation) const {
  const std::uint64_t forwards = forward_.current().position;
  if (forwards == 0) return;
  throw ContractViolation({Violation::kQuiescence, operation, "stage " + std::to_string(to_int(shape_.stage)), "",
                           "a step boundary",
                           "a step with " + std::to_string(forwards) + " of " + std::to_string(microbatches_) +
                               " forwards done and no commit"});
}

void StageContract::start_step() noexcept {
  forward_.restart();
  backward_.restart();
  matrices_.start_epoch();
  vectors_.start_epoch();
  std::fill(bound_.begin(), bound_.end(), TapeRef{});
  next_weight_grad_ = 0;
  reduction_ = Reduction::kNone;
}

void StageContract::commit_step() noexcept {
  version_.commit_step();
  start_step();
}

void StageContract::restore(Epoch epoch) noexcept {
  version_.restore(epoch);
  start_step();
}

void StageContract::abort() noexcept {
  open_.reset();
  tapes_.release_all();
  matrices_.abort();
  vectors_.abort();
}

void StageContract::rebuild() noexcept {
  version_.request_refresh();
  start_step();
}

}  // namespace qe
