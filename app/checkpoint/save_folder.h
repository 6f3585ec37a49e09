// One checkpoint's folder on its way from nothing to published: the steps that saving in the loop and saving in the
// background share.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "app/checkpoint/checkpoint.h"

namespace qe {

class SaveFolder {
 public:
  // `about` brings everything but files, tensors, digests, epoch and Adam's t, which the rank knows. Throws
  // ContractViolation (kQuiescence) on a rank with work in flight.
  SaveFolder(Storage&, Transport&, PipelineRank&, std::string dir, const Retention&, Manifest about);

  // Makes step_<n>.tmp, and does `mine` on every rank. Collective; throws CheckpointError on all ranks alike, and then
  // the folder is gone.
  void open(const std::function<void()>& mine);
  [[nodiscard]] bool rank_writes() const noexcept { return rank_writes_; }
  using Read = std::function<Bytes(std::size_t entry)>;  // what it gives is used before it is called again
  // This rank's file; returns its part of the manifest, for publish. Any thread; the only call that may be another's.
  [[nodiscard]] std::string write_file(const std::vector<StateEntry>&, const Read&) const;
  // `part` gives what write_file returned, or empty. Writes the manifest, renames the folder, and takes older ones out
  // of sight as retention says. Collective as open.
  SavedCheckpoint publish(const std::function<std::string()>& part);
  // Removes those, which takes a disk seconds where they are large. After publish; any thread. Throws CheckpointError.
  void remove_aside() const { remove_all(storage_, aside_); }

 private:
  void gather_parts(const std::vector<std::string>&);
  void remove() noexcept;
  [[nodiscard]] bool leads() const { return transport_.rank(Group::kWorld) == 0; }

  Storage& storage_;
  Transport& transport_;
  std::string dir_;
  Retention retention_;
  Manifest about_;
  SavedCheckpoint saved_;
  std::string unfinished_;
  bool rank_writes_;
  std::string file_;                // this rank's
  std::vector<std::string> aside_;  // on the rank that leads
};

}  // namespace qe
