#include "tests/runtime/reference_model.h"

#include <algorithm>
#include <numbers>
#include <span>

namespace qe::testing {
namespace {

constexpr double kEpsilon = 1e-5;
constexpr double kCubic = 0.044715;

std::string layer(int i) { return "layers." + std::to_string(i); }

double gelu_tanh(double u) { return std::tanh(std::sqrt(2.0 / std::numbers::pi) * (u + kCubic * u * u * u)); }
double gelu(double u) { return 0.5 * u * (1.0 + gelu_tanh(u)); }
double gelu_derivative(double u) {
  const double t = gelu_tanh(u);
  const double dz = std::sqrt(2.0 / std::numbers::pi) * (1.0 + 3.0 * kCubic * u * u);
  return 0.5 * (1.0 + t) + 0.5 * u * (1.0 - t * t) * dz;
}

// Tensors stacked below each other (matrices) or behind each other (vectors).
Matrix stacked(const ReferenceParameters& all, const std::vector<std::string>& names) {
  std::vector<double> values;
  for (const std::string& n : names) values.insert(values.end(), all.at(n).values().begin(), all.at(n).values().end());
  const Matrix& first = all.at(names.front());
  const int count = static_cast<int>(names.size());
  Matrix out = first.rows() == 1 ? Matrix(1, first.cols() * count) : Matrix(first.rows() * count, first.cols());
  out.values() = values;
  return out;
}

struct Moments {  // of a row
  double mean, rstd;
};
Moments row_moments(const Matrix& x, int row) {
  double mean = 0.0, variance = 0.0;
  for (int c = 0; c < x.cols(); ++c) mean += x(row, c) / x.cols();
  for (int c = 0; c < x.cols(); ++c) variance += (x(row, c) - mean) * (x(row, c) - mean) / x.cols();
  return {mean, 1.0 / std::sqrt(variance + kEpsilon)};
}

// One GEMM domain: its parameters and how its operands are represented.
struct Site {
  enum class Kind { kPlain, kDelayed, kDynamic };
  std::string name;  // "layers.0.qkv"
  std::vector<std::string> matrices, biases;
  Kind kind;
};

// What F leaves for the backward of one layer.
struct LayerTape {
  Matrix x, qkv, attended, middle, u;
  ReferenceOperand qkv_in, proj_in, fc1_in, fc2_in;
};

class Step {
 public:
  Step(const Config& config, const ReferenceParameters& parameters, const ReferenceSlots& slots)
      : config_(config), parameters_(parameters) {
    result_.slots = slots;
    for (const auto& [name, value] : parameters) result_.gradients[name] = Matrix(value.rows(), value.cols());
    for (int i = 0; i < config.model.num_layers; ++i) {
      for (const char* part : {"qkv", "proj", "fc1", "fc2"}) refresh(site(i, part));
    }
    refresh(head_site());
  }

  void microbatch(std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets) {
    forward(tokens, targets);
    if (config_.fp8.scale_update == ScaleUpdate::kMicrobatch) update_scales(true);
    backward(tokens);
    if (config_.fp8.scale_update == ScaleUpdate::kMicrobatch) update_scales(false);
  }
  ReferenceStep finish() {
    if (config_.fp8.scale_update == ScaleUpdate::kStep) {
      update_scales(true);
      update_scales(false);
    }
    return result_;
  }

 private:
  [[nodiscard]] bool fp32() const { return config_.precision.compute == Compute::kFp32; }
  [[nodiscard]] double rounded(double v) const { return fp32() ? v : round_to_bf16(v); }
  [[nodiscard]] Matrix rounded(Matrix m) const {
    for (double& v : m.values()) v = rounded(v);
    return m;
  }
  [[nodiscard]] const ReferenceFormat& backward_format() const {
    return config_.fp8.format == Fp8Format::kHybrid ? ReferenceFormat::e5m2() : ReferenceFormat::e4m3();
  }

  [[nodiscard]] Site site(int i, const std::string& part) const {
    const auto& bf16 = config_.precision.bf16_layers;
    const bool fp8 = config_.precision.compute == Compute::kFp8 && std::count(bf16.begin(), bf16.end(), i) == 0;
    const Site::Kind kind = fp8 ? Site::Kind::kDelayed : Site::Kind::kPlain;
    Site s{layer(i) + "." + part, {}, {}, kind};
    std::vector<std::string> names{layer(i) + ".mlp." + part};
    if (part == "proj") names = {layer(i) + ".attention.proj"};
    if (part == "qkv") {
      names.clear();
      for (const char* n : {"query", "key", "value"}) names.push_back(layer(i) + ".attention." + n);
    }
    for (const std::string& n : names) {
      s.matrices.push_back(n + ".weight");
      s.biases.push_back(n + ".bias");
    }
    return s;
  }
  [[nodiscard]] Site head_site() const {
    const bool fp8 = config_.precision.compute == Compute::kFp8;
    Site::Kind kind = Site::Kind::kPlain;
    if (fp8 && config_.head.precision == HeadPrecision::kFp8Delayed) kind = Site::Kind::kDelayed;
    if (fp8 && config_.head.precision == HeadPrecision::kFp8Dynamic) kind = Site::Kind::kDynamic;
    return {"head", {"head.weight"}, {}, kind};
  }

