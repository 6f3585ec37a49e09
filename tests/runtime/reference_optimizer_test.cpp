// The optimizer of a rank against AdamW in double precision, written from design.md 7. It is fed the gradients that the
// program's own update found, so only the update is judged and bounds are a few FP32 roundings.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "core/random.h"
#include "tests/catch.h"
#include "tests/runtime/reference_program.h"

namespace qe::testing {
namespace {

constexpr double kRate = 1e-2;
constexpr double kRounding = 0x1p-23;  // of FP32, relative, with its neighbour

struct Snapshot {
  explicit Snapshot(const Program& p)
      : weight(p.state("master.")), moment1(p.state("moment1.")), moment2(p.state("moment2.")) {}
  ReferenceParameters weight, moment1, moment2;
};

// What AdamW makes of one element; `decay` is 0 for vectors.
struct Element {
  double weight, moment1, moment2;
  double change;  // of the weight by the gradient
};
struct Rule {
  double beta1, beta2, epsilon, clip, correction1, correction2;
};
Element adamw(double w, double m, double v, double gradient, double decay, const Rule& r) {
  const double g = gradient * r.clip;
  Element e{};
  e.moment1 = r.beta1 * m + (1 - r.beta1) * g;
  e.moment2 = r.beta2 * v + (1 - r.beta2) * g * g;
  e.change = kRate * (e.moment1 / r.correction1) / (std::sqrt(e.moment2 / r.correction2) + r.epsilon);
  e.weight = w - kRate * decay * w - e.change;
  return e;
}

bool is_matrix(const std::string& name) {
  return name == "head.weight" ||
         (name.ends_with(".weight") && name.starts_with("layers.") && !name.ends_with("norm.weight"));
}

double global_norm(const ReferenceParameters& gradients) {
  double squares = 0.0;
  for (const auto& [name, g] : gradients) squares += norm(g) * norm(g);
  return std::sqrt(squares);
}

double clip_of(const Config& config, double gradient_norm) {
  if (config.optimizer.clip_grad == 0) return 1.0;
  return std::min(1.0, config.optimizer.clip_grad / (gradient_norm + 1e-6));
}

Rule rule_of(const Config& config, double gradient_norm, int applied) {
  const OptimizerSection& o = config.optimizer;
  return {o.adam_beta1,
          o.adam_beta2,
          o.adam_eps,
          clip_of(config, gradient_norm),
          1.0 - std::pow(o.adam_beta1, applied),
          1.0 - std::pow(o.adam_beta2, applied)};
}

// Elements outside their bound, by what they are.
struct Misses {
  int moment1 = 0, moment2 = 0, weight = 0;
};
Misses compare(const std::string& name, const Snapshot& before, const Snapshot& after, const Matrix& gradient,
               double decay, const Rule& rule) {
  Misses misses;
  const auto at = [&name](const ReferenceParameters& p, std::size_t i) { return p.at(name).values()[i]; };
  for (std::size_t i = 0; i < gradient.values().size(); ++i) {
    const double w = at(before.weight, i), m = at(before.moment1, i), v = at(before.moment2, i);
    const Element wanted = adamw(w, m, v, gradient.values()[i], decay, rule);
    const double size1 = std::fabs(rule.beta1 * m) + std::fabs((1 - rule.beta1) * gradient.values()[i] * rule.clip);
    // FP32's 1 − β₂ is off by 2^-24 / (1 − β₂).
    misses.moment1 += std::fabs(at(after.moment1, i) - wanted.moment1) > 8 * kRounding * size1;
    misses.moment2 += std::fabs(at(after.moment2, i) - wanted.moment2) > 32 * kRounding * wanted.moment2 + 1e-38;
    misses.weight += std::fabs(at(after.weight, i) - wanted.weight) >
                     2 * kRounding * std::fabs(w) + 64 * kRounding * (kRate * (decay * std::fabs(w) + 1.0));
  }
  return misses;
}

// A token that one sequence of the batch holds once and nowhere else: what is planted in its row reaches one sequence.
std::int32_t lone_token(const Batch& batch) {
  for (std::size_t i = batch.tokens.size(); i-- > 0;) {
    if (std::count(batch.tokens.begin(), batch.tokens.end(), batch.tokens[i]) == 1) return batch.tokens[i];
  }
  throw std::logic_error("every token of the batch occurs twice");
}

// One step that is skipped for an Inf in the token table; the table is put back.
StepResult skipped_step(Program& program, const Batch& batch, std::uint32_t number) {
  float* row = program.memory("master.embedding.token.weight") +
               std::int64_t{lone_token(batch)} * program.config.model.hidden_size;
  const float healthy = row[3];
  row[3] = std::numeric_limits<float>::infinity();
  program.make_caches_stale();
  const StepResult result = program.step(batch, kRate, number);
  row[3] = healthy;
  return result;
}

const std::vector<std::string> kOptimizer{"optimizer.adam_beta1=0.8", "optimizer.adam_beta2=0.9",
                                          "optimizer.adam_eps=1e-5", "optimizer.weight_decay=0.5",
                                          "optimizer.clip_grad=0.25"};

std::vector<std::string> with(std::vector<std::string> more) {
  more.insert(more.begin(), kOptimizer.begin(), kOptimizer.end());
  return more;
}

}  // namespace

TEST_CASE("AdamW moves every element as its definition says, over applied and skipped steps") {
  const Config config = reference_config(kOptimizer);
  Program program(config);
  int applied = 0;
  for (std::uint32_t step = 1; step <= 5; ++step) {
    const Batch batch = synthetic_batch(config, step);
    if (step == 3) {
      REQUIRE(skipped_step(program, batch, step).scalars.skip == 1);
      continue;
    }
    const Snapshot before(program);
    const StepResult result = program.step(batch, kRate, step);
    REQUIRE(result.scalars.skip == 0);
    const Snapshot after(program);
    const ReferenceParameters gradients = program.gradients();
    REQUIRE(gradients.size() == before.weight.size());
    const Rule rule = rule_of(config, global_norm(gradients), ++applied);
    REQUIRE(rule.clip < 1.0);
    for (const auto& [name, gradient] : gradients) {
      INFO("step " << step << ", " << name);
      const double decay = is_matrix(name) ? config.optimizer.weight_decay : 0.0;
      const Misses misses = compare(name, before, after, gradient, decay, rule);
      CHECK(misses.moment1 == 0);
      CHECK(misses.moment2 == 0);
      CHECK(misses.weight == 0);
    }
  }
}

TEST_CASE("bias corrections count applied updates: a skipped step does not age the moments") {
  const Config config = reference_config(kOptimizer);
  Program program(config);
  int applied = 0;
  for (std::uint32_t step = 1; step <= 6; ++step) {
    const Batch batch = synthetic_batch(config, step);
    const bool skip = step == 2 || step == 3;
    const OptimizerScalars s = (skip ? skipped_step(program, batch, step) : program.step(batch, kRate, step)).scalars;
    INFO("step " << step << " after " << applied << " applied updates");
    CHECK(s.skip == (skip ? 1 : 0));
    CHECK(s.step == step);
    CHECK(std::fabs(s.step_size * (1.0 - std::pow(0.8, applied + 1)) / kRate - 1.0) < 1e-6);
    CHECK(std::fabs(s.root_scale * std::sqrt(1.0 - std::pow(0.9, applied + 1)) - 1.0) < 1e-6);
    applied += skip ? 0 : 1;
  }
}

TEST_CASE("the gradient norm is that of every main gradient, and clip_grad / norm scales them all") {
  for (const char* clip : {"optimizer.clip_grad=0", "optimizer.clip_grad=0.25", "optimizer.clip_grad=1000"}) {
    const Config config = reference_config({clip});
    Program program(config);
    for (std::uint32_t step = 1; step <= 3; ++step) {
      const OptimizerScalars s = program.step(synthetic_batch(config, step), kRate, step).scalars;
      const double wanted = global_norm(program.gradients());
      INFO(clip << ", step " << step);
      CHECK(std::fabs(s.norm / wanted - 1.0) < 1e-6);
      CHECK(std::fabs(s.clip / clip_of(config, wanted) - 1.0) < 1e-6);
    }
  }
}

TEST_CASE("weight decay shrinks matrices by lr * decay, and no vector at all") {
  Program plain(reference_config({"optimizer.weight_decay=0"})),
      decayed(reference_config({"optimizer.weight_decay=0.5"}));
  const ReferenceParameters before = plain.state("master.");
  const Batch batch = synthetic_batch(plain.config, 1);
  plain.step(batch, kRate, 1);
  decayed.step(batch, kRate, 1);
  const ReferenceParameters without = plain.state("master."), with_decay = decayed.state("master.");
  for (const auto& [name, start] : before) {
    INFO(name);
    int misses = 0;
    for (std::size_t i = 0; i < start.values().size(); ++i) {
      const double difference = with_decay.at(name).values()[i] - without.at(name).values()[i];
      const double wanted = is_matrix(name) ? -kRate * 0.5 * start.values()[i] : 0.0;
      misses += std::fabs(difference - wanted) > (is_matrix(name) ? 1e-8 : 0.0);
    }
    CHECK(misses == 0);
  }
}

TEST_CASE("BF16 moments round up or down by the bits of (training seed, step, parameter, element, moment)") {
  const Config config = reference_config(with({"optimizer.moments_dtype=bf16", "training.seed=77"}));
  Program program(config);
  for (std::uint32_t step = 1; step <= 2; ++step) {
    const Snapshot before(program);
    program.step(synthetic_batch(config, step), kRate, step);
    const Snapshot after(program);
    const ReferenceParameters gradients = program.gradients();
    const Rule rule = rule_of(config, global_norm(gradients), static_cast<int>(step));
    int all = 0, wrong1 = 0, wrong2 = 0, up = 0;
    for (const auto& [index, unused] : program.ops.gradients) {
      const std::string name = program.rank.model_parameter(static_cast<int>(index)).name;
      const auto at = [&name](const ReferenceParameters& p, std::size_t i) { return p.at(name).values()[i]; };
      for (std::size_t i = 0; i < gradients.at(name).values().size(); ++i) {
        const Element e = adamw(0, at(before.moment1, i), at(before.moment2, i), at(gradients, i), 0, rule);
        const std::uint64_t counter = (std::uint64_t{step} << 32) | static_cast<std::uint32_t>(index);
        const std::uint32_t word = philox<7>(77, counter, i / 4).w[i % 4];
        // Adding sixteen random bits below the kept ones and cutting them off rounds up in proportion.
        const auto rounded = [](double v, std::uint32_t low) {
          const std::uint32_t bits = std::bit_cast<std::uint32_t>(static_cast<float>(v));
          return static_cast<double>(std::bit_cast<float>((bits + (low & 0xffffu)) & 0xffff0000u));
        };
        if (e.moment1 == 0.0) continue;
        ++all;
        wrong1 += rounded(e.moment1, word) != at(after.moment1, i);
        wrong2 += rounded(e.moment2, word >> 16) != at(after.moment2, i);
        up += std::fabs(at(after.moment1, i)) > std::fabs(e.moment1);
      }
    }
    // The last FP32 bit of a moment may differ from the double's, which matters once in some ten thousand.
    INFO("step " << step << ": " << wrong1 << " and " << wrong2 << " of " << all << " elements, " << up << " up");
    CHECK(all > 10000);
    CHECK(wrong1 * 500 < all);
    CHECK(wrong2 * 500 < all);
    CHECK(std::abs(up * 2 - all) * 10 < all);
  }
}

}  // namespace qe::testing
