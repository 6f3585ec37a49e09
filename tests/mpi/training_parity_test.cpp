// Training under mpirun -n 2 gives the bytes of PP=1 in one process: each rank's trace is its part of the reference's.
#include "app/pipeline_plan.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/mpi_transport.h"
#include "tests/catch.h"
#include "tests/runtime/training_run.h"

namespace qe::testing {
namespace {

constexpr int kSteps = 3;

TraceRecords trace_under_mpi(const Config& config) {
  CpuDevice device;
  CpuOps ops(device);
  const auto transport = make_mpi_transport(device, config.pipeline.pipeline_model_parallel_size, 1, 60);
  TraceProbe trace(device);
  PipelineRank rank(device, ops, *transport, make_rank_config(config), make_rank_plan(config), &trace);
  for (std::uint32_t step = 1; step <= kSteps; ++step) {
    const Batch batch = synthetic_batch(config, step);
    rank.train_step(batch.tokens, batch.targets, learning_rate(config.training, step), step);
  }
  // Every record of the run is on exactly one rank.
  const std::vector<std::string> counts = transport->exchange(std::to_string(trace.records().size()), Group::kPipeline);
  TraceRecords records = trace.records();
  std::uint64_t total = 0;
  for (const std::string& count : counts) total += std::stoull(count);
  records[{0, "records", "all ranks", -1}] = total;
  return records;
}

}  // namespace

TEST_CASE("each cell of the fast matrix gives under mpirun what one rank gives alone") {
  const std::vector<std::string> mappings[] = {
      {"pipeline.schedule=interleaved_1f1b", "pipeline.pipeline_model_parallel_size=2",
       "pipeline.virtual_pipeline_model_parallel_size=2"},
      {"pipeline.schedule=zbv", "pipeline.pipeline_model_parallel_size=2"}};
  const TraceRecords reference =
      run_training(test_config({"pipeline.backward=full", "gradients.placement=copied"}), {.steps = kSteps}).trace;
  for (const auto& mapping : mappings) {
    for (const char* mode : {"execution.mode=eager", "execution.mode=graph"}) {
      for (const char* backward : {"pipeline.backward=split", "pipeline.backward=full"}) {
        for (const char* placement : {"gradients.placement=copied", "gradients.placement=arena"}) {
          std::vector<std::string> cell = mapping;
          cell.insert(cell.end(), {mode, backward, placement});
          TraceRecords mine = trace_under_mpi(test_config(cell));
          INFO(mapping.front() << " " << mode << " " << backward << " " << placement);
          const auto total = mine.extract({0, "records", "all ranks", -1});
          CHECK(total.mapped() == reference.size());
          for (const auto& [key, digest] : mine) {
            const auto expected = reference.find(key);
            INFO(to_string(key));
            REQUIRE((expected != reference.end() && expected->second == digest));
          }
        }
      }
    }
  }
}

}  // namespace qe::testing
