// Ownership: binding, lookup and consumption of tape slots.
#include "core/qeffect/tape_pool.h"

#include <algorithm>

#include "core/qeffect/violation.h"

namespace qe {
namespace {

constexpr std::uint8_t bit(Consumer c) noexcept { return static_cast<std::uint8_t>(c); }
constexpr std::uint8_t kBothConsumers = bit(Consumer::kInputGrad) | bit(Consumer::kWeightGrad);

const char* letter(Consumer c) noexcept { return c == Consumer::kInputGrad ? "I" : "W"; }

}  // namespace

std::string to_string(const TapeKey& k) {
  return "epoch " + std::to_string(k.epoch) + ", stage " + std::to_string(to_int(k.stage)) + ", microbatch " +
         std::to_string(to_int(k.microbatch)) + ", unit " + std::to_string(k.unit) + ", invocation " +
         std::to_string(k.invocation);
}

std::string to_string(const TapeRef& r) {
  return "slot " + std::to_string(to_int(r.slot)) + ", generation " + std::to_string(r.generation);
}

TapePool::TapePool(StageIndex stage, int slots) : stage_(stage), slots_(static_cast<std::size_t>(slots)) {
  QE_EXPECTS(slots > 0, "a stage has at least one tape slot");
}

SlotIndex TapePool::slot_of(MicrobatchIndex m) const noexcept {
  return SlotIndex{to_int(m) % static_cast<int>(slots_.size())};
}

void TapePool::require_free(const TapeKey& key, const Action& action) const {
  const SlotIndex slot = slot_of(key.microbatch);
  if (!at(slot).live) return;
  throw ContractViolation({Violation::kOwnership, operation_begin(action), to_string(key),
                           to_string(TapeRef{slot, at(slot).generation}),
                           "slot " + std::to_string(to_int(slot)) + " free", describe(slot)});
}

TapeRef TapePool::bind(const TapeKey& key, const Action& action) {
  QE_EXPECTS(key.stage == stage_ && to_int(key.microbatch) >= 0, "a key is bound in its own stage's pool");
  require_free(key, action);
  const SlotIndex index = slot_of(key.microbatch);
  Slot& slot = slots_[static_cast<std::size_t>(to_int(index))];
  slot = {true, 0, slot.generation + 1, key};
  return {index, slot.generation};
}

bool TapePool::holds(const TapeKey& key, TapeRef ref) const noexcept {
  const int index = to_int(ref.slot);
  if (index < 0 || index >= static_cast<int>(slots_.size())) return false;
  const Slot& slot = at(ref.slot);
  return slot.live && slot.generation == ref.generation && slot.key == key;
}

void TapePool::require_bound(const TapeKey& key, TapeRef ref, const std::string& operation) const {
  if (holds(key, ref)) return;
  throw ContractViolation({Violation::kLookup, operation, to_string(key), to_string(ref),
                           "this tape live in exactly this generation", describe(ref.slot)});
}

void TapePool::check(const TapeKey& key, TapeRef ref, Consumer consumer, const Action& action) const {
  if (!holds(key, ref)) require_bound(key, ref, operation_begin(action));
  const std::uint8_t consumed = at(ref.slot).consumed;
  const auto refuse = [&](const std::string& expected, const std::string& found) {
    throw ContractViolation(
        {Violation::kOwnership, operation_begin(action), to_string(key), to_string(ref), expected, found});
  };
  if ((consumed & bit(consumer)) != 0) {
    refuse(std::string("one ") + letter(consumer) + " per tape", std::string("a second ") + letter(consumer));
  }
  if (consumer == Consumer::kWeightGrad && (consumed & bit(Consumer::kInputGrad)) == 0) {
    refuse("W after I, which leaves the output gradients on the tape", "W before I");
  }
}

void TapePool::complete(const TapeKey& key, TapeRef ref, Consumer consumer) {
  QE_EXPECTS(holds(key, ref), "a consumer completes the tape that it was checked against");
  Slot& slot = slots_[static_cast<std::size_t>(to_int(ref.slot))];
  slot.consumed |= bit(consumer);
  if (slot.consumed == kBothConsumers) slot.live = false;
}

void TapePool::release_all() noexcept {
  for (Slot& slot : slots_) slot.live = false;
}

std::optional<TapeRef> TapePool::find(const TapeKey& key) const noexcept {
  if (to_int(key.microbatch) < 0) return std::nullopt;
  const SlotIndex slot = slot_of(key.microbatch);
  if (!at(slot).live || at(slot).key != key) return std::nullopt;
  return TapeRef{slot, at(slot).generation};
}

std::optional<LiveTape> TapePool::first_live() const noexcept {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].live) return LiveTape{slots_[i].key, {SlotIndex{static_cast<int>(i)}, slots_[i].generation}};
  }
  return std::nullopt;
}

int TapePool::live() const noexcept {
  return static_cast<int>(std::count_if(slots_.begin(), slots_.end(), [](const Slot& s) { return s.live; }));
}

int TapePool::pending_weight_grads() const noexcept {
  return static_cast<int>(std::count_if(
      slots_.begin(), slots_.end(), [](const Slot& s) { return s.live && s.consumed == bit(Consumer::kInputGrad); }));
}

std::string TapePool::describe(SlotIndex index) const {
  const std::string name = "slot " + std::to_string(to_int(index));
  if (to_int(index) < 0 || to_int(index) >= static_cast<int>(slots_.size())) return name + " does not exist";
  const Slot& slot = at(index);
  const std::string generation = std::to_string(slot.generation);
  if (!slot.live) return name + " free, last generation " + generation;
  return name + " held by " + to_string(slot.key) + " in generation " + generation;
}

}  // namespace qe
