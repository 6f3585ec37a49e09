// When a run saves, and where it starts: the trainer's side of app/checkpoint. Every function is collective.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "app/checkpoint/background_save.h"
#include "app/checkpoint/checkpoint.h"
#include "app/checkpoint/resume.h"
#include "app/checkpoint/state_copy.h"
#include "app/config.h"
#include "app/data/token_dataset.h"

namespace qe {

// From the command line.
struct StartOptions {
  std::optional<std::string> resume;   // "latest", a step, or a checkpoint's folder
  std::vector<std::string> overrides;  // keys whose new value counts
  std::string init_from;               // a checkpoint's folder, for its weights; empty: none
};

struct FinishedSave {
  SavedCheckpoint checkpoint;
  bool background = false;
  double stall_ms = 0;   // that training stood still for it
  double waited_ms = 0;  // of those, for a file that was still being written
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
  // How this run computes its matrix products: compared with the run that it resumes, and saved. Throws CheckpointError
  // where they differ, on every rank alike because their choices are alike.
  void set_gemm_choices(std::vector<GemmChoice>);
  // Lines for the user about where the run starts.
  [[nodiscard]] std::vector<std::string> notes() const;

  // Loads the start, if there is one, and takes the memory that checkpoint.async needs; returns the position that the
  // run goes on from.
  RunPosition start(PipelineRank&);
  // After `step` steps of train_iters.
  [[nodiscard]] bool due(std::int64_t step, bool stopping) const noexcept;
  // Saves, or with checkpoint.async begins to; first waits for the save before, if that is still being written.
  void save(PipelineRank&, const RunPosition&);
  // Publishes a save of the background that every rank has written. At step boundaries. Throws CheckpointError on every
  // rank alike where one could not write.
  void poll();
  void finish();  // the same, and waits for it and for the removal of older ones
  [[nodiscard]] bool writing() const noexcept { return pending_ != nullptr; }
  // What has been published since the last call.
  std::vector<FinishedSave> take_finished() { return std::exchange(finished_, {}); }

 private:
  void publish_pending();
  void close_published();
  const Config& config_;
  Transport& transport_;
  std::unique_ptr<Storage> storage_;
  std::vector<std::string> overrides_;
  std::vector<GemmChoice> gemm_choices_;
  std::vector<DataFile> train_files_;
  std::int64_t windows_;
  std::optional<FoundCheckpoint> found_;
  std::optional<ResumeRecord> resumed_;
  std::vector<FinishedSave> finished_;
  StateCopy copy_;                             // of checkpoint.async
  std::unique_ptr<BackgroundSave> pending_;    // writes copy_ through storage_
  std::unique_ptr<BackgroundSave> published_;  // removes older checkpoints
  double pending_stall_ms_ = 0;
};

}  // namespace qe
