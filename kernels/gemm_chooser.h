// The choice among algorithms, of a backend that has several for one product. Reads and writes no files, times nothing.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/ops_args.h"
#include "kernels/gemm_choice.h"

namespace qe {

// Arguments stand for shapes, types, pitches and additions; their addresses mean nothing.
class GemmChooser {
 public:
  virtual ~GemmChooser() = default;

  [[nodiscard]] virtual GemmPlatform gemm_platform() const = 0;
  [[nodiscard]] virtual std::string gemm_product(const GemmArgs&) const = 0;

  // From now on these products are computed so, and all others as the library proposes first. Forgets what was chosen
  // before. `source` is what messages name. An algorithm is looked at when its product is first needed: a DeviceError
  // names both where the library cannot compute it so.
  virtual void use_gemms(std::span<const GemmChoice>, const std::string& source) = 0;

  // Chooses for these, keeps it, and says all choices so far: without doubles, sorted, the same in every process with
  // the same card, libraries and use_gemms(). Throws DeviceError that lists every product that cannot be computed.
  virtual std::vector<GemmChoice> choose_gemms(std::span<const GemmArgs>) = 0;

  // The algorithms that the library proposes for a product; the first is what it is computed by if nothing else is
  // said.
  virtual std::vector<std::string> gemm_candidates(const GemmArgs&) = 0;
};

}  // namespace qe
