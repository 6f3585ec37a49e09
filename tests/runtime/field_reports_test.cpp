// What users of other trainers reported and no other test of ours holds: each case is a promise that their report asks
// for. The whole table is docs/field_reports.md.
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <numeric>

#include "app/plan.h"
#include "core/random.h"
#include "tests/catch.h"
#include "tests/runtime/matrix.h"
#include "tests/runtime/reference_program.h"

namespace qe::testing {
namespace {

// Four layers, vocabulary 512; everything else as in test_config.
const Overrides kSmall{"model.num_layers=4", "model.vocab_size=512"};
Config small(const Overrides& more = {}) { return test_config(kSmall + more); }
Overrides microbatches(int m) { return {"training.global_batch_size=" + std::to_string(m)}; }

bool scales_are_usable(const Program& program) {
  const ReferenceSlots slots = program.slots();
  return std::all_of(slots.begin(), slots.end(),
                     [](const auto& s) { return std::isfinite(s.second.scale) && s.second.scale > 0.0f; });
}

// Another factor on the loss gradient, by the number of the loss in its step.
class WeightedLosses final : public InterceptedOps {
 public:
  WeightedLosses(Ops& ops, std::vector<float> factors) : InterceptedOps(ops), factors_(std::move(factors)) {}

  void cross_entropy(Stream& s, const CrossEntropyArgs& a) override {
    CrossEntropyArgs weighted = a;
    weighted.gradient_scale = &factors_[count_++ % factors_.size()];
    ops_.cross_entropy(s, weighted);
  }

 private:
  std::vector<float> factors_;
  std::size_t count_ = 0;
};

}  // namespace

TEST_CASE("output gradients of zero or next to nothing leave every scale finite and the step whole") {
  for (const float factor : {0.0f, 1e-45f, 1e-38f, 1e-30f}) {
    for (const char* head : {"head.precision=fp8_delayed", "head.precision=fp8_dynamic"}) {
      INFO(factor << " " << head);
      Program program(small({head}), [&](Ops& ops, Device&) {
        return std::make_unique<WeightedLosses>(ops, std::vector<float>{factor});
      });
      for (std::uint32_t step = 1; step <= 3; ++step) {
        const StepResult result = program.step(step);
        CHECK(result.scalars.skip == 0);
        CHECK(std::isfinite(result.loss_sum));
        CHECK(scales_are_usable(program));
      }
    }
  }
}

TEST_CASE("equal tokens, a head of zeros and a matrix of zeros train for twenty steps without a non-finite number") {
  const Config config = small();
  Program program(config);
  Batch batch = synthetic_batch(config, 1);
  std::fill(batch.tokens.begin(), batch.tokens.end(), 3);
  for (std::uint32_t step = 1; step <= 20; ++step) {
    for (const char* projection : {"query", "key", "value"}) {  // the second head of the first layer
      float* rows = program.memory(std::string("master.layers.0.attention.") + projection + ".weight") + 16 * 64;
      std::fill(rows, rows + 16 * 64, 0.0f);
    }
    float* whole = program.memory("master.layers.1.mlp.fc1.weight");
    std::fill(whole, whole + 176 * 64, 0.0f);
    const StepResult result = program.step(batch, 1e-3, step);
    INFO("step " << step);
    CHECK(result.scalars.skip == 0);
    CHECK(std::isfinite(result.loss_sum));
    CHECK(scales_are_usable(program));
  }
}

namespace {

// Keeps the amaxes that each update of scaling state finds, slot by slot, by the written rule: zero is no update.
class RollCounter final : public InterceptedOps {
 public:
  RollCounter(Ops& ops, Device& device) : InterceptedOps(ops), device_(device) {}

  struct Slots {
    const float* history;
    int length;
    int updates = 0;
    std::vector<std::vector<float>> rolled;
  };
  std::map<const float*, Slots> chains;

