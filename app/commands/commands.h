// The sub-commands. Each takes what main() parsed and returns an exit code; errors are thrown (core/error.h).
#pragma once

#include <string>
#include <vector>

#include "app/checkpointer.h"
#include "app/config.h"
#include "app/stop_signals.h"
#include "kernels/wire/job_board.h"

namespace qe {

// Between MPI_Init and MPI_Finalize, on every rank of a job that has config.ranks() ranks. `command_line` is for the
// report; `signals` and `board` may be null.
int run_train(const Config& config, const StartOptions& options, StopSignals* signals, JobBoard* board,
              const std::string& command_line);

struct BenchOptions {
  int steps = 20;        // measured complete optimizer steps; 0: none
  int warmup = 5;        // steps before them, the first one included
  bool ops = false;      // each operation alone, on rank 0's device
  std::string output;    // JSON file; empty: none
  std::string timeline;  // Chrome trace of one more step; empty: none
  std::string tune;      // tune file; empty: none
};
// As run_train, on random tokens; writes no run folder. `tune` is run_tune's.
int run_bench(const Config& config, const BenchOptions& options, JobBoard* board, const std::string& command_line);

// Times the algorithms of every product that the config's ranks compute, however many, in this process alone; adds the
// fastest to the tune file (app/gemm_table.h). Prints a line a product.
int run_tune(const Config& config, const std::string& path);

struct PlanOptions {
  std::string csv;            // "compute" or "lowered": print the lists as PyTorch's CSV and nothing else
  bool json = false;          // for programs
  bool compare = false;       // every schedule for this model and these ranks
  std::string costs;          // file of measured costs; empty: unit costs
  std::string measure_costs;  // file to write: measure this machine and do nothing else
};
// On one process, without MPI. Prints to standard output.
int run_plan(const Config& config, const PlanOptions& options);

struct TokenizeOptions {
  std::vector<std::string> inputs;  // one document each
  std::string output;
  bool force = false;  // replace an existing output
};
// Text files → one llm.c uint16 shard of bytes. Throws DataError when a file cannot be read or written, UsageError when
// the output exists and force is off.
int run_tokenize(const TokenizeOptions& options);

struct InspectOptions {
  std::string checkpoint;         // a checkpoint's folder, or a folder of checkpoints: its latest; empty with diff
  bool verify = false;            // read every byte and hold it against its digest
  std::vector<std::string> diff;  // two of them
};
// Prints what a checkpoint holds, or where two differ (then 1 when they do). Throws CheckpointError when one cannot be
// used. Needs no MPI.
int run_inspect(const InspectOptions& options);

// Throws DataError when the data section names files that training or evaluation could not use. Needs no MPI, so that a
// job is refused before it starts.
void check_data(const Config& config);

}  // namespace qe
