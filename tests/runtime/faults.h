// Decorators that stand between a rank and its operations or its messages and inject one fault each. They pass all else
// on. On the CPU alone: what is poisoned is written by the host when the stream gets there, in replays too.
#pragma once

#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "core/dtype.h"
#include "core/error.h"
#include "core/ops.h"
#include "core/transport.h"

namespace qe::testing {

// One call of an operation, by its name in core/ops.h, with the tensor that it is called for; empty where there is
// none. Of an operand that is the layout which the product of the same unit reads.
struct OpCall {
  std::string_view name;
  Stream& stream;
  Tensor result;
};

// Every operation goes through pass(), which runs it.
class InterceptedOps : public Ops {
 public:
  explicit InterceptedOps(Ops& ops) : ops_(ops) {}

  void embedding_forward(Stream& s, const EmbeddingForwardArgs& a) override {
    pass({"embedding_forward", s, a.out}, [&] { ops_.embedding_forward(s, a); });
  }
  void embedding_backward(Stream& s, const EmbeddingBackwardArgs& a) override {
    pass({"embedding_backward", s, a.grad_position}, [&] { ops_.embedding_backward(s, a); });
  }
  void layernorm_quantize(Stream& s, const LayerNormArgs& a) override {
    pass({"layernorm_quantize", s, a.out.rowwise}, [&] { ops_.layernorm_quantize(s, a); });
  }
  void layernorm_backward_residual(Stream& s, const LayerNormBackwardArgs& a) override {
    pass({"layernorm_backward_residual", s, a.grad_x}, [&] { ops_.layernorm_backward_residual(s, a); });
  }
  void quantize(Stream& s, const QuantizeArgs& a) override {
    pass({"quantize", s, a.out.rowwise}, [&] { ops_.quantize(s, a); });
  }
  void quantize_weight(Stream& s, const QuantizeWeightArgs& a) override {
    pass({"quantize_weight", s, a.out.rowwise}, [&] { ops_.quantize_weight(s, a); });
  }
  void dynamic_scale(Stream& s, const DynamicScaleArgs& a) override {
    pass({"dynamic_scale", s, make_tensor(a.scale, DType::kF32, {1, 1})}, [&] { ops_.dynamic_scale(s, a); });
  }
  void cast(Stream& s, const Tensor& from, const Tensor& to) override {
    pass({"cast", s, to}, [&] { ops_.cast(s, from, to); });
  }
  void gemm(Stream& s, const GemmArgs& a) override {
    pass({"gemm", s, a.d}, [&] { ops_.gemm(s, a); });
  }
  void gelu_quantize(Stream& s, const GeluArgs& a) override {
    pass({"gelu_quantize", s, a.out.rowwise}, [&] { ops_.gelu_quantize(s, a); });
  }
  void gelu_backward_quantize_bias(Stream& s, const GeluBackwardArgs& a) override {
    pass({"gelu_backward_quantize_bias", s, a.grad_u.rowwise}, [&] { ops_.gelu_backward_quantize_bias(s, a); });
  }
  void attention_forward(Stream& s, const AttentionArgs& a) override {
    pass({"attention_forward", s, a.out}, [&] { ops_.attention_forward(s, a); });
  }
  void attention_backward(Stream& s, const AttentionBackwardArgs& a) override {
    pass({"attention_backward", s, a.grad_v}, [&] { ops_.attention_backward(s, a); });
  }
  void cross_entropy(Stream& s, const CrossEntropyArgs& a) override {
    pass({"cross_entropy", s, a.logits}, [&] { ops_.cross_entropy(s, a); });
  }
  void update_scales(Stream& s, const UpdateScalesArgs& a) override {
    // The first slot's scale: of an activation, so that the next microbatch meets it.
    const Tensor scale = a.slots == 0 ? Tensor{} : make_tensor(a.scale, DType::kF32, {1, 1});
    pass({"update_scales", s, scale}, [&] { ops_.update_scales(s, a); });
  }
  void gradient_norm(Stream& s, const GradientNormArgs& a) override {
    pass({"gradient_norm", s, {}}, [&] { ops_.gradient_norm(s, a); });
  }
  void clip_factor(Stream& s, const ClipArgs& a) override {
    pass({"clip_factor", s, {}}, [&] { ops_.clip_factor(s, a); });
  }
  void adamw(Stream& s, const AdamWArgs& a) override {
    pass({"adamw", s, {}}, [&] { ops_.adamw(s, a); });
  }

 protected:
  virtual void pass(const OpCall&, const std::function<void()>& run) { run(); }
  Ops& ops_;
};

// Which calls a fault is for; it is asked for every call, in order.
using OpChoice = std::function<bool(const OpCall&)>;
inline OpChoice every_call(std::string name) {
  return [name = std::move(name)](const OpCall& call) { return call.name == name; };
}
// The nth call (from 1) of an operation. In graph mode captures call, replays do not.
inline OpChoice nth_call(std::string name, int nth) {
  return [name = std::move(name), left = nth](const OpCall& call) mutable { return call.name == name && --left == 0; };
}

// Fails the call, as an operation does whose launch the device refuses.
class FailingOps final : public InterceptedOps {
 public:
  FailingOps(Ops& ops, OpChoice choice) : InterceptedOps(ops), choice_(std::move(choice)) {}

