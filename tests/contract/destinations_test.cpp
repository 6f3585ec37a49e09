// Destinations, binding half: the bound address, shape, dtype, pitch and device, shared by nobody else.
#include "core/qeffect/destinations.h"

#include <vector>

#include "tests/contract/harness.h"

using namespace qe;
using namespace qe::contract_test;

namespace {

constexpr StageIndex kStage{0};
constexpr MicrobatchIndex kFirst{0};
constexpr MicrobatchIndex kSecond{1};

// Memory that is named, never touched.
struct Memory {
  std::vector<float> floats = std::vector<float>(1024);
  [[nodiscard]] Tensor matrix(std::size_t offset, std::int64_t rows = 4, std::int64_t cols = 8) {
    return make_tensor(floats.data() + offset, DType::kF32, {rows, cols});
  }
};

ContractConfig two_matrices(bool accumulate) { return {{{kStage, 2, 2, 0}}, 2, accumulate}; }

}  // namespace

TEST_CASE("the bound destination is accepted and every other one named") {
  Memory memory;
  QEffect q(two_matrices(true));
  q.bind_destination(kStage, 0, kFirst, memory.matrix(0), 3);
  q.bind_destination(kStage, 1, kFirst, memory.matrix(32), 3);
  std::vector<Tensor> actual{memory.matrix(0), memory.matrix(32)};
  q.check_destinations(kStage, kFirst, actual, 3);
  q.check_destinations(kStage, kSecond, actual, 3);  // accumulate: the same for every microbatch

  int device = 3;
  SECTION("address") { actual[1] = memory.matrix(64); }
  SECTION("shape") { actual[1].shape = {8, 4}; }
  SECTION("dtype") { actual[1].dtype = DType::kBF16; }
  SECTION("pitch") { actual[1].row_pitch = 16; }
  SECTION("null") { actual[1].data = nullptr; }
  SECTION("device") {
    device = 2;
    const ViolationReport r = refused([&] { q.check_destinations(kStage, kSecond, actual, device); });
    CHECK(r.key == "stage 0, matrix 0, microbatch 1");
    CHECK(r.expected.find("on device 3") != std::string::npos);
    CHECK(r.found.find("on device 2") != std::string::npos);
    return;
  }
  const ViolationReport r = refused([&] { q.check_destinations(kStage, kSecond, actual, device); });
  CHECK(r.relation == Violation::kDestination);
  CHECK(r.operation == "check_destinations");
  CHECK(r.key == "stage 0, matrix 1, microbatch 1");
  CHECK(r.expected.find("f32 [4, 8] with pitch 8 at 0x") == 0);
  CHECK(r.found != r.expected);

  refresh(q);
  run(q, "0F0 0F1 0I0 0W0 0I1 0W1");
  finish(q, 2);
}

TEST_CASE("a check covers all matrices of the stage, bound ones only") {
  Memory memory;
  QEffect q(two_matrices(true));
  const std::vector<Tensor> actual{memory.matrix(0), memory.matrix(32)};
  const ViolationReport unbound = refused([&] { q.check_destinations(kStage, kFirst, actual, 0); });
  CHECK(unbound.key == "stage 0, matrix 0, microbatch 0");
  CHECK(unbound.expected == "nothing bound");
  q.bind_destination(kStage, 0, kFirst, actual[0], 0);
  q.bind_destination(kStage, 1, kFirst, actual[1], 0);
  const ViolationReport missing = refused([&] { q.check_destinations(kStage, kFirst, std::span(actual).first(1), 0); });
  CHECK(missing.relation == Violation::kDestination);
  CHECK(missing.found == "1 matrices of microbatch 0");
  CHECK(refused([&] { q.check_destinations(kStage, MicrobatchIndex{2}, actual, 0); }).found ==
        "2 matrices of microbatch 2");
  q.check_destinations(kStage, kFirst, actual, 0);
}

TEST_CASE("with one destination a microbatch, an alias is refused and the first binding stands") {
  Memory memory;
  QEffect q(two_matrices(false));
  q.bind_destination(kStage, 0, kFirst, memory.matrix(0), 0);

  const ViolationReport r = refused([&] { q.bind_destination(kStage, 0, kSecond, memory.matrix(0), 0); });
  CHECK(r.relation == Violation::kDestination);
  CHECK(r.operation == "bind_destination");
  CHECK(r.key == "stage 0, matrix 0, microbatch 1");
  CHECK(r.expected == "memory that no other gradient is bound to");
  CHECK(r.found.find("aliased") != std::string::npos);
  CHECK(refused([&] { q.bind_destination(kStage, 1, kFirst, memory.matrix(31), 0); }).relation ==
        Violation::kDestination);  // one element of overlap

  q.bind_destination(kStage, 0, kSecond, memory.matrix(32), 0);
  q.bind_destination(kStage, 1, kFirst, memory.matrix(64), 0);
  q.bind_destination(kStage, 1, kSecond, memory.matrix(0), 1);  // another device's memory
  const std::vector<Tensor> first{memory.matrix(0), memory.matrix(64)};
  q.check_destinations(kStage, kFirst, first, 0);
  CHECK_THROWS_AS(q.check_destinations(kStage, kSecond, first, 0), ContractViolation);
}

