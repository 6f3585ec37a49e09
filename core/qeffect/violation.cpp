// The wording of contract violations; when one is raised is decided by the relation that was broken.
#include "core/qeffect/violation.h"

#include <utility>

#include "core/action.h"

namespace qe {
namespace {

std::string sentence(const ViolationReport& r) {
  std::string text = "the " + std::string(name_of(r.relation)) + " contract is violated by " + r.operation;
  if (!r.key.empty()) text += " for " + r.key;
  if (!r.ref.empty()) text += " (" + r.ref + ")";
  return text + ": expected " + r.expected + ", found " + r.found;
}

}  // namespace

const char* name_of(Violation v) noexcept {
  switch (v) {
    case Violation::kOrder:
      return "order";
    case Violation::kOwnership:
      return "ownership";
    case Violation::kLookup:
      return "lookup";
    case Violation::kVersion:
      return "version";
    case Violation::kCompletion:
      return "completion";
    case Violation::kDestination:
      return "destination";
    case Violation::kCommit:
      return "commit";
    case Violation::kRebuild:
      return "rebuild";
    case Violation::kQuiescence:
      return "quiescence";
  }
  return "?";
}

std::string operation_begin(const Action& action) { return "begin(" + to_string(action) + ")"; }

ContractViolation::ContractViolation(ViolationReport report)
    : Error(ExitCode::kContract, sentence(report)), report_(std::move(report)) {}

}  // namespace qe
