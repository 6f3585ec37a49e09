#include "core/stage/output_head.h"

namespace qe {

namespace {
constexpr const char* kNormName = "final_norm";

LinearPrecision precision(const StageConfig& c) {
  switch (c.head) {
    case HeadPrecision::kFp8Delayed:
      return LinearPrecision::kFp8Delayed;
    case HeadPrecision::kFp8Dynamic:
      return LinearPrecision::kFp8Dynamic;
    case HeadPrecision::kBf16:
      return LinearPrecision::kPlain;
  }
  return LinearPrecision::kPlain;
}
}  // namespace

void OutputHead::declare(ParameterList& list, const ModelConfig& model) {
  Norm::declare(list, kNormName, model.hidden_size);
  list.add({.name = kMatrixName,
            .kind = ParameterKind::kMatrix,
            .shape = {model.padded_vocab(), model.hidden_size},
            .real_rows = model.vocab_size,
            .init = Init::kNormal,
            .init_std = kInitStd});
}

OutputHead::OutputHead(StageParts& parts, const LossBuffers& loss)
    : loss_(loss),
      vocab_size_(parts.config.model.vocab_size),
      norm_(parts, kNormName),
      projection_(parts, {"head", kMatrixName, 1, "", precision(parts.config)}),
      logits_(parts.tape.add("logits", parts.config.activation_type(),
                             {parts.config.tokens(), parts.config.model.padded_vocab()})),
      d_norm_(parts.tape.scratch("d_norm", parts.config.activation_type(),
                                 {parts.config.tokens(), parts.config.model.hidden_size})) {}

void OutputHead::refresh(Ops& ops, Stream& stream, const Fp8State& forward_state) const {
  projection_.refresh(ops, stream, forward_state);
}

void OutputHead::forward(const StageRun& run, const Tensor& x) const {
  norm_.forward(run, x, projection_.input(run), projection_.input_quantizer(run));
  projection_.forward(run, {}, run.at(logits_));
  run.ops.cross_entropy(run.stream, {run.at(logits_), vocab_size_, loss_.targets, run.microbatch, loss_.loss,
                                     run.pass == Pass::kTrain, loss_.gradient_scale});
}

void OutputHead::input_grad(const StageRun& run, const Tensor& x, const Tensor& dx, const Linear* producer) const {
  projection_.quantize_output_grad(run, run.at(logits_));
  const Tensor d_norm = run.at(d_norm_);
  projection_.input_grad(run, d_norm);
  norm_.backward(run, d_norm, x, {}, dx, producer);
}

void OutputHead::weight_grad(const StageRun& run, int count, MicrobatchIndex first, bool first_write) const {
  projection_.weight_grad(run, count, first, first_write);
}

}  // namespace qe