TEST_CASE("with accumulate all microbatches share exactly one destination, and no other matrix has it") {
  Memory memory;
  QEffect q(two_matrices(true));
  q.bind_destination(kStage, 0, kFirst, memory.matrix(0), 0);
  q.bind_destination(kStage, 0, kSecond, memory.matrix(0), 0);
  const ViolationReport elsewhere = refused([&] { q.bind_destination(kStage, 0, kSecond, memory.matrix(32), 0); });
  CHECK(elsewhere.relation == Violation::kDestination);
  CHECK(elsewhere.key == "stage 0, matrix 0, microbatch 1");
  CHECK(elsewhere.expected.find("as bound before") != std::string::npos);
  CHECK_THROWS_WITH(q.bind_destination(kStage, 1, kFirst, memory.matrix(0), 0), ContainsSubstring("aliased"));
  q.bind_destination(kStage, 1, kFirst, memory.matrix(32), 0);
}

TEST_CASE("an alias across stages is refused") {
  Memory memory;
  QEffect q({{{StageIndex{0}, 1, 1, 0}, {StageIndex{1}, 1, 1, 0}}, 1});
  q.bind_destination(StageIndex{0}, 0, kFirst, memory.matrix(0), 0);
  const ViolationReport r = refused([&] { q.bind_destination(StageIndex{1}, 0, kFirst, memory.matrix(16), 0); });
  CHECK(r.key == "stage 1, matrix 0, microbatch 0");
  CHECK(r.found.find("of stage 0") != std::string::npos);
}

TEST_CASE("a shared matrix has one destination even where the others have one a microbatch") {
  Memory memory;
  QEffect q({{{kStage, 2, 2, 0, 1}}, 2, false});  // the head's main gradient beside an arena
  q.bind_destination(kStage, 0, kFirst, memory.matrix(0), 0);
  q.bind_destination(kStage, 0, kSecond, memory.matrix(32), 0);
  q.bind_destination(kStage, 1, kFirst, memory.matrix(64), 0);
  q.bind_destination(kStage, 1, kSecond, memory.matrix(64), 0);
  const std::vector<Tensor> second{memory.matrix(32), memory.matrix(64)};
  q.check_destinations(kStage, kSecond, second, 0);
}

TEST_CASE("a destination that is empty, folds on itself or does not exist is refused") {
  Memory memory;
  QEffect q(two_matrices(true));
  Tensor folded = memory.matrix(0);
  folded.row_pitch = 4;
  for (const Tensor& bad : {Tensor{}, memory.matrix(0, 0, 8), memory.matrix(0, 4, 0), folded}) {
    CHECK(refused([&] { q.bind_destination(kStage, 0, kFirst, bad, 0); }).relation == Violation::kDestination);
  }
  for (const int matrix : {-1, 2}) {
    CHECK(refused([&] { q.bind_destination(kStage, matrix, kFirst, memory.matrix(0), 0); }).found ==
          "a gradient that does not exist");
  }
  CHECK(refused([&] { q.bind_destination(kStage, 0, MicrobatchIndex{2}, memory.matrix(0), 0); }).relation ==
        Violation::kDestination);
}

TEST_CASE("column ranges of one buffer interleave without overlapping") {
  Memory memory;
  const Tensor wide = memory.matrix(0, 8, 24);
  CHECK_FALSE(overlap(wide.cols(0, 8), wide.cols(8, 8)));
  CHECK_FALSE(overlap(wide.cols(16, 8), wide.cols(8, 8)));
  CHECK(overlap(wide.cols(0, 9), wide.cols(8, 8)));
  CHECK(overlap(wide.cols(8, 8), wide.cols(0, 9)));
  CHECK(overlap(wide, wide.cols(23, 1)));
  CHECK(overlap(wide.cols(23, 1), wide));
  CHECK_FALSE(overlap(wide.rows(0, 4), wide.rows(4, 4)));
  CHECK(overlap(wide.rows(0, 5), wide.rows(4, 4)));
  // A row inside the gap of another view, and one a byte too long for it.
  const Tensor ends = wide.cols(20, 4);
  CHECK_FALSE(overlap(ends, memory.matrix(24, 1, 20)));
  CHECK(overlap(ends, memory.matrix(24, 1, 21)));
  CHECK_FALSE(overlap(memory.matrix(0, 1, 20), ends));
}
