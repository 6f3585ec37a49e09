// When a run saves, and where it starts: the trainer's side of app/checkpoint. Every function is collective.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "app/checkpoint/checkpoint.h"
#include "app/checkpoint/resume.h"
#include "app/config.h"
#include "app/data/token_dataset.h"

namespace qe {

// From the command line.
struct StartOptions {
  std::optional<std::string> resume;   // "latest", a step, or a checkpoint's folder
  std::vector<std::string> overrides;  // keys whose new value counts
  std::string init_from;               // a checkpoint's folder, for its weights; empty: none
};

class Checkpointer {
 public:
  // Looks for what the run starts from, checks it and compares it, before anything large is allocated. Throws
  // CheckpointError on every rank alike.
  Checkpointer(const Config&, const StartOptions&, Transport&, std::unique_ptr<Storage>, const TokenDataset& train);
  ~Checkpointer();

  // State comes from a checkpoint: initial parameters are not needed.
  [[nodiscard]] bool has_start() const noexcept { return found_.has_value(); }
  [[nodiscard]] const std::optional<ResumeRecord>& resumed() const noexcept { return resumed_; }
  // Lines for the user about where the run starts.
  [[nodiscard]] std::vector<std::string> notes() const;

  // Loads the start, if there is one; returns the position that the run goes on from.
  RunPosition load(PipelineRank&);
  // After `step` steps of train_iters.
  [[nodiscard]] bool due(std::int64_t step, bool stopping) const noexcept;
  SavedCheckpoint save(PipelineRank&, const RunPosition&);

 private:
  const Config& config_;
  Transport& transport_;
  std::unique_ptr<Storage> storage_;
  std::vector<DataFile> train_files_;
  std::int64_t windows_;
  std::optional<FoundCheckpoint> found_;
  std::optional<ResumeRecord> resumed_;
};

}  // namespace qe
