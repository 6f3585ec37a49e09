// The training step against an independent one (reference_model.h), and initial parameters against their definition.
// Every step begins from the program's own state, so that a difference belongs to the step that shows it.
#include <algorithm>
#include <cmath>

#include "tests/catch.h"
#include "tests/runtime/reference_program.h"

namespace qe::testing {
namespace {

constexpr double kLearningRate = 5e-3;  // large enough that weights and their amaxes move in every step

// Relative. The program sums in FP32 and the reference in double, so now and then a rounding goes the other way, and
// what follows differs a little. Each bound is about twice the worst of seventy seeds; FP8's worst are tiny gradients
// and a run's first step, where at scale 1 few output gradients survive E5M2. A wrong scale, factor or epsilon is off
// by far more.
struct Bounds {
  double loss;
  double gradient;         // |difference| / |reference|, Euclidean, of every parameter
  double median_gradient;  // of half of them
};
constexpr Bounds kFp32{1e-6, 1e-5, 1e-5};
constexpr Bounds kBf16{1e-5, 6e-3, 3e-3};
constexpr Bounds kFp8{1e-4, 0.15, 0.05};
constexpr double kAmax = 0.15;  // of every amax and scale: one element decides them
constexpr double kMedianAmax = 1e-5;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double distance(const Matrix& a, const Matrix& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.values().size(); ++i) {
    sum += (a.values()[i] - b.values()[i]) * (a.values()[i] - b.values()[i]);
  }
  return std::sqrt(sum);
}

void compare_gradients(const ReferenceParameters& program, const ReferenceParameters& reference, const Bounds& bounds) {
  REQUIRE(program.size() == reference.size());
  std::vector<double> errors;
  for (const auto& [name, expected] : reference) {
    double size = norm(expected);
    // The softmax does not see a shift of all keys, so this gradient is rounding noise beside the query's.
    if (name.ends_with("key.bias")) size = norm(reference.at(name.substr(0, name.size() - 8) + "query.bias"));
    INFO("gradient of " << name << ", norm " << size);
    const double difference = distance(program.at(name), expected);
    errors.push_back(difference == 0.0 ? 0.0 : difference / size);
    CHECK(errors.back() <= bounds.gradient);
  }
  CHECK(median(errors) <= bounds.median_gradient);
}

void compare_slots(const ReferenceSlots& program, const ReferenceSlots& reference) {
  REQUIRE(program.size() == reference.size());
  std::vector<double> errors{0.0};
  const auto check = [&errors](float found, float wanted) {
    INFO("found " << found << ", wanted " << wanted);
    errors.push_back(wanted == found ? 0.0 : std::fabs(static_cast<double>(found) / static_cast<double>(wanted) - 1.0));
    CHECK(errors.back() <= kAmax);
  };
  for (const auto& [name, expected] : reference) {
    const ReferenceSlot& found = program.at(name);
    INFO("scaling slot " << name << ": its scale, then its amax history from the current one");
    check(found.scale, expected.scale);
    REQUIRE(found.history.size() == expected.history.size());
    // A weight's current amax is the next step's.
    for (std::size_t i = name.ends_with(".w") ? 1 : 0; i < expected.history.size(); ++i) {
      check(found.history[i], expected.history[i]);
    }
  }
  CHECK(median(errors) <= kMedianAmax);
}

void compare_steps(const std::vector<std::string>& overrides, const Bounds& bounds, int steps = 4) {
  const Config config = reference_config(overrides);
  Program program(config);
  for (std::uint32_t step = 1; step <= static_cast<std::uint32_t>(steps); ++step) {
    const Batch batch = synthetic_batch(config, step);
    const ReferenceStep expected = reference_step(config, program.state("master."), program.slots(), batch);
    const StepResult result = program.step(batch, kLearningRate, step);
    INFO("step " << step << (overrides.empty() ? "" : " with " + overrides.front()));
    CHECK(std::fabs(result.loss_sum / expected.loss_sum - 1.0) <= bounds.loss);
    compare_gradients(program.gradients(), expected.gradients, bounds);
    compare_slots(program.slots(), expected.slots);
  }
}

}  // namespace

