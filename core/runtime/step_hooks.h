// Told of what a rank is about to do, on the host, as it issues it, and able to spoil it. For who reports where a rank
// is, and for faults that are made on purpose; the runtime itself needs none.
#pragma once

#include "core/action.h"
#include "core/device.h"
#include "core/qeffect/qeffect.h"
#include "core/stage/transformer_stage.h"
#include "core/tensor.h"

namespace qe {

class StepHooks {
 public:
  virtual ~StepHooks() = default;
  // A gradient's place, as it is bound before the first step; changed, it is bound so.
  virtual void binding(StageIndex, int matrix, MicrobatchIndex, Tensor&) = 0;
  // Every entry of the rank's list. False: it is left out.
  [[nodiscard]] virtual bool before(const Action&, QEffect&) = 0;
  // A compute action is on the stream, and not yet committed.
  virtual void after(const Action&, const TransformerStage&, Device&, Stream&) = 0;
  virtual void before_optimizer() = 0;  // the list is done
};

}  // namespace qe
