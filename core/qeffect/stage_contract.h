// One stage of the contract: its version, tapes, chains, ledgers and reduction, and which of them an action needs.
// Stages are independent; what spans them (epoch, boundary buffers, destinations) belongs to the facade.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/action.h"
#include "core/qeffect/boundary_owner.h"
#include "core/qeffect/effect_chain.h"
#include "core/qeffect/grad_ledger.h"
#include "core/qeffect/qeffect.h"
#include "core/qeffect/tape_pool.h"
#include "core/qeffect/weight_version.h"

namespace qe {

class StageContract {
 public:
  StageContract(const StageShape&, int microbatches);

  [[nodiscard]] StageIndex stage() const noexcept { return shape_.stage; }
  [[nodiscard]] const TapePool& tapes() const noexcept { return tapes_; }
  WeightVersion& version() noexcept { return version_; }
  [[nodiscard]] const WeightVersion& version() const noexcept { return version_; }

  // Every check of a compute action; changes nothing.
  void check(const Action&, const BoundaryOwner&) const;
  // After check(): binds the tape (F), opens the ledgers (I, W, B), keeps the ticket.
  void open(const Action&, std::uint64_t ticket);
  // The open action succeeded: consumers, chains and ledgers move.
  void commit();

  [[nodiscard]] bool is_open(std::uint64_t ticket) const noexcept { return open_ && open_->ticket == ticket; }
  [[nodiscard]] std::vector<SlotIndex> slots_of(const Action&) const;
  [[nodiscard]] bool wrote_weight_grads() const noexcept { return next_weight_grad_ > 0; }

  void begin_reduction();
  void complete_reduction();

  void require_complete(bool reduced) const;  // kCommit: nothing open, live, missing or being reduced
  void require_moved(std::uint64_t forward, std::uint64_t backward) const;  // kOrder: the chains
  // kQuiescence in the operation's name.
  void require_nothing_in_flight(const std::string& operation) const;
  void require_step_boundary(const std::string& operation) const;

  void commit_step() noexcept;
  void restore(Epoch) noexcept;
  void abort() noexcept;
  void rebuild() noexcept;

 private:
  enum class Reduction : std::uint8_t { kNone, kInFlight, kDone };
  struct Open {
    Action action;
    std::uint64_t ticket;
  };
  [[nodiscard]] TapeKey key_of(MicrobatchIndex) const noexcept;
  [[nodiscard]] TapeRef ref_of(MicrobatchIndex, const Action&) const;
  void check_forward(const Action&, const BoundaryOwner&) const;
  void check_input_grad(const Action&, const BoundaryOwner&) const;
  void check_weight_grad(const Action&) const;
  void check_accumulation_order(const Action&) const;
  void complete(const Action&, Consumer);
  void start_step() noexcept;

  StageShape shape_;
  int microbatches_;
  WeightVersion version_;
  TapePool tapes_;
  EffectChain forward_;
  EffectChain backward_;
  GradLedger matrices_;
  GradLedger vectors_;
  std::vector<TapeRef> bound_;  // [M] as F bound it in this step; generation 0: F has not begun
  int next_weight_grad_ = 0;    // not a chain: W moves no scaling state, but the order of its additions is observable
  Reduction reduction_ = Reduction::kNone;
  std::optional<Open> open_;
};

}  // namespace qe
