// What every contract test needs: a small QEffect, actions by their text, and the report of a refusal. No device.
#pragma once

#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "core/action.h"
#include "core/qeffect/qeffect.h"
#include "tests/catch.h"

namespace qe::contract_test {

// Six matrices and ten vectors, as a stage of one GPT layer.
inline StageShape one_layer(int stage, int slots) { return {StageIndex{stage}, slots, 6, 10}; }

inline ContractConfig one_stage(int microbatches, int slots) { return {{one_layer(0, slots)}, microbatches}; }

inline void refresh(QEffect& q, int stage = 0) {
  for (CacheLayout layout : {CacheLayout::kRowwise, CacheLayout::kColumnwise, CacheLayout::kBf16Copies}) {
    q.mark_refreshed(StageIndex{stage}, layout);
  }
}

// Begins and commits each action of "0F0 0I0 0W0", in order.
inline void run(QEffect& q, const std::string& actions) {
  std::istringstream words(actions);
  for (std::string word; words >> word;) {
    INFO("running " << word);
    ActionGuard guard = q.begin(parse_action(word));
    guard.commit();
  }
}

// Both device counters of each of `stages` stages after a whole step.
inline std::vector<std::uint64_t> counters(int microbatches, int stages = 1) {
  return std::vector<std::uint64_t>(static_cast<std::size_t>(2 * stages), static_cast<std::uint64_t>(microbatches));
}

inline void finish(QEffect& q, int microbatches, int stages = 1) {
  q.finalize_step(counters(microbatches, stages));
  q.commit_step();
}

inline TapeKey key(Epoch epoch, int stage, int microbatch) {
  return {epoch, StageIndex{stage}, MicrobatchIndex{microbatch}, 0, 0};
}

// The report of the violation that the call raises; fails the test when it raises none. The message must carry every
// field of the report, whatever was broken.
template <class Call>
ViolationReport refused(Call&& call) {
  std::optional<ViolationReport> report;
  std::string message;
  try {
    call();
  } catch (const ContractViolation& v) {
    report = v.report();
    message = v.what();
    CHECK(v.exit_code() == ExitCode::kContract);
  }
  REQUIRE(report.has_value());
  INFO(message);
  CHECK(message.find(name_of(report->relation)) != std::string::npos);
  for (const std::string& part :
       {report->operation, report->key, report->ref, "expected " + report->expected, "found " + report->found}) {
    CHECK(message.find(part) != std::string::npos);
  }
  CHECK(message.find('\n') == std::string::npos);
  CHECK_FALSE(report->operation.empty());
  CHECK_FALSE(report->expected.empty());
  CHECK_FALSE(report->found.empty());
  return *report;
}

inline ViolationReport refused_begin(QEffect& q, const std::string& action) {
  return refused([&] { ActionGuard guard = q.begin(parse_action(action)); });
}

}  // namespace qe::contract_test
