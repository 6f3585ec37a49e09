// The folder of checkpoints: names, what counts as complete, publishing, pruning. One process at a time writes here
// (rank 0); what a checkpoint holds is not its business.
//
//   step_00000100/      published: manifest.json and the files it names
//   step_00000100.tmp/  being written, or left behind by a run that died; never read
//   latest              the name of the newest published folder whose weights are finite
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "app/checkpoint/manifest.h"
#include "app/checkpoint/storage.h"

namespace qe {

struct Retention {
  int keep_last = 2;            // newest ones with finite weights
  std::int64_t keep_every = 0;  // and every one whose step is a multiple of this; 0: none
};

std::string step_name(std::int64_t step);                           // "step_00000100"
std::optional<std::int64_t> step_of_name(const std::string& name);  // the inverse; nothing for other names
std::string path_in(const std::string& dir, const std::string& name);

// Steps of the published folders, ascending. By name only; a folder that is not there has none.
std::vector<std::int64_t> steps_in(const std::string& dir);
// "steps 3, 6 and 9", "no checkpoint".
std::string listed(const std::vector<std::int64_t>& steps);

// Where `latest` points; nothing without a sound pointer.
std::optional<std::int64_t> pointed_at(const std::string& dir);
// Steps to try for "latest": where the pointer points, then newest first.
std::vector<std::int64_t> candidates_in(const std::string& dir);

// Names of folders that a save left unfinished.
std::vector<std::string> unfinished_in(const std::string& dir);

// The manifest of one checkpoint's folder. Throws CheckpointError that names the file unless the manifest is sound and
// every file that it names is there with its size.
Manifest open_checkpoint(const std::string& folder);
// Digests of the files i with i % parts == part against the manifest; throws CheckpointError that names the file.
void verify_files(const std::string& folder, const Manifest&, int part = 0, int parts = 1);

// The finished `folder`.tmp becomes `folder`, replacing an earlier one, and `latest` points there if `finite`.
void publish(Storage&, const std::string& dir, std::int64_t step, bool finite);
// Takes what retention does not keep among the checkpoints up to `step` out of the names that readers look at. Never
// the newest checkpoint with finite weights. Returns the folders that may be removed: these, and what is unfinished.
std::vector<std::string> set_aside(Storage&, const std::string& dir, std::int64_t step, const Retention&);
void remove_all(Storage&, const std::vector<std::string>& folders);

}  // namespace qe
