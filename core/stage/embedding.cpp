#include "core/stage/embedding.h"

namespace qe {

namespace {
constexpr const char* kToken = "embedding.token.weight";
constexpr const char* kPosition = "embedding.position.weight";
}  // namespace

void Embedding::declare(ParameterList& list, const ModelConfig& model) {
  const std::int64_t h = model.hidden_size;
  list.add({.name = kToken,
            .kind = ParameterKind::kVector,
            .shape = {model.padded_vocab(), h},
            .real_rows = model.vocab_size,
            .init = Init::kNormal,
            .init_std = kInitStd,
            .sparse_rows = true});
  list.add({.name = kPosition,
            .kind = ParameterKind::kVector,
            .shape = {model.max_position_embeddings, h},
            .real_rows = model.max_position_embeddings,
            .init = Init::kNormal,
            .init_std = kInitStd});
}

Embedding::Embedding(StageParts& parts, const std::int32_t* tokens)
    : weights_(&parts.weights),
      gradients_(&parts.gradients),
      tokens_(tokens),
      sequence_length_(parts.config.seq_length),
      token_(parts.weights.parameters().index(kToken)),
      position_(parts.weights.parameters().index(kPosition)) {
  const DType activation = parts.config.activation_type();
  const Shape shape = parts.weights.parameters()[token_].shape;
  cache_memory_ =
      parts.device.allocate(static_cast<std::size_t>(shape.elements()) * size_of(activation), MemoryKind::kWeightCache);
  token_copy_ = make_tensor(cache_memory_.data(), activation, shape);
}

void Embedding::refresh(Ops& ops, Stream& stream) const { ops.cast(stream, weights_->master(token_), token_copy_); }

void Embedding::add_copies(WeightCopies& copies) const { copies.at(token_) = {{token_copy_, {}, {}}, {}}; }

void Embedding::forward(const StageRun& run, const Tensor& out) const {
  run.ops.embedding_forward(run.stream,
                            {tokens_, run.microbatch, sequence_length_, token_copy_, weights_->master(position_), out});
}

void Embedding::input_grad(const StageRun& run, const Tensor& d_out) const {
  run.ops.embedding_backward(run.stream, {tokens_, run.microbatch, sequence_length_, d_out, gradients_->main(token_),
                                          gradients_->main(position_), gradients_->touched(token_)});
}

void Embedding::record_vector_grads(const StageRun& run) const {
  run.record(ProbeCategory::kVectorGrad, kToken, gradients_->main(token_));
  run.record(ProbeCategory::kVectorGrad, kPosition, gradients_->main(position_));
}

}  // namespace qe
