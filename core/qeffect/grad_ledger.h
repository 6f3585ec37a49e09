// Destinations, ledger half: every gradient of a stage is written exactly once per microbatch and step.
// Owns the book, not the memory; where a gradient goes is core/qeffect/destinations.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/action.h"
#include "core/ids.h"
#include "core/qeffect/violation.h"

namespace qe {

enum class GradKind : std::uint8_t { kMatrix, kVector };  // written by W (B), written by I (B)

class GradLedger {
 public:
  GradLedger(StageIndex, GradKind, int tensors, int microbatches);

  // Writes of every tensor for the action's microbatches may begin: never begun before (else kDestination) in gradient
  // memory that is usable (else kRebuild).
  void check(const Action&) const;
  void begin(const Action&);              // of every tensor
  void begin(int tensor, const Action&);  // of one
  void commit(const Action&);
  void commit(int tensor, const Action&);     // kDestination for a write that was not begun, kRebuild after an abort
  void abort() noexcept { aborted_ = true; }  // nothing can be written until start_epoch()
  void start_epoch() noexcept;

  [[nodiscard]] int open() const noexcept { return open_; }  // writes begun and not committed
  // Throws `relation` in the operation's name, naming the first missing microbatch and tensor.
  void require_complete(const std::string& operation, Violation relation) const;

 private:
  enum class Cell : std::uint8_t { kMissing, kOpen, kWritten };
  [[nodiscard]] std::size_t index_of(int tensor, int microbatch) const noexcept;
  [[nodiscard]] std::string name_of_cell(int tensor, int microbatch) const;
  void check(int tensor, const Action&) const;
  void require_usable(int tensor, const Action&, const std::string& operation) const;

  StageIndex stage_;
  GradKind kind_;
  int tensors_;
  int microbatches_;
  std::vector<Cell> cells_;  // [tensors, microbatches]
  int open_ = 0;
  int written_ = 0;
  bool aborted_ = false;
};

}  // namespace qe
