// One rank of the pipeline, put together: streams, stages, contract, executor, boundaries, optimizer, in destruction
// order. Knows nothing of JSON, files or the process it runs in, so that tests drive it as threads and app/ under
// mpirun.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/ops.h"
#include "core/runtime/boundary.h"
#include "core/runtime/graph_executor.h"
#include "core/runtime/optimizer.h"
#include "core/runtime/state_dict.h"
#include "core/runtime/step_runner.h"
#include "core/runtime/trace.h"
#include "core/schedule.h"
#include "core/transport.h"

namespace qe {

struct RankConfig {
  StageConfig stage;
  OptimizerConfig optimizer;
  bool captured = true;
  bool full_backward = false;
  bool peak_slots = true;
  bool initialize = true;          // false: masters stay zero, for a plan that lays memory out and runs nothing
  std::vector<StageRange> ranges;  // [S]
  StepHooks* hooks = nullptr;      // may be null, as the timeline
  StepTimeline* timeline = nullptr;
};

// The lowered schedule and what it needs.
struct RankPlan {
  Schedule schedule;
  std::vector<int> slots;        // [S] tape slots
  std::vector<RingDepth> rings;  // [S]
};

struct StepResult {
  double loss_sum = 0.0;  // Σ −log p over the step's target tokens of all replicas, on every rank
  OptimizerScalars scalars{};
};

class PipelineRank {
 public:
  // Allocates everything, initializes the parameters (if the config says so), captures the graphs. `trace` may be null.
  PipelineRank(Device&, Ops&, Transport&, const RankConfig&, const RankPlan&, TraceProbe* trace);
  ~PipelineRank();

  // [M, T] each, used where the rank holds the first or the last stage; the same on every rank of a replica. One
  // optimizer step, from 1: Algorithm 1, clip, AdamW, commit.
  StepResult train_step(std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets,
                        double learning_rate, std::uint32_t step);

  // Σ −log p of up to M microbatches of each replica, on every rank; at a step boundary. Changes caches and nothing
  // else (design.md 6).
  double evaluate(std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets, int microbatches);

  [[nodiscard]] ExecutionCounts counts() const noexcept { return executor_->counts(); }
  [[nodiscard]] double capture_seconds() const noexcept { return capture_seconds_; }
  [[nodiscard]] std::vector<StateEntry> state() const;
  [[nodiscard]] std::uint64_t state_digest();  // XXH3 over state(), derived amaxes as 0
  [[nodiscard]] std::uint64_t applied_updates() const noexcept { return optimizer_->applied_updates(); }  // Adam's t

  // One entry of state() to and from the host, at a step boundary.
  [[nodiscard]] std::vector<unsigned char> read(const StateEntry&);
  void read(const StateEntry&, std::span<unsigned char> to);  // as many bytes as the entry has
  [[nodiscard]] HostMemory allocate_host(std::size_t bytes) { return device_.allocate_host(bytes); }
  void load(const StateEntry&, std::span<const unsigned char> bytes);
  // After loading: the epoch and Adam's t go on from there, every cache is stale.
  void restore(Epoch, std::uint64_t applied_updates);

  [[nodiscard]] QEffect& contract() noexcept { return *contract_; }
  [[nodiscard]] const std::vector<const TransformerStage*>& stages() const noexcept { return stage_list_; }
  [[nodiscard]] const Parameter& model_parameter(int global_index) const { return model_[global_index]; }

 private:
  void make_stages(const RankPlan&, Probe*);
  void make_contract();
  void upload_batch(std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets);
  // Cells of shared_, each of which one rank of a pipeline has and the others have zero: every rank's become the
  // pipeline's, and the losses the job's.
  void sum_over_ranks(const Tensor& cells);
  [[nodiscard]] double loss_sum() const;  // of the job's losses, once the host has them
  void record_commit(const StepResult&, double learning_rate);

  Device& device_;
  Ops& ops_;
  Transport& transport_;
  RankConfig config_;
  TraceProbe* trace_;
  ParameterList model_;
  std::vector<int> rank_of_stage_;
  std::unique_ptr<Stream> caller_, graph_;
  std::vector<std::int32_t> batch_;  // [2, M · T]: tokens, then targets
  Buffer device_batch_;
  Buffer from_zero_;  // zeroed by each step and evaluation: the stages' counters, then shared_
  Tensor shared_;     // [1, M + partials]: losses, then the norm's partials, which one sum brings to every rank
  Tensor loss_;       // [1, M]
  HostMemory host_loss_{nullptr, nullptr};
  Buffer gradient_scale_;
  std::vector<std::unique_ptr<TransformerStage>> stages_;
  std::vector<const TransformerStage*> stage_list_;
  std::unique_ptr<QEffect> contract_;
  std::unique_ptr<Boundary> boundary_;
  std::unique_ptr<GraphExecutor> executor_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<StepRunner> runner_;
  double capture_seconds_ = 0.0;
};

}  // namespace qe
