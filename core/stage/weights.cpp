#include "core/stage/weights.h"

#include <new>

#include "core/error.h"

namespace qe {

StageWeights::StageWeights(Device& device, ParameterList parameters)
    : parameters_(std::move(parameters)), offsets_(lay_out(parameters_, [](const Parameter&) { return true; })) {
  memory_ = device.allocate(static_cast<std::size_t>(offsets_.total) * sizeof(float), MemoryKind::kWeights);
}

Tensor StageWeights::master(int parameter) const { return master_group(parameter, 1); }

Tensor StageWeights::master_group(int first, int count) const {
  Shape shape = parameters_[first].shape;
  for (int i = first + 1; i < first + count; ++i) {
    QE_EXPECTS(parameters_[i].adjacent, "parameters of a group are adjacent");
    // Vectors lengthen, matrices grow downwards: by kind, since a matrix may have one row as well.
    if (parameters_[first].kind == ParameterKind::kVector) {
      shape.cols += parameters_[i].shape.cols;
    } else {
      shape.rows += parameters_[i].shape.rows;
    }
  }
  return make_tensor(memory_.as<float>() + offsets_.offset[static_cast<std::size_t>(first)], DType::kF32, shape);
}

void StageWeights::initialize(Device& device, Stream& stream, std::uint64_t seed) const {
  for (int i = 0; i < parameters_.size(); ++i) {
    try {
      const std::vector<float> values = initial_values(parameters_[i], seed);
      device.upload(stream, master(i).data, values.data(), values.size() * sizeof(float));
    } catch (const std::bad_alloc&) {
      const std::int64_t bytes = parameters_[i].shape.elements() * static_cast<std::int64_t>(sizeof(float));
      throw DeviceError("The host has no " + std::to_string(bytes) + " bytes left for the initial values of " +
                        parameters_[i].name + "; use a smaller model, or raise the process's limit.");
    }
  }
}

}  // namespace qe
