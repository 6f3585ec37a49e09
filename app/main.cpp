// Process entry: command line → config → command, with the one try/catch that turns an error into its exit code.
// Everything a user can get wrong is refused before MPI_Init and printed once; later a failing rank takes the job down.
#include <mpi.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "app/commands/commands.h"
#include "app/config.h"
#include "app/environment.h"
#include "core/error.h"

namespace qe {
namespace {

struct CommandLine {
  std::string config_path;
  std::vector<std::string> overrides;
  StartOptions start;
  std::string resume;
  TokenizeOptions tokenize;
  BenchOptions bench;
  InspectOptions inspect;
  bool help_config = false;
  bool schema_markdown = false;
  std::string text;  // as typed, for the report
};

bool variable_is_zero_or_unset(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr || std::string(value) == "0";
}

// An error that all ranks have alike is printed by one of them; a file may be missing on one host only.
bool speaks_for(const Error& e) {
  return variable_is_zero_or_unset(e.exit_code() == ExitCode::kData ? "OMPI_COMM_WORLD_LOCAL_RANK"
                                                                    : "OMPI_COMM_WORLD_RANK") &&
         variable_is_zero_or_unset("SLURM_PROCID");
}

void print_error(const std::string& message) { std::fprintf(stderr, "qeffect: error: %s\n", message.c_str()); }

// Between MPI_Init and MPI_Finalize. An exception leaves through MPI_Abort, or the other ranks would wait for this one.
int run_ranks(const Config& config, const std::function<int()>& body) {
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size != config.ranks()) {
    const std::string wanted = std::to_string(config.ranks());
    if (rank == 0 && variable_is_zero_or_unset("SLURM_PROCID")) {
      print_error(
          "The config needs " + wanted + " rank(s), pipeline.pipeline_model_parallel_size x parallel.data, and got " +
          std::to_string(size) + "; start it with mpirun -n " + wanted +
          (size == 1 && std::getenv("SLURM_NTASKS") != nullptr ? ", or srun with an MPI plugin (--mpi=pmix)." : "."));
    }
    return static_cast<int>(ExitCode::kConfig);
  }
  int code = static_cast<int>(ExitCode::kRuntime);
  try {
    return body();
  } catch (const NonFiniteError& e) {  // every rank decided alike: told once, and the job ends in order
    if (rank == 0) print_error(e.what());
    return static_cast<int>(e.exit_code());
  } catch (const CheckpointError& e) {  // as above
    if (rank == 0) print_error(e.what());
    return static_cast<int>(e.exit_code());
  } catch (const Error& e) {
    print_error("rank " + std::to_string(rank) + ": " + e.what());
    code = static_cast<int>(e.exit_code());
  } catch (const std::exception& e) {
    print_error("rank " + std::to_string(rank) + ": " + e.what());
  }
  std::fflush(nullptr);
  MPI_Abort(MPI_COMM_WORLD, code);
  return code;
}

int run_job(const Config& config, const std::function<int()>& body) {
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
  const int code = run_ranks(config, body);
  MPI_Finalize();
  return code;
}

void check_start(const Config& config, const StartOptions& start) {
  if (!start.resume || !config.checkpoint.dir.empty() || start.resume->find('/') != std::string::npos) return;
  throw ConfigError("checkpoint.dir is needed to resume from " + *start.resume +
                    "; set it to the folder of the run's "
                    "checkpoints, or resume from one checkpoint's folder.");
}

int train(const CommandLine& line) {
  const Config config = load_config(line.config_path, line.overrides);
  check_override_names(line.start.overrides);
  check_start(config, line.start);
  check_data(config);
  StopSignals signals(!config.checkpoint.dir.empty());
  return run_job(config, [&] { return run_train(config, line.start, &signals, line.text); });
}

int bench(const CommandLine& line) {
  const Config config = load_config(line.config_path, line.overrides);
  return run_job(config, [&] { return run_bench(config, line.bench, line.text); });
}

void add_config_options(CLI::App& command, CommandLine& line) {
  command.add_option("--config", line.config_path, "Config file (JSON)")->required();
  command.add_option("--set", line.overrides, "Override keys: section.key=value; may be repeated");
}

void declare_options(CLI::App& app, CommandLine& line) {
  app.set_version_flag("--version", version_text());
  app.add_flag("--help-config", line.help_config, "Print every config key with its default, range and meaning");
  app.require_subcommand(0, 1);

  CLI::App* train = app.add_subcommand("train", "Train a model");
  add_config_options(*train, line);

  CLI::Option* resume =
      train->add_option("--resume", line.resume, "Go on from a checkpoint: latest, a step, or a checkpoint's folder");
  resume->expected(0, 1)->type_name("[latest|STEP|DIR]");
  train->final_callback([&line, resume] {
    if (resume->count() > 0) line.start.resume = line.resume.empty() ? "latest" : line.resume;
  });
  train->add_option("--override", line.start.overrides,
                    "With --resume: a key that may differ from the checkpoint's; may be repeated");
  train->add_option("--init-from", line.start.init_from, "Start a new run with the weights of a checkpoint's folder");

  CLI::App* bench = app.add_subcommand("bench", "Time complete steps on random tokens, and each operation alone");
  add_config_options(*bench, line);
  bench->add_option("--steps", line.bench.steps, "Measured optimizer steps; 0: none")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  bench->add_option("--warmup", line.bench.warmup, "Steps before them, the first included")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  bench->add_flag("--ops", line.bench.ops, "Also time each operation at the config's shapes");
  bench->add_option("--output", line.bench.output, "Write the results as JSON");

  CLI::App* tokenize = app.add_subcommand("tokenize", "Turn text files into a token file of bytes (vocabulary 257)");
  tokenize->add_option("--input", line.tokenize.inputs, "Text files, one document each")->required();
  tokenize->add_option("--output", line.tokenize.output, "Token file to write (llm.c, uint16)")->required();
  tokenize->add_flag("--force", line.tokenize.force, "Replace the output if it exists");

  CLI::App* inspect = app.add_subcommand("inspect", "Print what a checkpoint holds, or where two differ");
  inspect->add_option("checkpoint", line.inspect.checkpoint, "A checkpoint's folder, or a folder of checkpoints");
  inspect->add_flag("--verify", line.inspect.verify, "Read every byte and hold it against its digest");
  inspect->add_option("--diff", line.inspect.diff, "Compare two checkpoints by tensor name; exits 1 when they differ")
      ->expected(2);

  CLI::App* schema = app.add_subcommand("schema", "Print the JSON Schema of the config");
  schema->add_flag("--markdown", line.schema_markdown, "Print the page of keys instead");
}

int dispatch(const CLI::App& app, const CommandLine& line) {
  if (line.help_config) return std::fputs(config_help().c_str(), stdout) < 0 ? 1 : 0;
  if (app.got_subcommand("train")) return train(line);
  if (app.got_subcommand("bench")) return bench(line);
  if (app.got_subcommand("tokenize")) return run_tokenize(line.tokenize);
  if (app.got_subcommand("inspect")) return run_inspect(line.inspect);
  if (app.got_subcommand("schema")) {
    return std::fputs((line.schema_markdown ? config_markdown() : config_schema()).c_str(), stdout) < 0 ? 1 : 0;
  }
  throw UsageError("There is no command; use train, bench, tokenize, inspect or schema, or see qeffect --help.");
}

int run(int argc, char** argv) {
  CLI::App app("qeffect: FP8 delayed scaling with pipeline parallelism", "qeffect");
  CommandLine line;
  for (int i = 0; i < argc; ++i) line.text += (i > 0 ? " " : "") + std::string(argv[i]);
  declare_options(app, line);
  try {
    app.parse(argc, argv);
    return dispatch(app, line);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help, --version
    throw UsageError(std::string(e.what()) + "; see qeffect --help.");
  }
}

}  // namespace
}  // namespace qe

int main(int argc, char** argv) {
  try {
    return qe::run(argc, argv);
  } catch (const qe::Error& e) {
    if (qe::speaks_for(e)) qe::print_error(e.what());
    return static_cast<int>(e.exit_code());
  } catch (const std::exception& e) {
    qe::print_error(e.what());
    return static_cast<int>(qe::ExitCode::kRuntime);
  }
}