  // amax is gathered from the value before any rounding; the FP8 code is made from the same value.
  ReferenceOperand delayed(const Matrix& x, const std::string& slot_name, const ReferenceFormat& format) {
    ReferenceSlot& slot = result_.slots.at(slot_name);
    slot.history[0] = std::max(slot.history[0], reference_amax(x));
    return reference_quantize(x, slot.scale, format);
  }
  ReferenceOperand operand(const Site& s, const Matrix& x, const char* suffix, const ReferenceFormat& format) {
    switch (s.kind) {
      case Site::Kind::kDelayed:
        return delayed(x, s.name + suffix, format);
      case Site::Kind::kDynamic: {
        const Matrix bf16 = rounded(x);
        return reference_quantize(bf16, reference_dynamic_scale(bf16, format), format);
      }
      case Site::Kind::kPlain:
        break;
    }
    return {rounded(x), 1.0};
  }
  void refresh(const Site& s) {
    weights_[s.name] = operand(s, rounded(stacked(parameters_, s.matrices)), ".w", ReferenceFormat::e4m3());
  }

  // Y = rounded(X·Wᵀ + residual + bias).
  Matrix linear(const Site& s, const ReferenceOperand& x, const Matrix* residual) {
    const ReferenceOperand& w = weights_.at(s.name);
    Matrix y = times_transposed(x.values, w.values);
    const Matrix bias = s.biases.empty() ? Matrix(1, y.cols()) : rounded(stacked(parameters_, s.biases));
    for (int t = 0; t < y.rows(); ++t) {
      for (int c = 0; c < y.cols(); ++c) {
        const double product = y(t, c) * x.scale_inv * w.scale_inv;
        y(t, c) = rounded(product + (residual != nullptr ? (*residual)(t, c) : 0.0) + bias(0, c));
      }
    }
    return y;
  }
  // dX = rounded(dY·W); adds dW = dYᵀ·X and the bias gradient, the column sums of dY before it is quantized.
  Matrix linear_backward(const Site& s, const Matrix& dy, const ReferenceOperand& x) {
    add_column_sums(s.biases, dy);
    const ReferenceOperand q = operand(s, dy, ".dy", backward_format());
    const Matrix dw = transposed_times(q.values, x.values);
    int row = 0;
    for (const std::string& name : s.matrices) {
      Matrix& gradient = result_.gradients.at(name);
      for (int r = 0; r < gradient.rows(); ++r, ++row) {
        for (int c = 0; c < gradient.cols(); ++c) gradient(r, c) += dw(row, c) * q.scale_inv * x.scale_inv;
      }
    }
    const ReferenceOperand& w = weights_.at(s.name);
    Matrix dx = times(q.values, w.values);
    for (double& v : dx.values()) v = rounded(v * q.scale_inv * w.scale_inv);
    return dx;
  }
  void add_column_sums(const std::vector<std::string>& names, const Matrix& m) {
    int c = 0;
    for (const std::string& name : names) {
      Matrix& gradient = result_.gradients.at(name);
      for (int i = 0; i < gradient.cols(); ++i, ++c) {
        for (int t = 0; t < m.rows(); ++t) gradient(0, i) += m(t, c);
      }
    }
  }

  Matrix layer_norm(const std::string& name, const Matrix& x) const {
    const Matrix &gain = parameters_.at(name + ".weight"), &bias = parameters_.at(name + ".bias");
    Matrix y(x.rows(), x.cols());
    for (int t = 0; t < x.rows(); ++t) {
      const Moments m = row_moments(x, t);
      for (int c = 0; c < x.cols(); ++c) y(t, c) = (x(t, c) - m.mean) * m.rstd * gain(0, c) + bias(0, c);
    }
    return y;
  }
  // rounded(backward(dy) + residual).
  Matrix layer_norm_backward(const std::string& name, const Matrix& dy, const Matrix& x, const Matrix* residual) {
    const Matrix& gain = parameters_.at(name + ".weight");
    Matrix &d_gain = result_.gradients.at(name + ".weight"), &d_bias = result_.gradients.at(name + ".bias");
    Matrix dx(x.rows(), x.cols());
    for (int t = 0; t < x.rows(); ++t) {
      const Moments m = row_moments(x, t);
      double mean_grad = 0.0, mean_product = 0.0;
      for (int c = 0; c < x.cols(); ++c) {
        const double normalized = (x(t, c) - m.mean) * m.rstd;
        d_gain(0, c) += dy(t, c) * normalized;
        d_bias(0, c) += dy(t, c);
        mean_grad += dy(t, c) * gain(0, c) / x.cols();
        mean_product += dy(t, c) * gain(0, c) * normalized / x.cols();
      }
      for (int c = 0; c < x.cols(); ++c) {
        const double normalized = (x(t, c) - m.mean) * m.rstd;
        const double d = m.rstd * (dy(t, c) * gain(0, c) - mean_grad - normalized * mean_product);
        dx(t, c) = rounded(d + (residual != nullptr ? (*residual)(t, c) : 0.0));
      }
    }
    return dx;
  }

