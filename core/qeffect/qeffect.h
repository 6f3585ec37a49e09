// QEffect: the contract's façade (paper section III, design.md section 2). Host state machines only, no arithmetic and no device.
//
// A check precedes its action; the action's transition commits only if the action succeeded:
//     ActionGuard guard = qeffect.begin(action);   // checks, changes nothing that abort cannot take back
//     ...run the action...
//     guard.commit();                              // the transition
// A guard destroyed without commit() aborts the epoch: tapes are released and gradient memory is unusable until rebuild().
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
};

struct ContractConfig {
  std::vector<StageShape> stages;  // of this rank, ascending
  int microbatches = 1;
  bool accumulate = true;  // all microbatches of a matrix share one destination; false: each has its own
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
  void commit();

 private:
  friend class QEffect;
  ActionGuard(QEffect& owner, const Action& action, std::vector<SlotIndex> slots, bool first_write);
  QEffect* owner_;
  Action action_;
  std::vector<SlotIndex> slots_;
  bool first_write_;
};

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
  void restore(Epoch);  // a load: the epoch continues there, every cache is stale

  // --- actions: F, I, W, B ---
  ActionGuard begin(const Action&);
  // Checks version, boundary buffers and that no tape is live; binds nothing.
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
  void begin_reduction(StageIndex);     // refused while a gradient of the stage is missing
  void complete_reduction(StageIndex);

  // --- step ---
  // All tapes free, every gradient written exactly once, reductions done, chains moved M times and equal to the device
  // counters: {forward, backward} of each stage, in stage order.
  void finalize_step(std::span<const std::uint64_t> device_counters);
  // The optimizer has run (or skipped): epoch + 1, weights new, counters and ledger start again.
  void commit_step();
  void require_quiescent() const;

  // --- failure ---
  void abort_epoch() noexcept;
  [[nodiscard]] bool aborted() const noexcept;
  void rebuild();  // gradient memory is zero again; the epoch starts over with stale caches

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
