// Training on GPUs under mpirun gives the bytes that one rank on one GPU gives: each rank's trace is its part of the
// reference's, with both ranks on one card and, where there are two, each on its own. Two pipelines of two ranks agree
// with each other.
#include <mpi.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <span>
#include <sstream>

#include "app/pipeline_plan.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/ipc_transport.h"
#include "kernels/cuda/nccl_transport.h"
#include "kernels/wire/mpi_wire.h"
#include "kernels/wire/solo_transport.h"
#include "tests/catch.h"
#include "tests/runtime/training_run.h"

namespace qe::testing {
namespace {

constexpr std::uint32_t kSteps = 6, kManySteps = 20;  // both over the rollover of a history of four

Config cuda_config(std::vector<std::string> overrides) {
  for (const char* shape :
       {"model.num_layers=8", "model.hidden_size=512", "model.ffn_hidden_size=1408", "model.num_attention_heads=8",
        "model.max_position_embeddings=64", "training.seq_length=64", "execution.backend=cuda"}) {
    overrides.emplace_back(shape);
  }
  return test_config(overrides);
}

TraceRecords train(const Config& config, std::uint32_t steps, CudaDevice& device, Transport& transport) {
  CudaOps ops(device);
  TraceProbe trace(device);
  PipelineRank rank(device, ops, transport, make_rank_config(config), make_rank_plan(config), &trace);
  for (std::uint32_t step = 1; step <= steps; ++step) {
    const Batch batch = synthetic_batch(config, step);
    const std::size_t share = batch.tokens.size() / static_cast<std::size_t>(config.parallel.data);
    const std::size_t first = share * static_cast<std::size_t>(transport.rank(Group::kData));
    rank.train_step(std::span(batch.tokens).subspan(first, share), std::span(batch.targets).subspan(first, share),
                    learning_rate(config.training, step), step);
  }
  return trace.records();
}

TraceRecords train_alone(const Config& config, std::uint32_t steps) {
  CudaDevice device(0);
  SoloTransport transport(device);
  return train(config, steps, device, transport);
}

void require_part_of(const TraceRecords& reference, const TraceRecords& mine, Transport& transport) {
  std::size_t total = 0;  // every record of the run is on exactly one rank
  for (const std::string& count : transport.exchange(std::to_string(mine.size()), Group::kPipeline)) {
    total += std::stoull(count);
  }
  CHECK(total == reference.size());
  int wrong = 0;
  for (const auto& [key, digest] : mine) {
    const auto expected = reference.find(key);
    if (expected != reference.end() && expected->second == digest) continue;
    UNSCOPED_INFO(to_string(key));
    if (++wrong == 10) break;
  }
  CHECK(wrong == 0);
}

int world_size() {
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  return ranks;
}

// The lines of every rank of the group, sorted.
std::vector<std::string> gather_lines(const TraceRecords& mine, Transport& transport, Group group) {
  std::string text;
  for (const auto& [key, digest] : mine) text += to_string(key) + " = " + std::to_string(digest) + '\n';
  std::vector<std::string> lines;
  for (const std::string& part : transport.exchange(text, group)) {
    std::istringstream stream(part);
    for (std::string line; std::getline(stream, line);) lines.push_back(line);
  }
  std::sort(lines.begin(), lines.end());
  return lines;
}

// Where two ranks can run and what carries their messages.
struct Carrier {
  const char* name;
  bool shared, nccl;
};
constexpr Carrier kCarriers[] = {
    {"ipc, one card", true, false}, {"ipc, two cards", false, false}, {"nccl", false, true}};

bool is_here(const Carrier& c) { return c.shared || (CudaDevice::count() > 1 && (!c.nccl || nccl_was_built())); }

std::unique_ptr<Transport> connect(const Carrier& carrier, CudaDevice& device, int pipeline, int data) {
  MpiWorld world = join_mpi_world(pipeline, data);
  if (carrier.nccl) return make_nccl_transport(device, std::move(world.wire), world.layout, 60);
  return make_ipc_transport(device, std::move(world.wire), world.layout, 60);
}

int my_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

const std::vector<std::string> kMappings[] = {
    {"pipeline.schedule=interleaved_1f1b", "pipeline.pipeline_model_parallel_size=2",
     "pipeline.virtual_pipeline_model_parallel_size=2"},
    {"pipeline.schedule=zbv", "pipeline.pipeline_model_parallel_size=2"}};

// Every mapping, mode and carrier, and each of these ways to hold gradients, against one rank alone.
void compare_with_one_rank(std::uint32_t steps, const std::vector<std::vector<std::string>>& gradients) {
  std::vector<std::string> eager = gradients.front();
  eager.emplace_back("execution.mode=eager");
  const TraceRecords reference = train_alone(cuda_config(eager), steps);
  for (const Carrier& carrier : kCarriers) {
    if (!is_here(carrier)) continue;
    for (const auto& mapping : kMappings) {
      for (const char* mode : {"execution.mode=eager", "execution.mode=graph"}) {
        for (const auto& keys : gradients) {
          std::vector<std::string> cell = mapping;
          cell.emplace_back(mode);
          cell.insert(cell.end(), keys.begin(), keys.end());
          INFO(mapping.front() << " " << mode << " " << keys.front() << ", " << carrier.name);
          CudaDevice device(carrier.shared ? 0 : my_rank());
          const auto transport = connect(carrier, device, 2, 1);
          require_part_of(reference, train(cuda_config(cell), steps, device, *transport), *transport);
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("two pipelines of two ranks give on one card the same bytes under either schedule, and one state") {
  if (world_size() != 4) return;
  std::vector<std::string> reference;
  for (const std::vector<std::string>& mapping :
       {std::vector<std::string>{"pipeline.schedule=zbv", "execution.mode=graph"},
        std::vector<std::string>{"pipeline.schedule=interleaved_1f1b",
                                 "pipeline.virtual_pipeline_model_parallel_size=2", "execution.mode=eager"}}) {
    std::vector<std::string> cell{"parallel.data=2", "training.global_batch_size=8",
                                  "pipeline.pipeline_model_parallel_size=2"};
    cell.insert(cell.end(), mapping.begin(), mapping.end());
    CudaDevice device(0);
    MpiWorld world = join_mpi_world(2, 2);
    const auto transport = make_ipc_transport(device, std::move(world.wire), world.layout, 60);
    const TraceRecords mine = train(cuda_config(cell), kSteps, device, *transport);
    const std::vector<std::string> lines = gather_lines(mine, *transport, Group::kPipeline);
    if (reference.empty()) reference = lines;
    INFO(mapping.front());
    CHECK(lines.size() > 1000);
    CHECK((lines == reference));
    // Losses and activations are each replica's own; weights, moments and scales are not.
    std::string state;
    for (const auto& [key, digest] : mine) {
      if (key.category == "state") state += std::to_string(digest) + ' ';
    }
    CHECK_FALSE(state.empty());
    for (const std::string& other : transport->exchange(state, Group::kData)) CHECK((other == state));
  }
}

TEST_CASE("two ranks on GPUs give what one gives alone") {
  if (world_size() != 2) return;
  compare_with_one_rank(kSteps, {{"gradients.placement=accumulate"}});
  compare_with_one_rank(kSteps, {{"gradients.placement=arena"}});
}

TEST_CASE("two ranks on GPUs give what one gives alone over many steps, accumulating into either kind of slots",
          "[slow]") {
  if (world_size() != 2) return;
  compare_with_one_rank(kManySteps, {{"gradients.placement=accumulate", "pipeline.tape_slots=peak"},
                                     {"gradients.placement=accumulate", "pipeline.tape_slots=per_microbatch"}});
}

TEST_CASE("two ranks on GPUs give what one gives alone over many steps, with a view for each microbatch", "[slow]") {
  if (world_size() != 2) return;
  compare_with_one_rank(kManySteps, {{"gradients.placement=arena"}, {"gradients.placement=copied"}});
}

TEST_CASE("two replicas on GPUs hold one state at every step") {
  if (world_size() != 2) return;
  for (const Carrier& carrier : kCarriers) {
    if (!is_here(carrier)) continue;
    INFO(carrier.name);
    CudaDevice device(carrier.shared ? 0 : my_rank());
    const auto transport = connect(carrier, device, 1, 2);
    const Config config = cuda_config({"parallel.data=2", "training.global_batch_size=8", "execution.mode=graph"});
    std::string state;
    for (const auto& [key, digest] : train(config, kSteps, device, *transport)) {
      if (key.category == "state") state += std::to_string(digest) + ' ';
    }
    CHECK_FALSE(state.empty());
    for (const std::string& other : transport->exchange(state, Group::kData)) CHECK((other == state));
  }
}

TEST_CASE("300 captured steps on two GPUs are 300 eager ones, and memory stays as it is", "[slow]") {
  if (world_size() != 2) return;
  for (const Carrier& carrier : kCarriers) {
    if (carrier.shared || !is_here(carrier)) continue;
    INFO(carrier.name);
    std::vector<std::string> runs;
    for (const char* mode : {"execution.mode=eager", "execution.mode=graph"}) {
      CudaDevice device(my_rank());
      CudaOps ops(device);
      const auto transport = connect(carrier, device, 2, 1);
      const Config config = cuda_config({"pipeline.schedule=zbv", "pipeline.pipeline_model_parallel_size=2", mode});
      PipelineRank rank(device, ops, *transport, make_rank_config(config), make_rank_plan(config), nullptr);
      std::string run;
      std::size_t free_at_20 = 0;
      for (std::uint32_t step = 1; step <= 300; ++step) {
        const Batch batch = synthetic_batch(config, step);
        const StepResult r = rank.train_step(batch.tokens, batch.targets, learning_rate(config.training, step), step);
        run += std::to_string(std::bit_cast<std::uint64_t>(r.loss_sum)) + " " +
               std::to_string(std::bit_cast<std::uint32_t>(r.scalars.norm)) + "\n";
        transport->barrier(Group::kWorld);  // nobody else is between two allocations
        if (step == 20) free_at_20 = device.memory_pool().free;
      }
      CHECK(device.memory_pool().free == free_at_20);
      run += std::to_string(rank.state_digest());
      runs.push_back(run);
    }
    CHECK((runs[0] == runs[1]));
  }
}

}  // namespace qe::testing
