// The text form of actions: printing and a strict parser that accepts exactly what is printed, and nothing else.
#include "core/action.h"

#include <array>
#include <charconv>
#include <optional>

#include "core/error.h"

namespace qe {
namespace {

struct KindName {
  ActionKind kind;
  std::string_view text;
};

// No name begins with another one: the longer SEND_* and REDUCE_GRAD start with letters of no compute kind.
constexpr std::array<KindName, 9> kKinds{{
    {ActionKind::kForward, "F"},
    {ActionKind::kInputGrad, "I"},
    {ActionKind::kWeightGrad, "W"},
    {ActionKind::kFullBackward, "B"},
    {ActionKind::kSendF, "SEND_F"},
    {ActionKind::kRecvF, "RECV_F"},
    {ActionKind::kSendB, "SEND_B"},
    {ActionKind::kRecvB, "RECV_B"},
    {ActionKind::kReduceGrad, "REDUCE_GRAD"},
}};

std::string_view text_of(ActionKind kind) noexcept {
  for (const KindName& k : kKinds) {
    if (k.kind == kind) return k.text;
  }
  return "?";
}

[[noreturn]] void refuse(std::string_view text, const std::string& why) {
  throw ScheduleError("action \"" + std::string(text) + "\" cannot be read: " + why +
                      "; write it like 2F0, 1I3, 0W4x4, 0SEND_F2 or 3REDUCE_GRAD");
}

// Takes a number off the front: plain digits, no sign, no leading zero (one text per action), within int32.
std::int32_t take_number(std::string_view& rest, std::string_view text, const char* what) {
  std::int32_t value = 0;
  const bool digit = !rest.empty() && rest.front() >= '0' && rest.front() <= '9';
  if (!digit) refuse(text, std::string("the ") + what + " is missing");
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
  if (error != std::errc{}) refuse(text, std::string("the ") + what + " is too large");
  const auto length = static_cast<std::size_t>(end - rest.data());
  if (length > 1 && rest.front() == '0') refuse(text, std::string("the ") + what + " has a leading zero");
  rest.remove_prefix(length);
  return value;
}

std::optional<ActionKind> take_kind(std::string_view& rest) noexcept {
  for (const KindName& k : kKinds) {
    if (rest.substr(0, k.text.size()) == k.text) {
      rest.remove_prefix(k.text.size());
      return k.kind;
    }
  }
  return std::nullopt;
}

}  // namespace

std::string to_string(const Action& a) {
  std::string text = std::to_string(to_int(a.stage));
  text += text_of(a.kind);
  if (a.kind == ActionKind::kReduceGrad) return text;
  text += std::to_string(to_int(a.microbatch));
  if (a.count != 1) text.append("x").append(std::to_string(a.count));
  return text;
}

Action parse_action(std::string_view text) {
  std::string_view rest = text;
  const StageIndex stage{take_number(rest, text, "stage")};
  const std::optional<ActionKind> kind = take_kind(rest);
  if (!kind) refuse(text, "no action kind follows the stage");

  Action action{*kind, stage};
  if (action.kind != ActionKind::kReduceGrad) {
    action.microbatch = MicrobatchIndex{take_number(rest, text, "microbatch")};
  }
  if (action.kind == ActionKind::kWeightGrad && !rest.empty() && rest.front() == 'x') {
    rest.remove_prefix(1);
    action.count = take_number(rest, text, "count of microbatches");
    if (action.count < 2) refuse(text, "a group has at least two microbatches");
  }
  if (!rest.empty()) refuse(text, "\"" + std::string(rest) + "\" is left over");
  return action;
}

}  // namespace qe
