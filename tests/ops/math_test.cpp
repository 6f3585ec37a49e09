// The CPU backend's elementary functions: stated bounds, special values, and the same bits on every instruction set.
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/math.h"
#include "tests/ops/ops_fixture.h"

using namespace qe;
using namespace qe::test;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

std::uint32_t bits_of(float v) { return std::bit_cast<std::uint32_t>(v); }

// |got − want| in units of want's last place; subnormal results count in the smallest unit.
double error_in_ulp(float got, double want) {
  if (std::isnan(want)) return std::isnan(got) ? 0 : kInf;
  if (std::isinf(static_cast<float>(want))) return got == static_cast<float>(want) ? 0 : kInf;
  int exponent = 0;
  std::frexp(want, &exponent);
  if (want == 0) exponent = -200;
  return std::abs(got - want) / std::ldexp(1.0, std::max(exponent - 24, -149));
}

template <class Ours, class Reference>
double largest_error(std::uint64_t step, Ours ours, Reference reference) {
  double worst = 0;
  for (std::uint64_t u = 0; u < (1ull << 32); u += step) {
    const float x = std::bit_cast<float>(static_cast<std::uint32_t>(u));
    worst = std::max(worst, error_in_ulp(ours(x), reference(double{x})));
  }
  return worst;
}

void require_bounds(std::uint64_t step) {
  REQUIRE(largest_error(
              step, [](float x) { return cpu::exp(x); }, [](double x) { return std::exp(x); }) < 1.1);
  REQUIRE(largest_error(
              step, [](float x) { return cpu::tanh(x); }, [](double x) { return std::tanh(x); }) < 2.5);
  REQUIRE(largest_error(
              step, [](float x) { return cpu::log(x); }, [](double x) { return std::log(x); }) < 1.0);
  REQUIRE(largest_error(
              step, [](float x) { return cpu::rsqrt(x); }, [](double x) { return 1 / std::sqrt(x); }) < 1.5);
}

// The same loops twice: for the plain target, where std::fma is a library call, and as clones.
struct Results {
  std::vector<float> exp, tanh, log;
  float sum = 0, dot = 0;
};
QE_CPU_INLINE void evaluate(const std::vector<float>& x, Results& r) {
  for (std::size_t i = 0; i < x.size(); ++i) r.exp[i] = cpu::exp(x[i]);
  for (std::size_t i = 0; i < x.size(); ++i) r.tanh[i] = cpu::tanh(x[i]);
  for (std::size_t i = 0; i < x.size(); ++i) r.log[i] = cpu::log(x[i]);
  const auto n = static_cast<std::int64_t>(x.size());
  r.sum = cpu::sum_over(n, [&r](std::int64_t i) { return r.tanh[static_cast<std::size_t>(i)]; });
  r.dot = cpu::dot(r.tanh.data(), x.data(), n);
}
void evaluate_plain(const std::vector<float>& x, Results& r) { evaluate(x, r); }
QE_CPU_CLONES void evaluate_cloned(const std::vector<float>& x, Results& r) { evaluate(x, r); }

}  // namespace

TEST_CASE("exp, tanh, log and rsqrt keep their stated bounds on a sample of all floats") { require_bounds(10007); }
TEST_CASE("exp, tanh, log and rsqrt keep their stated bounds on a dense sample of all floats", "[slow]") {
  require_bounds(61);
}

TEST_CASE("elementary functions meet their special values") {
  REQUIRE(cpu::exp(0.0f) == 1.0f);
  REQUIRE(cpu::exp(-0.0f) == 1.0f);
  REQUIRE(cpu::exp(kInf) == kInf);
  REQUIRE(cpu::exp(-kInf) == 0.0f);
  REQUIRE(cpu::exp(-200.0f) == 0.0f);
  REQUIRE(cpu::exp(88.8f) == kInf);
  REQUIRE(std::isnan(cpu::exp(kNaN)));
  REQUIRE(bits_of(cpu::tanh(0.0f)) == 0u);
  REQUIRE(bits_of(cpu::tanh(-0.0f)) == 0x80000000u);
  REQUIRE(cpu::tanh(1e-40f) == 1e-40f);
  REQUIRE(cpu::tanh(kInf) == 1.0f);
  REQUIRE(cpu::tanh(-kInf) == -1.0f);
  REQUIRE(std::isnan(cpu::tanh(kNaN)));
  REQUIRE(cpu::log(1.0f) == 0.0f);
  REQUIRE(cpu::log(0.0f) == -kInf);
  REQUIRE(cpu::log(-0.0f) == -kInf);
  REQUIRE(cpu::log(kInf) == kInf);
  REQUIRE(std::isnan(cpu::log(-1.0f)));
  REQUIRE(std::isnan(cpu::log(kNaN)));
  REQUIRE(cpu::rsqrt(4.0f) == 0.5f);
  REQUIRE(cpu::rsqrt(0.0f) == kInf);
}

TEST_CASE("loops give the same bits with and without instruction set clones") {
  std::vector<float> x = uniform(4999, 11, -12.0f, 12.0f);
  for (std::size_t i = 0; i < 64; ++i) x[i * 61] = std::ldexp(x[i], static_cast<int>(i) - 40);
  Results plain, cloned;
  for (Results* r : {&plain, &cloned}) {
    for (std::vector<float>* v : {&r->exp, &r->tanh, &r->log}) v->resize(x.size());
  }
  evaluate_plain(x, plain);
  evaluate_cloned(x, cloned);
  const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
    for (std::size_t i = 0; i < a.size(); ++i) {
      if (bits_of(a[i]) != bits_of(b[i])) return false;
    }
    return a.size() == b.size();
  };
  REQUIRE(same(plain.exp, cloned.exp));
  REQUIRE(same(plain.tanh, cloned.tanh));
  REQUIRE(same(plain.log, cloned.log));
  REQUIRE(bits_of(plain.sum) == bits_of(cloned.sum));
  REQUIRE(bits_of(plain.dot) == bits_of(cloned.dot));
}

TEST_CASE("sums over an index add lane by lane, then by the fixed tree") {
  for (const std::int64_t n : {0, 1, 31, 32, 33, 100, 256}) {
    const std::vector<float> v = uniform(n, 12);
    std::vector<float> lanes(32, 0.0f);
    for (std::size_t i = 0; i < v.size(); ++i) lanes[i % 32] += v[i];
    for (std::size_t width = 16; width >= 1; width /= 2) {
      for (std::size_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    REQUIRE(cpu::sum_over(n, [&v](std::int64_t i) { return v[static_cast<std::size_t>(i)]; }) == lanes[0]);
  }
}