  void update_scales(Stream& s, const UpdateScalesArgs& a) override {
    device_.host_call(s, [this, a] {
      Slots& chain = chains.try_emplace(a.history, Slots{a.history, a.history_length, 0, {}}).first->second;
      chain.rolled.resize(static_cast<std::size_t>(a.slots));
      ++chain.updates;
      for (int slot = 0; slot < a.slots; ++slot) {
        const float amax = a.history[slot * a.history_length];
        if (amax != 0.0f) chain.rolled[static_cast<std::size_t>(slot)].push_back(amax);
      }
    });
    ops_.update_scales(s, a);
  }

 private:
  Device& device_;
};

void check_histories(const RollCounter::Slots& chain) {
  for (std::size_t slot = 0; slot < chain.rolled.size(); ++slot) {
    const std::vector<float>& rolled = chain.rolled[slot];
    const float* row = chain.history + slot * static_cast<std::size_t>(chain.length);
    CHECK(row[0] == 0.0f);
    for (int back = 1; back < chain.length; ++back) {  // the newest is last
      const auto n = static_cast<std::size_t>(back);
      CHECK(row[chain.length - back] == (n <= rolled.size() ? rolled[rolled.size() - n] : 0.0f));
    }
  }
}

}  // namespace

TEST_CASE("histories roll once for each F and each I, whatever their length and the number of microbatches") {
  const int steps = 3;
  for (const int length : {1, 3, 4, 5, 16}) {
    for (const int m : {1, 2, 4, 7}) {
      const std::string mode = (length + m) % 2 == 0 ? "execution.mode=eager" : "execution.mode=graph";
      INFO("history " << length << ", " << m << " microbatches, " << mode);
      RollCounter* counter = nullptr;
      Program program(test_config(kMatrixModel + microbatches(m) +
                                  Overrides{"fp8.amax_history_len=" + std::to_string(length), mode}),
                      [&](Ops& ops, Device& device) {
                        auto made = std::make_unique<RollCounter>(ops, device);
                        counter = made.get();
                        return made;
                      });
      for (std::uint32_t step = 1; step <= steps; ++step) program.step(step);
      const auto updates = [&] {
        std::vector<int> n;
        for (const auto& [history, chain] : counter->chains) n.push_back(chain.updates);
        return n;
      };
      CHECK(updates() == std::vector<int>{steps * m, steps * m});  // the forward chain and the backward chain
      std::map<std::size_t, int> slots;                            // by number of rolls
      for (const auto& [history, chain] : counter->chains) {
        check_histories(chain);
        for (const auto& rolled : chain.rolled) ++slots[rolled.size()];
      }
      // Weights roll once a step, inputs and output gradients once a microbatch: 33 of each.
      const auto per_step = static_cast<std::size_t>(steps), per_microbatch = static_cast<std::size_t>(steps * m);
      std::map<std::size_t, int> wanted;
      wanted[per_step] += 33;
      wanted[per_microbatch] += 66;
      CHECK(slots == wanted);
      // An evaluation runs forwards and rolls nothing.
      const Batch batch = synthetic_batch(program.config, 9);
      program.rank.evaluate(batch.tokens, batch.targets, m);
      CHECK(updates() == std::vector<int>{steps * m, steps * m});
    }
  }
}

namespace {

// Abraham Lincoln at Gettysburg, 1863.
const std::string kSpeech =
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, "
    "and dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, testing "
    "whether that nation, or any nation so conceived and so dedicated, can long endure. We are met on a great "
    "battle-field of that war. We have come to dedicate a portion of that field, as a final resting place for those "
    "who here gave their lives that that nation might live. It is altogether fitting and proper that we should do "
    "this. But, in a larger sense, we can not dedicate, we can not consecrate, we can not hallow this ground. The "
    "brave men, living and dead, who struggled here, have consecrated it, far above our poor power to add or detract. "
    "The world will little note, nor long remember what we say here, but it can never forget what they did here. It is "
    "for us the living, rather, to be dedicated here to the unfinished work which they who fought here have thus far "
    "so nobly advanced. It is rather for us to be here dedicated to the great task remaining before us, that from "
    "these honored dead we take increased devotion to that cause for which they gave the last full measure of "
    "devotion, that we here highly resolve that these dead shall not have died in vain, that this nation, under God, "
    "shall have a new birth of freedom, and that government of the people, by the people, for the people, shall not "
    "perish from the earth.";

Batch speech_batch(const Config& config, std::uint32_t step) {
  const auto length = static_cast<std::size_t>(config.training.seq_length);
  Batch batch;
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(config.training.global_batch_size); ++i) {
    const std::size_t from = philox(random_key(11, "windows"), step, i).w[0] % (kSpeech.size() - length);
    for (std::size_t t = from; t < from + length; ++t) {
      batch.tokens.push_back(static_cast<unsigned char>(kSpeech[t]));
      batch.targets.push_back(static_cast<unsigned char>(kSpeech[t + 1]));
    }
  }
  return batch;
}

// Nats a token, mean of the last fifty of so many steps.
double learned(const std::string& precision, std::uint32_t steps) {
  const Config config = test_config({"model.num_layers=2", "optimizer.clip_grad=1", precision});
  Program program(config);
  double sum = 0.0;
  for (std::uint32_t step = 1; step <= steps; ++step) {
    const StepResult result = program.step(speech_batch(config, step), 1e-3, step);
    if (step + 50 > steps) sum += result.loss_sum / static_cast<double>(config.tokens_per_step());
  }
  return sum / 50;
}

}  // namespace

