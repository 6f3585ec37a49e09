// What a run leaves behind: metrics.jsonl (a line a step), report.json (the whole run) and the resolved config.
// Owns the files' form (configs/schema/report.schema.json); the trainer owns the numbers.
#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "app/checkpoint/resume.h"
#include "app/config.h"
#include "app/data/ngram.h"
#include "kernels/gemm_choice.h"

namespace qe {

inline constexpr int kReportSchemaVersion = 1;

struct StepRecord {
  std::int64_t step = 0;  // from 1
  double loss = 0;        // nats per target token; may be non-finite
  double grad_norm = 0;   // before clipping; may be non-finite
  double lr = 0;
  double ms = 0;         // wall time of the optimizer step, maximum over ranks
  bool skipped = false;  // not finite, so that the weights did not move, and the run goes on
};

struct EvalRecord {
  std::int64_t step = 0;
  double valid_loss = 0;  // nats per target token
  std::int64_t target_tokens = 0;
  double ms = 0;
};

// What one rank used. Counts are of the whole run.
struct RankUsage {
  std::string device;  // as the backend names it
  std::int64_t graphs = 0;
  std::int64_t replays = 0;
  std::int64_t handoffs = 0;
  std::int64_t matrix_copies = 0;
  std::int64_t weight_quantize_launches = 0;
  int peak_tapes = 0;
  double capture_ms = 0;
  std::int64_t planned_bytes = 0;                     // before the first was allocated
  std::map<std::string, std::int64_t> bytes_by_kind;  // at the end; keys are name_of(MemoryKind)
  std::int64_t peak_bytes = 0;
  std::int64_t end_bytes = 0;
};

struct CheckResult {
  std::string name;
  bool passed = false;
  std::string detail;
};

// One checkpoint of this process.
struct SaveRecord {
  std::int64_t step = 0;
  bool background = false;
  std::uint64_t bytes = 0;  // of all ranks' files
  double stall_ms = 0;      // that training stood still for it
  double waited_ms = 0;     // of those, for a file that was still being written when the next save or the end came
  double write_ms = 0;      // of the slowest rank's file
};

struct DataCounts {
  std::int64_t files = 0, tokens = 0, windows = 0, dropped_tokens = 0;
};

// Why a run ended early.
struct RunFailure {
  std::string message;
  int exit_code = 1;
  std::int64_t step = 0;  // the last one that began
};

struct RunReport {
  std::string command;
  Config config;
  std::string status = "completed";               // or "failed", "stopped" (by a signal, and resumable)
  std::optional<RunFailure> failure;              // with status failed
  std::optional<ResumeRecord> resumed;            // the run went on from a checkpoint
  std::string init_from;                          // the weights' folder; empty: none
  std::vector<std::vector<double>> rank_step_ms;  // [ranks][steps of this process], the first step included
  std::int64_t skipped_steps = 0;
  std::optional<double> initial_train_loss;  // of step 1
  std::optional<double> final_train_loss;    // of the last step
  std::optional<double> final_valid_loss;
  std::optional<double> out_of_domain_loss;
  std::optional<NgramBaseline> baselines;
  DataCounts train_data;
  std::optional<DataCounts> valid_data;
  std::vector<SaveRecord> checkpoints;
  std::vector<RankUsage> ranks;
  std::vector<CheckResult> checks;
  std::vector<GemmChoice> gemm_choices;  // empty on the CPU
};

// Model FLOPs of one token, forward and backward, no recomputation: 6 (L(4h² + 2hf) + Vh) + 6 L h T. Matrix products
// only; attention counted at its causal half; embedding look-ups and padding excluded. T is the sequence length here.
std::int64_t flops_per_token(const ModelConfig& model, int seq_length) noexcept;

// The median over steps of the maximum over ranks, the first step left out (with one step: that one). 0: no steps.
double median_step_ms(const std::vector<std::vector<double>>& rank_step_ms);

// One JSON object a line, on disk when append returns. Numbers read back to the same bits; a non-finite one is null and
// "status" says so: ok, skipped, non_finite.
class MetricsLog {
 public:
  // A run that goes on after `resumed_step` keeps the lines up to there and loses those that it will write again.
  MetricsLog(const std::string& run_directory, const Config& config, std::optional<std::int64_t> resumed_step = {});
  ~MetricsLog();
  MetricsLog(const MetricsLog&) = delete;
  MetricsLog& operator=(const MetricsLog&) = delete;

  void append(const StepRecord& record);
  void append(const EvalRecord& record);

 private:
  void write(const std::string& line);

  std::int64_t tokens_per_step_;
  std::int64_t flops_per_token_;
  int ranks_;
  std::string path_;
  std::FILE* file_;
};

// [{"product", "algorithm"}].
nlohmann::ordered_json gemm_json(const std::vector<GemmChoice>&);

// report.json of the directory, put in place by a rename. The text alone for tests.
std::string report_json(const RunReport& report);
void write_report(const std::string& run_directory, const RunReport& report);

}  // namespace qe
