// Saving and loading a rank's state, by all ranks together. Every function here is collective: each rank calls it at a
// step boundary, and an error on one of them is a CheckpointError with its path on all of them.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "app/checkpoint/store.h"
#include "core/runtime/pipeline_rank.h"
#include "core/transport.h"

namespace qe {

// Runs `mine` on every rank and returns what each returned, in world rank order. Where it threw, all ranks throw a
// CheckpointError with the messages of those that did.
std::vector<std::string> all_or_none(Transport&, const std::function<std::string()>& mine);

// Makes the folder and sees that all ranks have the same one.
void probe_shared_folder(Storage&, Transport&, const std::string& dir);

// The pipeline ranks of the first replica write one file each; replicas hold the same state.
inline bool writes_checkpoints(const Transport& t) { return t.rank(Group::kData) == 0; }

struct SavedCheckpoint {
  std::int64_t step = 0;
  std::string folder;
  std::string parameters_xxh3;
  bool finite = true;       // false: written, but `latest` does not point to it
  std::uint64_t bytes = 0;  // of all ranks' files
  double write_ms = 0;      // of the slowest rank's file
};

// Writes step_<position.step> of `dir` and publishes it. `about` brings everything but files, tensors, digests, epoch
// and Adam's t, which the rank knows. The pipeline ranks of the first replica write one file each; replicas hold the
// same state. Throws ContractViolation (kQuiescence) on a rank with work in flight.
SavedCheckpoint save_checkpoint(Storage&, Transport&, PipelineRank&, const std::string& dir, const Retention&,
                                Manifest about);

struct FoundCheckpoint {
  std::string folder;
  Manifest manifest;
  std::vector<std::string> passed_over;  // why newer ones were not taken, a sentence each
};

// `wanted` is "latest", a step of `dir`, or a checkpoint's folder. Every file's digest is checked. "latest" takes the
// first complete one with finite weights; nothing when the folder holds no checkpoint at all. Throws CheckpointError
// when there is none that can be used; the message lists what is there.
std::optional<FoundCheckpoint> find_checkpoint(Transport&, const std::string& dir, const std::string& wanted);

enum class Restored : std::uint8_t { kEverything, kWeights };
// Loads the rank's share by name; kWeights leaves moments, scaling state, epoch and Adam's t as they were. Throws
// CheckpointError with the names when a tensor is missing, has another shape or type, or is left over.
void load_checkpoint(Transport&, PipelineRank&, const FoundCheckpoint&, Restored);

}  // namespace qe
