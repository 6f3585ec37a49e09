#include "core/stage/grad_memory.h"

#include <algorithm>

#include "core/error.h"
#include "core/stage/output_head.h"

namespace qe {

GradMemory::GradMemory(Device& device, const StageConfig& config, const ParameterList& parameters)
    : parameters_(&parameters),
      microbatches_(config.microbatches),
      placement_(config.gradients.placement),
      matrix_type_(placement_ == Placement::kAccumulate ? config.gradients.dtype : DType::kF32),
      view_type_(config.activation_type()),
      matrices_(lay_out(parameters, [](const Parameter& p) { return p.kind == ParameterKind::kMatrix; })),
      vectors_(lay_out(parameters, [](const Parameter& p) { return p.kind == ParameterKind::kVector; })),
      views_(lay_out(parameters, [this](const Parameter& p) {
        return placement_ != Placement::kAccumulate && p.kind == ParameterKind::kMatrix &&
               p.name != OutputHead::kMatrixName;
      })) {
  const auto bytes = [](std::int64_t elements, DType t) { return static_cast<std::size_t>(elements) * size_of(t); };
  for (const Parameter& p : parameters) {
    counts_.push_back(p.sparse_rows ? vectors_.total : -1);
    if (p.sparse_rows) vectors_.total += p.shape.rows;
  }
  matrix_memory_ = device.allocate(bytes(matrices_.total, matrix_type_), MemoryKind::kGradients);
  vector_memory_ = device.allocate(bytes(vectors_.total, DType::kF32), MemoryKind::kGradients);
  if (views_.total == 0) return;
  views_.total = (views_.total + 127) / 128 * 128;
  arena_ = device.allocate(bytes(views_.total, view_type_) * static_cast<std::size_t>(config.microbatches),
                           MemoryKind::kGradients);
  if (placement_ != Placement::kCopied) return;
  std::int64_t largest = 0;
  std::int64_t run = 0;
  for (const Parameter& p : parameters) {
    run = p.adjacent ? run + p.shape.elements() : p.shape.elements();
    if (p.kind == ParameterKind::kMatrix && p.name != OutputHead::kMatrixName) largest = std::max(largest, run);
  }
  staging_ = device.allocate(bytes(largest, view_type_), MemoryKind::kGradients);
}

Tensor GradMemory::group(unsigned char* base, const ParameterOffsets& offsets, DType dtype, int first,
                         int count) const {
  const std::int64_t offset = offsets.offset[static_cast<std::size_t>(first)];
  QE_EXPECTS(offset >= 0, "the parameter has memory of this kind");
  const bool vector = (*parameters_)[first].kind == ParameterKind::kVector;  // a matrix may have one row as well
  Shape shape = (*parameters_)[first].shape;
  for (int i = first + 1; i < first + count; ++i) {
    QE_EXPECTS((*parameters_)[i].adjacent, "parameters of a group are adjacent");
    std::int64_t& growing = vector ? shape.cols : shape.rows;
    growing += vector ? (*parameters_)[i].shape.cols : (*parameters_)[i].shape.rows;
  }
  return make_tensor(base + offset * static_cast<std::int64_t>(size_of(dtype)), dtype, shape);
}

Tensor GradMemory::main(int parameter) const { return main_group(parameter, 1); }

Tensor GradMemory::main_group(int first, int count) const {
  return (*parameters_)[first].kind == ParameterKind::kMatrix
             ? group(matrix_memory_.as<unsigned char>(), matrices_, matrix_type_, first, count)
             : group(vector_memory_.as<unsigned char>(), vectors_, DType::kF32, first, count);
}

Tensor GradMemory::touched(int parameter) const {
  const std::int64_t offset = counts_[static_cast<std::size_t>(parameter)];
  if (offset < 0) return {};
  return make_tensor(vector_memory_.as<float>() + offset, DType::kF32, {1, (*parameters_)[parameter].shape.rows});
}

Tensor GradMemory::all(ParameterKind kind) const {
  return kind == ParameterKind::kMatrix ? make_tensor(matrix_memory_.data(), matrix_type_, {1, matrices_.total})
                                        : make_tensor(vector_memory_.data(), DType::kF32, {1, vectors_.total});
}

int GradMemory::views(int parameter) const noexcept { return has_views(parameter) ? microbatches_ : 0; }

Tensor GradMemory::view(int parameter, MicrobatchIndex m) const {
  unsigned char* base = arena_.as<unsigned char>() +
                        std::int64_t{to_int(m)} * views_.total * static_cast<std::int64_t>(size_of(view_type_));
  return group(base, views_, view_type_, parameter, 1);
}

GradMemory::Destination GradMemory::destination(int first, int count, MicrobatchIndex m, bool first_write) const {
  if (!has_views(first)) return {main_group(first, count), !first_write};
  Tensor d = group(arena_.as<unsigned char>(), views_, view_type_, first, count);
  d.data = placement_ == Placement::kCopied ? staging_.data() : view(first, m).data;
  return {d, false};
}

void GradMemory::deliver(Device& device, Stream& stream, int first, int count, MicrobatchIndex m) const {
  if (placement_ != Placement::kCopied || !has_views(first)) return;
  const unsigned char* from = staging_.as<unsigned char>();
  for (int p = first; p < first + count; ++p) {
    const Tensor to = view(p, m);
    device.copy(stream, to.data, from, to.bytes());
    from += to.bytes();
  }
}

Tensor GradMemory::bound(int parameter, MicrobatchIndex m) const {
  return has_views(parameter) ? view(parameter, m) : main(parameter);
}

int GradMemory::copies_per_weight_grad() const noexcept {
  if (placement_ != Placement::kCopied) return 0;
  return static_cast<int>(std::count_if(views_.offset.begin(), views_.offset.end(), [](auto o) { return o >= 0; }));
}

}  // namespace qe