  // probabilities[query][key] of one head of one sequence that begins in row `first`.
  Matrix probabilities(const Matrix& qkv, int first, int head) const {
    const int length = config_.training.seq_length, h = config_.model.hidden_size, d = config_.model.head_dim();
    Matrix p(length, length);
    for (int i = 0; i < length; ++i) {
      double sum = 0.0;
      for (int j = 0; j <= i; ++j) {
        double score = 0.0;
        for (int c = head * d; c < (head + 1) * d; ++c) score += qkv(first + i, c) * qkv(first + j, h + c);
        p(i, j) = std::exp(score / std::sqrt(static_cast<double>(d)));
        sum += p(i, j);
      }
      for (int j = 0; j <= i; ++j) p(i, j) /= sum;
    }
    return p;
  }
  Matrix attention(const Matrix& qkv) const {
    const int length = config_.training.seq_length, h = config_.model.hidden_size, d = config_.model.head_dim();
    Matrix out(qkv.rows(), h);
    for (int first = 0; first < qkv.rows(); first += length) {
      for (int head = 0; head < config_.model.num_attention_heads; ++head) {
        const Matrix p = probabilities(qkv, first, head);
        for (int i = 0; i < length; ++i) {
          for (int c = head * d; c < (head + 1) * d; ++c) {
            double sum = 0.0;
            for (int j = 0; j <= i; ++j) sum += p(i, j) * qkv(first + j, 2 * h + c);
            out(first + i, c) = rounded(sum);
          }
        }
      }
    }
    return out;
  }
  // Gradients of q, k and v side by side. Σ_j p·dp of a row is taken as out·d_out, with out as it was rounded.
  Matrix attention_backward(const Matrix& qkv, const Matrix& out, const Matrix& d_out) const {
    const int length = config_.training.seq_length, h = config_.model.hidden_size, d = config_.model.head_dim();
    Matrix grad(qkv.rows(), 3 * h);
    for (int first = 0; first < qkv.rows(); first += length) {
      for (int head = 0; head < config_.model.num_attention_heads; ++head) {
        const Matrix p = probabilities(qkv, first, head);
        const int begin = head * d, end = begin + d;
        for (int i = 0; i < length; ++i) {
          double delta = 0.0;
          for (int c = begin; c < end; ++c) delta += out(first + i, c) * d_out(first + i, c);
          for (int j = 0; j <= i; ++j) {
            double dp = 0.0;
            for (int c = begin; c < end; ++c) dp += d_out(first + i, c) * qkv(first + j, 2 * h + c);
            const double ds = p(i, j) * (dp - delta) / std::sqrt(static_cast<double>(d));
            for (int c = begin; c < end; ++c) {
              grad(first + i, c) += ds * qkv(first + j, h + c);
              grad(first + j, h + c) += ds * qkv(first + i, c);
              grad(first + j, 2 * h + c) += p(i, j) * d_out(first + i, c);
            }
          }
        }
      }
    }
    return rounded(grad);
  }

