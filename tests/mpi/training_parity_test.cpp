// Training under mpirun gives the bytes of one process: each rank's trace is its part of the reference's.
#include <mpi.h>

#include "app/pipeline_plan.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/mpi_transport.h"
#include "tests/catch.h"
#include "tests/runtime/matrix.h"

namespace qe::testing {
namespace {

constexpr int kSteps = 3;

TraceRecords trace_under_mpi(const Config& config) {
  CpuDevice device;
  CpuOps ops(device);
  const auto transport =
      make_mpi_transport(device, config.pipeline.pipeline_model_parallel_size, config.parallel.data, 60);
  TraceProbe trace(device);
  PipelineRank rank(device, ops, *transport, make_rank_config(config), make_rank_plan(config), &trace);
  for (std::uint32_t step = 1; step <= kSteps; ++step) {
    const Batch batch = synthetic_batch(config, step);
    const std::size_t share = batch.tokens.size() / static_cast<std::size_t>(config.parallel.data);
    const std::size_t first = share * static_cast<std::size_t>(transport->rank(Group::kData));
    rank.train_step(std::span(batch.tokens).subspan(first, share), std::span(batch.targets).subspan(first, share),
                    learning_rate(config.training, step), step);
  }
  // Every record of the run is on exactly one rank.
  const std::vector<std::string> counts = transport->exchange(std::to_string(trace.records().size()), Group::kPipeline);
  TraceRecords records = trace.records();
  std::uint64_t total = 0;
  for (const std::string& count : counts) total += std::stoull(count);
  records[{0, "records", "all ranks", -1}] = total;
  return records;
}

void require_part_of(const TraceRecords& reference, TraceRecords mine) {
  const auto total = mine.extract({0, "records", "all ranks", -1});
  CHECK(total.mapped() == reference.size());
  for (const auto& [key, digest] : mine) {
    const auto expected = reference.find(key);
    INFO(to_string(key));
    REQUIRE((expected != reference.end() && expected->second == digest));
  }
}

int world_size() {
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  return ranks;
}

}  // namespace

TEST_CASE("two pipelines of two ranks give under mpirun what they give as threads") {
  if (world_size() != 4) return;
  const Config config = test_config({"parallel.data=2", "training.global_batch_size=8", "pipeline.schedule=zbv",
                                     "pipeline.pipeline_model_parallel_size=2", "execution.mode=graph"});
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const RunOutcome reference = run_training(config, {.steps = kSteps});
  require_part_of(reference.replicas.at(static_cast<std::size_t>(rank / 2)), trace_under_mpi(config));
}

TEST_CASE("under every schedule, mode, backward and placement two and four processes give what one rank gives alone") {
  if (world_size() == 1) return;
  const Overrides plain = kMatrixModel + Overrides{"pipeline.backward=full"};
  for (const Overrides& placement : {kViews[1], kSlots[0]}) {
    const TraceRecords reference = run_training(test_config(plain + placement), {.steps = kSteps}).trace;
    for (const Overrides& cell : cells({mappings(world_size()), kModes, kBackwards})) {
      INFO(name_of(cell + placement));
      require_part_of(reference, trace_under_mpi(test_config(kMatrixModel + cell + placement)));
    }
  }
}

}  // namespace qe::testing
