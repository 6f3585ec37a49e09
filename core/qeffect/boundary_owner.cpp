// Completion, host half: one open use per boundary buffer.
#include "core/qeffect/boundary_owner.h"

#include "core/qeffect/violation.h"

namespace qe {
namespace {

const char* name_of(BoundaryKind kind) noexcept {
  switch (kind) {
    case BoundaryKind::kInputRing:
      return "input ring entry";
    case BoundaryKind::kOutputGradRing:
      return "output gradient ring entry";
    case BoundaryKind::kOutput:
      return "output of slot";
    case BoundaryKind::kInputGrad:
      return "input gradient of slot";
  }
  return "?";
}

}  // namespace

std::string to_string(const BoundaryBuffer& b) {
  return "stage " + std::to_string(to_int(b.stage)) + ", " + name_of(b.kind) + " " + std::to_string(b.index);
}

void BoundaryOwner::check(const BoundaryBuffer& buffer, const Action& by, const char* verb) const {
  const auto use = uses_.find(buffer);
  if (use == uses_.end() || use->second.ordered) return;
  throw ContractViolation({Violation::kCompletion, std::string(verb) + "(" + to_string(by) + ")", to_string(buffer), "",
                           "a wait for the buffer's last use before the next one",
                           to_string(use->second.by) + " in flight and no wait for it"});
}

void BoundaryOwner::begin_use(const BoundaryBuffer& buffer, const Action& by) {
  check(buffer, by, "begin_use");
  uses_.insert_or_assign(buffer, Use{by, false});  // ordered after the earlier use, so its end implies that one's
}

void BoundaryOwner::ordered(const BoundaryBuffer& buffer) noexcept {
  const auto use = uses_.find(buffer);
  if (use != uses_.end()) use->second.ordered = true;
}

void BoundaryOwner::require_free(const BoundaryBuffer& buffer, const Action& by) const { check(buffer, by, "begin"); }

void BoundaryOwner::complete_all() noexcept { uses_.clear(); }

int BoundaryOwner::in_flight() const noexcept { return static_cast<int>(uses_.size()); }

void BoundaryOwner::require_idle(const std::string& operation) const {
  if (uses_.empty()) return;
  const auto& [buffer, use] = *uses_.begin();
  throw ContractViolation({Violation::kQuiescence, operation, to_string(buffer), "", "no message or copy in flight",
                           to_string(use.by) + " in flight"});
}

}  // namespace qe
