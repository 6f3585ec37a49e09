// An action: one unit of work in a rank's list, and its text form (semantics.md section 3.1).
// Owns the vocabulary only: what an action costs or needs is decided elsewhere.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/ids.h"

namespace qe {

// PyTorch's letters: F forward, I input gradient, W weight gradient, B = I and W in one.
enum class ActionKind : std::uint8_t {
  kForward,
  kInputGrad,
  kWeightGrad,
  kFullBackward,
  kSendF,
  kRecvF,
  kSendB,
  kRecvB,
  kReduceGrad,
};

// count > 1: a W over that many consecutive microbatches, the first of which is `microbatch`.
// SEND_F sends that stage's output on, RECV_F receives that stage's input; SEND_B sends that stage's input gradient
// back, RECV_B receives that stage's output gradient. REDUCE_GRAD has no microbatch (stored as 0).
struct Action {
  ActionKind kind;
  StageIndex stage;
  MicrobatchIndex microbatch{};
  int count = 1;

  auto operator<=>(const Action&) const = default;
};

constexpr bool is_compute(ActionKind k) noexcept {
  return k == ActionKind::kForward || k == ActionKind::kInputGrad || k == ActionKind::kWeightGrad ||
         k == ActionKind::kFullBackward;
}
constexpr bool is_send(ActionKind k) noexcept { return k == ActionKind::kSendF || k == ActionKind::kSendB; }
constexpr bool is_recv(ActionKind k) noexcept { return k == ActionKind::kRecvF || k == ActionKind::kRecvB; }

// "2F0", "1I3", "0W4x4" (four microbatches from 4), "0SEND_F2", "3REDUCE_GRAD".
std::string to_string(const Action&);
// Exact inverse of to_string. Throws ScheduleError naming the text.
Action parse_action(std::string_view text);

}  // namespace qe
