// Version: a cached weight is used only in the epoch it was made for (design.md section 2). One per stage.
#pragma once

#include <array>
#include <cstdint>

#include "core/action.h"
#include "core/ids.h"

namespace qe {

enum class CacheLayout : std::uint8_t { kRowwise, kColumnwise, kBf16Copies };
inline constexpr int kCacheLayouts = 3;
const char* name_of(CacheLayout) noexcept;

class WeightVersion {
 public:
  explicit WeightVersion(StageIndex);

  [[nodiscard]] Epoch weight_epoch() const noexcept { return weight_epoch_; }
  [[nodiscard]] Epoch cache_epoch(CacheLayout) const noexcept;
  // True only after a commit, a load, a rebuild or at the start; a layout stale for any other reason is a violation.
  [[nodiscard]] bool needs_refresh() const noexcept { return needs_refresh_; }

  void mark_refreshed(CacheLayout) noexcept;  // needs_refresh ends when every layout is fresh
  // F and B need rowwise and the copies, I and B columnwise. Throws ContractViolation kVersion naming the layout.
  void check_fresh(const Action&) const;

  void commit_step() noexcept;             // weights are new
  void restore(Epoch) noexcept;            // weights were loaded
  void request_refresh() noexcept;         // after a rebuild
  void invalidate(CacheLayout) noexcept;   // marks one layout stale without asking for a refresh: a fault

 private:
  StageIndex stage_;
  Epoch weight_epoch_ = 0;
  std::array<Epoch, kCacheLayouts> cache_epoch_;
  bool needs_refresh_ = true;
};

}  // namespace qe
