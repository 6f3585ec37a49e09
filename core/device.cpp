#include "core/device.h"

namespace qe {

const char* name_of(MemoryKind kind) noexcept {
  switch (kind) {
    case MemoryKind::kWeights:
      return "weights";
    case MemoryKind::kWeightCache:
      return "weight_cache";
    case MemoryKind::kMoments:
      return "moments";
    case MemoryKind::kGradients:
      return "gradients";
    case MemoryKind::kTape:
      return "tape";
    case MemoryKind::kBoundary:
      return "boundary";
    case MemoryKind::kScalingState:
      return "scaling_state";
    case MemoryKind::kWorkspace:
      return "workspace";
    case MemoryKind::kStep:
      return "step";
  }
  return "?";
}

}  // namespace qe
