// Strong index types that every room shares. Owns no behaviour beyond conversion and order.
#pragma once

#include <cstdint>

namespace qe {

enum class StageIndex : std::int32_t {};       // global (virtual) stage, 0 .. S-1
enum class MicrobatchIndex : std::int32_t {};  // 0 .. M-1 within one optimizer step
enum class SlotIndex : std::int32_t {};        // physical tape slot of one stage
using Epoch = std::uint64_t;                   // optimizer steps committed, skipped ones included

constexpr int to_int(StageIndex s) noexcept { return static_cast<int>(s); }
constexpr int to_int(MicrobatchIndex m) noexcept { return static_cast<int>(m); }
constexpr int to_int(SlotIndex s) noexcept { return static_cast<int>(s); }

}  // namespace qe
