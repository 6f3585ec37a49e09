// What one run is: the resolved, validated configuration, and the strict reader that makes it from JSON.
// Owns names, ranges, defaults and contradictions. Needs no MPI, no device and no data file.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "app/data/token_layout.h"
#include "core/dtype.h"
#include "core/schedule.h"
#include "core/stage/layer_config.h"
#include "schedules/schedules.h"

namespace qe {

enum class LrSchedule : std::uint8_t { kConstant, kCosine, kLinear, kWsd };
enum class NonFinitePolicy : std::uint8_t { kStop, kSkip };
enum class ExecutionMode : std::uint8_t { kEager, kGraph };

struct PrecisionSection {
  Compute compute = Compute::kFp8;
  std::vector<int> bf16_layers;  // ascending; under fp8 the matrices of these layers stay in BF16
};

struct HeadSection {
  HeadPrecision precision = HeadPrecision::kFp8Delayed;  // resolved: fp8_delayed under fp8, else bf16
};

struct TrainingSection {
  std::int64_t train_iters = 100;  // optimizer steps, skipped ones counted; 0: set up and evaluate only
  int seq_length = 64;             // L
  int micro_batch_size = 1;        // sequences
  int global_batch_size = 4;       // sequences of a step
  std::int64_t seed = 1;
  double lr = 3e-4;
  double min_lr = 0;
  LrSchedule lr_schedule = LrSchedule::kConstant;
  std::int64_t lr_warmup_iters = 0;
  std::int64_t lr_decay_iters = 0;  // resolved; see learning_rate()
  std::int64_t eval_interval = 0;   // steps between evaluations; 0: only after the last step
  std::int64_t eval_iters = 0;      // microbatches of one evaluation; 0: every full window of data.valid
  NonFinitePolicy on_nonfinite = NonFinitePolicy::kStop;
  int max_skipped = 10;  // consecutive skipped steps before the run stops
};

struct OptimizerSection {
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.95;
  double adam_eps = 1e-8;
  double weight_decay = 0.1;
  double clip_grad = 1.0;  // global L2 norm; 0: off
  DType moments_dtype = DType::kF32;
};

struct PipelineSection {
  int pipeline_model_parallel_size = 1;          // P
  int virtual_pipeline_model_parallel_size = 1;  // V, resolved: 2 under zbv, the file's under csv, else 1
  ScheduleKind schedule = ScheduleKind::k1F1B;
  std::string schedule_csv;                   // path, under csv
  std::shared_ptr<const Schedule> csv_lists;  // what the file holds, valid (schedules/csv.h); not a key
  Backward backward = Backward::kSplit;       // resolved: full for a file with B and no W, else split
  TapeSlots tape_slots = TapeSlots::kPeak;    // resolved: peak with accumulate, else per_microbatch
  std::vector<int> layers_per_stage;          // [S], resolved: an even division, earlier stages take the remainder
};

struct ParallelSection {
  int data = 1;
};

struct ExecutionSection {
  std::string backend = "auto";    // for bind_rank
  std::string transport = "auto";  // for bind_rank
  ExecutionMode mode = ExecutionMode::kGraph;
  std::string gemm_table;  // tune file (app/gemm_table.h); empty: none
};

struct DataSection {
  std::vector<std::string> train;          // globs
  std::vector<std::string> valid;          // globs; empty: no evaluation
  std::vector<std::string> out_of_domain;  // globs; evaluated once, after the last step
  DataFormat format = DataFormat::kLlmc;   // of all of them
};

struct CheckpointSection {
  std::string dir;            // empty: no checkpoints
  std::int64_t interval = 0;  // steps between checkpoints; 0: after the last step and on a signal
  int keep_last = 2;
  std::int64_t keep_every = 0;  // steps; 0: none
  bool async = false;
};

struct ReportSection {
  std::string dir;  // empty: runs/<config name>-<time>
};

struct RuntimeSection {
  double timeout_s = 300;           // deadline of every wait
  std::vector<std::string> faults;  // made on purpose (app/injected_faults.h)
};

struct Config {
  std::string name;  // the file's name without folder and ".json"; not a key

  ModelConfig model;
  PrecisionSection precision;
  Fp8Recipe fp8;
  HeadSection head;
  TrainingSection training;
  OptimizerSection optimizer;
  GradientConfig gradients;
  PipelineSection pipeline;
  ParallelSection parallel;
  ExecutionSection execution;
  DataSection data;
  CheckpointSection checkpoint;
  ReportSection report;
  RuntimeSection runtime;

  // M: microbatches of one replica in one step.
  [[nodiscard]] int microbatches() const noexcept {
    return training.global_batch_size / (training.micro_batch_size * parallel.data);
  }
  // MPI ranks the run needs.
  [[nodiscard]] int ranks() const noexcept { return pipeline.pipeline_model_parallel_size * parallel.data; }
  // Sequences of one replica in one step.
  [[nodiscard]] int replica_batch_size() const noexcept { return training.global_batch_size / parallel.data; }
  // Target tokens of one optimizer step, all replicas.
  [[nodiscard]] std::int64_t tokens_per_step() const noexcept {
    return std::int64_t{training.global_batch_size} * training.seq_length;
  }
  [[nodiscard]] PipelineShape shape() const noexcept {
    return {pipeline.pipeline_model_parallel_size, pipeline.virtual_pipeline_model_parallel_size, microbatches()};
  }
  [[nodiscard]] StageConfig stage_config() const;
};

// Reads JSON with // comments, and the schedule's file if it names one; applies the overrides ("a.b=value", value as
// JSON, else as a string); fills in defaults that depend on other keys; checks ranges and contradictions. `source_name`
// is the path that messages name. Throws ConfigError with one line for every fault found.
Config parse_config(const std::string& json_text, const std::string& source_name,
                    const std::vector<std::string>& overrides = {});

// parse_config of a file's text. Throws ConfigError when the file cannot be read.
Config load_config(const std::string& path, const std::vector<std::string>& overrides = {});

// Every key with its resolved value, as JSON that parse_config reads back to the same Config.
std::string dump_config(const Config&);

// The learning rate of optimizer step `step`, from 1. Linear warm-up lr·step/warmup; then constant, or a fall to
// min_lr: cosine and linear reach it at step lr_decay_iters; wsd holds lr and falls linearly in the last lr_decay_iters
// steps.
double learning_rate(const TrainingSection&, std::int64_t step) noexcept;

// Made from the key table: the text of --help-config, the JSON Schema, the page docs/config.md.
std::string config_help();
std::string config_schema();
std::string config_markdown();

}  // namespace qe
