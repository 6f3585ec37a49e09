// Scaling state and weight caches where users of other trainers saw them go wrong (docs/field_reports.md).
#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/random.h"
#include "tests/catch.h"
#include "tests/runtime/matrix.h"
#include "tests/runtime/reference_program.h"

namespace qe::testing {
namespace {

bool scales_are_usable(const Program& program) {
  const ReferenceSlots slots = program.slots();
  return std::all_of(slots.begin(), slots.end(),
                     [](const auto& s) { return std::isfinite(s.second.scale) && s.second.scale > 0.0f; });
}

}  // namespace

TEST_CASE("output gradients of zero or next to nothing leave every scale finite and the step whole") {
  for (const float factor : {0.0f, 1e-45f, 1e-38f, 1e-30f}) {
    for (const char* head : {"head.precision=fp8_delayed", "head.precision=fp8_dynamic"}) {
      INFO(factor << " " << head);
      Program program(four_layer_config({head}), [&](Ops& ops, Device&) {
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
  const Config config = four_layer_config();
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
    program.make_caches_stale();
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
    if (a.slots == 0) return ops_.update_scales(s, a);
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

void check_histories(const RollCounter::Slots& chain, const Fp8State& state) {
  for (std::size_t slot = 0; slot < chain.rolled.size(); ++slot) {
    const std::vector<float>& rolled = chain.rolled[slot];
    const float* row = chain.history + slot * static_cast<std::size_t>(chain.length);
    const bool weight = state.name(static_cast<int>(slot)).ends_with(Linear::kWeightSlot);
    CHECK((row[0] != 0.0f) == weight);                 // the update has written the next step's weights
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
        const TransformerStage& stage = *program.rank.stages()[0];
        const Fp8State& forward = stage.scaling(Chain::kForward);
        const bool is_forward = forward.history(0, 1).data == history;
        check_histories(chain, is_forward ? forward : stage.scaling(Chain::kBackward));
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

// Casts a weight again before every product that reads it, in both layouts, with the scale of the refresh or update
// that cached it.
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
    w.cached_with = a.quantizer.scale;
    w.args = a;
    w.args.quantizer = {w.scale.as<float>(), nullptr};
    by_layout_[a.out.rowwise.data] = by_layout_[a.out.columnwise.data] = &w;
  }
  void adamw(Stream& s, const AdamWArgs& a) override {
    ops_.adamw(s, a);
    for (auto& [rowwise, w] : weights_) device_.copy(s, w.scale.data(), w.cached_with, sizeof(float));
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
    const float* cached_with;
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

}  // namespace qe::testing
