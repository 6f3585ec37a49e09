#include "app/bench/op_times.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>

#include "core/random.h"
#include "core/stage/parameters.h"

namespace qe {
namespace {

using Clock = std::chrono::steady_clock;
double us_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

std::string text(Shape s) { return "[" + std::to_string(s.rows) + ", " + std::to_string(s.cols) + "]"; }

class OpBench {
 public:
  OpBench(Backend& backend, const StageConfig& config)
      : device_(*backend.device), ops_(*backend.ops), config_(config), stream_(device_.make_stream("bench")) {}

  std::vector<OpTime> run() {
    time_block_ops();
    time_attention();
    time_layer("", fp8());
    if (!config_.bf16_layers.empty()) time_layer(" bf16", false);
    time_linear("head", config_.model.padded_vocab(), hidden(), fp8() && config_.head != HeadPrecision::kBf16);
    time_embedding();
    time_cross_entropy();
    time_optimizer();
    return std::move(times_);
  }

 private:
  std::int64_t hidden() const { return config_.model.hidden_size; }
  std::int64_t ffn() const { return config_.model.ffn_hidden_size; }
  std::int64_t tokens() const { return config_.tokens(); }
  bool fp8() const { return config_.compute == Compute::kFp8; }
  DType activation() const { return config_.activation_type(); }
  DType backward_type() const { return fp8() ? config_.fp8.backward_type() : activation(); }
  DType forward_type() const { return fp8() ? config_.fp8.forward_type() : activation(); }

  Tensor zeros(DType type, Shape shape) {
    const auto bytes = static_cast<std::size_t>(shape.elements()) * size_of(type);
    buffers_.push_back(device_.allocate(bytes, MemoryKind::kWorkspace));
    return make_tensor(buffers_.back().data(), type, shape);
  }
  // Uniform in [-1, 1): zeros would time faster than real data.
  Tensor random(DType type, Shape shape) {
    const Tensor values = zeros(DType::kF32, shape);
    std::vector<float> host(static_cast<std::size_t>(shape.elements()));
    for (std::size_t i = 0; i < host.size(); i += 4) {
      const RandomWords r = philox(1, buffers_.size(), i);
      for (std::size_t k = 0; k < std::min<std::size_t>(4, host.size() - i); ++k) {
        host[i + k] = static_cast<float>(r.w[k] >> 8) * 0x1p-23f - 1.0f;
      }
    }
    device_.upload(*stream_, values.data, host.data(), values.bytes());
    if (type == DType::kF32) return values;
    const Tensor rounded = zeros(type, shape);
    ops_.cast(*stream_, values, rounded);
    device_.synchronize(*stream_);
    return rounded;
  }
  float* cell(float value) {
    const Tensor t = zeros(DType::kF32, {1, 1});
    device_.upload(*stream_, t.data, &value, sizeof value);
    return t.as<float>();
  }
  Quantizer quantizer() { return {cell(64.0f), cell(0.0f)}; }
  Operand operand(DType type, Shape shape) {
    Operand o;
    o.rowwise = zeros(type, shape);
    if (!is_fp8(type)) return o;
    o.columnwise = zeros(type, {shape.cols, shape.rows});
    o.scale_inv = {cell(1.0f), DType::kF32, {1, 1}, kScalePitch};
    return o;
  }
  Operand random_operand(DType type, Shape shape) {
    if (!is_fp8(type)) return {random(type, shape), {}, {}};
    const Operand o = operand(type, shape);
    ops_.quantize(*stream_, {random(DType::kBF16, shape), o, quantizer(), {}});
    return o;
  }
  static std::int64_t bytes(const Tensor& t) { return static_cast<std::int64_t>(t.bytes()); }
  static std::int64_t bytes(const Operand& o) { return bytes(o.rowwise) + bytes(o.columnwise); }

