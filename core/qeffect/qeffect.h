// QEffect: the contract's façade (paper section III, design.md section 2). Host state machines only, no arithmetic and
// no device.
//
// A check precedes its action; the action's transition commits only if the action succeeded:
//     ActionGuard guard = qeffect.begin(action);   // checks, changes nothing that abort cannot take back
//     ...run the action...
//     guard.commit();                              // the transition
// A guard destroyed without commit() aborts the epoch: tapes are released and gradient memory is unusable until
// rebuild().
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/action.h"
#include "core/qeffect/boundary_owner.h"
#include "core/qeffect/tape_key.h"
#include "core/qeffect/violation.h"
#include "core/qeffect/weight_version.h"
#include "core/tensor.h"

namespace qe {

// One stage of this rank as the contract sees it.
struct StageShape {
  StageIndex stage{};
  int slots = 1;     // slot(m) = m mod slots
  int matrices = 0;  // the head's included
  int vectors = 0;
  // The last ones of `matrices`: one destination for all microbatches in every placement (the head's main gradient).
  int shared_matrices = 0;
};

struct ContractConfig {
  std::vector<StageShape> stages;  // of this rank, ascending
  int microbatches = 1;
  bool accumulate = true;  // all microbatches of a matrix share one destination; false: each has its own
  bool reduced = false;    // replicas: finalize_step() needs one completed reduction of every stage
};

class QEffect;

class [[nodiscard]] ActionGuard {
 public:
  ActionGuard(ActionGuard&&) noexcept;
  ActionGuard& operator=(ActionGuard&&) = delete;
  ~ActionGuard();

  // The tape slots of the action, one per microbatch that it covers.
  [[nodiscard]] std::span<const SlotIndex> slots() const noexcept { return slots_; }
  [[nodiscard]] const Action& action() const noexcept { return action_; }
  // First W (or B) of the stage in this step: the first-write form of its gradient GEMMs.
  [[nodiscard]] bool first_write() const noexcept { return first_write_; }
  // The action succeeded. Throws kRebuild when the epoch was aborted meanwhile; once only.
  void commit();

 private:
  friend class QEffect;
  ActionGuard(QEffect& owner, std::uint64_t ticket, const Action& action, std::vector<SlotIndex> slots,
              bool first_write);
  QEffect* owner_;  // null once committed or moved from
  std::uint64_t ticket_;
  Action action_;
  std::vector<SlotIndex> slots_;
  bool first_write_;
};

// Every refusal is a ContractViolation and leaves tapes, chains, ledgers and versions as they were: a rejected check is
// no abort, and the caller may go on with the action that was due. A stage that is not of this rank is kLookup
// everywhere.
class QEffect {
 public:
  explicit QEffect(const ContractConfig&);
  ~QEffect();
  QEffect(const QEffect&) = delete;
  QEffect& operator=(const QEffect&) = delete;

  // --- version ---
  [[nodiscard]] bool needs_refresh(StageIndex) const;
  void mark_refreshed(StageIndex, CacheLayout);
  [[nodiscard]] Epoch epoch() const noexcept;  // optimizer steps committed
  [[nodiscard]] const WeightVersion& version(StageIndex) const;
  void restore(Epoch);  // a load: the epoch continues there, every cache is stale. Only when quiescent
  void invalidate(StageIndex, CacheLayout);  // a cache was lost without a commit, a load or a rebuild: a fault

  // --- actions: F, I, W, B ---
  // One action of a stage at a time. Checked in this order:
  //   all   usable gradient memory (kRebuild), an unfinished step (kCommit), no action of the stage in progress
  //   (kOrder) F     caches (kVersion), next in the forward chain (kOrder), slot (kOwnership), the slot's output
  //   (kCompletion) I, B  tape as F bound it (kLookup), not consumed (kOwnership), next in the backward chain (kOrder),
  //   caches
  //         (kVersion), the slot's input gradient (kCompletion), gradients unwritten (kDestination)
  //   W     each tape (kLookup), I done and W not (kOwnership), ascending (kOrder), gradients unwritten (kDestination)
  ActionGuard begin(const Action&);
  // Checks version, boundary buffers of slot 0 and that no tape is live; binds nothing.
  void begin_evaluate(StageIndex, MicrobatchIndex) const;

  // --- destinations ---
  // The one place where microbatch m's gradient of a matrix of the stage goes. With accumulate the same for every m.
  void bind_destination(StageIndex, int matrix, MicrobatchIndex, const Tensor&, int device);
  // What an action (eager) or a captured graph really writes, against what was bound; one Tensor a matrix, in order.
  void check_destinations(StageIndex, MicrobatchIndex, std::span<const Tensor> actual, int device) const;

  // --- boundary buffers ---
  void begin_use(const BoundaryBuffer&, const Action& by);  // a send, receive or local copy now touches the buffer
  void ordered(const BoundaryBuffer&);  // a wait for that use was issued on the stream that touches the buffer next
  void complete_uses();                 // the host has synchronized: none is in flight

  // --- reductions ---
  // Once a step (kOrder), refused while a gradient of the stage is missing (kDestination).
  void begin_reduction(StageIndex);
  void complete_reduction(StageIndex);

  // --- step ---
  // All tapes free, every gradient written exactly once, reductions done, chains moved M times and equal to the device
  // counters: {forward, backward} of each stage, in stage order. Missing work is kCommit, a chain's count kOrder.
  // Afterwards only commit_step() is legal (kCommit).
  void finalize_step(std::span<const std::uint64_t> device_counters);
  // The optimizer has run (or skipped): epoch + 1, weights new, counters and ledger start again.
  void commit_step();
  // kQuiescence unless the rank stands at a step boundary with nothing in flight.
  void require_quiescent() const;

  // --- failure ---
  void abort_epoch() noexcept;
  [[nodiscard]] bool aborted() const noexcept;
  // Gradient memory is zero again; the epoch starts over with stale caches. kRebuild when nothing was aborted.
  void rebuild();

  [[nodiscard]] int live_tapes() const noexcept;
  [[nodiscard]] int pending_weight_grads() const noexcept;
  // The reference under which a live tape is bound. Unknown or stale: violation kLookup.
  [[nodiscard]] TapeRef find(const TapeKey&) const;
  void check_reference(const TapeKey&, TapeRef) const;

 private:
  friend class ActionGuard;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace qe
