// Ownership: which logical action's retained work lies in which tape slot of one stage (paper section III).
// Owns names and generations; the memory of a tape belongs to core/stage.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/action.h"
#include "core/ids.h"
#include "core/qeffect/tape_key.h"

namespace qe {

struct LiveTape {
  TapeKey key;
  TapeRef ref;
};

// Key → ref is injective, a slot frees itself after both consumers, a slot's generation never goes back.
class TapePool {
 public:
  TapePool(StageIndex, int slots);

  // Peak slots form a window over ascending microbatches; with one slot a microbatch this is the identity.
  [[nodiscard]] SlotIndex slot_of(MicrobatchIndex) const noexcept;

  // kOwnership while another tape lies in the key's slot.
  void require_free(const TapeKey&, const Action&) const;
  TapeRef bind(const TapeKey&, const Action&);

  // kLookup unless exactly this key lies in the slot in exactly this generation. Changes nothing.
  void require_bound(const TapeKey&, TapeRef, const std::string& operation) const;
  // kLookup as above; kOwnership for a second I or W, and for W before I.
  void check(const TapeKey&, TapeRef, Consumer, const Action&) const;
  // The consumer has run; both done: the slot is free.
  void complete(const TapeKey&, TapeRef, Consumer);
  void release_all() noexcept;

  [[nodiscard]] std::optional<TapeRef> find(const TapeKey&) const noexcept;
  [[nodiscard]] std::optional<LiveTape> first_live() const noexcept;
  [[nodiscard]] int live() const noexcept;
  [[nodiscard]] int pending_weight_grads() const noexcept;  // I done, W not

 private:
  struct Slot {
    bool live = false;
    std::uint8_t consumed = 0;  // bits of Consumer
    std::uint64_t generation = 0;
    TapeKey key;
  };
  [[nodiscard]] bool holds(const TapeKey&, TapeRef) const noexcept;
  [[nodiscard]] const Slot& at(SlotIndex s) const { return slots_[static_cast<std::size_t>(to_int(s))]; }
  [[nodiscard]] std::string describe(SlotIndex) const;

  StageIndex stage_;
  std::vector<Slot> slots_;
};

}  // namespace qe
