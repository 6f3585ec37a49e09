// The delayed-scaling update of one slot, case by case, with the expected values written out.
#include "core/fp8/scale_rule.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/catch.h"

using qe::AmaxAlgorithm;
using qe::DType;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kOld = 3.25f;  // the scale before the update

// A slot whose scaling state is driven by one amax an update.
struct Slot {
  std::vector<float> history;
  float scale = 1.0f;
  AmaxAlgorithm algorithm = AmaxAlgorithm::kMax;

  explicit Slot(int length) : history(static_cast<std::size_t>(length), 0.0f) {}
  void update(float amax) {
    history[0] = amax;
    scale = qe::update_slot(history.data(), static_cast<int>(history.size()), scale, DType::kE4M3, 0, algorithm);
  }
};

}  // namespace

TEST_CASE("the scale of every amax, format and margin is the written one") {
  struct Case {
    float amax;
    float e4m3[3];  // margins 0, 2 and 3
    float e5m2[3];
  };
  // 1e-45 is the smallest subnormal, 0x1.fffffcp-127 the largest: qmax / amax overflows, so the scale is FLT_MAX.
  const Case cases[] = {
      {0.0f, {kOld, kOld, kOld}, {kOld, kOld, kOld}},
      {1e-45f, {FLT_MAX, FLT_MAX, FLT_MAX}, {FLT_MAX, FLT_MAX, FLT_MAX}},
      {0x1.fffffcp-127f, {FLT_MAX, FLT_MAX, FLT_MAX}, {FLT_MAX, FLT_MAX, FLT_MAX}},
      {1e-38f, {FLT_MAX, FLT_MAX, FLT_MAX}, {FLT_MAX, FLT_MAX, FLT_MAX}},
      {1e-30f,
       {0x1.6168e2p+108f, 0x1.6168e2p+106f, 0x1.6168e2p+105f},
       {0x1.6168e2p+115f, 0x1.6168e2p+113f, 0x1.6168e2p+112f}},
      {0.3f, {0x1.755554p+10f, 0x1.755554p+8f, 0x1.755554p+7f}, {0x1.755554p+17f, 0x1.755554p+15f, 0x1.755554p+14f}},
      {448.0f, {1.0f, 0.25f, 0.125f}, {128.0f, 32.0f, 16.0f}},
      {57344.0f, {0.0078125f, 0.001953125f, 0.0009765625f}, {1.0f, 0.25f, 0.125f}},
      {kInf, {kOld, kOld, kOld}, {kOld, kOld, kOld}},
      {kNaN, {kOld, kOld, kOld}, {kOld, kOld, kOld}},
  };
  const int margins[] = {0, 2, 3};
  for (const Case& c : cases) {
    for (int i = 0; i < 3; ++i) {
      INFO("amax " << c.amax << ", margin " << margins[i]);
      for (const AmaxAlgorithm algorithm : {AmaxAlgorithm::kMax, AmaxAlgorithm::kMostRecent}) {
        float h4[4] = {c.amax, 0.0f, 0.0f, 0.0f};
        CHECK(qe::update_slot(h4, 4, kOld, DType::kE4M3, margins[i], algorithm) == c.e4m3[i]);
        float h1[1] = {c.amax};
        CHECK(qe::update_slot(h1, 1, kOld, DType::kE5M2, margins[i], algorithm) == c.e5m2[i]);
      }
    }
  }
}

TEST_CASE("a scale's reciprocal is never zero, so that a tiny tensor dequantizes to finite numbers") {
  const float scale_inv = 1.0f / qe::scale_from_amax(1e-45f, 1.0f, DType::kE5M2, 0);
  CHECK(scale_inv == 0x1p-128f);  // 1 / FLT_MAX, a subnormal
  CHECK(std::isfinite(FLT_MAX * 1e-45f));
}