TEST_CASE("fp8 learns a text as bf16 does: after 500 steps their losses are within two per cent") {
  const double fp8 = learned("precision.compute=fp8", 500), bf16 = learned("precision.compute=bf16", 500);
  INFO("fp8 " << fp8 << " bf16 " << bf16);
  CHECK(bf16 < 2.5);
  CHECK(std::fabs(fp8 / bf16 - 1.0) < 0.02);
}

namespace {

// Casts a weight again before every product that reads it, in both layouts, with the scale of the step's refresh.
class Requantizing final : public InterceptedOps {
 public:
  Requantizing(Ops& ops, Device& device) : InterceptedOps(ops), device_(device) {}
  int casts = 0;  // beyond the refreshes'

  void quantize_weight(Stream& s, const QuantizeWeightArgs& a) override {
    ops_.quantize_weight(s, a);
    if (a.out.columnwise.empty()) return;
    Weight& w = weights_[a.out.rowwise.data];
    if (w.scale.data() == nullptr) w.scale = device_.allocate(sizeof(float), MemoryKind::kWorkspace);
    device_.copy(s, w.scale.data(), a.quantizer.scale, sizeof(float));
    w.args = a;
    w.args.quantizer = {w.scale.as<float>(), nullptr};
    by_layout_[a.out.rowwise.data] = by_layout_[a.out.columnwise.data] = &w;
  }
  void gemm(Stream& s, const GemmArgs& a) override {
    for (const void* operand : {a.a.data, a.b.data}) {
      const auto found = by_layout_.find(operand);
      if (found == by_layout_.end()) continue;
      ++casts;
      ops_.quantize_weight(s, found->second->args);
    }
    ops_.gemm(s, a);
  }

 private:
  struct Weight {
    QuantizeWeightArgs args;
    Buffer scale;
  };
  Device& device_;
  std::map<const void*, Weight> weights_;
  std::map<const void*, Weight*> by_layout_;
};

}  // namespace

