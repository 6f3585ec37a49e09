// The plan against the program that it is about: bytes, graphs and hand-offs of ranks that really ran, lists from files
// that really trained, and the words that people and programs get.
#include "app/plan.h"

#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>

#include "app/plan_compare.h"
#include "app/plan_measure.h"
#include "core/error.h"
#include "core/random.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/thread_transport.h"
#include "schedules/csv.h"
#include "tests/catch.h"
#include "tests/runtime/training_run.h"
#include "tests/unit/scratch.h"

namespace qe::testing {
namespace {

using Json = nlohmann::json;

const Overrides kP2{"pipeline.pipeline_model_parallel_size=2"};
const Overrides kZbv = kP2 + Overrides{"pipeline.schedule=zbv"};

// What each rank of the first replica reports after one step.
struct Ran {
  std::vector<std::array<std::size_t, kMemoryKinds>> bytes;
  std::vector<ExecutionCounts> counts;
};

Ran run_one_step(const Config& config) {
  const int ranks = config.pipeline.pipeline_model_parallel_size;
  ThreadWorld world(ranks, config.parallel.data);
  Ran ran;
  ran.bytes.resize(static_cast<std::size_t>(ranks));
  ran.counts.resize(static_cast<std::size_t>(ranks));
  std::mutex mutex;
  run_ranks(world, [&](int rank) {
    CpuDevice device;
    CpuOps ops(device);
    const auto transport = world.connect(rank, device);
    PipelineRank pipeline(device, ops, *transport, make_rank_config(config), make_rank_plan(config), nullptr);
    Batch batch = synthetic_batch(config, 1);
    batch.tokens.resize(batch.tokens.size() / static_cast<std::size_t>(config.parallel.data));
    batch.targets.resize(batch.tokens.size());
    pipeline.train_step(batch.tokens, batch.targets, 1e-3, 1);
    transport->barrier(Group::kWorld);
    if (transport->rank(Group::kData) != 0) return;
    const std::lock_guard lock(mutex);
    const auto r = static_cast<std::size_t>(transport->rank(Group::kPipeline));
    ran.bytes[r] = device.memory_by_kind();
    ran.counts[r] = pipeline.counts();
  });
  return ran;
}

std::string write_file(const std::string& path, const std::string& text) {
  std::ofstream(path) << text;
  return path;
}

std::string refusal(const Overrides& overrides) {
  try {
    test_config(overrides);
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "accepted";
}

Overrides csv_run(const std::string& path) {
  return kP2 + Overrides{"pipeline.schedule=csv", "pipeline.schedule_csv=" + path};
}

// DualPipeV for two ranks and four microbatches, as PyTorch's ScheduleDualPipeV gives it.
const std::string kDualPipeV =
    "0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,3B3,0I2,0W2,0I3,"
    "0W3\n"
    "1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1B2,2I3,1I3,2W3,1W3\n";

// Stages in pairs on a rank: stage 3's tapes are free before stage 2 has read its input gradients.
const std::string kBlocks =
    "0F0,1F0,0F1,1F1,0F2,1F2,0F3,1F3,1I0,1I1,1W0,1W1,0I0,0W0,0I1,0W1,1I2,1W2,1I3,1W3,0I2,0I3,0W2,0W3\n"
    "2F0,3F0,3I0,3W0,2F1,3F1,3I1,3W1,2I0,2I1,2W0,2W1,2F2,2F3,3F2,3I2,3W2,3F3,3I3,3W3,2I2,2W2,2I3,2W3\n";

}  // namespace

TEST_CASE("planned bytes by kind, graphs and hand-offs are those of ranks that ran") {
  const Scratch dir;
  const std::vector<Overrides> configs{
      {"execution.mode=graph"},
      kZbv + Overrides{"execution.mode=graph"},
      kZbv + Overrides{"gradients.placement=arena", "execution.mode=graph"},
      kZbv + Overrides{"gradients.placement=copied", "pipeline.backward=full", "execution.mode=graph"},
      kZbv + Overrides{"gradients.w_group=2", "execution.mode=graph"},
      kZbv + Overrides{"pipeline.layers_per_stage=[3,1,3,1]", "fp8.scale_update=step", "execution.mode=graph"},
      kZbv + Overrides{"precision.bf16_layers=[1,2,3]", "execution.mode=graph"},
      kZbv + Overrides{"precision.bf16_layers=[2,3]", "fp8.scale_update=step", "execution.mode=graph"},
      kZbv + Overrides{"precision.bf16_layers=[2,3,4,5]", "parallel.data=2", "training.global_batch_size=8"},
      kP2 + Overrides{"pipeline.schedule=interleaved_1f1b", "pipeline.virtual_pipeline_model_parallel_size=2",
                      "optimizer.moments_dtype=bf16", "gradients.dtype=bf16", "execution.mode=graph"},
      kP2 + Overrides{"pipeline.schedule=zb1p", "head.precision=fp8_dynamic", "pipeline.tape_slots=per_microbatch"},
      kP2 + Overrides{"pipeline.schedule=gpipe", "precision.compute=bf16"},
      {"pipeline.pipeline_model_parallel_size=4", "precision.compute=fp32", "execution.mode=graph"},
      kZbv + Overrides{"parallel.data=2", "training.global_batch_size=8", "execution.mode=graph"},
      csv_run(write_file(dir / "blocks.csv", kBlocks)) + Overrides{"execution.mode=graph"},
  };
  for (std::size_t c = 0; c < configs.size(); ++c) {
    const Config config = test_config(configs[c]);
    const Plan plan = make_plan(config, unit_costs());
    const Ran ran = run_one_step(config);
    for (std::size_t r = 0; r < plan.ranks.size(); ++r) {
      INFO("config " << c << " rank " << r);
      const PlannedRank& rank = plan.ranks[r];
      for (std::size_t k = 0; k < kMemoryKinds; ++k) {
        INFO(name_of(static_cast<MemoryKind>(k)));
        CHECK(rank.footprint.bytes[k] == ran.bytes[r][k]);
      }
      CHECK(rank.footprint.graphs == ran.counts[r].graphs);
      CHECK(rank.footprint.first_write_graphs == ran.counts[r].first_write_graphs);
      CHECK(rank.footprint.refresh_graphs == ran.counts[r].refresh_graphs);
      // The first step makes the caches; later ones do where no update has.
      const bool later = caches_follow_update(config.stage_config());
      const auto first = later ? 2 * static_cast<std::int64_t>(rank.stages.size()) : 0;
      CHECK(rank.handoffs + first == static_cast<std::int64_t>(ran.counts[r].handoffs));
    }
  }
}

TEST_CASE("lists from a file train to the bytes of 1f1b: compute, lowered, mixed with B, in any placement") {
  const Scratch dir;
  const Schedule zb1p = make_zb1p({2, 2, 4});
  const std::vector<Overrides> runs{
      csv_run(write_file(dir / "dualpipev.csv", kDualPipeV)) + Overrides{"execution.mode=graph"},
      csv_run(dir / "dualpipev.csv") + Overrides{"pipeline.backward=full"},
      csv_run(write_file(dir / "blocks.csv", kBlocks)) + Overrides{"execution.mode=graph"},
      csv_run(dir / "blocks.csv") + Overrides{"pipeline.tape_slots=per_microbatch"},
      csv_run(write_file(dir / "zb1p.csv", to_csv(lower(zb1p)))) + Overrides{"execution.mode=graph"},
      kP2 + Overrides{"pipeline.schedule=gpipe", "execution.mode=graph"},
      kP2 + Overrides{"pipeline.schedule=zb1p", "execution.mode=graph"},
      {"pipeline.schedule=zb1p", "pipeline.pipeline_model_parallel_size=4",
       "pipeline.virtual_pipeline_model_parallel_size=2"},
  };
  const TraceRecords reference = run_training(test_config({}), {.steps = 2}).trace;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    INFO("run " << i);
    CHECK(differences(reference, run_training(test_config(runs[i]), {.steps = 2}).trace).empty());
    RunOptions adversarial{.steps = 2, .policy = DrainPolicy::kAdversarial, .policy_seed = i};
    CHECK(differences(reference, run_training(test_config(runs[i]), adversarial).trace).empty());
  }
}

TEST_CASE("shuffled lists that are accepted train to the same bytes in any order that their waits allow") {
  // As a file of compute actions, and with the messages in it: then those are shuffled too.
  const Scratch dir;
  const TraceRecords reference = run_training(test_config({}), {.steps = 1}).trace;
  int trained = 0, with_messages = 0;
  for (std::uint64_t seed = 0; trained < 16 || with_messages < 8; ++seed) {
    Schedule lists = seed % 2 == 0 ? make_zbv({2, 2, 4}) : make_interleaved_1f1b({2, 2, 4});
    if (seed % 4 > 1) lists = lower(lists);
    const Schedule original = lists;
    for (std::uint64_t draw = 0; draw < 6; ++draw) {
      const RandomWords r = philox(random_key(1, "shuffled lists"), seed, draw);
      auto& list = lists.actions[r.w[0] % 2];
      const std::size_t i = r.w[1] % (list.size() - 1);
      std::swap(list[i], list[i + 1]);
    }
    const std::string file = write_file(dir / "shuffled.csv", to_csv(lists));
    if (lists == original || refusal(csv_run(file)) != "accepted") continue;
    ++trained;
    with_messages += is_lowered(lists);
    INFO("seed " << seed << "\n" << to_csv(lists));
    const RunOptions options{.steps = 1, .policy = DrainPolicy::kAdversarial, .policy_seed = seed};
    CHECK(differences(reference, run_training(test_config(csv_run(file)), options).trace).empty());
  }
}

TEST_CASE("a file's shape becomes the config's, and a file of B alone its full backward") {
  const Scratch dir;
  const std::string split = write_file(dir / "split.csv", to_csv(make_zbv({2, 2, 4})));
  const std::string full =
      write_file(dir / "full.csv", to_csv(make_schedule(ScheduleKind::k1F1B, {2, 1, 4}, Backward::kFull)));
  const Config c = test_config(csv_run(split));
  CHECK(c.pipeline.virtual_pipeline_model_parallel_size == 2);
  CHECK(c.pipeline.backward == Backward::kSplit);
  CHECK(make_rank_plan(c).schedule == make_rank_plan(test_config(kZbv)).schedule);
  CHECK(dump_config(parse_config(dump_config(c), "x.json")) == dump_config(c));
  CHECK(test_config(csv_run(full)).pipeline.backward == Backward::kFull);
  const Config again = test_config(csv_run(full) + Overrides{"pipeline.backward=split"});
  CHECK(make_rank_plan(again).schedule == lower(make_1f1b({2, 1, 4})));
  const Config grouped = test_config(csv_run(split) + Overrides{"gradients.w_group=2"});
  CHECK(make_rank_plan(grouped).schedule ==
        make_rank_plan(test_config(kZbv + Overrides{"gradients.w_group=2"})).schedule);
}

TEST_CASE("a schedule file that does not fit the config is refused at the key that should change") {
  const Scratch dir;
  const std::string file = write_file(dir / "x.csv", to_csv(make_zbv({2, 2, 4})));
  const auto refused = [&](const Overrides& more) { return refusal(csv_run(file) + more); };
  CHECK_THAT(refused({"pipeline.pipeline_model_parallel_size=4"}),
             ContainsSubstring("pipeline.pipeline_model_parallel_size: found 4") && ContainsSubstring("2 lines") &&
                 ContainsSubstring("wanted 2."));
  CHECK_THAT(refused({"training.global_batch_size=6"}),
             ContainsSubstring("training.global_batch_size: found 6") && ContainsSubstring("wanted 4."));
  CHECK_THAT(refused({"pipeline.virtual_pipeline_model_parallel_size=1"}), ContainsSubstring("2 stages a line"));
  CHECK_THAT(refused({"model.num_layers=3"}), ContainsSubstring("a layer for each of the 4 stages"));
  CHECK_THAT(refusal({"pipeline.schedule=csv"}), ContainsSubstring("pipeline.schedule_csv: found none"));
  CHECK_THAT(refusal({"pipeline.schedule_csv=x.csv"}), ContainsSubstring("has no effect under pipeline.schedule 1f1b"));
  CHECK_THAT(refusal(csv_run(dir / "none.csv")), ContainsSubstring("none.csv cannot be opened: No such file"));
  CHECK_THAT(refusal(csv_run(write_file(dir / "bad.csv", "0F0,0I0,0W0\n1F0,1W0,1I0\n"))),
             ContainsSubstring("bad.csv:2, cell 2 \"1W0\"") && ContainsSubstring("<-- ERROR HERE"));
  const std::string groups = write_file(dir / "groups.csv", "0F0,0F1,0F2,0F3,0I0,0I1,0W0x2,0I2,0I3,0W2x2\n");
  const Overrides one{"pipeline.schedule=csv", "pipeline.schedule_csv=" + groups};
  CHECK(refusal(one + Overrides{"gradients.w_group=2"}) == "accepted");
  CHECK_THAT(refusal(one), ContainsSubstring("found 0W0x2 in line 1") && ContainsSubstring("gradients.w_group 1"));
  CHECK_THAT(refusal(one + Overrides{"gradients.w_group=4"}), ContainsSubstring("found 0W0x2 in line 1"));
}

TEST_CASE("the plan of zbv on two ranks shows the paper's figure 5 and the table's makespan") {
  const int microbatches[] = {2, 4, 8, 16}, tapes[] = {3, 4, 4, 4}, delayed[] = {2, 5, 9, 17};
  for (int i = 0; i < 4; ++i) {
    const Config config = test_config(
        kZbv + Overrides{"model.num_layers=4", "training.global_batch_size=" + std::to_string(microbatches[i])});
    const Plan plan = make_plan(config, unit_costs());
    INFO("M " << microbatches[i]);
    CHECK(plan.ranks[0].need.peak_tapes == tapes[i]);
    for (const PlannedRank& rank : plan.ranks) CHECK(rank.delayed_w == delayed[i]);
    if (microbatches[i] == 4) CHECK(plan.prediction.lists == 25);
    if (microbatches[i] == 8) CHECK(plan.prediction.lists == 49);
  }
}

TEST_CASE("uneven stages and the V placement are shown, and the slow stage is predicted slow") {
  const Config config = test_config(kZbv + Overrides{"pipeline.layers_per_stage=[1,4,2,1]"});
  const PlanCosts costs = unit_costs();
  const Plan plan = make_plan(config, costs);
  CHECK(plan.stages[1].range.num_layers == 4);
  CHECK(plan.stages[1].rank == 1);
  CHECK(plan.stages[2].rank == 1);
  CHECK(plan.stages[3].rank == 0);
  CHECK(plan.prediction.lists > make_plan(test_config(kZbv), costs).prediction.lists);
  const std::string text = plan_text(config, plan, costs);
  CHECK_THAT(text, ContainsSubstring("embedding, 0") && ContainsSubstring("1 to 4") && ContainsSubstring("7, head"));
  CHECK_THAT(text, ContainsSubstring("unit costs: F = I = W = 1 a layer"));
  CHECK_THAT(text, ContainsSubstring("rank 0  rank 1"));
}

TEST_CASE("the JSON plan has the lists, every rank's bytes and the source of its costs") {
  const Config config = test_config(kZbv);
  const Plan plan = make_plan(config, unit_costs());
  const Json j = Json::parse(plan_json(config, plan, unit_costs()));
  CHECK(j["schedule"]["lists"][1][0] == "1RECV_F0");
  CHECK(j["resources"][0]["bytes_by_kind"]["weights"] == plan.ranks[0].footprint.bytes[0]);
  CHECK(j["resources"][0]["graphs"] == 0);  // eager
  CHECK(j["prediction"]["unit"] == "layer action");
  CHECK(j["prediction"]["makespan"] == 50);  // two layers a stage
  CHECK(j["derived"]["parameters"] == plan.parameters);
}

TEST_CASE("the comparison ranks by time, plans a refused schedule with the nearest M and says why another cannot run") {
  const std::vector<Candidate> all = compare_schedules(
      test_config(kP2 + Overrides{"training.global_batch_size=5", "model.num_layers=4"}), unit_costs());
  const auto find = [&](ScheduleKind kind, int chunks) {
    const auto at = std::find_if(all.begin(), all.end(), [&](const Candidate& c) {
      return c.kind == kind && c.chunks_per_rank == chunks && c.backward == Backward::kSplit;
    });
    REQUIRE(at != all.end());
    return *at;
  };
  CHECK(find(ScheduleKind::kInterleaved1F1B, 2).microbatches == 4);
  CHECK_THAT(find(ScheduleKind::kInterleaved1F1B, 2).refusal, ContainsSubstring("use 4 or 6 microbatches"));
  CHECK(find(ScheduleKind::kInterleaved1F1B, 2).possible);
  CHECK(find(ScheduleKind::kZbv, 2).microbatches == 5);
  CHECK(find(ScheduleKind::kZbv, 2).step == 31);
  CHECK(find(ScheduleKind::k1F1B, 1).step == 34);  // (5 + 1) x 4 units of two layers, less the W at the end
  for (std::size_t i = 1; i < all.size(); ++i) {
    if (all[i].possible) CHECK(all[i - 1].per_microbatch() <= all[i].per_microbatch());
  }
  const std::vector<Candidate> few =
      compare_schedules(test_config(kP2 + Overrides{"model.num_layers=2"}), unit_costs());
  CHECK(!few.back().possible);
  CHECK_THAT(few.back().refusal, ContainsSubstring("a layer for each of the 4 stages"));
  CHECK_THAT(compare_text(test_config({}), few, unit_costs()), ContainsSubstring("a layer for each of the 4 stages"));
  CHECK(Json::parse(compare_json(test_config({}), few, unit_costs()))["schedules"].size() == few.size());
}

TEST_CASE("sixty-four layers on 1,024 ranks are compared") {
  const Config config = test_config({"model.num_layers=64", "model.hidden_size=8192", "model.ffn_hidden_size=28672",
                                     "model.num_attention_heads=64", "pipeline.pipeline_model_parallel_size=64",
                                     "parallel.data=16", "training.global_batch_size=2048"});
  REQUIRE(config.ranks() == 1024);
  CHECK(compare_schedules(config, unit_costs()).front().possible);
}

TEST_CASE("measured costs come back from their file, and predict the sum of a single rank's parts") {
  const Scratch dir;
  const Config config = test_config({"pipeline.schedule=gpipe"});
  PlanCosts costs;
  costs.device = "a device";
  costs.layer = {1, 2, 3, 0.5};
  costs.embedding = {0.25, 0.5, 0, 0};
  costs.head = {4, 5, 6, 1};
  costs.message = 0.125;
  costs.action = 0.0625;
  costs.optimizer = 1;
  const std::string file = write_file(dir / "costs.json", costs_json(costs, config));
  const PlanCosts read = read_costs(file, config);
  CHECK(read.measured);
  CHECK_THAT(read.source, ContainsSubstring("costs.json (a device)"));
  const Plan plan = make_plan(config, read);
  const double actions = 4 * (8 * 6 + 0.75 + 15 + 3 * 0.0625), refresh = 8 * 0.5 + 1;
  CHECK(plan.prediction.lists == actions + refresh);
  CHECK(plan.prediction.bubble == 0);
  CHECK(plan.prediction.step == plan.prediction.lists + static_cast<double>(plan.parameters) * 1e-6);
  CHECK_THAT(plan_text(config, plan, read), ContainsSubstring(" ms"));
}

TEST_CASE("layers that stay in bf16 are predicted at their own cost, which a file for them must have") {
  const Scratch dir;
  const Config config = test_config({"pipeline.schedule=gpipe", "precision.bf16_layers=[1,2,7]"});
  PlanCosts costs;
  costs.device = "a device";
  costs.layer = {1, 2, 3, 0.5};
  const std::string without = write_file(dir / "costs.json", costs_json(costs, config));
  CHECK_THROWS_WITH(read_costs(without, config), ContainsSubstring("ms.bf16_layer: found none"));
  costs.bf16_layer = {4, 5, 6, 0.25};
  const PlanCosts read = read_costs(write_file(dir / "costs.json", costs_json(costs, config)), config);
  const Plan plan = make_plan(config, read);
  CHECK(plan.prediction.lists == 4 * (5 * 6 + 3 * 15) + 5 * 0.5 + 3 * 0.25);
  CHECK_THAT(plan_text(config, plan, read), ContainsSubstring("Layers [1,2,7] in bf16"));
  // The same file serves the same widths without a list.
  CHECK(make_plan(test_config({"pipeline.schedule=gpipe"}), read).prediction.lists == 4 * 8 * 6 + 8 * 0.5);
}

TEST_CASE("a cost file of another form, or measured under other widths, is refused line by line") {
  const Scratch dir;
  const Config config = test_config({});
  PlanCosts costs = unit_costs();
  costs.device = "a device";
  const auto refused = [&](const std::function<void(nlohmann::ordered_json&)>& change, const Config& other) {
    auto j = nlohmann::ordered_json::parse(costs_json(costs, config));
    change(j);
    write_file(dir / "costs.json", j.dump());
    try {
      read_costs(dir / "costs.json", other);
    } catch (const ConfigError& e) {
      return std::string(e.what());
    }
    return std::string("accepted");
  };
  CHECK(refused([](auto&) {}, config) == "accepted");
  CHECK_THAT(refused([](auto& j) { j["ms"]["layer"]["forward"] = 0; }, config),
             ContainsSubstring("ms.layer.forward: wanted a number above 0"));
  CHECK_THAT(refused([](auto& j) { j["ms"]["message"] = "fast"; }, config), ContainsSubstring("ms.message: wanted"));
  CHECK_THAT(refused([](auto& j) { j["ms"].erase("head"); }, config), ContainsSubstring("ms.head: found none"));
  CHECK_THAT(refused([](auto& j) { j["ms"]["speed"] = 1; }, config), ContainsSubstring("ms.speed: unknown key"));
  CHECK_THAT(refused([](auto& j) { j["schema_version"] = 2; }, config), ContainsSubstring("found 2, wanted 1"));
  CHECK_THAT(refused([](auto&) {}, test_config({"model.ffn_hidden_size=192", "execution.mode=graph"})),
             ContainsSubstring("has 2 faults") &&
                 ContainsSubstring("model.ffn_hidden_size: was measured with 176, this config has 192") &&
                 ContainsSubstring("execution.mode"));
  CHECK_THROWS_AS(read_costs(dir / "none.json", config), ConfigError);
}

TEST_CASE("measuring gives every part a time and a file that the same config reads") {
  const Scratch dir;
  const Config config = test_config({"model.hidden_size=32", "model.num_attention_heads=2", "gradients.w_group=2",
                                     "model.ffn_hidden_size=64", "execution.mode=graph", "precision.bf16_layers=[4]"});
  const PlanCosts costs = measure_costs(config);
  REQUIRE(costs.bf16_layer);
  CHECK(costs.bf16_layer->forward > 0);
  CHECK(costs.layer.forward > 0);
  CHECK(costs.layer.input_grad > 0);
  CHECK(costs.layer.weight_grad > 0);
  CHECK(costs.layer.refresh == 0);  // updates write the caches
  CHECK(costs.message > 0);
  CHECK(costs.optimizer > 0);
  const PlanCosts read = read_costs(write_file(dir / "costs.json", costs_json(costs, config)), config);
  CHECK(make_plan(config, read).prediction.step > 0);
}

}  // namespace qe::testing
