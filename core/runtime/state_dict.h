// The flat list of everything that outlives a step: what a checkpoint stores, a state hash covers and a diff names.
// Entries carry global names and slices, never ranks, so that another cut of the model can load them (design.md 8).
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/runtime/optimizer.h"
#include "core/stage/transformer_stage.h"

namespace qe {

struct StateEntry {
  std::string name;  // "master.layers.3.mlp.fc1.weight", "fp8.layers.3.fc1.in.amax_history"
  Shape global_shape;
  Shape offset;  // of the view within the global tensor; today every entry is whole
  Tensor view;   // the memory itself, to read from and to load into
  // A weight slot's current amax (element 0) is written with the cache, by an update or a refresh, whenever that
  // happens: whoever stores or hashes the entry puts 0 in its place.
  bool first_is_derived = false;
};

// Masters, both moments, histories and scales of a stage.
std::vector<StateEntry> state_dict(const TransformerStage&, const Optimizer&);
// The entry's bytes on the host, derived values as 0. Waits for the stream. `to` has as many bytes as the view.
void read_entry(Device&, Stream&, const StateEntry&, std::span<unsigned char> to);
std::vector<unsigned char> read_entry(Device&, Stream&, const StateEntry&);
// The inverse. Waits for the stream. `bytes` are as many as the view has.
void write_entry(Device&, Stream&, const StateEntry&, std::span<const unsigned char> bytes);

}  // namespace qe
