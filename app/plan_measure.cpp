#include "app/plan_measure.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <memory>

#include "app/gemm_table.h"
#include "app/pipeline_plan.h"
#include "app/plan_memory.h"
#include "core/random.h"
#include "kernels/backend.h"

namespace qe {
namespace {

constexpr int kRepetitions = 9;
constexpr double kShortestSample_ms = 20;  // a sample repeats its work until it is this long
constexpr int kStages = 3;                 // embedding and a layer, a layer, a layer and the head

using Clock = std::chrono::steady_clock;

double median(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  return samples[samples.size() / 2];
}

double milliseconds(const std::function<void()>& work) {
  const auto start = Clock::now();
  work();
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// The config on one rank with one layer a stage, and a few microbatches.
Config three_stages(const Config& config, const std::vector<int>& bf16_layers) {
  Config c = config;
  c.model.num_layers = kStages;
  c.precision.bf16_layers = bf16_layers;
  c.parallel.data = 1;
  c.fp8.reduce_amax = ReduceAmax::kOff;
  c.pipeline = {};
  c.pipeline.virtual_pipeline_model_parallel_size = kStages;
  c.pipeline.schedule = ScheduleKind::kInterleaved1F1B;
  c.pipeline.tape_slots = config.pipeline.tape_slots;
  c.pipeline.layers_per_stage.assign(kStages, 1);
  const int microbatches = std::max(4, 2 * c.gradients.w_group);
  c.training.global_batch_size = microbatches / c.gradients.w_group * c.gradients.w_group * c.training.micro_batch_size;
  return c;
}

Backend backend_of(const Config& config) {
  Backend backend = make_backend(config.execution.backend);
  (void)use_gemm_table(config.execution.gemm_table, backend);
  return backend;
}

class Laboratory {
 public:
  Laboratory(const Config& config, const std::vector<int>& bf16_layers)
      : config_(three_stages(config, bf16_layers)),
        backend_(backend_of(config_)),
        plan_(make_rank_plan(config_)),
        rank_(*backend_.device, *backend_.ops, alone_, make_rank_config(config_), plan_, nullptr),
        stream_(backend_.device->make_stream("measure")),
        nothing_(backend_.device->allocate(sizeof(float), MemoryKind::kStep)) {
    const auto cells = static_cast<std::size_t>(config_.tokens_per_step());
    const auto vocabulary = static_cast<std::uint32_t>(config_.model.vocab_size);
    for (std::size_t i = 0; i < cells; ++i) {
      const RandomWords r = philox(random_key(1, "tokens to measure"), 0, i);
      tokens_.push_back(static_cast<std::int32_t>(r.w[0] % vocabulary));
      targets_.push_back(static_cast<std::int32_t>(r.w[1] % vocabulary));
    }
  }

  PlanCosts run() {
    warm_up();
    const std::vector<PartCosts> stages = measure_stages();
    PlanCosts costs;
    costs.device = backend_.device->description();
    costs.layer = stages[1];
    costs.embedding = difference(stages[0], stages[1]);
    costs.head = difference(stages[2], stages[1]);
    costs.message = measure_message();
    costs.optimizer = measure_optimizer();
    measure_rest(stages, costs);
    return costs;
  }

  // A stage of one layer alone.
  PartCosts run_plain_layer() {
    warm_up();
    return measure_stages()[1];
  }

 private:
  using Unit = std::function<void()>;

  void warm_up() {
    for (int i = 0; i < 2; ++i) train_step();  // every slot and scale holds what a run's would
  }

  void train_step() {
    ++step_;
    rank_.train_step(tokens_, targets_, 0.0, step_);
  }

  static PartCosts difference(const PartCosts& with, const PartCosts& without) {
    const auto part = [](double a, double b) { return std::max(0.0, a - b); };
    return {part(with.forward, without.forward), part(with.input_grad, without.input_grad),
            part(with.weight_grad, without.weight_grad), part(with.refresh, without.refresh)};
  }

  // The call, or the replay of its graph.
  Unit unit(const Unit& call) {
    if (config_.execution.mode == ExecutionMode::kEager) return call;
    const std::shared_ptr<Graph> graph = backend_.device->capture(*stream_, call);
    return [this, graph] { backend_.device->launch(*graph, *stream_); };
  }
  Unit unit_of(const TransformerStage& stage, const Action& action) {
    std::vector<SlotIndex> slots;
    for (int i = 0; i < action.count; ++i) slots.push_back(SlotIndex{(to_int(action.microbatch) + i) % stage.slots()});
    switch (action.kind) {
      case ActionKind::kForward:
        return unit([this, &stage, slots] { stage.forward(*stream_, slots.front()); });
      case ActionKind::kInputGrad:
        return unit([this, &stage, slots] { stage.input_grad(*stream_, slots.front()); });
      default:
        return unit([this, &stage, slots] { stage.weight_grad(*stream_, slots, false); });
    }
  }

  double timed(const Unit& work) {
    return milliseconds([&] {
      work();
      backend_.device->synchronize(*stream_);
    });
  }

  // Every unit in the place that it has in a step, so that caches hold what they would hold there.
  std::vector<PartCosts> measure_stages() {
    struct Timed {
      Unit run;
      std::vector<double>* samples;
    };
    std::map<std::pair<StageIndex, ActionKind>, std::vector<double>> samples;
    std::map<StageIndex, std::vector<double>> refreshes;
    std::vector<Timed> step;
    for (const TransformerStage* stage : rank_.stages()) {
      if (stage->caches_follow_update()) continue;
      step.push_back({unit([this, stage] { stage->refresh(*stream_); }), &refreshes[stage->index()]});
    }
    for (const Action& action : plan_.schedule.actions[0]) {
      if (!is_compute(action.kind)) continue;
      const TransformerStage& stage = *stage_of(rank_.stages(), action.stage);
      step.push_back({unit_of(stage, action), &samples[{action.stage, action.kind}]});
    }
    std::vector<double> waits;
    for (int i = -1; i < kRepetitions; ++i) {
      waits.push_back(timed([&] { backend_.device->zero(*stream_, nothing_.data(), nothing_.bytes()); }));
      for (const Timed& t : step) {
        const double ms = timed(t.run);
        if (i >= 0) t.samples->push_back(ms);
      }
    }
    // What waiting costs by itself: in a step nobody waits between units.
    const double wait = median(waits);
    std::vector<PartCosts> costs;
    for (const TransformerStage* stage : rank_.stages()) {
      const auto of = [&](ActionKind kind) { return std::max(1e-6, median(samples[{stage->index(), kind}]) - wait); };
      costs.push_back({of(ActionKind::kForward), of(ActionKind::kInputGrad),
                       of(ActionKind::kWeightGrad) / config_.gradients.w_group,
                       stage->caches_follow_update() ? 0.0 : std::max(0.0, median(refreshes[stage->index()]) - wait)});
    }
    return costs;
  }

  // Of one call among many in a row.
  double time(const Unit& enqueue) {
    Device& device = *backend_.device;
    const auto sample = [&](int calls) {
      return milliseconds([&] {
        for (int i = 0; i < calls; ++i) enqueue();
        device.synchronize(*stream_);
      });
    };
    const double once = std::max(1e-3, (sample(1), sample(1)));
    const int calls = static_cast<int>(std::clamp(kShortestSample_ms / once, 1.0, 1000.0));
    std::vector<double> samples;
    for (int i = 0; i < kRepetitions; ++i) samples.push_back(sample(calls) / calls);
    return median(samples);
  }

  double measure_message() {
    const Tensor boundary = rank_.stages()[0]->output(SlotIndex{0});
    const Buffer from = backend_.device->allocate(boundary.bytes(), MemoryKind::kBoundary);
    const Buffer to = backend_.device->allocate(boundary.bytes(), MemoryKind::kBoundary);
    return time([&] { backend_.device->copy(*stream_, to.data(), from.data(), boundary.bytes()); });
  }

  double measure_optimizer() {
    const RankConfig config = make_rank_config(config_);
    const ParameterList model = model_parameters(config.stage);
    const std::int64_t count = Optimizer::partials_of(model);
    const Buffer cells = backend_.device->allocate(static_cast<std::size_t>(count) * sizeof(float), MemoryKind::kStep);
    Optimizer optimizer(*backend_.device, *backend_.ops, config.optimizer, rank_.stages(), model,
                        make_tensor(cells.data(), DType::kF32, {1, count}), nullptr, nullptr);
    std::int64_t parameters = 0;
    for (const Parameter& p : model) parameters += p.real_rows * p.shape.cols;
    std::uint32_t step = 0;
    const double whole = time([&] {
      optimizer.begin_step(*stream_, 0.0f, ++step);
      optimizer.end_step(*stream_);
    });
    return whole / (static_cast<double>(parameters) * 1e-6);
  }

  // What whole steps take beyond their parts, shared out over the actions.
  void measure_rest(const std::vector<PartCosts>& stages, PlanCosts& costs) {
    std::vector<double> samples;
    for (int i = 0; i < kRepetitions; ++i) samples.push_back(milliseconds([&] { train_step(); }));
    double parts = 0, parameters = 0;
    for (const PartCosts& s : stages) {
      parts += config_.microbatches() * (s.forward + s.input_grad + s.weight_grad) + s.refresh;
    }
    for (const Parameter& p : model_parameters(config_.stage_config())) {
      parameters += static_cast<double>(p.real_rows * p.shape.cols);
    }
    parts += costs.optimizer * parameters * 1e-6;
    double actions = 0;
    for (const Action& a : plan_.schedule.actions[0]) actions += is_compute(a.kind);
    costs.action = std::max(0.0, median(samples) - parts) / actions;
  }

  Config config_;
  PlaceInJob alone_{0, 1, 1};
  Backend backend_;
  RankPlan plan_;
  PipelineRank rank_;
  std::unique_ptr<Stream> stream_;
  Buffer nothing_;
  std::vector<std::int32_t> tokens_, targets_;
  std::uint32_t step_ = 0;
};

}  // namespace

PlanCosts measure_costs(const Config& config) {
  PlanCosts costs = Laboratory(config, {}).run();
  if (!config.precision.bf16_layers.empty()) costs.bf16_layer = Laboratory(config, {0, 1, 2}).run_plain_layer();
  return costs;
}

}  // namespace qe