TEST_CASE("cached weights give the bytes of casting both layouts again before every product, for twenty steps") {
  // The learning rate moves every weight and amax in each step, so that a cache of the last step would show.
  for (const Overrides& mapping : {Overrides{}, mappings(2)[2], mappings(2)[4]}) {
    const Config config = test_config(kMatrixModel + mapping);
    RunOptions cached{.steps = 20}, recast{.steps = 20};
    std::vector<Requantizing*> ranks(2, nullptr);
    std::vector<int> casts(2, 0);
    recast.wrap_ops = [&](int rank, Ops& ops, Device& device) {
      auto made = std::make_unique<Requantizing>(ops, device);
      ranks[static_cast<std::size_t>(rank)] = made.get();
      return made;
    };
    recast.after_step = [&](int rank, PipelineRank&, std::uint32_t) {
      casts[static_cast<std::size_t>(rank)] = ranks[static_cast<std::size_t>(rank)]->casts;
    };
    const TraceRecords reference = run_training(config, cached).trace;
    CHECK(differences(reference, run_training(config, recast).trace).empty());
    // Every F and every I of every microbatch reads the 33 weights once.
    CHECK(std::accumulate(casts.begin(), casts.end(), 0) == 20 * 4 * 2 * 33);
  }
}

TEST_CASE("a microbatch's gradients in the arena are after the step what they were when its W had run") {
  for (const Overrides& mapping : {mappings(2)[2], mappings(2)[4]}) {
    const Config config =
        test_config(kMatrixModel + mapping + Overrides{"gradients.placement=arena", "execution.mode=graph"});
    std::mutex mutex;
    TraceRecords after;
    RunOptions options{.steps = 3};
    options.after_step = [&](int, PipelineRank& rank, std::uint32_t step) {
      const std::lock_guard lock(mutex);
      for (const TransformerStage* stage : rank.stages()) {
        for (const int matrix : stage->matrices()) {
          if (stage->gradients().views(matrix) == 0) continue;  // the head's
          for (int m = 0; m < 4; ++m) {
            const Tensor t = stage->gradients().bound(matrix, MicrobatchIndex{m});
            const std::string& name = stage->weights().parameters()[matrix].name;
            after[{step, "matrix gradient", name, m}] = XXH3_64bits(t.data, t.bytes());
          }
        }
      }
    };
    const TraceRecords trace = run_training(config, options).trace;
    CHECK(after.size() == 3u * 8u * 6u * 4u);
    for (const auto& [key, digest] : after) {
      INFO(to_string(key));
      REQUIRE(trace.at(key) == digest);
    }
  }
}

TEST_CASE("before the first step gradients are zero and counters at their start, with graphs captured and without") {
  for (const char* mode : {"execution.mode=eager", "execution.mode=graph"}) {
    const Config config = small({mode, "gradients.placement=arena"});
    Program program(config);
    for (const TransformerStage* stage : program.rank.stages()) {
      for (const ParameterKind kind : {ParameterKind::kMatrix, ParameterKind::kVector}) {
        const Tensor all = stage->gradients().all(kind);
        CHECK(std::count(all.as<unsigned char>(), all.as<unsigned char>() + all.bytes(), 0) ==
              static_cast<std::ptrdiff_t>(all.bytes()));
      }
    }
    CHECK(program.rank.contract().epoch() == 0);
    CHECK(program.rank.applied_updates() == 0);
    CHECK(program.slots().at("layers.0.fc1.in").scale == 1.0f);
  }
}

TEST_CASE("every mode and schedule writes each matrix's gradient once a microbatch and leaves none pending") {
  for (const Overrides& cell : cells({mappings(2), kModes, kBackwards})) {
    RunOptions options{.steps = 2};
    options.after_step = [](int, PipelineRank& rank, std::uint32_t) {
      if (rank.contract().pending_weight_grads() != 0 || rank.contract().live_tapes() != 0) {
        throw std::logic_error("work is left");
      }
    };
    std::map<std::string, int> writes;
    for (const auto& [key, digest] : run_training(test_config(kMatrixModel + cell), options).trace) {
      if (key.step == 2 && key.category == "matrix gradient") ++writes[key.name];
    }
    INFO(name_of(cell));
    CHECK(writes.size() == 8 * 6 + 1);
    CHECK(std::all_of(writes.begin(), writes.end(), [](const auto& w) { return w.second == 4; }));
  }
}