  void forward(std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets) {
    const Matrix& token_table = parameters_.at("embedding.token.weight");
    const Matrix& position_table = parameters_.at("embedding.position.weight");
    const int rows = static_cast<int>(tokens.size()), h = config_.model.hidden_size;
    Matrix x(rows, h);
    for (int t = 0; t < rows; ++t) {
      for (int c = 0; c < h; ++c) {
        x(t, c) = rounded(rounded(token_table(tokens[t], c)) + position_table(t % config_.training.seq_length, c));
      }
    }
    tape_.assign(static_cast<std::size_t>(config_.model.num_layers), {});
    for (int i = 0; i < config_.model.num_layers; ++i) x = layer_forward(i, x);
    last_ = x;
    const Matrix normalized = layer_norm("final_norm", x);
    head_in_ = operand(head_site(), normalized, ".in", ReferenceFormat::e4m3());
    loss(linear(head_site(), head_in_, nullptr), targets);
  }
  Matrix layer_forward(int i, const Matrix& x) {
    LayerTape& t = tape_[static_cast<std::size_t>(i)];
    const ReferenceFormat& e4m3 = ReferenceFormat::e4m3();
    t.x = x;
    t.qkv_in = operand(site(i, "qkv"), layer_norm(layer(i) + ".attention_norm", x), ".in", e4m3);
    t.qkv = linear(site(i, "qkv"), t.qkv_in, nullptr);
    t.attended = attention(t.qkv);
    t.proj_in = operand(site(i, "proj"), t.attended, ".in", e4m3);
    t.middle = linear(site(i, "proj"), t.proj_in, &t.x);
    t.fc1_in = operand(site(i, "fc1"), layer_norm(layer(i) + ".mlp_norm", t.middle), ".in", e4m3);
    t.u = linear(site(i, "fc1"), t.fc1_in, nullptr);
    Matrix g = t.u;
    for (double& v : g.values()) v = gelu(v);
    t.fc2_in = operand(site(i, "fc2"), g, ".in", e4m3);
    return linear(site(i, "fc2"), t.fc2_in, &t.middle);
  }
  // Adds the loss and leaves dlogits of the mean over the step's targets; padding columns take no part.
  void loss(const Matrix& logits, std::span<const std::int32_t> targets) {
    d_logits_ = Matrix(logits.rows(), logits.cols());
    for (int t = 0; t < logits.rows(); ++t) {
      double sum = 0.0;
      for (int v = 0; v < config_.model.vocab_size; ++v) sum += std::exp(logits(t, v));
      result_.loss_sum += std::log(sum) - logits(t, targets[t]);
      for (int v = 0; v < config_.model.vocab_size; ++v) {
        const double p = std::exp(logits(t, v)) / sum;
        const double d = (p - (v == targets[t] ? 1.0 : 0.0)) / static_cast<double>(config_.tokens_per_step());
        d_logits_(t, v) = rounded(d);
      }
    }
  }

  void backward(std::span<const std::int32_t> tokens) {
    Matrix d = linear_backward(head_site(), d_logits_, head_in_);
    d = layer_norm_backward("final_norm", d, last_, nullptr);
    for (int i = config_.model.num_layers; i-- > 0;) d = layer_backward(i, d);
    Matrix &d_token = result_.gradients.at("embedding.token.weight"),
           &d_position = result_.gradients.at("embedding.position.weight");
    for (int t = 0; t < d.rows(); ++t) {
      for (int c = 0; c < d.cols(); ++c) {
        d_token(tokens[t], c) += d(t, c);
        d_position(t % config_.training.seq_length, c) += d(t, c);
      }
    }
  }
  Matrix layer_backward(int i, const Matrix& d_out) {
    const LayerTape& t = tape_[static_cast<std::size_t>(i)];
    Matrix d = linear_backward(site(i, "fc2"), d_out, t.fc2_in);
    for (std::size_t k = 0; k < d.values().size(); ++k) d.values()[k] *= gelu_derivative(t.u.values()[k]);
    d = linear_backward(site(i, "fc1"), d, t.fc1_in);
    const Matrix d_middle = layer_norm_backward(layer(i) + ".mlp_norm", d, t.middle, &d_out);
    d = linear_backward(site(i, "proj"), d_middle, t.proj_in);
    d = attention_backward(t.qkv, t.attended, d);
    d = linear_backward(site(i, "qkv"), d, t.qkv_in);
    return layer_norm_backward(layer(i) + ".attention_norm", d, t.x, &d_middle);
  }

  void update_scales(bool forward) {
    for (auto& [name, slot] : result_.slots) {
      if (name.ends_with(".dy") == forward) continue;
      reference_update(slot, forward ? ReferenceFormat::e4m3() : backward_format(), config_.fp8);
    }
  }

  const Config& config_;
  const ReferenceParameters& parameters_;
  std::map<std::string, ReferenceOperand> weights_;
  std::vector<LayerTape> tape_;  // of the microbatch, as are the next three
  Matrix last_, d_logits_;
  ReferenceOperand head_in_;
  ReferenceStep result_;
};

}  // namespace

ReferenceStep reference_step(const Config& config, const ReferenceParameters& parameters, const ReferenceSlots& slots,
                             const Batch& batch) {
  Step step(config, parameters, slots);
  const auto cells = static_cast<std::size_t>(config.training.micro_batch_size) * config.training.seq_length;
  for (std::size_t first = 0; first < batch.tokens.size(); first += cells) {
    step.microbatch(std::span(batch.tokens).subspan(first, cells), std::span(batch.targets).subspan(first, cells));
  }
  return step.finish();
}

}  // namespace qe::testing
