// What a broken relation of the contract looks like (design.md section 2).
#pragma once

#include <cstdint>
#include <string>

#include "core/error.h"

namespace qe {

struct Action;

enum class Violation : std::uint8_t {
  kOrder,        // out-of-order or repeated state transition; host and device counters differ
  kOwnership,    // occupied slot, duplicate consumer, W before I
  kLookup,       // stale or unknown reference
  kVersion,      // a cached weight of another epoch
  kCompletion,   // a boundary buffer with an unfinished send, receive or copy
  kDestination,  // duplicate, missing, aliased or mis-bound gradient write
  kCommit,       // the step is not complete
  kRebuild,      // gradient memory of an aborted epoch
  kQuiescence,   // a checkpoint with work in flight
};
const char* name_of(Violation) noexcept;

// One failing check. Every field is part of the message.
struct ViolationReport {
  Violation relation;
  std::string operation;  // the first failing operation: "begin(2I0)", "finalize_step", "require_quiescent"
  std::string key;        // of what: a TapeKey, a matrix and microbatch, a boundary buffer; may be empty
  std::string ref;        // TapeRef, where there is one
  std::string expected;
  std::string found;
};

// "begin(2I0)": how a report calls the check before an action.
std::string operation_begin(const Action&);

// Its message is one sentence made of all fields of the report; exit code 6.
class ContractViolation : public Error {
 public:
  explicit ContractViolation(ViolationReport);
  [[nodiscard]] const ViolationReport& report() const noexcept { return report_; }

 private:
  ViolationReport report_;
};

}  // namespace qe
