#include "core/runtime/optimizer.h"

#include <cmath>
#include <cstring>

#include "core/error.h"

namespace qe {

namespace {

// base^exponent by squaring: the same bits on every machine, which the C library's pow does not promise.
double power(double base, std::uint64_t exponent) {
  double result = 1.0;
  for (; exponent != 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result *= base;
    base *= base;
  }
  return result;
}

}  // namespace

Optimizer::Optimizer(Device& device, Ops& ops, const OptimizerConfig& config,
                     std::vector<const TransformerStage*> stages, const ParameterList& model, const Tensor& partials,
                     Probe* probe, StepTimeline* timeline)
    : device_(device), ops_(ops), config_(config), probe_(probe), timeline_(timeline) {
  const auto count = static_cast<std::size_t>(model.size());
  scalars_ = device.allocate(sizeof(OptimizerScalars), MemoryKind::kStep);
  result_ = device.allocate_host(sizeof(OptimizerScalars));
  auto* squares = partials.as<float>();
  auto* scalars = scalars_.as<OptimizerScalars>();
  norm_args_ = {{}, squares, squares + count};
  clip_args_ = {squares, squares + count, model.size(), config.clip_grad, scalars};
  adamw_args_ = {{}, scalars, config.beta1, config.beta2, config.epsilon, config.weight_decay, config.seed};
  for (const TransformerStage* stage : stages) {
    StageMoments m{stage, lay_out(stage->weights().parameters(), [](const Parameter&) { return true; }), {}};
    for (Buffer& memory : m.memory) {
      memory =
          device.allocate(static_cast<std::size_t>(m.offsets.total) * size_of(config.moments), MemoryKind::kMoments);
    }
    stages_.push_back(std::move(m));
    add_items(stages_.back(), model);
  }
}

void Optimizer::add_items(const StageMoments& m, const ParameterList& model) {
  const ParameterList& parameters = m.stage->weights().parameters();
  const GradMemory& gradients = m.stage->gradients();
  WeightCopies copies(static_cast<std::size_t>(parameters.size()));
  if (m.stage->caches_follow_update()) copies = m.stage->weight_copies();
  // A stage's parameters are a range of the model's: one look-up finds them all.
  const int first = model.index(parameters[0].name);
  for (int p = 0; p < parameters.size(); ++p) {
    GradientItem gradient{gradients.main(p), {}, first + p, gradients.touched(p)};
    for (int k = 0; k < gradients.views(p); ++k) gradient.microbatch.push_back(gradients.view(p, MicrobatchIndex{k}));
    norm_args_.items.push_back(std::move(gradient));
    const bool vector = parameters[p].kind == ParameterKind::kVector;
    const WeightCopy& copy = copies[static_cast<std::size_t>(p)];
    adamw_args_.items.push_back({m.stage->weights().master(p), gradients.main(p), moment(0, m.stage->index(), p),
                                 moment(1, m.stage->index(), p), first + p, !vector, vector, gradients.touched(p),
                                 copy.out, copy.quantizer});
  }
}

Tensor Optimizer::moment(int which, StageIndex stage, int parameter) const {
  for (const StageMoments& m : stages_) {
    if (m.stage->index() != stage) continue;
    const std::int64_t offset = m.offsets.offset[static_cast<std::size_t>(parameter)];
    return make_tensor(
        m.memory[which].as<unsigned char>() + offset * static_cast<std::int64_t>(size_of(config_.moments)),
        config_.moments, m.stage->weights().parameters()[parameter].shape);
  }
  QE_EXPECTS(false, "the stage is of this rank");
}

void Optimizer::prepare(Stream& stream) {
  OptimizerScalars scalars{};
  scalars.skip = 1;
  device_.upload(stream, scalars_.data(), &scalars, sizeof scalars);
  ops_.gradient_norm(stream, norm_args_);
  ops_.adamw(stream, adamw_args_);
}

void Optimizer::begin_step(Stream& stream, float learning_rate, std::uint32_t step) {
  OptimizerScalars scalars{};
  scalars.learning_rate = learning_rate;
  const double correction1 = 1.0 - power(config_.beta1, applied_updates_ + 1);
  const double correction2 = 1.0 - power(config_.beta2, applied_updates_ + 1);
  scalars.step_size = static_cast<float>(static_cast<double>(learning_rate) / correction1);
  scalars.root_scale = static_cast<float>(1.0 / std::sqrt(correction2));
  scalars.step = step;
  device_.upload(stream, scalars_.data(), &scalars, sizeof scalars);

  const StepTimeline::Span span(timeline_, stream, "optimizer", [] { return "gradient norm"; });
  ops_.gradient_norm(stream, norm_args_);
}

void Optimizer::end_step(Stream& stream) {
  if (probe_ != nullptr) {
    for (const StageMoments& m : stages_) {
      const ParameterList& parameters = m.stage->weights().parameters();
      for (int p = 0; p < parameters.size(); ++p) {
        probe_->record(stream, ProbeCategory::kMainGrad, parameters[p].name, nullptr, m.stage->gradients().main(p));
      }
    }
  }
  {
    const StepTimeline::Span span(timeline_, stream, "optimizer", [] { return "AdamW"; });
    ops_.clip_factor(stream, clip_args_);
    ops_.adamw(stream, adamw_args_);
  }

  device_.download(stream, result_.get(), scalars_.data(), sizeof(OptimizerScalars));
}

OptimizerScalars Optimizer::result() {
  OptimizerScalars scalars{};
  std::memcpy(&scalars, result_.get(), sizeof scalars);
  if (scalars.skip == 0) ++applied_updates_;
  return scalars;
}

}  // namespace qe