 private:
  void pass(const OpCall& call, const std::function<void()>& run) override {
    if (choice_(call)) throw DeviceError("injected: " + std::string(call.name) + " failed.");
    run();
  }
  OpChoice choice_;
};

// Does nothing in the call's place.
class DroppingOps final : public InterceptedOps {
 public:
  DroppingOps(Ops& ops, OpChoice choice) : InterceptedOps(ops), choice_(std::move(choice)) {}

 private:
  void pass(const OpCall& call, const std::function<void()>& run) override {
    if (!choice_(call)) run();
  }
  OpChoice choice_;
};

inline void write_nan(const Tensor& t, std::int64_t row, std::int64_t col) {
  unsigned char* at = t.rows(row, 1).cols(col, 1).as<unsigned char>();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  if (t.dtype == DType::kF32) {
    std::memcpy(at, &nan, sizeof nan);
  } else if (t.dtype == DType::kBF16) {
    const Bf16 rounded = to_bf16(nan);
    std::memcpy(at, &rounded, sizeof rounded);
  } else {
    *at = 0x7F;  // of either FP8 format
  }
}

// Once armed, puts a NaN into the last element of the next result of a chosen call, in a replay too.
class PoisoningOps final : public InterceptedOps {
 public:
  PoisoningOps(Ops& ops, Device& device, OpChoice choice)
      : InterceptedOps(ops), device_(device), choice_(std::move(choice)) {}

  void arm() noexcept { *armed_ = true; }

 private:
  void pass(const OpCall& call, const std::function<void()>& run) override {
    run();
    if (!choice_(call)) return;
    device_.host_call(call.stream, [t = call.result, armed = armed_] {
      if (std::exchange(*armed, false)) write_nan(t, t.shape.rows - 1, t.shape.cols - 1);
    });
  }
  Device& device_;
  OpChoice choice_;
  std::shared_ptr<bool> armed_ = std::make_shared<bool>(false);
};

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

// Every message goes through pass_send(), which sends it. All else passes.
class InterceptedTransport : public Transport {
 public:
  explicit InterceptedTransport(Transport& transport) : transport_(transport) {}

  [[nodiscard]] int rank(Group g) const override { return transport_.rank(g); }
  [[nodiscard]] int size(Group g) const override { return transport_.size(g); }
  void send(Stream& s, const void* data, std::size_t bytes, int peer, const Action& label) override {
    pass_send(s, label, [&] { transport_.send(s, data, bytes, peer, label); });
  }
  void recv(Stream& s, void* data, std::size_t bytes, int peer, const Action& label) override {
    transport_.recv(s, data, bytes, peer, label);
  }
  void all_reduce_sum(Stream& s, float* data, std::int64_t count, Group g) override {
    transport_.all_reduce_sum(s, data, count, g);
  }
  void all_reduce_max(Stream& s, float* data, std::int64_t count, Group g) override {
    transport_.all_reduce_max(s, data, count, g);
  }
  void all_gather(Stream& s, const void* in, void* out, std::size_t bytes, Group g) override {
    transport_.all_gather(s, in, out, bytes, g);
  }
  void barrier(Group g) override { transport_.barrier(g); }
  std::vector<std::string> exchange(const std::string& mine, Group g) override { return transport_.exchange(mine, g); }

 protected:
  virtual void pass_send(Stream&, const Action& label, const std::function<void()>& send) = 0;
  Transport& transport_;
};

// The stream sleeps before each message of the kind, so that it arrives late: legal, and must not show.
class SlowTransport final : public InterceptedTransport {
 public:
  SlowTransport(Transport& t, Device& device, ActionKind kind, std::chrono::microseconds delay)
      : InterceptedTransport(t), device_(device), kind_(kind), delay_(delay) {}

 private:
  void pass_send(Stream& stream, const Action& label, const std::function<void()>& send) override {
    if (label.kind == kind_) device_.host_call(stream, [delay = delay_] { std::this_thread::sleep_for(delay); });
    send();
  }
  Device& device_;
  ActionKind kind_;
  std::chrono::microseconds delay_;
};

// From one message on a rank sends nothing any more.
class SilentTransport final : public InterceptedTransport {
 public:
  SilentTransport(Transport& t, const Action& first_lost) : InterceptedTransport(t), first_lost_(first_lost) {}

 private:
  void pass_send(Stream&, const Action& label, const std::function<void()>& send) override {
    silent_ = silent_ || label == first_lost_;
    if (!silent_) send();
  }
  Action first_lost_;
  bool silent_ = false;
};

}  // namespace qe::testing
