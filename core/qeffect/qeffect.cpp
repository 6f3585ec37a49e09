// The contract's facade: finds the stage, adds what spans stages (epoch, abort, boundary buffers, destinations).
#include "core/qeffect/qeffect.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/qeffect/destinations.h"
#include "core/qeffect/stage_contract.h"

namespace qe {

struct QEffect::State {
  explicit State(const ContractConfig&);

  StageContract& at(StageIndex, const char* operation);
  void require_usable(const std::string& operation, const std::string& key) const;
  void require_unfinished(const std::string& operation, const std::string& key) const;
  void require_quiescent(const std::string& operation) const;
  void abort(std::optional<Action> by) noexcept;
  void commit(const Action&, std::uint64_t ticket);
  void abandon(const Action&, std::uint64_t ticket) noexcept;

  ContractConfig config;
  std::vector<StageContract> stages;
  BoundaryOwner boundary;
  Destinations destinations;
  Epoch epoch = 0;
  std::uint64_t tickets = 0;  // of begun actions, so that a guard of an aborted epoch is recognised
  bool finalized = false;
  bool aborted = false;
  std::optional<Action> aborted_by;
};

QEffect::State::State(const ContractConfig& c) : config(c) {
  QE_EXPECTS(c.microbatches > 0, "a step has at least one microbatch");
  for (const StageShape& shape : c.stages) {
    QE_EXPECTS(stages.empty() || stages.back().stage() < shape.stage, "stages are named once, ascending");
    stages.emplace_back(shape, c.microbatches);
    destinations.add_stage(shape.stage, shape.matrices, c.accumulate ? shape.matrices : shape.shared_matrices,
                           c.microbatches);
  }
}

StageContract& QEffect::State::at(StageIndex stage, const char* operation) {
  for (StageContract& s : stages) {
    if (s.stage() == stage) return s;
  }
  std::string owned;
  for (const StageContract& s : stages) owned += (owned.empty() ? "" : ", ") + std::to_string(to_int(s.stage()));
  throw ContractViolation({Violation::kLookup, operation, "stage " + std::to_string(to_int(stage)), "",
                           "a stage of this rank (" + owned + ")", "another rank's stage or none"});
}

void QEffect::State::require_usable(const std::string& operation, const std::string& key) const {
  if (!aborted) return;
  throw ContractViolation(
      {Violation::kRebuild, operation, key, "", "gradient memory rebuilt after the abort",
       "epoch " + std::to_string(epoch) + " aborted" + (aborted_by ? " by " + to_string(*aborted_by) : std::string())});
}

void QEffect::State::require_unfinished(const std::string& operation, const std::string& key) const {
  if (!finalized) return;
  throw ContractViolation({Violation::kCommit, operation, key, "", "commit_step() after finalize_step()",
                           "epoch " + std::to_string(epoch) + " finalized and not committed"});
}

void QEffect::State::require_quiescent(const std::string& operation) const {
  for (const StageContract& s : stages) s.require_nothing_in_flight(operation);
  boundary.require_idle(operation);
  const std::string key = "epoch " + std::to_string(epoch);
  if (aborted) {
    throw ContractViolation({Violation::kQuiescence, operation, key, "", "usable gradient memory", "an aborted epoch"});
  }
  if (finalized) {
    throw ContractViolation(
        {Violation::kQuiescence, operation, key, "", "a step boundary", "a step finalized and not committed"});
  }
  for (const StageContract& s : stages) s.require_step_boundary(operation);
}

void QEffect::State::abort(std::optional<Action> by) noexcept {
  for (StageContract& s : stages) s.abort();
  if (!aborted) aborted_by = by;
  aborted = true;
  finalized = false;
}

void QEffect::State::commit(const Action& action, std::uint64_t ticket) {
  StageContract& s = at(action.stage, "commit");
  if (s.is_open(ticket)) return s.commit();
  throw ContractViolation({Violation::kRebuild, "commit(" + to_string(action) + ")",
                           to_string(TapeKey{epoch, action.stage, action.microbatch}), "", "the epoch it began in",
                           "that epoch aborted"});
}

void QEffect::State::abandon(const Action& action, std::uint64_t ticket) noexcept {
  const bool open =
      std::any_of(stages.begin(), stages.end(), [ticket](const StageContract& s) { return s.is_open(ticket); });
  if (open) abort(action);
}

// --- guard ---

ActionGuard::ActionGuard(QEffect& owner, std::uint64_t ticket, const Action& action, std::vector<SlotIndex> slots,
                         bool first_write)
    : owner_(&owner), ticket_(ticket), action_(action), slots_(std::move(slots)), first_write_(first_write) {}

ActionGuard::ActionGuard(ActionGuard&& other) noexcept
    : owner_(std::exchange(other.owner_, nullptr)),
      ticket_(other.ticket_),
      action_(other.action_),
      slots_(std::move(other.slots_)),
      first_write_(other.first_write_) {}

ActionGuard::~ActionGuard() {
  if (owner_ != nullptr) owner_->state_->abandon(action_, ticket_);
}

void ActionGuard::commit() {
  QE_EXPECTS(owner_ != nullptr, "a guard commits once");
  owner_->state_->commit(action_, ticket_);
  owner_ = nullptr;
}

// --- version ---

QEffect::QEffect(const ContractConfig& config) : state_(std::make_unique<State>(config)) {}
QEffect::~QEffect() = default;

bool QEffect::needs_refresh(StageIndex stage) const {
  return state_->at(stage, "needs_refresh").version().needs_refresh();
}

void QEffect::mark_refreshed(StageIndex stage, CacheLayout layout) {
  state_->at(stage, "mark_refreshed").version().mark_refreshed(layout);
}

Epoch QEffect::epoch() const noexcept { return state_->epoch; }

const WeightVersion& QEffect::version(StageIndex stage) const { return state_->at(stage, "version").version(); }

void QEffect::restore(Epoch epoch) {
  state_->require_quiescent("restore");
  state_->epoch = epoch;
  for (StageContract& s : state_->stages) s.restore(epoch);
}

void QEffect::invalidate(StageIndex stage, CacheLayout layout) {
  state_->at(stage, "invalidate").version().invalidate(layout);
}

// --- actions ---

ActionGuard QEffect::begin(const Action& action) {
  QE_EXPECTS(is_compute(action.kind), "only F, I, W and B begin; messages use begin_use, reductions begin_reduction");
  StageContract& s = state_->at(action.stage, "begin");
  if (state_->aborted || state_->finalized) {
    const std::string key = to_string(TapeKey{state_->epoch, action.stage, action.microbatch});
    state_->require_usable(operation_begin(action), key);
    state_->require_unfinished(operation_begin(action), key);
  }
  s.check(action, state_->boundary);

  const bool writes = action.kind == ActionKind::kWeightGrad || action.kind == ActionKind::kFullBackward;
  ActionGuard guard(*this, ++state_->tickets, action, s.slots_of(action), writes && !s.wrote_weight_grads());
  s.open(action, guard.ticket_);
  return guard;
}

void QEffect::begin_evaluate(StageIndex stage, MicrobatchIndex m) const {
  const StageContract& s = state_->at(stage, "begin_evaluate");
  const Action forward{ActionKind::kForward, stage, m};
  const std::string operation = "begin_evaluate(" + to_string(forward) + ")";
  state_->require_usable(operation, "stage " + std::to_string(to_int(stage)));
  state_->require_unfinished(operation, "stage " + std::to_string(to_int(stage)));
  for (const StageContract& other : state_->stages) {
    const auto tape = other.tapes().first_live();
    if (!tape) continue;
    throw ContractViolation({Violation::kOwnership, operation, to_string(tape->key), to_string(tape->ref),
                             "no live tape, as evaluation runs in slot 0's memory", "a live tape"});
  }
  s.version().check_fresh(forward);
  state_->boundary.require_free({stage, BoundaryKind::kOutput, 0}, forward);
}

// --- destinations and boundary buffers ---

void QEffect::bind_destination(StageIndex stage, int matrix, MicrobatchIndex m, const Tensor& tensor, int device) {
  const StageContract& s = state_->at(stage, "bind_destination");
  state_->destinations.bind(s.stage(), matrix, m, tensor, device);
}

void QEffect::check_destinations(StageIndex stage, MicrobatchIndex m, std::span<const Tensor> actual,
                                 int device) const {
  const StageContract& s = state_->at(stage, "check_destinations");
  state_->destinations.check(s.stage(), m, actual, device);
}

void QEffect::begin_use(const BoundaryBuffer& buffer, const Action& by) { state_->boundary.begin_use(buffer, by); }
void QEffect::ordered(const BoundaryBuffer& buffer) { state_->boundary.ordered(buffer); }
void QEffect::complete_uses() { state_->boundary.complete_all(); }

// --- reductions and step ---

void QEffect::begin_reduction(StageIndex stage) {
  StageContract& s = state_->at(stage, "begin_reduction");
  state_->require_usable("begin_reduction", "stage " + std::to_string(to_int(stage)));
  state_->require_unfinished("begin_reduction", "stage " + std::to_string(to_int(stage)));
  s.begin_reduction();
}

void QEffect::complete_reduction(StageIndex stage) {
  StageContract& s = state_->at(stage, "complete_reduction");
  state_->require_usable("complete_reduction", "stage " + std::to_string(to_int(stage)));
  s.complete_reduction();
}

void QEffect::finalize_step(std::span<const std::uint64_t> device_counters) {
  QE_EXPECTS(device_counters.size() == 2 * state_->stages.size(), "two device counters a stage of this rank");
  const std::string key = "epoch " + std::to_string(state_->epoch);
  state_->require_usable("finalize_step", key);
  state_->require_unfinished("finalize_step", key);
  for (const StageContract& s : state_->stages) s.require_complete(state_->config.reduced);
  for (std::size_t i = 0; i < state_->stages.size(); ++i) {
    state_->stages[i].require_moved(device_counters[2 * i], device_counters[2 * i + 1]);
  }
  state_->finalized = true;
}

void QEffect::commit_step() {
  const std::string key = "epoch " + std::to_string(state_->epoch);
  state_->require_usable("commit_step", key);
  if (!state_->finalized) {
    throw ContractViolation(
        {Violation::kCommit, "commit_step", key, "", "finalize_step() before it", "a step that is not finalized"});
  }
  for (StageContract& s : state_->stages) s.commit_step();
  ++state_->epoch;
  state_->finalized = false;
}

void QEffect::require_quiescent() const { state_->require_quiescent("require_quiescent"); }

// --- failure ---

void QEffect::abort_epoch() noexcept { state_->abort(std::nullopt); }

bool QEffect::aborted() const noexcept { return state_->aborted; }

void QEffect::rebuild() {
  if (!state_->aborted) {
    throw ContractViolation({Violation::kRebuild, "rebuild", "epoch " + std::to_string(state_->epoch), "",
                             "an aborted epoch", "gradient memory in use"});
  }
  for (StageContract& s : state_->stages) s.rebuild();
  state_->aborted = false;
}

// --- tapes ---

int QEffect::live_tapes() const noexcept {
  int live = 0;
  for (const StageContract& s : state_->stages) live += s.tapes().live();
  return live;
}

int QEffect::pending_weight_grads() const noexcept {
  int pending = 0;
  for (const StageContract& s : state_->stages) pending += s.tapes().pending_weight_grads();
  return pending;
}

TapeRef QEffect::find(const TapeKey& key) const {
  const auto ref = state_->at(key.stage, "find").tapes().find(key);
  if (ref) return *ref;
  throw ContractViolation({Violation::kLookup, "find", to_string(key), "", "a live tape of this key", "none"});
}

void QEffect::check_reference(const TapeKey& key, TapeRef ref) const {
  state_->at(key.stage, "check_reference").tapes().require_bound(key, ref, "check_reference");
}

}  // namespace qe
