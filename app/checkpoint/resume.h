// What a resumed run must have in common with its checkpoint, and what a report says about where a run started.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "app/config.h"
#include "kernels/gemm_choice.h"

namespace qe {

struct Manifest;
struct DataFile;

struct KeyChange {
  std::string key;          // "training.lr"
  std::string stored, now;  // JSON
};

// For report.json.
struct ResumeRecord {
  std::string from;  // the checkpoint's folder
  std::int64_t step = 0;
  std::vector<std::string> passed_over;  // newer ones that could not be used, and why
  std::vector<KeyChange> overridden;     // must be the same, and were named on the command line
  std::vector<KeyChange> changed;        // may be another: cut, schedule, mode, machine, length of the run
  bool data_restarted = false;           // training data from the beginning: other files or another seq_length
};

// What --override names for the algorithms of matrix products.
inline constexpr char kGemmChoicesName[] = "gemm_choices";

// Throws UsageError when a name is neither a config key nor that.
void check_override_names(const std::vector<std::string>& keys);

// Compares the stored config and data with this run's. Throws CheckpointError that lists every difference which must
// not be, or was not named in `overrides`. `from`, `step`, `passed_over` of the result are the caller's to fill.
ResumeRecord compare_for_resume(const Manifest&, const std::string& folder, const Config&,
                                const std::vector<DataFile>& train_files, const std::vector<std::string>& overrides);

// Products that both runs compute must be computed alike, unless that is overridden, which is recorded. Throws
// CheckpointError with the list of differences.
void compare_gemm_choices(const Manifest&, const std::string& folder, const std::vector<GemmChoice>& now,
                          const std::vector<std::string>& overrides, ResumeRecord&);

// For weights alone: the model section must be the same.
void require_same_model(const Manifest&, const std::string& folder, const Config&);

}  // namespace qe
