// Version: a cached weight is used only in the epoch it was made for (design.md section 2). One per stage.
#pragma once

#include <array>
#include <cstdint>
#include <limits>

#include "core/action.h"
#include "core/ids.h"

namespace qe {

enum class CacheLayout : std::uint8_t { kRowwise, kColumnwise, kBf16Copies };
inline constexpr int kCacheLayouts = 3;
inline constexpr Epoch kNeverCached = std::numeric_limits<Epoch>::max();
const char* name_of(CacheLayout) noexcept;

class WeightVersion {
 public:
  explicit WeightVersion(StageIndex);

  [[nodiscard]] Epoch weight_epoch() const noexcept { return weight_epoch_; }
  // kNeverCached while the layout was not made since the start, a load, a rebuild or a fault.
  [[nodiscard]] Epoch cache_epoch(CacheLayout) const noexcept;
  // True only after a commit, a load, a rebuild or at the start; a layout stale for any other reason is a violation.
  [[nodiscard]] bool needs_refresh() const noexcept { return needs_refresh_; }

  void mark_refreshed(CacheLayout) noexcept;  // needs_refresh ends when every layout is fresh
  // F reads rowwise and the BF16 copies, I and B columnwise and the copies (a BF16 head's I reads its copy), W neither.
  // Throws ContractViolation kVersion naming the first stale layout.
  void check_fresh(const Action&) const;

  void commit_step() noexcept;            // weights are new
  void restore(Epoch) noexcept;           // weights were loaded
  void request_refresh() noexcept;        // after a rebuild
  void invalidate(CacheLayout) noexcept;  // marks one layout stale without asking for a refresh: a fault

 private:
  void require_fresh(CacheLayout, const Action&) const;
  void drop_caches() noexcept;

  StageIndex stage_;
  Epoch weight_epoch_ = 0;
  std::array<Epoch, kCacheLayouts> cache_epoch_;
  bool needs_refresh_ = true;
};

}  // namespace qe