  // Long enough recordings that the clock and the launch do not matter, short enough for the CPU backend.
  void add(const std::string& name, const std::string& shape, std::int64_t traffic, std::int64_t flops,
           const std::function<void()>& call) {
    constexpr int kSamples = 15;
    constexpr double kTargetUs = 4000.0;
    const auto timed = [&](const std::function<void()>& work) {
      device_.synchronize(*stream_);
      const auto start = Clock::now();
      work();
      device_.synchronize(*stream_);
      return us_since(start);
    };
    call();  // first-call costs stay out
    const int calls = std::clamp(static_cast<int>(kTargetUs / timed(call)), 1, 200);
    const auto graph = device_.capture(*stream_, [&] {
      for (int i = 0; i < calls; ++i) call();
    });
    std::vector<double> samples;
    timed([&] { device_.launch(*graph, *stream_); });
    for (int i = 0; i < kSamples; ++i) samples.push_back(timed([&] { device_.launch(*graph, *stream_); }) / calls);
    std::nth_element(samples.begin(), samples.begin() + kSamples / 2, samples.end());
    times_.push_back({name, shape, samples[kSamples / 2], traffic, flops});
  }
  // Frees what the operation before needed.
  void release() {
    device_.synchronize(*stream_);
    buffers_.clear();
  }

  void time_block_ops() {
    const Tensor x = random(activation(), {tokens(), hidden()}), residual = random(activation(), x.shape);
    const Tensor gamma = random(DType::kF32, {1, hidden()}), beta = random(DType::kF32, {1, hidden()});
    const Tensor mean = zeros(DType::kF32, {1, tokens()}), rstd = zeros(DType::kF32, {1, tokens()});
    const Operand normed = operand(forward_type(), x.shape);
    const LayerNormArgs forward{x, gamma, beta, 1e-5f, normed, quantizer(), mean, rstd};
    add("layernorm_quantize", text(x.shape), bytes(x) + bytes(normed), 0,
        [&] { ops_.layernorm_quantize(*stream_, forward); });
    const Tensor grad = random(activation(), x.shape), dx = zeros(activation(), x.shape);
    LayerNormBackwardArgs backward{
        grad, x, mean, rstd, gamma, residual, dx, zeros(DType::kF32, {1, hidden()}), zeros(DType::kF32, {1, hidden()})};
    if (fp8()) {
      backward.quantized = operand(backward_type(), x.shape);
      backward.quantizer = quantizer();
      backward.grad_bias = zeros(DType::kF32, {1, hidden()});
    }
    add("layernorm_backward_residual", text(x.shape), 4 * bytes(x) + bytes(backward.quantized), 0,
        [&] { ops_.layernorm_backward_residual(*stream_, backward); });
    for (const std::int64_t n : {hidden(), 3 * hidden()}) {
      const QuantizeArgs q{random(activation(), {tokens(), n}), operand(backward_type(), {tokens(), n}), quantizer(),
                           zeros(DType::kF32, {1, n})};
      add("quantize + bias gradient", text(q.x.shape), bytes(q.x) + bytes(q.out), 0,
          [&] { ops_.quantize(*stream_, q); });
    }
    const GeluArgs gelu{random(activation(), {tokens(), ffn()}), operand(forward_type(), {tokens(), ffn()}),
                        quantizer()};
    add("gelu_quantize", text(gelu.u.shape), bytes(gelu.u) + bytes(gelu.out), 0,
        [&] { ops_.gelu_quantize(*stream_, gelu); });
    const GeluBackwardArgs dgelu{gelu.u, random(activation(), gelu.u.shape), operand(backward_type(), gelu.u.shape),
                                 quantizer(), zeros(DType::kF32, {1, ffn()})};
    add("gelu_backward_quantize_bias", text(gelu.u.shape), 2 * bytes(gelu.u) + bytes(dgelu.grad_u), 0,
        [&] { ops_.gelu_backward_quantize_bias(*stream_, dgelu); });
    release();
  }

  void time_attention() {
    const int heads = config_.model.num_attention_heads, dim = config_.model.head_dim();
    const Tensor qkv = random(activation(), {tokens(), 3 * hidden()});
    const Tensor dqkv = zeros(activation(), qkv.shape), out = zeros(activation(), {tokens(), hidden()});
    const AttentionArgs a{config_.micro_batch_size,
                          config_.seq_length,
                          heads,
                          heads,
                          dim,
                          1.0f / std::sqrt(static_cast<float>(dim)),
                          qkv.cols(0, hidden()),
                          qkv.cols(hidden(), hidden()),
                          qkv.cols(2 * hidden(), hidden()),
                          out,
                          zeros(DType::kF32, {heads, tokens()})};
    // Two products over the causal half of L × L.
    const std::int64_t flops = 2 * tokens() * config_.seq_length * hidden();
    const std::string shape = std::to_string(a.sequences) + " x " + std::to_string(a.sequence_length) + ", " +
                              std::to_string(heads) + " heads x " + std::to_string(dim);
    AttentionArgs forward = a;
    if (fp8()) {
      forward.quantized = operand(forward_type(), out.shape);
      forward.quantizer = quantizer();
    }
    add("attention_forward", shape, bytes(qkv) + bytes(out) + bytes(forward.quantized), flops,
        [&] { ops_.attention_forward(*stream_, forward); });
    const AttentionBackwardArgs b{a,
                                  random(activation(), out.shape),
                                  dqkv.cols(0, hidden()),
                                  dqkv.cols(hidden(), hidden()),
                                  dqkv.cols(2 * hidden(), hidden()),
                                  zeros(DType::kF32, {heads, tokens()})};
    add("attention_backward", shape, 2 * bytes(qkv) + 2 * bytes(out), flops * 5 / 2,
        [&] { ops_.attention_backward(*stream_, b); });
    release();
  }

