#include "core/runtime/pipeline_rank.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <numeric>

#include "core/error.h"
#include "core/runtime/evaluator.h"

namespace qe {

namespace {
constexpr int kThisDevice = 0;  // one device a rank
}

PipelineRank::PipelineRank(Device& device, Ops& ops, Transport& transport, const RankConfig& config,
                           const RankPlan& plan, TraceProbe* trace)
    : device_(device),
      ops_(ops),
      transport_(transport),
      config_(config),
      trace_(trace),
      model_(model_parameters(config.stage)),
      rank_of_stage_(plan.schedule.rank_of_stage),
      caller_(device.make_stream("caller")),
      graph_(device.make_stream("graph")) {
  make_stages(plan, trace);
  make_contract();
  boundary_ = std::make_unique<Boundary>(device, transport, *contract_, stage_list_, plan.rings, rank_of_stage_,
                                         *graph_, config.timeline);
  executor_ = std::make_unique<GraphExecutor>(device, *caller_, *graph_, stage_list_, *contract_,
                                              ExecutorConfig{config.captured, config.full_backward, config.peak_slots});
  const Tensor partials = shared_.cols(loss_.shape.cols, Optimizer::partials_of(model_));
  optimizer_ =
      std::make_unique<Optimizer>(device, ops, config.optimizer, stage_list_, model_, partials, trace, config.timeline);
  const auto rank = static_cast<std::size_t>(transport.rank(Group::kPipeline));
  runner_ = std::make_unique<StepRunner>(
      device, transport, *contract_, *executor_, *boundary_, stage_list_, plan.schedule.actions.at(rank), *caller_,
      *graph_, from_zero_.as<std::uint64_t>(), config.stage.fp8.scale_update, config.hooks, config.timeline);
  optimizer_->prepare(*caller_);
  device.synchronize();
  const auto start = std::chrono::steady_clock::now();
  executor_->capture();
  capture_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

PipelineRank::~PipelineRank() = default;

void PipelineRank::make_stages(const RankPlan& plan, Probe* probe) {
  const StageConfig& c = config_.stage;
  const auto cells = static_cast<std::size_t>(c.microbatches) * static_cast<std::size_t>(c.tokens());
  const int rank = transport_.rank(Group::kPipeline);
  std::vector<int> mine;
  for (int s = 0; s < static_cast<int>(rank_of_stage_.size()); ++s) {
    if (rank_of_stage_[static_cast<std::size_t>(s)] == rank) mine.push_back(s);
  }
  batch_.resize(2 * cells);
  device_batch_ = device_.allocate(2 * cells * sizeof(std::int32_t), MemoryKind::kStep);
  const std::size_t counter_bytes = 2 * mine.size() * sizeof(std::uint64_t);
  const std::int64_t shared = c.microbatches + Optimizer::partials_of(model_);
  from_zero_ = device_.allocate(counter_bytes + static_cast<std::size_t>(shared) * sizeof(float), MemoryKind::kStep);
  auto* counters = from_zero_.as<std::uint64_t>();
  shared_ = make_tensor(from_zero_.as<unsigned char>() + counter_bytes, DType::kF32, {1, shared});
  loss_ = shared_.cols(0, c.microbatches);
  host_loss_ = device_.allocate_host(loss_.bytes());
  gradient_scale_ = device_.allocate(sizeof(float), MemoryKind::kStep);
  const float scale = 1.0f / (static_cast<float>(cells) * static_cast<float>(transport_.size(Group::kData)));
  device_.upload(*caller_, gradient_scale_.data(), &scale, sizeof scale);

  for (std::size_t i = 0; i < mine.size(); ++i) {
    const auto s = static_cast<std::size_t>(mine[i]);
    const auto* tokens = device_batch_.as<std::int32_t>();
    const StageBuffers buffers{tokens,
                               {tokens + cells, loss_.as<float>(), gradient_scale_.as<float>()},
                               counters + 2 * i,
                               counters + 2 * i + 1};
    stages_.push_back(std::make_unique<TransformerStage>(device_, ops_, *caller_, c, StageIndex{mine[i]},
                                                         config_.ranges.at(s), plan.slots.at(s), buffers, probe));
    if (config_.initialize) stages_.back()->weights().initialize(device_, *caller_, c.seed);
    stage_list_.push_back(stages_.back().get());
  }
}

void PipelineRank::make_contract() {
  ContractConfig contract;
  contract.microbatches = config_.stage.microbatches;
  contract.reduced = transport_.size(Group::kData) > 1;
  contract.accumulate = config_.stage.gradients.placement == Placement::kAccumulate;
  for (const TransformerStage* s : stage_list_) {
    const ParameterList& parameters = s->weights().parameters();
    const auto matrices = static_cast<int>(s->matrices().size());
    contract.stages.push_back(
        {s->index(), s->slots(), matrices, parameters.size() - matrices, s->range().head ? 1 : 0});
  }
  contract_ = std::make_unique<QEffect>(contract);
  for (const TransformerStage* s : stage_list_) {
    const std::vector<int> matrices = s->matrices();
    for (int i = 0; i < static_cast<int>(matrices.size()); ++i) {
      for (int m = 0; m < contract.microbatches; ++m) {
        Tensor bound = s->gradients().bound(matrices[static_cast<std::size_t>(i)], MicrobatchIndex{m});
        if (config_.hooks != nullptr) config_.hooks->binding(s->index(), i, MicrobatchIndex{m}, bound);
        contract_->bind_destination(s->index(), i, MicrobatchIndex{m}, bound, kThisDevice);
      }
    }
  }
}

void PipelineRank::upload_batch(std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets) {
  QE_EXPECTS(2 * tokens.size() == batch_.size() && targets.size() == tokens.size(),
             "a batch is M · T tokens and targets");
  // Few operations: the first F waits for each of them, and the host has nothing else to do meanwhile.
  std::copy(targets.begin(), targets.end(), std::copy(tokens.begin(), tokens.end(), batch_.begin()));
  device_.upload(*caller_, device_batch_.data(), batch_.data(), device_batch_.bytes());
  device_.zero(*caller_, from_zero_.data(), from_zero_.bytes());
}

void PipelineRank::sum_over_ranks(const Tensor& cells) {
  const StepTimeline::Span span(config_.timeline, *caller_, "optimizer", [] { return "sum over ranks"; });
  transport_.all_reduce_sum(*caller_, cells.as<float>(), cells.shape.cols, Group::kPipeline);
  if (transport_.size(Group::kData) == 1) return;
  transport_.all_reduce_sum(*caller_, loss_.as<float>(), loss_.shape.cols, Group::kData);
}

double PipelineRank::loss_sum() const {
  const auto* cells = reinterpret_cast<const float*>(host_loss_.get());
  return std::accumulate(cells, cells + config_.stage.microbatches, 0.0);
}

StepResult PipelineRank::train_step(std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets,
                                    double learning_rate, std::uint32_t step) {
  if (trace_ != nullptr) trace_->begin_step(step);
  if (config_.timeline != nullptr) config_.timeline->begin_step(*caller_);
  upload_batch(tokens, targets);
  for (const TransformerStage* s : stage_list_) s->save_scaling(*caller_);
  runner_->run();
  // The device takes the norm while the host looks at what was done; nothing is updated before the contract has agreed.
  optimizer_->begin_step(*caller_, static_cast<float>(learning_rate), step);
  runner_->finalize();
  if (config_.hooks != nullptr) config_.hooks->before_optimizer();
  sum_over_ranks(shared_);
  optimizer_->end_step(*caller_);
  device_.download(*caller_, host_loss_.get(), loss_.data, loss_.bytes());
  device_.synchronize(*caller_);
  const OptimizerScalars scalars = optimizer_->result();
  const StepResult result{loss_sum(), scalars};
  if (result.scalars.skip != 0) {
    for (const TransformerStage* s : stage_list_) s->restore_scaling(*caller_);
  }
  contract_->commit_step();
  for (const TransformerStage* s : stage_list_) {
    if (result.scalars.skip == 0 && s->caches_follow_update()) runner_->mark_refreshed(s->index());
  }
  if (trace_ != nullptr) record_commit(result, learning_rate);
  return result;
}

double PipelineRank::evaluate(std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets,
                              int microbatches) {
  upload_batch(tokens, targets);
  for (const TransformerStage* s : stage_list_) {
    if (contract_->needs_refresh(s->index())) runner_->refresh(s->index());
  }
  enqueue_evaluation(device_, *graph_, *contract_, *boundary_, *executor_, stage_list_, rank_of_stage_, microbatches);
  sum_over_ranks(loss_);
  device_.download(*caller_, host_loss_.get(), loss_.data, loss_.bytes());
  device_.synchronize();
  contract_->complete_uses();
  return loss_sum();
}

std::vector<StateEntry> PipelineRank::state() const {
  std::vector<StateEntry> all;
  for (const TransformerStage* s : stage_list_) {
    std::vector<StateEntry> entries = state_dict(*s, *optimizer_);
    std::move(entries.begin(), entries.end(), std::back_inserter(all));
  }
  return all;
}

std::vector<unsigned char> PipelineRank::read(const StateEntry& entry) { return read_entry(device_, *caller_, entry); }
void PipelineRank::read(const StateEntry& entry, std::span<unsigned char> to) {
  read_entry(device_, *caller_, entry, to);
}

void PipelineRank::load(const StateEntry& entry, std::span<const unsigned char> bytes) {
  write_entry(device_, *caller_, entry, bytes);
}

void PipelineRank::restore(Epoch epoch, std::uint64_t applied_updates) {
  contract_->restore(epoch);
  optimizer_->restore(applied_updates);
}

std::uint64_t PipelineRank::state_digest() {
  std::uint64_t digest = 0;
  for (const StateEntry& e : state()) {
    const std::vector<unsigned char> bytes = read_entry(device_, *caller_, e);
    digest = XXH3_64bits_withSeed(bytes.data(), bytes.size(), digest);
  }
  return digest;
}

void PipelineRank::record_commit(const StepResult& result, double learning_rate) {
  device_.synchronize();
  trace_->record_state(*caller_, state());
  for (std::size_t i = 0; i < stage_list_.size(); ++i) {
    const TransformerStage& s = *stage_list_[i];
    for (const Linear* linear : s.linears()) {
      const Operand& w = linear->weight_cache();
      trace_->record_tensor(*caller_, "weight cache, rowwise", linear->name(), w.rowwise);
      if (linear->fp8()) trace_->record_tensor(*caller_, "weight cache, transposed", linear->name(), w.columnwise);
    }
    // Under every layer of the stage, so that different cuts compare.
    for (int l = s.range().first_layer; l < s.range().first_layer + s.range().num_layers; ++l) {
      trace_->record_value("forward counter", layer_name(l), runner_->counters()[2 * i]);
      trace_->record_value("backward counter", layer_name(l), runner_->counters()[2 * i + 1]);
      trace_->record_value("weight epoch", layer_name(l), contract_->version(s.index()).weight_epoch());
      trace_->record_value("cache epoch", layer_name(l),
                           contract_->version(s.index()).cache_epoch(CacheLayout::kColumnwise));
    }
  }
  if (stage_list_.front()->range().embedding) {  // once, whatever the number of ranks
    trace_->record_value("clip norm", "step", std::bit_cast<std::uint32_t>(result.scalars.norm));
    trace_->record_value("learning rate", "step", std::bit_cast<std::uint64_t>(learning_rate));
  }
}

}  // namespace qe
