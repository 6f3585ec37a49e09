// What the blocks of a stage share: while it is being put together (StageParts) and while an action runs (StageRun).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/fp8/fp8_state.h"
#include "core/ops.h"
#include "core/stage/grad_memory.h"
#include "core/stage/layer_config.h"
#include "core/stage/probe.h"
#include "core/stage/tape.h"
#include "core/stage/weights.h"

namespace qe {

// Blocks add what they need; the stage allocates it when all have spoken.
struct StageParts {
  Device& device;
  const StageConfig& config;
  const StageWeights& weights;
  const GradMemory& gradients;
  TapeLayout tape;
  std::vector<std::string> forward_slots;  // FP8 scaling slots of the forward chain, in layer order
  std::vector<std::string> backward_slots;
};

enum class Pass : std::uint8_t { kTrain, kEvaluate };

// What actions read instead of a parameter's master, by parameter of a stage; empty where they read the master.
struct WeightCopy {
  Operand out;
  Quantizer quantizer;
};
using WeightCopies = std::vector<WeightCopy>;

struct StageRun {
  Ops& ops;
  Device& device;
  Stream& stream;
  const Tape& tape;
  const Fp8State& forward_state;
  const Fp8State& backward_state;
  Pass pass;
  SlotIndex slot;
  MicrobatchCell microbatch;
  Probe* probe;  // null: nobody looks

  [[nodiscard]] Tensor at(FieldId id) const { return tape.at(id, slot); }
  [[nodiscard]] Operand at(const OperandField& f) const { return tape.at(f, slot); }
  // How an operand quantizes; in evaluation nothing is gathered.
  [[nodiscard]] Quantizer forward_quantizer(int s) const {
    return s < 0 ? Quantizer{} : forward_state.quantizer(s, pass == Pass::kTrain);
  }
  [[nodiscard]] Quantizer backward_quantizer(int s) const {
    return s < 0 ? Quantizer{} : backward_state.quantizer(s, true);
  }
  void record(ProbeCategory category, const std::string& name, const Tensor& value) const {
    if (probe != nullptr) probe->record(stream, category, name, microbatch, value);
  }
};

}  // namespace qe
