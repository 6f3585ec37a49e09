// Completion, host half: which message or copy may still touch a boundary buffer (design.md sections 2 and 6).
// It checks that the ordering wait was issued, not that the message is over.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <string>

#include "core/action.h"
#include "core/ids.h"

namespace qe {

enum class BoundaryKind : std::uint8_t {
  kInputRing,       // received inputs of a stage; index = microbatch mod depth
  kOutputGradRing,  // received output gradients
  kOutput,          // a slot's output; index = slot
  kInputGrad,       // a slot's input gradient
};

struct BoundaryBuffer {
  StageIndex stage{};
  BoundaryKind kind{};
  int index = 0;
  auto operator<=>(const BoundaryBuffer&) const = default;
};
std::string to_string(const BoundaryBuffer&);  // "stage 1, input ring entry 0"

class BoundaryOwner {
 public:
  // Refused (kCompletion) while an earlier use is neither ordered nor complete.
  void begin_use(const BoundaryBuffer&, const Action& by);
  void ordered(const BoundaryBuffer&) noexcept;  // without an earlier use: nothing to order
  // The buffer may be written: no use, or the wait for it was issued.
  void require_free(const BoundaryBuffer&, const Action& by) const;
  void complete_all() noexcept;
  // Throws kQuiescence in the operation's name while a use is in flight.
  void require_idle(const std::string& operation) const;
  [[nodiscard]] int in_flight() const noexcept;  // uses begun and not complete, ordered or not

 private:
  struct Use {
    Action by;
    bool ordered;
  };
  void check(const BoundaryBuffer&, const Action& by, const char* verb) const;
  std::map<BoundaryBuffer, Use> uses_;
};

}  // namespace qe