TEST_CASE("bias gradients are whole when I is done: a W neither makes them nor needs them") {
  // All Ws at the end, as one group. Before the first of them every vector gradient is overwritten.
  const Config config = small({"gradients.w_group=4"});
  Program undisturbed(config);
  undisturbed.step(1);
  const TransformerStage* stage = nullptr;
  Program program(config, [&](Ops& ops, Device& device) {
    return std::make_unique<DroppingOps>(ops, [&](const OpCall& call) {
      if (stage == nullptr || call.name != "gemm") return false;
      const Tensor first = stage->gradients().main(stage->matrices().back());  // the head's W is a stage's first
      if (call.result.data != first.data) return false;
      const Tensor vectors = stage->gradients().all(ParameterKind::kVector);
      device.host_call(call.stream, [vectors] {
        std::fill(vectors.as<float>(), vectors.as<float>() + vectors.shape.elements(), 0.5f);
      });
      return false;
    });
  });
  stage = program.rank.stages()[0];
  program.step(1);
  const ReferenceParameters wanted = undisturbed.gradients();
  for (const auto& [name, gradient] : program.gradients()) {
    INFO(name);
    const bool matrix =
        program.rank.stages()[0]->weights().parameters()[stage->weights().parameters().index(name)].kind ==
        ParameterKind::kMatrix;
    if (matrix) {
      CHECK(gradient.values() == wanted.at(name).values());
    } else {
      CHECK(std::all_of(gradient.values().begin(), gradient.values().end(), [](double v) { return v == 0.5; }));
    }
  }
}

TEST_CASE("the same eight sequences in one, two, four or eight microbatches have one gradient") {
  // BF16 without clipping. Every row is computed alike; only the order of the sums over tokens differs.
  const auto gradients = [](int m) {
    Program program(small({"precision.compute=bf16", "optimizer.clip_grad=0", "training.global_batch_size=8",
                           "training.micro_batch_size=" + std::to_string(8 / m)}));
    REQUIRE(program.config.microbatches() == m);
    program.step(1);
    return program.gradients();
  };
  const ReferenceParameters wanted = gradients(8);
  for (const int m : {1, 2, 4}) {
    for (const auto& [name, gradient] : gradients(m)) {
      double difference = 0.0;
      for (std::size_t i = 0; i < gradient.values().size(); ++i) {
        difference += std::pow(gradient.values()[i] - wanted.at(name).values()[i], 2);
      }
      INFO(name << " with " << m << " microbatches");
      CHECK(std::sqrt(difference) <= 1e-5 * norm(wanted.at(name)) + 1e-12);
    }
  }
}

TEST_CASE("every microbatch alone reaches the gradient: with the others' losses weighed by zero it is that one's") {
  // Powers of two: the factor 1/N of four microbatches is an exact quarter of one microbatch's.
  const Config four = small({"precision.compute=fp32"});
  const Config one = small({"precision.compute=fp32", "training.global_batch_size=1"});
  const Batch batch = synthetic_batch(four, 1);
  const float quarter = 1.0f / static_cast<float>(four.tokens_per_step());
  for (std::size_t j = 0; j < 4; ++j) {
    std::vector<float> factors(4, 0.0f);
    factors[j] = quarter;
    Program masked(four, [&](Ops& ops, Device&) { return std::make_unique<WeightedLosses>(ops, factors); });
    masked.step(batch, 1e-3, 1);
    Program alone(one);
    const auto from = batch.tokens.begin() + static_cast<std::ptrdiff_t>(32 * j);
    const auto targets = batch.targets.begin() + static_cast<std::ptrdiff_t>(32 * j);
    alone.step({{from, from + 32}, {targets, targets + 32}}, 1e-3, 1);
    const ReferenceParameters wanted = alone.gradients();
    for (const auto& [name, gradient] : masked.gradients()) {
      INFO("microbatch " << j << ", " << name);
      REQUIRE(norm(gradient) > 0.0);
      std::vector<double> quarters = wanted.at(name).values();
      for (double& v : quarters) v /= 4;
      REQUIRE(gradient.values() == quarters);
    }
  }
}

