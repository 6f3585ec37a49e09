// One rank's run from first step to report: data, step loop, evaluation, logs. Owns everything below it, in destruction
// order. The command line and MPI_Init are main's, arithmetic and contract are core's.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "app/checkpointer.h"
#include "app/config.h"
#include "app/data/batch_sampler.h"
#include "app/data/token_dataset.h"
#include "app/injected_faults.h"
#include "app/progress.h"
#include "app/rank_place.h"
#include "app/report.h"
#include "app/run_directory.h"
#include "app/start_check.h"
#include "app/stop_signals.h"
#include "core/runtime/pipeline_rank.h"
#include "kernels/backend.h"

namespace qe {

class Trainer {
 public:
  // Collective over the job, whose ranks have the same config and options. Throws DataError for unusable data,
  // CheckpointError when the start cannot be used. `signals` and `board` may be null.
  Trainer(const Config&, const StartOptions&, StopSignals* signals, JobBoard* board, const std::string& command_line);
  ~Trainer();

  // Trains up to step config.training.train_iters, evaluates, writes the report. Returns kStoppedBySignal after saving
  // when any rank was asked to stop, else kOk. Throws NonFiniteError on every rank alike when the policy says stop; the
  // report then says failed.
  ExitCode run();

 private:
  void start();
  void open_run();
  bool train_and_evaluate();  // false: asked to stop
  void train_step(std::uint32_t step);
  void save();
  void tell_saves();    // what has been published since it was last told
  void finish_saves();  // waits for the one in the background
  void finish_earlier_save();
  // Tells the ranks this one's step; returns the slowest rank's ms and notes whether any was asked to stop. Throws when
  // ranks disagree on the gradient norm.
  double compare_ranks(std::uint32_t step, double ms, float norm);
  void handle_skip(std::uint32_t step, const OptimizerScalars&);
  double evaluate(const TokenDataset&);
  void log_evaluation(std::int64_t step);
  void note_failure(const std::string& message, ExitCode);
  void fail_alone(const std::string& message, ExitCode);  // the other ranks are told, and wait no longer
  void report_failure_alone(const std::string& message, ExitCode);
  void fill_report();                  // collective
  void write_report_alone() noexcept;  // of what rank 0 knows, when the others may be gone
  [[nodiscard]] RankUsage usage() const;
  [[nodiscard]] bool leads() const { return transport_->rank(Group::kWorld) == 0; }

  Config config_;
  JobBoard* board_;
  RankPlace place_;
  std::shared_ptr<FaultPlan> faults_;  // null: none are asked for, and nothing of them runs
  std::unique_ptr<StepHooks> fault_hooks_;
  RankPlan plan_;
  RankBinding binding_;
  Backend backend_;
  std::unique_ptr<Transport> transport_;
  TokenDataset train_data_;
  std::optional<TokenDataset> valid_data_, out_of_domain_data_;
  BatchSampler sampler_;
  StopSignals* signals_;
  std::unique_ptr<Checkpointer> checkpoints_;
  std::string gemm_note_;  // which tuned algorithms are used; empty: no tune file
  StartCheck checked_;
  std::unique_ptr<PipelineRank> rank_;
  std::vector<std::int32_t> tokens_, targets_;  // [M, T]
  std::vector<double> step_ms_;
  RunPosition position_;  // of the last step; losses and skips of the whole run
  std::int64_t begun_step_ = 0;
  bool stopping_ = false;
  RunReport report_;
  // Rank 0 only.
  std::optional<RunDirectory> run_directory_;
  std::unique_ptr<MetricsLog> metrics_;
  std::unique_ptr<Progress> progress_;
};

}  // namespace qe
