// One pipeline stage as the actions see it: F, I, W, evaluation and refresh, written once against Ops for every
// backend, precision and placement. It enqueues arithmetic and nothing else: order, ownership and versions are checked
// by whoever calls it (core/runtime/step_runner.h).
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/ids.h"
#include "core/stage/attention_block.h"
#include "core/stage/embedding.h"
#include "core/stage/mlp_block.h"
#include "core/stage/output_head.h"

namespace qe {

// Device memory that the runtime owns and the stage reads or writes at fixed addresses.
struct StageBuffers {
  const std::int32_t* tokens = nullptr;       // [M, T]; first stage
  LossBuffers loss;                           // last stage
  std::uint64_t* forward_counter = nullptr;   // +1 by the last node of F
  std::uint64_t* backward_counter = nullptr;  // +1 by the last node of I
};

enum class Chain : std::uint8_t { kForward, kBackward };

// Whether anything of the stage quantizes under delayed scaling: some layer, or the head.
bool has_scaling_state(const StageConfig&, const StageRange&);
// Whether its scales move in units of their own, two a stage, and not inside F and I.
bool scales_apart(const StageConfig&, const StageRange&);

// Whether an update writes every cached weight beside its master, so that only the start, a load and a skipped step
// need a refresh. Not in a model with a dynamic scale, which depends on the whole new weight; and then on no stage, so
// that the cut does not show.
bool caches_follow_update(const StageConfig&);

class TransformerStage {
 public:
  TransformerStage(Device&, Ops&, Stream& setup, const StageConfig&, StageIndex, const StageRange&, int slots,
                   const StageBuffers&, Probe* probe);

  // Units. Each enqueues on the stream and may be captured; slots as the contract issued them.
  void refresh(Stream&) const;             // every cached weight from the masters
  void forward(Stream&, SlotIndex) const;  // input(slot) → output(slot), tape filled, forward scales rolled, token + 1
  void input_grad(Stream&,
                  SlotIndex) const;  // output_grad() → input_grad(slot), vector gradients, backward scales, token + 1
  void weight_grad(Stream&, std::span<const SlotIndex>, bool first_write) const;
  void evaluate(Stream&, SlotIndex) const;  // as F, with no amax, no roll and no token; the loss only
  // Where scales_apart(): the update as a unit of its own, after F or I (then with token + 1) or once a step. With
  // reduced amaxes the runner gathers them (F and I have done it already when scales move per microbatch), reduces
  // scaling(chain).amaxes() over the replicas and calls this, which puts them back first.
  void gather_amaxes(Stream&, Chain) const;
  void update_scales(Stream&, Chain) const;

  // The scaling state as the step found it, so that a skipped step can put it back.
  void save_scaling(Stream&) const;
  void restore_scaling(Stream&) const;

  // By parameter, what an update writes beside the new masters. Only where caches_follow_update().
  [[nodiscard]] WeightCopies weight_copies() const;

  // Boundary memory of a slot, [T, h] in the activation type.
  [[nodiscard]] Tensor input(SlotIndex) const;  // not on the first stage
  [[nodiscard]] Tensor output(SlotIndex) const;
  [[nodiscard]] Tensor output_grad() const;          // read by the next I, whatever its slot; not on the last stage
  [[nodiscard]] Tensor input_grad(SlotIndex) const;  // not on the first stage
  // Before each F: which microbatch the slot will hold, read by ops at run time. Nothing to enqueue where every
  // microbatch has its own slot, whose cell was written once.
  void set_microbatch(Stream&, SlotIndex, MicrobatchIndex) const;
  void set_evaluated(Stream&, MicrobatchIndex) const;  // the same before evaluate(), which has a cell of its own

  [[nodiscard]] StageIndex index() const noexcept { return index_; }
  [[nodiscard]] const StageRange& range() const noexcept { return range_; }
  [[nodiscard]] int slots() const noexcept { return tape_->slots(); }
  [[nodiscard]] int w_group() const noexcept { return tape_->group(); }  // microbatches of one W
  [[nodiscard]] const StageWeights& weights() const noexcept { return weights_; }
  [[nodiscard]] const GradMemory& gradients() const noexcept { return gradients_; }
  [[nodiscard]] const Fp8State& scaling(Chain c) const noexcept {
    return c == Chain::kForward ? forward_state_ : backward_state_;
  }
  // Every GEMM domain, in order.
  [[nodiscard]] std::vector<const Linear*> linears() const;
  // Parameter indices of the matrices: the ledger's order.
  [[nodiscard]] std::vector<int> matrices() const;
  [[nodiscard]] bool reduces_amaxes() const noexcept { return reduces_amaxes_; }
  [[nodiscard]] bool scales_apart() const noexcept { return scales_apart_; }
  [[nodiscard]] bool caches_follow_update() const noexcept { return caches_follow_update_; }
  [[nodiscard]] int weight_quantize_launches() const noexcept;  // of one refresh

 private:
  struct Layer {
    int index;
    AttentionBlock attention;
    MlpBlock mlp;
    FieldId middle;  // [T, h], after attention
    FieldId out;     // [T, h]
  };
  [[nodiscard]] StageRun run(Stream&, SlotIndex, Pass) const;
  void forward_pass(const StageRun&) const;
  void finish_chain(const StageRun&, Chain) const;
  [[nodiscard]] std::uint64_t* token(Chain) const;
  void write_cell(Stream&, int cell, MicrobatchIndex) const;
  [[nodiscard]] Tensor layer_input(const StageRun&, std::size_t layer) const;
  void record_forward(const StageRun&, const Layer&) const;
  void record_input_grad(const StageRun&, const Layer&, const Tensor& dx) const;

  Device& device_;
  Ops& ops_;
  StageIndex index_;
  StageRange range_;
  int microbatches_;
  bool update_per_microbatch_;
  bool scales_apart_;
  bool reduces_amaxes_;
  bool caches_follow_update_;
  StageBuffers buffers_;
  Probe* probe_;
  StageWeights weights_;
  GradMemory gradients_;
  std::optional<Embedding> embedding_;
  std::vector<Layer> layers_;
  std::optional<OutputHead> head_;
  FieldId input_{}, input_grad_{}, output_grad_{}, d_layer_{}, d_middle_{};
  std::unique_ptr<Tape> tape_;
  Buffer microbatch_cells_;            // [slots + 1]: the last is evaluation's
  Buffer scaling_, scaling_at_start_;  // both chains' states
  Fp8State forward_state_, backward_state_;
};

// The stage of this rank with that index; QE_EXPECTS that it is there.
const TransformerStage* stage_of(std::span<const TransformerStage* const> stages, StageIndex);

}  // namespace qe
