// Version: weight epoch against cache epochs. Knows when a cache may be used, not how it is made.
#include "core/qeffect/weight_version.h"

#include <algorithm>

#include "core/qeffect/tape_key.h"
#include "core/qeffect/violation.h"

namespace qe {
namespace {

std::size_t index_of(CacheLayout layout) noexcept { return static_cast<std::size_t>(layout); }

std::string cache_text(Epoch epoch) {
  return epoch == kNeverCached ? "no valid copy" : "the copy of epoch " + std::to_string(epoch);
}

}  // namespace

const char* name_of(CacheLayout layout) noexcept {
  switch (layout) {
    case CacheLayout::kRowwise:
      return "rowwise";
    case CacheLayout::kColumnwise:
      return "columnwise";
    case CacheLayout::kBf16Copies:
      return "BF16 copies";
  }
  return "?";
}

WeightVersion::WeightVersion(StageIndex stage) : stage_(stage) { drop_caches(); }

Epoch WeightVersion::cache_epoch(CacheLayout layout) const noexcept { return cache_epoch_[index_of(layout)]; }

void WeightVersion::mark_refreshed(CacheLayout layout) noexcept {
  cache_epoch_[index_of(layout)] = weight_epoch_;
  const bool all_fresh =
      std::all_of(cache_epoch_.begin(), cache_epoch_.end(), [this](Epoch cached) { return cached == weight_epoch_; });
  if (all_fresh) needs_refresh_ = false;
}

void WeightVersion::require_fresh(CacheLayout layout, const Action& action) const {
  const Epoch cached = cache_epoch(layout);
  if (cached == weight_epoch_) return;
  throw ContractViolation({Violation::kVersion, operation_begin(action),
                           to_string(TapeKey{weight_epoch_, action.stage, action.microbatch}), "",
                           std::string(name_of(layout)) + " weight cache of epoch " + std::to_string(weight_epoch_) +
                               " (refresh the stage first)",
                           cache_text(cached)});
}

void WeightVersion::check_fresh(const Action& action) const {
  switch (action.kind) {
    case ActionKind::kForward:
      require_fresh(CacheLayout::kRowwise, action);
      require_fresh(CacheLayout::kBf16Copies, action);
      return;
    case ActionKind::kInputGrad:
    case ActionKind::kFullBackward:
      require_fresh(CacheLayout::kColumnwise, action);
      require_fresh(CacheLayout::kBf16Copies, action);
      return;
    default:
      return;  // W multiplies two operands of the tape, messages read no weight
  }
}

// The caches keep the epoch they were made for, so a report can say which one would have been used.
void WeightVersion::commit_step() noexcept {
  ++weight_epoch_;
  needs_refresh_ = true;
}

void WeightVersion::restore(Epoch epoch) noexcept {
  weight_epoch_ = epoch;
  request_refresh();
}

void WeightVersion::request_refresh() noexcept {
  drop_caches();
  needs_refresh_ = true;
}

void WeightVersion::invalidate(CacheLayout layout) noexcept { cache_epoch_[index_of(layout)] = kNeverCached; }

void WeightVersion::drop_caches() noexcept { cache_epoch_.fill(kNeverCached); }

}  // namespace qe
