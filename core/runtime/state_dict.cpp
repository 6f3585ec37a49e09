#include "core/runtime/state_dict.h"

#include <algorithm>

#include "core/error.h"

namespace qe {

std::vector<StateEntry> state_dict(const TransformerStage& stage, const Optimizer& optimizer) {
  std::vector<StateEntry> entries;
  const auto add = [&](std::string name, const Tensor& view) {
    entries.push_back({std::move(name), view.shape, {0, 0}, view});
  };
  const ParameterList& parameters = stage.weights().parameters();
  for (int p = 0; p < parameters.size(); ++p) {
    add("master." + parameters[p].name, stage.weights().master(p));
    add("moment1." + parameters[p].name, optimizer.moment(0, stage.index(), p));
    add("moment2." + parameters[p].name, optimizer.moment(1, stage.index(), p));
  }
  for (const Chain chain : {Chain::kForward, Chain::kBackward}) {
    const Fp8State& state = stage.scaling(chain);
    for (int s = 0; s < state.slots(); ++s) {
      add("fp8." + state.name(s) + ".amax_history", state.history(s, 1));
      entries.back().first_is_derived = state.name(s).ends_with(Linear::kWeightSlot);
      add("fp8." + state.name(s) + ".scale", state.scale(s, 1));
    }
  }
  return entries;
}

void read_entry(Device& device, Stream& stream, const StateEntry& entry, std::span<unsigned char> to) {
  QE_EXPECTS(entry.view.contiguous() && to.size() == entry.view.bytes(), "state is stored in whole tensors");
  device.download(stream, to.data(), entry.view.data, to.size());
  device.synchronize(stream);
  if (entry.first_is_derived) std::fill_n(to.begin(), size_of(entry.view.dtype), static_cast<unsigned char>(0));
}

std::vector<unsigned char> read_entry(Device& device, Stream& stream, const StateEntry& entry) {
  std::vector<unsigned char> bytes(entry.view.bytes());
  read_entry(device, stream, entry, bytes);
  return bytes;
}

void write_entry(Device& device, Stream& stream, const StateEntry& entry, std::span<const unsigned char> bytes) {
  QE_EXPECTS(entry.view.contiguous() && bytes.size() == entry.view.bytes(), "state is loaded in whole tensors");
  device.upload(stream, entry.view.data, bytes.data(), bytes.size());
  device.synchronize(stream);
}

}  // namespace qe
