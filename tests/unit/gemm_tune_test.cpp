// Tuning on made-up algorithms: which is kept, and what one that is refused or unsteady does to that.
#include "app/bench/gemm_tune.h"

#include "core/error.h"
#include "tests/catch.h"
#include "tests/unit/scripted_gemms.h"

using namespace qe;
using namespace qe::testing;

namespace {

// Addresses as a dry run hands them out: never read.
GemmArgs product(std::int64_t m, DType type = DType::kBF16) {
  void* nowhere = reinterpret_cast<void*>(std::uintptr_t{256});
  GemmArgs g;
  g.a = make_tensor(nowhere, type, {m, 16});
  g.b = make_tensor(nowhere, type, {16, 16});
  g.d = make_tensor(nowhere, DType::kF32, {m, 16});
  if (is_fp8(type)) g.a_scale_inv = g.b_scale_inv = {nowhere, DType::kF32, {1, 1}, kScalePitch};
  return g;
}

std::vector<GemmTableEntry> tune(std::vector<std::string> proposals, const std::vector<GemmArgs>& products) {
  ScriptedBackend scripted;
  scripted.gemms->proposals = std::move(proposals);
  std::vector<GemmTableEntry> entries;
  tune_gemms(*scripted.backend.device, *scripted.backend.ops, *scripted.gemms, products,
             [&](const GemmTableEntry& e) { entries.push_back(e); });
  CHECK(scripted.gemms->used.empty());  // nothing stays behind
  return entries;
}

}  // namespace

TEST_CASE("the first algorithm gives way to one that is 2 % faster and repeats, and to the fastest of those") {
  const auto all = [](std::size_t) { return true; };
  CHECK(pick_algorithm({100}, all) == 0);
  CHECK(pick_algorithm({100, 98.1}, all) == 0);
  CHECK(pick_algorithm({100, 98, 99}, all) == 1);
  CHECK(pick_algorithm({100, 90, 80, 80}, all) == 2);
  CHECK(pick_algorithm({100, 90, 80}, [](std::size_t i) { return i != 2; }) == 1);
  CHECK(pick_algorithm({100, 90, 80}, [](std::size_t i) { return i == 0; }) == 0);
}

TEST_CASE("the fastest algorithm that repeats its bytes is kept, beside the time of the first") {
  const auto entries = tune({"slow", "unsteady", "refused", "quick"}, {product(16)});
  REQUIRE(entries.size() == 1);
  CHECK(entries[0].algorithm == "quick");
  CHECK(entries[0].us > 0);
  CHECK(entries[0].us < entries[0].first_us);
}

TEST_CASE("the first algorithm stays where none is faster, and where the faster ones are unsteady") {
  for (const char* other : {"slow", "unsteady"}) {
    const auto entries = tune({"quick", other}, {product(16)});
    REQUIRE(entries.size() == 1);
    CHECK(entries[0].algorithm == "quick");
    CHECK(entries[0].us == entries[0].first_us);
  }
}

TEST_CASE("a product is tuned once, whatever is added in its calls, in FP8 too") {
  GemmArgs added = product(32, DType::kE4M3), residual = product(32, DType::kE4M3);
  added.accumulate = true;
  residual.residual = residual.d;
  const auto entries = tune({"quick"}, {added, product(32, DType::kE4M3), residual, product(16), added});
  REQUIRE(entries.size() == 2);
  CHECK(entries[0].product == "16");
  CHECK(entries[1].product == "32");
}

TEST_CASE("a product that the library cannot compute as it proposes first ends the tuning") {
  CHECK_THROWS_AS(tune({"refused", "quick"}, {product(16)}), DeviceError);
}