  void time_gemm(const std::string& name, const GemmArgs& g, std::int64_t depth) {
    const std::int64_t passes = g.accumulate ? 2 : 1;
    add("gemm " + name,
        text(g.d.shape) + " K=" + std::to_string(depth) + " " + name_of(g.d.dtype) +
            (g.accumulate ? " accumulate" : ""),
        bytes(g.a) + bytes(g.b) + passes * bytes(g.d), 2 * g.d.shape.elements() * depth,
        [&] { ops_.gemm(*stream_, g); });
  }

  void time_layer(const std::string& suffix, bool quantized) {
    time_linear("qkv" + suffix, 3 * hidden(), hidden(), quantized);
    time_linear("proj" + suffix, hidden(), hidden(), quantized);
    time_linear("fc1" + suffix, ffn(), hidden(), quantized);
    time_linear("fc2" + suffix, hidden(), ffn(), quantized);
  }

  // Y = X·Wᵀ + bias, dX = dY·W, dW = dYᵀ·X in the forms that a placement uses.
  void time_linear(const std::string& name, std::int64_t out, std::int64_t in, bool quantized) {
    const DType forward = quantized ? config_.fp8.forward_type() : activation();
    const DType backward = quantized ? config_.fp8.backward_type() : activation();
    const Operand w = random_operand(forward, {out, in}), x = random_operand(forward, {tokens(), in});
    const Operand dy = random_operand(backward, {tokens(), out});
    GemmArgs f;
    f.a = x.rowwise;
    f.b = w.rowwise;
    f.a_scale_inv = x.scale_inv;
    f.b_scale_inv = w.scale_inv;
    if (name != "head") f.bias = random(activation(), {1, out});
    f.d = zeros(activation(), {tokens(), out});
    f.fast_accumulation = true;
    time_gemm("F " + name, f, in);
    GemmArgs i;
    i.a = dy.rowwise;
    i.b = quantized ? w.columnwise : w.rowwise;
    i.b_transposed = !quantized;
    i.a_scale_inv = dy.scale_inv;
    i.b_scale_inv = w.scale_inv;
    i.d = zeros(activation(), {tokens(), in});
    time_gemm("I " + name, i, out);
    GemmArgs g;
    g.a = quantized ? dy.columnwise : dy.rowwise;
    g.b = quantized ? x.columnwise : x.rowwise;
    g.a_transposed = g.b_transposed = !quantized;
    g.a_scale_inv = dy.scale_inv;
    g.b_scale_inv = x.scale_inv;
    for (const DType type : {DType::kF32, DType::kBF16}) {
      g.d = zeros(type, {out, in});
      for (const bool accumulate : {false, true}) {
        g.accumulate = accumulate;
        time_gemm("W " + name, g, tokens());
      }
    }
    const QuantizeWeightArgs q{random(DType::kF32, {out, in}), operand(forward, {out, in}), quantizer()};
    add("quantize_weight " + name, text(q.master.shape), bytes(q.master) + bytes(q.out), 0,
        [&] { ops_.quantize_weight(*stream_, q); });
    release();
  }

