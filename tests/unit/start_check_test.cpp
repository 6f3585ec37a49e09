// The check before a run: room for every rank and one list of products, asked before any memory is taken.
#include "app/start_check.h"

#include <array>
#include <fstream>
#include <set>

#include "app/checkpointer.h"
#include "app/commands/commands.h"
#include "app/pipeline_plan.h"
#include "app/plan_memory.h"
#include "core/error.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/thread_transport.h"
#include "tests/catch.h"
#include "tests/runtime/training_run.h"
#include "tests/unit/scratch.h"

using namespace qe;
using namespace qe::testing;

namespace {

const Overrides kTwoRanks{"pipeline.schedule=zbv", "pipeline.pipeline_model_parallel_size=2",
                          "pipeline.virtual_pipeline_model_parallel_size=2"};

// What each rank ended with: planned bytes, or the refusal.
std::vector<std::string> start(const Config& config) {
  ThreadWorld world(config.pipeline.pipeline_model_parallel_size, config.parallel.data);
  std::vector<std::string> ends(static_cast<std::size_t>(config.ranks()));
  run_ranks(world, [&](int rank) {
    Backend backend = make_backend("cpu");
    const auto transport = world.connect(rank, dynamic_cast<CpuDevice&>(*backend.device));
    std::string& end = ends[static_cast<std::size_t>(rank)];
    try {
      const StartCheck check = check_start(make_rank_config(config), make_rank_plan(config), backend, *transport);
      end = std::to_string(check.planned_bytes);
      CHECK(check.gemms.empty());
    } catch (const AgreedError& e) {
      end = e.what();
    }
    transport->barrier(Group::kWorld);
  });
  return ends;
}

std::set<std::array<std::int64_t, 3>> shapes(const Config& config) {
  std::set<std::array<std::int64_t, 3>> all;
  for (const GemmArgs& g : matrix_products(make_rank_config(config), make_rank_plan(config), 1)) {
    all.insert({g.d.shape.rows, g.d.shape.cols, g.a_transposed ? g.a.shape.rows : g.a.shape.cols});
  }
  return all;
}

}  // namespace

TEST_CASE("a rank that fits is told how many bytes it will hold") {
  const std::vector<std::string> ends = start(test_config(kTwoRanks));
  REQUIRE(ends.size() == 2);
  const Config config = test_config(kTwoRanks);
  for (int r = 0; r < 2; ++r) {
    const RankFootprint planned = lay_out(make_rank_config(config), make_rank_plan(config), r, 1);
    CHECK(ends[static_cast<std::size_t>(r)] == std::to_string(planned.total()));
  }
}

TEST_CASE("a model that does not fit is refused on every rank alike, before memory is taken") {
  const std::vector<std::string> ends =
      start(test_config(kTwoRanks + Overrides{"model.hidden_size=65536", "model.ffn_hidden_size=262144",
                                              "model.num_attention_heads=1024", "gradients.placement=arena"}));
  CHECK(ends[0] == ends[1]);
  CHECK_THAT(ends[0], ContainsSubstring("Rank 0 needs") && ContainsSubstring("the 2 ranks there") &&
                          ContainsSubstring("GiB free") && ContainsSubstring("gradients.placement accumulate") &&
                          ContainsSubstring("optimizer.moments_dtype bf16"));
}

TEST_CASE("every rank knows the products of the whole model, in eager mode too") {
  const auto alone = shapes(test_config({}));
  CHECK(alone.size() > 10);
  CHECK(shapes(test_config(kTwoRanks)) == alone);
  CHECK(shapes(test_config(kTwoRanks + Overrides{"execution.mode=eager"})) == alone);
}

TEST_CASE("ranks that would compute a product differently are refused alike, with the product and both algorithms") {
  const auto compare = [](const std::vector<std::vector<GemmChoice>>& choices) {
    ThreadWorld world(static_cast<int>(choices.size()), 1);
    std::vector<std::string> ends(choices.size());
    run_ranks(world, [&](int rank) {
      CpuDevice device;
      const auto transport = world.connect(rank, device);
      const auto r = static_cast<std::size_t>(rank);
      try {
        expect_same_gemms(choices[r], *transport);
      } catch (const AgreedError& e) {
        ends[r] = e.what();
      }
      transport->barrier(Group::kWorld);
    });
    return ends;
  };
  const std::vector<GemmChoice> ours{{"a", "1"}, {"b", "2"}};
  CHECK(compare({ours, ours, ours}) == std::vector<std::string>(3));
  const std::vector<std::string> ends = compare({ours, ours, {{"a", "1"}, {"b", "3"}}});
  CHECK(ends[0] == ends[1]);
  CHECK(ends[0] == ends[2]);
  CHECK_THAT(ends[0], ContainsSubstring("Rank 2 would compute \"b: algorithm 3\"") &&
                          ContainsSubstring("rank 0 has \"b: algorithm 2\""));
  CHECK_THAT(compare({ours, {ours[0]}})[1], ContainsSubstring("would compute \"nothing\""));
}

TEST_CASE("a checkpoint keeps how its run computed, and only a run that computes so goes on from it unasked") {
  const Scratch dir;
  std::ofstream(dir / "t.txt") << std::string(900, '!');
  REQUIRE(run_tokenize({{dir / "t.txt"}, dir / "t.bin", false}) == 0);
  const Config config = test_config({"checkpoint.dir=" + (dir / "c"), "data.train=" + (dir / "t.bin")});
  ThreadWorld world(1, 1);
  CpuDevice device;
  CpuOps ops(device);
  const auto transport = world.connect(0, device);
  const TokenDataset data({dir / "t.bin"}, config.model.vocab_size, config.training.seq_length, "data.train",
                          config.data.format);
  PipelineRank rank(device, ops, *transport, make_rank_config(config), make_rank_plan(config), nullptr);
  const auto open = [&](const StartOptions& start) {
    return std::make_unique<Checkpointer>(config, start, *transport, make_disk_storage(), data);
  };
  const auto first = open({});
  first->set_gemm_choices({{"a", "1"}, {"b", "2"}});
  first->save(rank, {});

  const auto resume = [&](const std::vector<GemmChoice>& now,
                          const std::vector<std::string>& overrides) -> std::string {
    const auto again = open({"latest", overrides, ""});
    try {
      again->set_gemm_choices(now);
    } catch (const CheckpointError& e) {
      return e.what();
    }
    return again->resumed()->overridden.empty() ? "goes on" : "overridden";
  };
  CHECK(resume({{"a", "1"}, {"c", "3"}}, {}) == "goes on");
  CHECK_THAT(resume({{"a", "9"}}, {}), ContainsSubstring("a, stored algorithm 1, now 9"));
  CHECK(resume({{"a", "9"}}, {"gemm_choices"}) == "overridden");
}
