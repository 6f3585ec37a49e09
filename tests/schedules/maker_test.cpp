// Every shape gives a list that is safe to run, or a refusal that names a shape which does.
#include <chrono>
#include <sstream>

#include "core/error.h"
#include "schedules/schedules.h"
#include "tests/catch.h"
#include "tests/schedules/list_runner.h"

using qe::Backward;
using qe::PipelineShape;
using qe::Schedule;
using qe::ScheduleKind;

namespace {

constexpr ScheduleKind kKinds[] = {ScheduleKind::k1F1B, ScheduleKind::kInterleaved1F1B, ScheduleKind::kZbv,
                                   ScheduleKind::kGpipe, ScheduleKind::kZb1p};

// "use 4 or 6 microbatches." → {4, 6}
std::vector<int> numbers_named(const std::string& refusal) {
  std::istringstream words(refusal.substr(refusal.rfind("use ") + 4));
  std::vector<int> numbers;
  std::string other;
  for (int number = 0; words >> number; words >> other) numbers.push_back(number);
  return numbers;
}

void check_runs(ScheduleKind kind, const PipelineShape& shape, Backward backward) {
  const Schedule lowered = qe::lower(qe::make_schedule(kind, shape, backward));
  REQUIRE_NOTHROW(qe::validate(lowered));
  if (shape.microbatches <= 2 * shape.ranks) REQUIRE(qe_test::run_lists(lowered) == "");
  for (const auto& list : lowered.actions) {
    for (const qe::Action& action : list) REQUIRE(qe::parse_action(to_string(action)) == action);
  }
}

// Every number that a refusal names works, and nothing nearer does; two are named exactly when both are as near.
void check_refusal_helps(ScheduleKind kind, PipelineShape shape, const std::string& refusal) {
  REQUIRE_THROWS_WITH(qe::make_schedule(kind, shape, Backward::kSplit), refusal);
  const bool chunks = refusal.find("per rank") != std::string::npos;
  int& number = chunks ? shape.chunks_per_rank : shape.microbatches;
  const int found = number;
  std::vector<int> nearest;
  for (int distance = 1; nearest.empty(); ++distance) {
    for (const int near : {found - distance, found + distance}) {
      number = near;
      if (near > 0 && qe::why_not(kind, shape).empty()) nearest.push_back(near);
    }
  }
  REQUIRE(numbers_named(refusal) == nearest);
  for (const int named : nearest) {
    number = named;
    check_runs(kind, shape, Backward::kSplit);
  }
}

}  // namespace

TEST_CASE("every shape gives a valid list or a refusal naming one that works") {
  const int ranks = GENERATE(1, 2, 3, 4, 8);
  const int chunks = GENERATE(1, 2, 3);
  for (const ScheduleKind kind : kKinds) {
    for (int microbatches = 1; microbatches <= 4 * ranks; ++microbatches) {
      const PipelineShape shape{ranks, chunks, microbatches};
      INFO(qe::name_of(kind) << " P=" << ranks << " V=" << chunks << " M=" << microbatches);
      const std::string refusal = qe::why_not(kind, shape);
      if (refusal.empty()) {
        check_runs(kind, shape, Backward::kSplit);
        check_runs(kind, shape, Backward::kFull);
      } else {
        check_refusal_helps(kind, shape, refusal);
      }
    }
  }
}

TEST_CASE("looped schedules refuse microbatches that do not make equal rounds and name the nearest that do") {
  const ScheduleKind kind = GENERATE(ScheduleKind::kInterleaved1F1B, ScheduleKind::kZb1p);
  const auto refusal = [&](int ranks, int microbatches) { return qe::why_not(kind, {ranks, 2, microbatches}); };
  CHECK_THAT(refusal(2, 5), ContainsSubstring("use 4 or 6 microbatches"));
  CHECK_THAT(refusal(2, 7), ContainsSubstring("use 6 or 8 microbatches"));
  CHECK_THAT(refusal(4, 9), ContainsSubstring("use 8 or 10 microbatches"));
  CHECK_THAT(refusal(4, 13), ContainsSubstring("use 12 microbatches"));
  CHECK_THAT(refusal(4, 14), ContainsSubstring("use 15 microbatches"));
  CHECK(refusal(4, 6) == "");
  CHECK(refusal(4, 10) == "");
  CHECK(refusal(1, 7) == "");
}

TEST_CASE("a chunk count that a schedule cannot place is refused with the one it can") {
  CHECK_THAT(qe::why_not(ScheduleKind::k1F1B, {4, 2, 8}),
             ContainsSubstring("exactly 1 chunk per rank, found 2; use 1"));
  CHECK_THAT(qe::why_not(ScheduleKind::kZbv, {4, 1, 8}),
             ContainsSubstring("exactly 2 chunks per rank, found 1; use 2"));
  CHECK_THAT(qe::why_not(ScheduleKind::kInterleaved1F1B, {4, 0, 8}), ContainsSubstring("at least 1 chunk per rank"));
  CHECK_THAT(qe::why_not(ScheduleKind::kZbv, {0, 2, 8}), ContainsSubstring("at least 1 rank"));
  CHECK_THAT(qe::why_not(ScheduleKind::kZbv, {4, 2, 0}), ContainsSubstring("at least 1 microbatch"));
  REQUIRE_THROWS_AS(qe::make_zbv({4, 3, 8}), qe::ScheduleError);
}

TEST_CASE("a full backward drops every W and puts B where I stood") {
  const PipelineShape shape{4, 2, 8};
  const Schedule split = qe::make_schedule(ScheduleKind::kZbv, shape, Backward::kSplit);
  const Schedule full = qe::make_schedule(ScheduleKind::kZbv, shape, Backward::kFull);
  for (std::size_t rank = 0; rank < split.actions.size(); ++rank) {
    std::vector<qe::Action> expected;
    for (qe::Action action : split.actions[rank]) {
      if (action.kind == qe::ActionKind::kWeightGrad) continue;
      if (action.kind == qe::ActionKind::kInputGrad) action.kind = qe::ActionKind::kFullBackward;
      expected.push_back(action);
    }
    CHECK(full.actions[rank] == expected);
  }
}

TEST_CASE("64 ranks with 256 microbatches are made, lowered and validated in seconds") {
  const auto start = std::chrono::steady_clock::now();
  for (const ScheduleKind kind : kKinds) {
    const int chunks = qe::why_not(kind, {64, 2, 256}).empty() ? 2 : 1;
    const Schedule lowered = qe::lower(qe::make_schedule(kind, {64, chunks, 256}, Backward::kSplit));
    qe::validate(lowered);
    CHECK(qe::resources(lowered).ranks.size() == 64);
  }
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
}