TEST_CASE("history rolls element by element: the newest is last, the current is zero") {
  float h[4] = {5.0f, 1.0f, 2.0f, 3.0f};
  CHECK(qe::update_slot(h, 4, 1.0f, DType::kE4M3, 0, AmaxAlgorithm::kMax) == 448.0f / 5.0f);
  CHECK(h[0] == 0.0f);
  CHECK(h[1] == 2.0f);
  CHECK(h[2] == 3.0f);
  CHECK(h[3] == 5.0f);
  h[0] = 0.5f;
  CHECK(qe::update_slot(h, 4, 1.0f, DType::kE4M3, 0, AmaxAlgorithm::kMax) == 448.0f / 5.0f);
  CHECK(h[1] == 3.0f);
  CHECK(h[2] == 5.0f);
  CHECK(h[3] == 0.5f);
}

TEST_CASE("the oldest entry takes part one last time in the update that drops it") {
  float h[3] = {1.0f, 7.0f, 2.0f};
  CHECK(qe::update_slot(h, 3, 1.0f, DType::kE4M3, 0, AmaxAlgorithm::kMax) == 64.0f);  // 448 / 7
  h[0] = 1.0f;
  CHECK(qe::update_slot(h, 3, 1.0f, DType::kE4M3, 0, AmaxAlgorithm::kMax) == 224.0f);  // 448 / 2
}

TEST_CASE("the window is the newest L amaxes for every history length") {
  for (const int length : {1, 2, 4, 1024}) {
    INFO("history length " << length);
    Slot slot(length);
    std::vector<float> seen;
    for (int i = 0; i < 2 * length + 5; ++i) {
      seen.push_back(static_cast<float>((i * 37) % 101 + 1));
      slot.update(seen.back());
      float newest = 0.0f;
      for (std::size_t k = seen.size(); k-- > 0 && seen.size() - k <= static_cast<std::size_t>(length);) {
        newest = std::max(newest, seen[k]);
      }
      REQUIRE(slot.scale == 448.0f / newest);
      REQUIRE(slot.history[0] == 0.0f);
      for (int k = 1; k < length; ++k) {  // entry L − k is the k-th newest
        const auto age = static_cast<std::size_t>(k);
        const float want = age <= seen.size() ? seen[seen.size() - age] : 0.0f;
        REQUIRE(slot.history[static_cast<std::size_t>(length - k)] == want);
      }
    }
  }
}

TEST_CASE("a current amax of zero changes neither history nor scale") {
  for (const AmaxAlgorithm algorithm : {AmaxAlgorithm::kMax, AmaxAlgorithm::kMostRecent}) {
    float h[4] = {0.0f, 1.0f, 2.0f, 3.0f};
    CHECK(qe::update_slot(h, 4, kOld, DType::kE4M3, 0, algorithm) == kOld);
    CHECK(h[0] == 0.0f);
    CHECK(h[1] == 1.0f);
    CHECK(h[2] == 2.0f);
    CHECK(h[3] == 3.0f);
  }
}

TEST_CASE("one Inf freezes the scale for exactly L updates under max") {
  for (const int length : {1, 2, 4, 1024}) {
    INFO("history length " << length);
    Slot slot(length);
    slot.update(2.0f);
    REQUIRE(slot.scale == 224.0f);
    slot.update(kInf);
    REQUIRE(slot.scale == 224.0f);
    for (int i = 1; i < length; ++i) {
      slot.update(4.0f);
      REQUIRE(slot.scale == 224.0f);
    }
    slot.update(4.0f);
    REQUIRE(slot.scale == 112.0f);
  }
}

TEST_CASE("most_recent looks at the newest amax alone but history still rolls") {
  Slot slot(3);
  slot.algorithm = AmaxAlgorithm::kMostRecent;
  slot.update(64.0f);
  slot.update(kInf);
  CHECK(slot.scale == 7.0f);
  slot.update(2.0f);
  CHECK(slot.scale == 224.0f);
  CHECK(slot.history[1] == kInf);
  CHECK(slot.history[2] == 2.0f);
}

TEST_CASE("a NaN amax rolls in but the maximum ignores it") {
  Slot slot(3);
  slot.update(7.0f);
  slot.scale = kOld;  // so that the 7 in history has to give the scale again
  slot.update(kNaN);
  CHECK(slot.scale == 64.0f);
  CHECK(std::isnan(slot.history[2]));
  slot.update(2.0f);  // 7 takes part one last time
  CHECK(slot.scale == 64.0f);
  slot.update(2.0f);
  CHECK(slot.scale == 224.0f);
}
