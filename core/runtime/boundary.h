// Boundaries of a rank's stages: receive rings, slot outputs, the messages and local copies between them, and the
// events that order them (design.md 6). Tells the contract of every use; computes nothing.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "core/device.h"
#include "core/qeffect/qeffect.h"
#include "core/runtime/step_timeline.h"
#include "core/schedule.h"
#include "core/stage/transformer_stage.h"
#include "core/transport.h"

namespace qe {

// Depth of a stage's receive rings: most messages that arrived and were not consumed; 0 where none arrives.
struct RingDepth {
  int input = 0;
  int output_grad = 0;
};

class Boundary {
 public:
  // `stages` are this rank's; `rings` and rank_of_stage cover all stages. `rank` is the pipeline rank.
  // `timeline` may be null.
  Boundary(Device&, Transport&, QEffect&, std::vector<const TransformerStage*> stages,
           const std::vector<RingDepth>& rings, const std::vector<int>& rank_of_stage, Stream& graph,
           StepTimeline* timeline);

  // SEND_F, RECV_F, SEND_B, RECV_B.
  void run_message(const Action&);

  // Around a compute action of a slot, in this order:
  void order_rewrites(const Action&, SlotIndex);  // the graph stream waits for readers of what the action will write
  void deliver_inputs(const Action&, SlotIndex);  // ring entry or same-rank neighbour → the slot's own input
  void mark_produced(const Action&, SlotIndex);   // the action's outputs are on the graph stream

  void synchronize();  // the host waits for every message

 private:
  struct RingEntry {
    Buffer memory;
    std::unique_ptr<Event> received, copied;
  };
  struct Output {  // of one slot
    std::unique_ptr<Event> produced, consumed;
  };
  struct StageBoundary {
    const TransformerStage* stage;
    std::vector<RingEntry> input_ring, output_grad_ring;
    std::vector<Output> outputs, input_grads;
  };
  enum class Direction : std::uint8_t { kForward, kBackward };

  [[nodiscard]] StageBoundary* find(StageIndex);  // null: of another rank
  [[nodiscard]] StageBoundary& at(StageIndex);
  std::vector<RingEntry> make_ring(int depth, std::size_t bytes);
  std::vector<Output> make_outputs(int slots);
  void send(StageBoundary&, Direction, const Action&);
  void receive(StageBoundary&, Direction, const Action&);
  void deliver(StageBoundary&, Direction, const Action&, const Tensor& to);
  Stream& stream_to(int peer);
  Stream& stream_from(int peer);

  Device& device_;
  Transport& transport_;
  QEffect& contract_;
  std::vector<int> rank_of_stage_;
  Stream& graph_;
  StepTimeline* timeline_;
  std::map<int, std::unique_ptr<Stream>> to_peer_, from_peer_;  // one per directed edge
  std::vector<StageBoundary> stages_;
};

}  // namespace qe
