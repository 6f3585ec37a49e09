// Told of what a rank is about to do, on the host, as it issues it. For who reports where a rank is, and for faults
// that are made on purpose; the runtime itself needs none.
#pragma once

#include "core/action.h"

namespace qe {

class StepHooks {
 public:
  virtual ~StepHooks() = default;
  virtual void before(const Action&) = 0;  // every entry of the rank's list
  virtual void before_optimizer() = 0;     // the list is done
};

}  // namespace qe
