// Injected faults: what the contract must refuse by name, what the finiteness check must find, and what may not show.
#include "tests/runtime/faults.h"

#include <algorithm>
#include <optional>

#include "tests/catch.h"
#include "tests/runtime/matrix.h"
#include "tests/runtime/reference_program.h"

namespace qe::testing {
namespace {

// The head needs every operation that there is.
Config config_with(const Overrides& more) {
  return test_config(kMatrixModel + Overrides{"head.precision=fp8_dynamic"} + more);
}

std::optional<ViolationReport> violation(const std::function<void()>& run) {
  try {
    run();
  } catch (const ContractViolation& v) {
    CHECK(v.exit_code() == ExitCode::kContract);
    return v.report();
  }
  return std::nullopt;
}

constexpr const char* kOperations[] = {"embedding_forward",
                                       "embedding_backward",
                                       "layernorm_quantize",
                                       "layernorm_backward_residual",
                                       "quantize",
                                       "quantize_weight",
                                       "dynamic_scale",
                                       "cast",
                                       "gemm",
                                       "gelu_quantize",
                                       "gelu_backward_quantize_bias",
                                       "attention_forward",
                                       "attention_backward",
                                       "cross_entropy",
                                       "update_scales",
                                       "gradient_norm",
                                       "clip_factor",
                                       "adamw"};

// Does the operation make a tensor that the step goes on with?
bool makes_tensor(const std::string& name) {
  return name != "gradient_norm" && name != "clip_factor" && name != "adamw";
}

}  // namespace

TEST_CASE("whatever operation fails on a rank, its error is the one that the run ends with, and no rank waits") {
  for (const char* name : kOperations) {
    for (const char* mode : {"execution.mode=eager", "execution.mode=graph"}) {
      INFO(name << " " << mode);
      RunOptions options{.steps = 1, .trace = false};
      options.wrap_ops = [name](int, Ops& ops, Device&) {
        return std::make_unique<FailingOps>(ops, nth_call(name, 1));
      };
      const Config config = config_with({"pipeline.schedule=zbv", "pipeline.pipeline_model_parallel_size=2", mode});
      CHECK_THROWS_WITH(run_training(config, options), "injected: " + std::string(name) + " failed.");
    }
  }
}

TEST_CASE("an operation that fails in any unit aborts the epoch; until a rebuild the next step is refused by name") {
  // By the number of products that run before the fault: F, I and W have theirs in this order.
  for (const int product : {1, 40, 60, 80, 120}) {
    INFO("product " << product);
    bool armed = false;
    int left = product;
    Program one(config_with({}), [&](Ops& ops, Device&) {
      return std::make_unique<FailingOps>(
          ops, [&](const OpCall& call) { return armed && call.name == "gemm" && --left == 0; });
    });
    one.step(1);
    armed = true;
    CHECK_THROWS_AS(one.step(2), DeviceError);
    CHECK(one.rank.contract().aborted());
    CHECK(one.rank.contract().live_tapes() == 0);
    const auto report = violation([&] { one.step(3); });
    REQUIRE(report.has_value());
    CHECK(report->relation == Violation::kRebuild);
  }
}

TEST_CASE("a NaN in the result of any operation reaches the verdict, eager and in a replay; the step leaves no trace") {
  for (const char* mode : {"execution.mode=eager", "execution.mode=graph"}) {
    for (const std::string name : kOperations) {
      if (!makes_tensor(name)) continue;
      INFO(name << " " << mode);
      PoisoningOps* poison = nullptr;
      Program one(config_with({mode}), [&](Ops& ops, Device& device) {
        // The last row of the token table is padding that nobody reads: of the casts take one of a bias.
        const OpChoice choice = [name](const OpCall& call) {
          return call.name == name && (name != "cast" || call.result.shape.rows == 1);
        };
        auto made = std::make_unique<PoisoningOps>(ops, device, choice);
        poison = made.get();
        return made;
      });
      CHECK(one.step(1).scalars.skip == 0);
      const auto before = one.state_bytes();
      poison->arm();
      const StepResult bad = one.step(2);
      CHECK(bad.scalars.skip == 1);
      CHECK(bad.scalars.first_bad >= 0);
      CHECK((one.state_bytes() == before));
      CHECK(one.step(3).scalars.skip == 0);
    }
  }
}

TEST_CASE("a NaN in one element of one weight gradient on the middle stage skips the step on every rank, named") {
  const Overrides mapping{"pipeline.schedule=1f1b", "pipeline.pipeline_model_parallel_size=3", "model.num_layers=6"};
  for (const char* clip : {"optimizer.clip_grad=0", "optimizer.clip_grad=1"}) {
    for (const char* mode : {"execution.mode=eager", "execution.mode=graph"}) {
      const Config config = test_config(kMatrixModel + mapping + Overrides{clip, mode});
      std::vector<PoisoningOps*> poison(3, nullptr);
      std::vector<std::vector<std::uint64_t>> states(3);
      RunOptions options{.steps = 7, .trace = false};
      options.wrap_ops = [&](int rank, Ops& ops, Device& device) {
        // fc2's gradient is the only product that fills 32 x 48.
        auto made = std::make_unique<PoisoningOps>(ops, device, [](const OpCall& call) {
          return call.name == "gemm" && call.result.shape == Shape{32, 48};
        });
        poison[static_cast<std::size_t>(rank)] = made.get();
        return made;
      };
      options.after_step = [&](int rank, PipelineRank& pipeline, std::uint32_t step) {
        states[static_cast<std::size_t>(rank)].push_back(pipeline.state_digest());
        if (rank == 1 && step == 4) poison[1]->arm();
      };
      const RunOutcome run = run_training(config, options);
      for (std::uint32_t step = 1; step <= 7; ++step) {
        INFO(clip << " " << mode << " step " << step);
        CHECK(run.scalars[step - 1].skip == (step == 5 ? 1 : 0));
        if (step == 1) continue;
        // No rank's weights, moments or scales move in step 5, and all move in the others.
        for (const auto& of_rank : states) CHECK((of_rank[step - 1] == of_rank[step - 2]) == (step == 5));
      }
      const ParameterList model = model_parameters(make_rank_config(config).stage);
      const std::string named = model[run.scalars[4].first_bad].name;
      CHECK((named == "layers.2.mlp.fc2.weight" || named == "layers.3.mlp.fc2.weight"));
    }
  }
}

TEST_CASE("a gradient write that does not happen leaves what was in memory, and the verdict names its matrix") {
  for (const char* placement : {"gradients.placement=arena", "gradients.placement=accumulate"}) {
    bool armed = false;
    Tensor target;
    Program one(config_with({placement}), [&](Ops& ops, Device&) {
      return std::make_unique<DroppingOps>(ops, [&](const OpCall& call) {
        return armed && call.name == "gemm" && call.result.data == target.data && std::exchange(armed, false);
      });
    });
    one.step(1);
    const TransformerStage& stage = *one.rank.stages()[0];
    const int matrix = stage.weights().parameters().index("layers.3.mlp.fc1.weight");
    target = stage.gradients().bound(matrix, MicrobatchIndex{0});
    write_nan(target, 7, 5);
    CHECK(one.step(2).scalars.skip == 0);  // every write replaces what was there
    write_nan(target, 7, 5);
    armed = true;
    const StepResult bad = one.step(3);
    INFO(placement);
    REQUIRE(bad.scalars.skip == 1);
    CHECK(one.rank.model_parameter(bad.scalars.first_bad).name == "layers.3.mlp.fc1.weight");
  }
}

TEST_CASE("an update of scaling state that is lost on the device is an order violation, eager and captured") {
  for (const char* mode : {"execution.mode=eager", "execution.mode=graph"}) {
    for (const int nth : {1, 2}) {  // of microbatch 0's F and I; captured, those of the only slot
      Program one(config_with({mode}), [&](Ops& ops, Device&) {
        return std::make_unique<DroppingOps>(ops, nth_call("update_scales", nth));
      });
      const auto report = violation([&] { one.step(1); });
      INFO(mode << " " << nth);
      REQUIRE(report.has_value());
      CHECK(report->relation == Violation::kOrder);
      CHECK(report->operation == "finalize_step");
    }
  }
}

TEST_CASE("a cached layout that goes stale is refused before the first product that would read it") {
  struct Case {
    CacheLayout layout;
    const char* action;
    int products;  // that run in the step before the refusal
  };
  // A forward has four products a layer and the head's.
  for (const Case& c : {Case{CacheLayout::kRowwise, "begin(0F0)", 0}, Case{CacheLayout::kBf16Copies, "begin(0F0)", 0},
                        Case{CacheLayout::kColumnwise, "begin(0I0)", 8 * 4 + 1}}) {
    int products = 0;
    Program one(config_with({}), [&](Ops& ops, Device&) {
      return std::make_unique<DroppingOps>(ops, [&](const OpCall& call) {
        products += call.name == "gemm";
        return false;
      });
    });
    one.step(1);
    const Batch batch = synthetic_batch(one.config, 2);
    one.rank.evaluate(batch.tokens, batch.targets, 1);  // refreshes, so that step 2 has no reason to
    one.rank.contract().invalidate(StageIndex{0}, c.layout);
    products = 0;
    const auto report = violation([&] { one.step(2); });
    REQUIRE(report.has_value());
    CHECK(report->relation == Violation::kVersion);
    CHECK(report->operation == c.action);
    CHECK(products == c.products);
  }
}

TEST_CASE("a list that lacks, repeats or exchanges an action is refused by the contract of the rank that runs it") {
  struct Case {
    std::function<void(std::vector<Action>&)> change;
    Violation relation;
  };
  const auto at = [](std::vector<Action>& list, const char* text) {
    return std::find(list.begin(), list.end(), parse_action(text));
  };
  const Case cases[] = {
      {[&](auto& l) { l.erase(at(l, "0W2")); }, Violation::kOrder},  // 0W3 is not the next
      {[&](auto& l) { l.erase(at(l, "0W3")); }, Violation::kDestination},
      {[&](auto& l) { l.erase(at(l, "0I3")); }, Violation::kOwnership},
      {[&](auto& l) { l.insert(at(l, "0W0"), parse_action("0I0")); }, Violation::kOwnership},
      {[&](auto& l) { l.insert(at(l, "0I1"), parse_action("0I0")); }, Violation::kLookup},
      {[&](auto& l) { std::iter_swap(at(l, "0F1"), at(l, "0F2")); }, Violation::kOrder},
      {[&](auto& l) { std::iter_swap(at(l, "0I1"), at(l, "0W1")); }, Violation::kOwnership},
      {[&](auto& l) { l.insert(at(l, "0F0"), parse_action("0REDUCE_GRAD")); }, Violation::kDestination},
      {[&](auto& l) { l.erase(at(l, "0REDUCE_GRAD")); }, Violation::kCommit},
  };
  const Config config =
      test_config(kMatrixModel + Overrides{"pipeline.schedule=gpipe", "pipeline.tape_slots=per_microbatch",
                                           "parallel.data=2", "training.global_batch_size=8"});
  int n = 0;
  for (const Case& c : cases) {
    INFO("case " << n++);
    RunOptions options{.steps = 1, .trace = false};
    options.change_plan = [&](RankPlan& plan) { c.change(plan.schedule.actions[0]); };
    const auto report = violation([&] { run_training(config, options); });
    REQUIRE(report.has_value());
    CHECK(name_of(report->relation) == std::string(name_of(c.relation)));
  }
}

TEST_CASE("messages that come late change nothing") {
  for (const Overrides& mapping : {mappings(2)[2], mappings(2)[4], mappings(4)[1]}) {
    const Config config = test_config(kMatrixModel + mapping + Overrides{"execution.mode=graph"});
    const TraceRecords reference = run_training(config, {.steps = 2}).trace;
    for (const ActionKind kind : {ActionKind::kSendF, ActionKind::kSendB}) {
      RunOptions slow{.steps = 2};
      slow.wrap_transport = [kind](int, Transport& t, Device& device) {
        return std::make_unique<SlowTransport>(t, device, kind, std::chrono::milliseconds(2));
      };
      INFO(name_of(mapping) << (kind == ActionKind::kSendF ? "forward" : "backward"));
      CHECK(differences(reference, run_training(config, slow).trace).empty());
    }
  }
}

TEST_CASE("a rank that falls silent ends the run at the deadline, named with the message that is waited for") {
  RunOptions options{.steps = 1, .trace = false, .timeout_s = 0.5};
  options.wrap_transport = [](int, Transport& t, Device&) {
    return std::make_unique<SilentTransport>(t, parse_action("0SEND_F2"));
  };
  CHECK_THROWS_WITH(run_training(test_config(kMatrixModel + mappings(2)[1]), options),
                    ContainsSubstring("rank 1 waits for 1RECV_F2") && ContainsSubstring("from rank 0"));
}

}  // namespace qe::testing
