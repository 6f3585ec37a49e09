// A CPU backend that computes products by algorithms of made-up names and speeds, for tests of who chooses among them.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "kernels/backend.h"
#include "tests/runtime/faults.h"

namespace qe::testing {

class ScriptedGemms final : public InterceptedOps, public GemmChooser {
 public:
  ScriptedGemms(Device& device, std::unique_ptr<Ops> ops)
      : InterceptedOps(*ops), device_(device), owned_(std::move(ops)) {}

  GemmPlatform platform{"a card", 1, "a library"};
  std::vector<std::string> proposals{"quick"};
  std::vector<GemmChoice> used;  // what was last asked for

  [[nodiscard]] GemmPlatform gemm_platform() const override { return platform; }
  [[nodiscard]] std::string gemm_product(const GemmArgs& a) const override { return std::to_string(a.d.shape.rows); }
  void use_gemms(std::span<const GemmChoice> choices, const std::string&) override {
    used.assign(choices.begin(), choices.end());
  }
  std::vector<GemmChoice> choose_gemms(std::span<const GemmArgs>) override { return used; }
  std::vector<std::string> gemm_candidates(const GemmArgs&) override { return proposals; }

  // "quick" computes once and "slow" four times; "unsteady" is fastest and never gives the same bytes; "refused"
  // throws.
  void gemm(Stream& s, const GemmArgs& a) override {
    const std::string algorithm = used.empty() ? proposals.front() : used.front().algorithm;
    if (algorithm == "refused") throw DeviceError("this product is refused");
    if (algorithm == "unsteady") return device_.host_call(s, [this, d = a.d] { *d.as<float>() = ++calls_; });
    for (int i = 0; i < (algorithm == "slow" ? 4 : 1); ++i) InterceptedOps::gemm(s, a);
  }

 private:
  Device& device_;
  std::unique_ptr<Ops> owned_;
  float calls_ = 0;
};

struct ScriptedBackend {
  ScriptedBackend() {
    auto ops = std::make_unique<ScriptedGemms>(*backend.device, std::move(backend.ops));
    gemms = ops.get();
    backend.ops = std::move(ops);
  }
  Backend backend = make_backend("cpu");
  ScriptedGemms* gemms = nullptr;
};

}  // namespace qe::testing