TEST_CASE("layers that stages do not divide are all there, once each, and the plan shows where") {
  struct Case {
    int layers, ranks;
    std::vector<int> wanted;
  };
  for (const Case& c : {Case{30, 4, {8, 8, 7, 7}}, Case{7, 2, {4, 3}}}) {
    const Config config = test_config({"model.num_layers=" + std::to_string(c.layers),
                                       "pipeline.pipeline_model_parallel_size=" + std::to_string(c.ranks)});
    const Plan plan = make_plan(config, unit_costs());
    std::vector<int> counts;
    int next = 0;
    for (const auto& stage : plan.stages) {
      CHECK(stage.range.first_layer == next);
      next += stage.range.num_layers;
      counts.push_back(stage.range.num_layers);
    }
    CHECK(next == c.layers);
    CHECK(counts == c.wanted);
    CHECK_THAT(plan_text(config, plan, unit_costs()), ContainsSubstring(std::to_string(c.layers - 1) + ", head"));
  }
}

TEST_CASE("a reduction never overtakes a W, whatever order the streams take") {
  const Config config =
      test_config(kMatrixModel + mappings(2)[4] +
                  Overrides{"parallel.data=2", "training.global_batch_size=8", "execution.mode=graph"});
  const RunOutcome reference = run_training(config, {.steps = 2});
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    const RunOutcome run =
        run_training(config, {.steps = 2, .policy = DrainPolicy::kAdversarial, .policy_seed = 100 * seed});
    for (std::size_t replica = 0; replica < 2; ++replica) {
      INFO("seed " << seed << " replica " << replica);
      CHECK(differences(reference.replicas[replica], run.replicas[replica]).empty());
    }
  }
}

TEST_CASE("rows that pad the vocabulary are zero after fifty steps, in weights, moments and what a checkpoint stores") {
  const Config config = small({"model.num_layers=1", "model.vocab_size=257"});
  Program program(config);
  for (std::uint32_t step = 1; step <= 50; ++step) program.step(step);
  int tables = 0;
  for (const StateEntry& e : program.rank.state()) {
    if (!e.name.ends_with("head.weight") && !e.name.ends_with("embedding.token.weight")) continue;
    const std::vector<unsigned char> bytes = program.rank.read(e);
    const std::size_t row = bytes.size() / static_cast<std::size_t>(e.view.shape.rows);
    INFO(e.name);
    CHECK(e.view.shape.rows == 384);
    const auto zeros = [&](std::size_t from, std::size_t to) {
      return std::all_of(bytes.begin() + static_cast<std::ptrdiff_t>(from * row),
                         bytes.begin() + static_cast<std::ptrdiff_t>(to * row), [](unsigned char b) { return b == 0; });
    };
    CHECK(zeros(257, 384));
    CHECK_FALSE(zeros(0, 257));
    ++tables;
  }
  CHECK(tables == 2 * 3);
  CHECK_THAT(dump_config(config), ContainsSubstring("\"vocab_size\": 257"));
}

TEST_CASE("an evaluation's loss is the same by ones and by fours, with a last microbatch that is not full") {
  // Seven sequences: seven microbatches of one, or two of four with one row that does not count.
  const auto loss = [](int rows) {
    Program program(small({"training.micro_batch_size=" + std::to_string(rows), "training.global_batch_size=8"}));
    Batch batch = synthetic_batch(program.config, 5);
    std::fill(batch.tokens.begin() + 7 * 32, batch.tokens.end(), 0);
    std::fill(batch.targets.begin() + 7 * 32, batch.targets.end(), -1);
    return program.rank.evaluate(batch.tokens, batch.targets, (7 + rows - 1) / rows);
  };
  const double one = loss(1), four = loss(4);
  CHECK(std::isfinite(one));
  CHECK(std::fabs(four / one - 1.0) < 1e-6);
  CHECK(std::fabs(one / (7 * 32) - std::log(512.0)) < 0.3);
}

}  // namespace qe::testing