  std::int32_t* indices(std::int64_t limit) {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens()));
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<std::int32_t>(philox(2, 0, i).w[0] % static_cast<std::uint32_t>(limit));
    }
    const Tensor t = zeros(DType::kF32, {1, tokens()});
    device_.upload(*stream_, t.data, ids.data(), ids.size() * sizeof(std::int32_t));
    return t.as<std::int32_t>();
  }

  void time_embedding() {
    const std::int64_t vocab = config_.model.padded_vocab();
    const std::int32_t* ids = indices(config_.model.vocab_size);
    const auto* first = reinterpret_cast<const std::int32_t*>(cell(0.0f));
    const Tensor out = zeros(activation(), {tokens(), hidden()});
    const EmbeddingForwardArgs f{ids,
                                 first,
                                 config_.seq_length,
                                 random(activation(), {vocab, hidden()}),
                                 random(DType::kF32, {config_.seq_length, hidden()}),
                                 out};
    add("embedding_forward", text(out.shape), 2 * bytes(out) + bytes(f.position_table), 0,
        [&] { ops_.embedding_forward(*stream_, f); });
    const EmbeddingBackwardArgs b{ids,
                                  first,
                                  config_.seq_length,
                                  out,
                                  zeros(DType::kF32, {vocab, hidden()}),
                                  zeros(DType::kF32, {config_.seq_length, hidden()})};
    add("embedding_backward", text(out.shape), bytes(out) * 5 + 2 * bytes(b.grad_position), 0,
        [&] { ops_.embedding_backward(*stream_, b); });
    release();
  }

  void time_cross_entropy() {
    const CrossEntropyArgs c{random(activation(), {tokens(), config_.model.padded_vocab()}),
                             config_.model.vocab_size,
                             indices(config_.model.vocab_size),
                             reinterpret_cast<const std::int32_t*>(cell(0.0f)),
                             cell(0.0f),
                             true,
                             cell(1.0f / static_cast<float>(tokens()))};
    add("cross_entropy + gradient", text(c.logits.shape), 2 * bytes(c.logits), 0,
        [&] { ops_.cross_entropy(*stream_, c); });
    release();
  }

  void time_optimizer() {
    StageConfig one = config_;
    one.model.num_layers = 1;
    const ParameterList layer = stage_parameters(one, {0, 1, false, false});
    for (const DType moments : {DType::kF32, DType::kBF16}) {
      GradientNormArgs norm;
      AdamWArgs adamw{};
      std::int64_t elements = 0, copied = 0;
      for (const Parameter& p : layer) {
        const auto index = static_cast<std::int64_t>(norm.items.size());
        const Tensor gradient = random(DType::kF32, p.shape);
        norm.items.push_back({gradient, {}, index});
        const bool matrix = p.kind == ParameterKind::kMatrix;
        adamw.items.push_back({random(DType::kF32, p.shape), gradient, zeros(moments, p.shape), zeros(moments, p.shape),
                               index, matrix, false});
        if (matrix) {
          adamw.items.back().copy = operand(forward_type(), p.shape);
          adamw.items.back().quantizer = quantizer();
          copied += bytes(adamw.items.back().copy);
        }
        elements += p.shape.elements();
      }
      norm.partial_squares = zeros(DType::kF32, {1, layer.size()}).as<float>();
      norm.partial_bad = zeros(DType::kF32, {1, layer.size()}).as<float>();
      const OptimizerScalars scalars{1e-4f, 1e-3f, 4.5f, 1, 1.0f, 1.0f, 0, -1};
      const Tensor cells = zeros(DType::kF32, {1, 64});
      device_.upload(*stream_, cells.data, &scalars, sizeof scalars);
      adamw.scalars = cells.as<OptimizerScalars>();
      adamw.beta1 = 0.9f;
      adamw.beta2 = 0.95f;
      adamw.epsilon = 1e-8f;
      adamw.weight_decay = 0.1f;
      adamw.seed = 1;
      const std::string shape = std::to_string(elements) + " parameters";
      if (moments == DType::kF32) {
        add("gradient_norm, a layer", shape, 4 * elements, 0, [&] { ops_.gradient_norm(*stream_, norm); });
      }
      const auto moment_bytes = static_cast<std::int64_t>(size_of(moments));
      add(std::string("adamw and copies, a layer, moments ") + name_of(moments), shape,
          (12 + 4 * moment_bytes) * elements + copied, 0, [&] { ops_.adamw(*stream_, adamw); });
      release();
    }
  }

  Device& device_;
  Ops& ops_;
  const StageConfig& config_;
  std::unique_ptr<Stream> stream_;
  std::vector<Buffer> buffers_;
  std::vector<OpTime> times_;
};

}  // namespace

std::vector<OpTime> time_ops(Backend& backend, const StageConfig& config) { return OpBench(backend, config).run(); }

}  // namespace qe
