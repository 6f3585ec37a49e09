// Runs one unit of a stage: an eager call or the replay of its graph, behind one run(). Owns the graphs and the
// hand-off. What may run is decided before it is called (core/runtime/step_runner.h).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "core/action.h"
#include "core/device.h"
#include "core/qeffect/handoff.h"
#include "core/qeffect/qeffect.h"
#include "core/stage/transformer_stage.h"

namespace qe {

struct ExecutorConfig {
  bool captured = true;
  bool full_backward = false;
  bool peak_slots = true;  // slots are reused: the first write of a step is a graph of its own (design.md 4)
};

struct ExecutionCounts {
  int graphs = 0;
  int first_write_graphs = 0;  // of these, with peak slots
  int refresh_graphs = 0;      // of these
  int update_graphs = 0;       // of these: two a stage where scales move apart from F and I
  std::uint64_t updates = 0;   // calls of them, in either mode; a hand-off each way around each
  std::uint64_t replays = 0;
  std::uint64_t eager_calls = 0;
  std::uint64_t handoffs = 0;  // one each way around every call
  std::uint64_t matrix_copies = 0;
  std::uint64_t weight_quantize_launches = 0;
};

class GraphExecutor {
 public:
  // `stages` are this rank's. The contract is asked for the bound destinations only.
  GraphExecutor(Device&, Stream& caller, Stream& graph, std::vector<const TransformerStage*> stages, QEffect&,
                const ExecutorConfig&);

  // Captures every unit: F, I (F, B) per slot, W per group of slots, one refresh a stage, with peak slots one
  // first-write W (B) a stage, two updates a stage whose scales move apart.
  // Changes no state. Nothing when the mode is eager.
  void capture();

  void refresh(StageIndex);
  void run(const Action&, std::span<const SlotIndex>, bool first_write);
  void update_scales(StageIndex, Chain);  // where the stage's scales move apart from F and I
  void evaluate(StageIndex, SlotIndex);   // eager in both modes

  [[nodiscard]] ExecutionCounts counts() const noexcept;

 private:
  enum class Unit : std::uint8_t {
    kForward,
    kInputGrad,
    kWeightGrad,
    kFullBackward,
    kRefresh,
    kUpdateForward,
    kUpdateBackward
  };
  struct Key {
    StageIndex stage;
    Unit unit;
    int slot;
    bool first_write;
    auto operator<=>(const Key&) const = default;
  };
  static Unit unit_of(ActionKind);
  [[nodiscard]] const TransformerStage& stage(StageIndex) const;
  void call(const Key&, std::span<const SlotIndex>) const;
  void capture_unit(const Key&);
  void execute(const Key&, std::span<const SlotIndex>);
  void check_destinations(const TransformerStage&, std::span<const SlotIndex>) const;

  Device& device_;
  Stream& graph_;
  std::vector<const TransformerStage*> stages_;
  QEffect& contract_;
  ExecutorConfig config_;
  Handoff handoff_;
  std::map<Key, std::unique_ptr<Graph>> graphs_;
  ExecutionCounts counts_;
};

}  // namespace qe