TEST_CASE("fp32: loss and gradients of four steps are those of the definition") {
  compare_steps({"precision.compute=fp32"}, kFp32);
}

TEST_CASE("bf16: loss and gradients of four steps are those of the definition") {
  compare_steps({"precision.compute=bf16"}, kBf16);
}

TEST_CASE("fp8: loss, gradients, histories and scales of six steps are those of the definition") {
  compare_steps({}, kFp8, 6);
}

TEST_CASE("fp8 variants: format, margin, algorithm, history length and scale update mean what they say") {
  SECTION("e4m3 in both directions") { compare_steps({"fp8.format=e4m3"}, kFp8); }
  SECTION("margin") { compare_steps({"fp8.margin=2"}, kFp8); }
  SECTION("most recent amax") { compare_steps({"fp8.amax_compute_algo=most_recent"}, kFp8); }
  SECTION("a history of one") { compare_steps({"fp8.amax_history_len=1"}, kFp8); }
  SECTION("a layer in BF16") { compare_steps({"precision.bf16_layers=[1]"}, kFp8); }
  SECTION("one update a step") { compare_steps({"fp8.scale_update=step"}, kFp8); }
}

TEST_CASE("heads: dynamic scales and BF16 are those of the definition") {
  SECTION("fp8_dynamic") { compare_steps({"head.precision=fp8_dynamic"}, kFp8); }
  SECTION("bf16") { compare_steps({"head.precision=bf16"}, kFp8); }
}

TEST_CASE("W groups and captured graphs compute the same definition") {
  SECTION("two microbatches a W") { compare_steps({"gradients.w_group=2"}, kFp8); }
  SECTION("graph mode") { compare_steps({"execution.mode=graph"}, kFp8); }
}

TEST_CASE("initial parameters have the spread that their role asks for") {
  const Config config = test_config({});
  const Program program(config);
  const double residual = 0.02 / std::sqrt(2.0 * config.model.num_layers);
  for (const auto& [name, values] : program.state("master.")) {
    INFO(name);
    const bool table = name == "head.weight" || name == "embedding.token.weight";
    const int rows = table ? config.model.vocab_size : values.rows();
    double sum = 0.0, squares = 0.0, padding = 0.0, within = 0.0;
    for (int r = 0; r < values.rows(); ++r) {
      for (int c = 0; c < values.cols(); ++c) {
        const double v = values(r, c);
        if (r >= rows) padding += std::fabs(v);
        if (r >= rows) continue;
        sum += v;
        squares += v * v;
      }
    }
    CHECK(padding == 0.0);
    const double count = static_cast<double>(rows) * values.cols();
    const bool matrix = values.rows() > 1;
    if (!matrix) {  // norms' gains are one; every bias is zero
      const double wanted = name.ends_with("norm.weight") ? 1.0 : 0.0;
      for (const double v : values.values()) REQUIRE(v == wanted);
      continue;
    }
    const bool output = name.ends_with("attention.proj.weight") || name.ends_with("mlp.fc2.weight");
    const double wanted = output ? residual : 0.02;
    const double spread = std::sqrt(squares / count);
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < values.cols(); ++c) within += std::fabs(values(r, c)) < wanted ? 1.0 / count : 0.0;
    }
    CHECK(std::fabs(spread / wanted - 1.0) < 4.0 / std::sqrt(2.0 * count));  // four standard errors
    CHECK(std::fabs(sum / count) < 4.0 * wanted / std::sqrt(count));
    CHECK(std::fabs(within - 0.6827) < 4.0 * 0.4655 / std::sqrt(count));  // a normal's share within one deviation
  }
}

}  // namespace qe::testing
