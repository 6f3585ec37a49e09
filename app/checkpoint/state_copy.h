// A rank's whole state on the host, as it was at one step boundary.
#pragma once

#include <cstddef>
#include <vector>

#include "app/checkpoint/storage.h"
#include "core/runtime/pipeline_rank.h"

namespace qe {

class StateCopy {
 public:
  // Takes the memory, as much as the state has bytes. Page-locked memory is slow to take and fast to fill, so this is
  // done once, before training. Throws CheckpointError where the host has not so much.
  void reserve(PipelineRank&);
  // Copies the state, into memory that is taken first if need be. Earlier entries are gone.
  void fill(PipelineRank&);

  [[nodiscard]] const std::vector<StateEntry>& entries() const noexcept { return entries_; }
  [[nodiscard]] Bytes bytes(std::size_t entry) const {
    return {memory_.get() + offsets_[entry], entries_[entry].view.bytes()};
  }

 private:
  HostMemory memory_{nullptr, [](unsigned char*) noexcept {}};
  std::size_t size_ = 0;
  std::vector<StateEntry> entries_;
  std::vector<std::size_t> offsets_;
};

}  // namespace qe
