// Destinations, binding half: the address at which each gradient must arrive. Compares views, never touches memory.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/ids.h"
#include "core/tensor.h"

namespace qe {

class Destinations {
 public:
  // The last `shared` of the matrices have one destination for all microbatches, the others one per microbatch.
  void add_stage(StageIndex, int matrices, int shared, int microbatches);

  // kDestination when the view is empty, overlaps another destination or rebinds one elsewhere. Binding the same view
  // again changes nothing.
  void bind(StageIndex, int matrix, MicrobatchIndex, const Tensor&, int device);
  // kDestination at the first matrix that is unbound or differs in address, shape, dtype, pitch or device.
  void check(StageIndex, MicrobatchIndex, std::span<const Tensor> actual, int device) const;

 private:
  struct Destination {
    Tensor tensor;  // empty: unbound
    int device = 0;
  };
  struct Stage {
    StageIndex stage;
    int matrices;
    int own;  // matrices with a destination per microbatch: the first ones
    int microbatches;
    std::vector<Destination> bound;  // [own, microbatches] then [shared]
  };
  [[nodiscard]] std::size_t find_stage(StageIndex) const;
  [[nodiscard]] static std::size_t index_of(const Stage&, int matrix, MicrobatchIndex);
  void require_unaliased(const Stage&, std::size_t index, const Tensor&, int device, const std::string& key) const;

  std::vector<Stage> stages_;
};

// Whether two views share a byte; column ranges of one wider buffer may interleave without sharing any.
bool overlap(const Tensor&, const Tensor&) noexcept;

}  // namespace qe
