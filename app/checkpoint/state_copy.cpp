#include "app/checkpoint/state_copy.h"

#include <new>
#include <string>

#include "core/error.h"

namespace qe {

void StateCopy::reserve(PipelineRank& rank) {
  entries_ = rank.state();
  offsets_.clear();
  std::size_t total = 0;
  for (const StateEntry& e : entries_) {
    offsets_.push_back(total);
    total += e.view.bytes();
  }
  if (total <= size_) return;
  try {
    memory_ = rank.allocate_host(total);
  } catch (const std::bad_alloc&) {
    throw CheckpointError("The host has no " + std::to_string(total) +
                          " bytes left for the copy that is written in the background; set checkpoint.async to false.");
  }
  size_ = total;
}

void StateCopy::fill(PipelineRank& rank) {
  reserve(rank);
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    rank.read(entries_[i], {memory_.get() + offsets_[i], entries_[i].view.bytes()});
  }
}

}  // namespace qe
