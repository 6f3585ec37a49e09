// The program under test as the reference sees it: one rank without threads on the CPU, its state by name, and what its
// operations were given. Computes nothing itself.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/thread_transport.h"
#include "tests/runtime/faults.h"
#include "tests/runtime/reference_model.h"

namespace qe::testing {

// Notes the losses that are asked for and copies the gradients that AdamW finds.
class WatchedOps final : public InterceptedOps {
 public:
  WatchedOps(Ops& ops, Device& device) : InterceptedOps(ops), device_(device) {}

  std::map<std::int64_t, std::vector<float>> gradients;  // of the last step, by global parameter index
  std::vector<CrossEntropyArgs> losses;                  // every call

  void cross_entropy(Stream& s, const CrossEntropyArgs& a) override {
    losses.push_back(a);
    ops_.cross_entropy(s, a);
  }
  void adamw(Stream& s, const AdamWArgs& a) override {
    for (const AdamWItem& item : a.items) {
      std::vector<float>& copy = gradients[item.global_index];
      copy.resize(static_cast<std::size_t>(item.gradient.shape.elements()));
      device_.download(s, copy.data(), item.gradient.data, item.gradient.bytes());
    }
    ops_.adamw(s, a);
  }

 private:
  Device& device_;
};

class Program {
 public:
  // Stands between the program and its operations (tests/runtime/faults.h).
  using Decorate = std::function<std::unique_ptr<Ops>(Ops&, Device&)>;

  // One pipeline rank, one replica, FP32 gradients.
  explicit Program(const Config& c, const Decorate& decorate = {})
      : config(c),
        world(1, 1),
        cpu_ops(device),
        decorated(decorate ? decorate(cpu_ops, device) : nullptr),
        ops(decorated ? *decorated : cpu_ops, device),
        transport(world.connect(0, device)),
        rank(device, ops, *transport, make_rank_config(c), make_rank_plan(c), nullptr) {}

  StepResult step(const Batch& batch, double learning_rate, std::uint32_t number) {
    return rank.train_step(batch.tokens, batch.targets, learning_rate, number);
  }
  StepResult step(std::uint32_t number) { return step(synthetic_batch(config, number), 1e-3, number); }

  // Entries of the rank's state list whose name begins so, by the rest of their name: "master.", "moment1.".
  [[nodiscard]] ReferenceParameters state(const std::string& prefix) const {
    ReferenceParameters found;
    for (const StateEntry& e : rank.state()) {
      if (e.name.starts_with(prefix)) found[e.name.substr(prefix.size())] = matrix_of(e.view);
    }
    return found;
  }
  [[nodiscard]] ReferenceSlots slots() const {
    const std::string history = ".amax_history", scale = ".scale";
    ReferenceSlots found;
    for (const auto& [name, values] : state("fp8.")) {
      if (name.ends_with(history)) {
        found[name.substr(0, name.size() - history.size())].history.assign(values.values().begin(),
                                                                           values.values().end());
      } else {
        found[name.substr(0, name.size() - scale.size())].scale = static_cast<float>(values(0, 0));
      }
    }
    return found;
  }
  // Everything that outlives a step, by name.
  [[nodiscard]] std::map<std::string, std::vector<unsigned char>> state_bytes() {
    std::map<std::string, std::vector<unsigned char>> bytes;
    for (const StateEntry& e : rank.state()) bytes[e.name] = rank.read(e);
    return bytes;
  }
  // What AdamW was given in the last step.
  [[nodiscard]] ReferenceParameters gradients() const {
    ReferenceParameters found;
    for (const auto& [index, values] : ops.gradients) {
      const Parameter& p = rank.model_parameter(static_cast<int>(index));
      Matrix m(static_cast<int>(p.shape.rows), static_cast<int>(p.shape.cols));
      m.values().assign(values.begin(), values.end());
      found[p.name] = std::move(m);
    }
    return found;
  }
  // After planting values in masters: they are cached again before they are used.
  void make_caches_stale() { rank.restore(rank.contract().epoch(), rank.applied_updates()); }
  // The memory of one entry, to plant a value in.
  [[nodiscard]] float* memory(const std::string& name) const {
    for (const StateEntry& e : rank.state()) {
      if (e.name == name) return e.view.as<float>();
    }
    throw std::out_of_range(name);
  }

  static Matrix matrix_of(const Tensor& t) {
    Matrix m(static_cast<int>(t.shape.rows), static_cast<int>(t.shape.cols));
    for (std::size_t i = 0; i < m.values().size(); ++i) {
      m.values()[i] = static_cast<double>(t.dtype == DType::kF32 ? t.as<float>()[i] : to_float(t.as<Bf16>()[i]));
    }
    return m;
  }

  Config config;
  ThreadWorld world;
  CpuDevice device;
  CpuOps cpu_ops;
  std::unique_ptr<Ops> decorated;
  WatchedOps ops;
  std::unique_ptr<Transport> transport;
  PipelineRank rank;
};

// Two layers of hidden 32, two sequences a microbatch, padded vocabulary, history of three: everything that the full
// size has, at a cost that plain loops can pay.
inline Config reference_config(std::vector<std::string> overrides) {
  const std::vector<std::string> small{
      "model.num_layers=2",           "model.hidden_size=32",   "model.ffn_hidden_size=48",
      "model.num_attention_heads=2",  "model.vocab_size=100",   "model.max_position_embeddings=20",
      "fp8.amax_history_len=3",       "training.seq_length=16", "training.micro_batch_size=2",
      "training.global_batch_size=8", "training.seed=3"};
  overrides.insert(overrides.begin(), small.begin(), small.end());
  return test_config(overrides);
}

// Four layers and a vocabulary of 512; everything else as in test_config.
inline Config four_layer_config(const Overrides& more = {}) {
  return test_config(Overrides{"model.num_layers=4", "model.vocab_size=512"} + more);
}

}  // namespace qe::testing
