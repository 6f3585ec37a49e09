#include "tests/runtime/training_run.h"

#include <mutex>

#include "core/random.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/thread_transport.h"

namespace qe::testing {

Config test_config(const std::vector<std::string>& overrides) {
  // Eight layers of hidden 64 and a four-entry amax history: small, and past the history's rollover within one step.
  return parse_config(R"({
    "model": {"num_layers": 8, "hidden_size": 64, "ffn_hidden_size": 176, "num_attention_heads": 4, "vocab_size": 257,
              "max_position_embeddings": 32},
    "fp8": {"amax_history_len": 4},
    "training": {"seq_length": 32, "micro_batch_size": 1, "global_batch_size": 4, "lr": 1e-3, "train_iters": 20},
    "execution": {"backend": "cpu", "mode": "eager"}
  })",
                      "test config", overrides);
}

Batch synthetic_batch(const Config& config, std::uint32_t step) {
  const auto cells = static_cast<std::size_t>(config.tokens_per_step());
  const std::uint64_t key = random_key(7, "synthetic tokens");
  Batch batch;
  for (std::size_t i = 0; i < cells; ++i) {
    const RandomWords r = philox(key, step, i);
    const auto vocab = static_cast<std::uint32_t>(config.model.vocab_size);
    batch.tokens.push_back(static_cast<std::int32_t>(r.w[0] % vocab));
    batch.targets.push_back(static_cast<std::int32_t>(r.w[1] % vocab));
  }
  return batch;
}

RunOutcome run_training(const Config& config, const RunOptions& options) {
  RankPlan plan = make_rank_plan(config);
  if (options.change_plan) options.change_plan(plan);
  const RankConfig rank_config = make_rank_config(config);
  RunOutcome outcome;
  outcome.counts.resize(static_cast<std::size_t>(config.ranks()));
  outcome.replicas.resize(static_cast<std::size_t>(config.parallel.data));
  std::mutex mutex;
  const auto run_rank = [&](Device& device, Ops& ops, Transport& transport) {
    const int rank = transport.rank(Group::kWorld);
    TraceProbe trace(device);
    PipelineRank pipeline(device, ops, transport, rank_config, plan, options.trace ? &trace : nullptr);
    if (options.before_steps) options.before_steps(pipeline, transport);
    for (std::uint32_t step = options.first_step; step <= static_cast<std::uint32_t>(options.steps); ++step) {
      const Batch batch = synthetic_batch(config, step);
      const auto replica = static_cast<std::size_t>(transport.rank(Group::kData));
      const std::size_t share = batch.tokens.size() / static_cast<std::size_t>(config.parallel.data);
      const StepResult result = pipeline.train_step(std::span(batch.tokens).subspan(replica * share, share),
                                                    std::span(batch.targets).subspan(replica * share, share),
                                                    learning_rate(config.training, step), step);
      if (rank == 0) {
        outcome.losses.push_back(result.loss_sum);
        outcome.scalars.push_back(result.scalars);
      }
      if (options.after_step) options.after_step(rank, pipeline, step);
      if (options.at_boundary) options.at_boundary(pipeline, transport, step);
    }
    transport.barrier(Group::kWorld);
    const std::lock_guard lock(mutex);
    outcome.counts[static_cast<std::size_t>(rank)] = pipeline.counts();
    outcome.replicas[static_cast<std::size_t>(transport.rank(Group::kData))].insert(trace.records().begin(),
                                                                                    trace.records().end());
  };
  if (config.execution.backend == "cpu") {
    ThreadWorld world(config.pipeline.pipeline_model_parallel_size, config.parallel.data, options.timeout_s);
    run_ranks(world, [&](int rank) {
      CpuDevice device(options.policy, options.policy_seed + static_cast<std::uint64_t>(rank));
      CpuOps ops(device);
      const auto transport = world.connect(rank, device);
      const auto other_ops = options.wrap_ops ? options.wrap_ops(rank, ops, device) : nullptr;
      const auto other_transport = options.wrap_transport ? options.wrap_transport(rank, *transport, device) : nullptr;
      run_rank(device, other_ops ? *other_ops : ops, other_transport ? *other_transport : *transport);
    });
  } else {
    const Backend backend = make_backend(config.execution.backend);
    run_rank(*backend.device, *backend.ops, *make_transport(*backend.device, 1, 1, config.runtime.timeout_s, "ipc"));
  }
  outcome.trace = outcome.replicas.front();
  return outcome;
}

}  // namespace qe::testing
