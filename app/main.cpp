// Process entry: command line → config → command, with the one try/catch that turns an error into its exit code.
// Everything a user can get wrong is checked before MPI_Init; who prints it is app/job's.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "app/commands/commands.h"
#include "app/config.h"
#include "app/config_faults.h"
#include "app/environment.h"
#include "app/gemm_table.h"
#include "app/injected_faults.h"
#include "app/job.h"
#include "core/error.h"
#include "kernels/backend.h"

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
  PlanOptions plan;
  bool fault_injection = false;
  bool help_config = false;
  bool schema_markdown = false;
  std::string text;  // as typed, for the report
};

void check_start(const Config& config, const StartOptions& start) {
  if (!start.resume || !config.checkpoint.dir.empty() || start.resume->find('/') != std::string::npos) return;
  throw ConfigError("checkpoint.dir is needed to resume from " + *start.resume +
                    "; set it to the folder of the run's "
                    "checkpoints, or resume from one checkpoint's folder.");
}

void check_gemm_table(const Config& config) {
  if (!config.execution.gemm_table.empty()) (void)read_gemm_tables(config.execution.gemm_table);
}

// The config, and what stands in the file that its schedule comes from.
std::string text_of(const Config& config) {
  return dump_config(config) + (config.pipeline.csv_lists ? format_grid(*config.pipeline.csv_lists) : "");
}

// What ranks must have alike beside the config.
std::string text_of(const StartOptions& start) {
  std::string text = "--resume " + start.resume.value_or("none") + "\n--init-from " + start.init_from + "\n";
  for (const std::string& key : start.overrides) text += "--override " + key + "\n";
  return text;
}

int train(const CommandLine& line) {
  std::optional<StopSignals> signals;
  const auto prepare = [&] {
    const Config config = load_config(line.config_path, line.overrides);
    expect_built(config.execution.backend, config.execution.transport);
    expect_faults_allowed(config, line.fault_injection);
    check_override_names(line.start.overrides);
    check_start(config, line.start);
    check_data(config);
    check_gemm_table(config);
    signals.emplace(!config.checkpoint.dir.empty());
    return JobStart{config, "train\n" + text_of(config) + text_of(line.start)};
  };
  return run_job(prepare, [&](const Config& config, JobBoard* board) {
    return run_train(config, line.start, &*signals, board, line.text);
  });
}

// One process tunes for all ranks: the job is one of a single rank, whatever the config's runs need.
int tune(const CommandLine& line) {
  Config config;
  const auto prepare = [&] {
    config = load_config(line.config_path, line.overrides);
    expect_built(config.execution.backend, config.execution.transport);
    Config alone = config;
    alone.pipeline.pipeline_model_parallel_size = alone.parallel.data = 1;
    return JobStart{alone, "bench --tune\n" + text_of(config)};
  };
  return run_job(prepare, [&](const Config&, JobBoard*) { return run_tune(config, line.bench.tune); });
}

int bench(const CommandLine& line) {
  if (!line.bench.tune.empty()) return tune(line);
  const auto prepare = [&] {
    const Config config = load_config(line.config_path, line.overrides);
    expect_built(config.execution.backend, config.execution.transport);
    expect_faults_allowed(config, false);
    check_gemm_table(config);
    const BenchOptions& o = line.bench;
    return JobStart{config, "bench\n" + text_of(config) + "--steps " + std::to_string(o.steps) + "\n--warmup " +
                                std::to_string(o.warmup) + "\n--ops " + (o.ops ? "on" : "off") + "\n--timeline " +
                                (o.timeline.empty() ? "off" : "on")};
  };
  return run_job(
      prepare, [&](const Config& config, JobBoard* board) { return run_bench(config, line.bench, board, line.text); });
}

void add_config_options(CLI::App& command, CommandLine& line) {
  command.add_option("--config", line.config_path, "Config file (JSON)")->required();
  command.add_option("--set", line.overrides, "Override keys: section.key=value; may be repeated");
}

void add_plan(CLI::App& app, CommandLine& line) {
  CLI::App* plan = app.add_subcommand("plan", "Tell what a config will do: layout, lists, memory, graphs, step time");
  add_config_options(*plan, line);
  plan->add_option("--costs", line.plan.costs, "File of measured costs, for times in milliseconds");
  CLI::Option* csv = plan->add_option("--csv", line.plan.csv, "Print the action lists alone, as PyTorch's CSV")
                         ->check(CLI::IsMember({"compute", "lowered"}));
  CLI::Option* json = plan->add_flag("--json", line.plan.json, "Print JSON")->excludes(csv);
  CLI::Option* compare =
      plan->add_flag("--compare", line.plan.compare, "Compare all schedules for this model and these ranks")
          ->excludes(csv);
  plan->add_option("--measure-costs", line.plan.measure_costs,
                   "Measure this machine's costs on one rank, write them to a file and do nothing else")
      ->excludes(csv)
      ->excludes(json)
      ->excludes(compare);
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

  train->add_flag("--enable-fault-injection", line.fault_injection, "Let the config break the run: runtime.faults");

  add_plan(app, line);

  CLI::App* bench = app.add_subcommand("bench", "Time complete steps on random tokens, and each operation alone");
  add_config_options(*bench, line);
  bench->add_option("--steps", line.bench.steps, "Measured optimizer steps; 0: none")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  bench->add_option("--warmup", line.bench.warmup, "Steps before them, the first included")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  CLI::Option* ops = bench->add_flag("--ops", line.bench.ops, "Also time each operation at the config's shapes");
  CLI::Option* output = bench->add_option("--output", line.bench.output, "Write the results as JSON");
  CLI::Option* timeline =
      bench->add_option("--timeline", line.bench.timeline, "Watch one more step and write it as a Chrome trace");
  bench
      ->add_option("--tune", line.bench.tune,
                   "Time cuBLASLt's algorithms for the config's matrix products on one GPU, add the fastest to a file "
                   "for execution.gemm_table and do nothing else")
      ->excludes(ops)
      ->excludes(output)
      ->excludes(timeline);

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

std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  return names;
}

int dispatch(const CLI::App& app, const CommandLine& line) {
  if (line.help_config) return std::fputs(config_help().c_str(), stdout) < 0 ? 1 : 0;
  if (app.got_subcommand("train")) return train(line);
  if (app.got_subcommand("plan")) return run_plan(load_config(line.config_path, line.overrides), line.plan);
  if (app.got_subcommand("bench")) return bench(line);
  if (app.got_subcommand("tokenize")) return run_tokenize(line.tokenize);
  if (app.got_subcommand("inspect")) return run_inspect(line.inspect);
  if (app.got_subcommand("schema")) {
    return std::fputs((line.schema_markdown ? config_markdown() : config_schema()).c_str(), stdout) < 0 ? 1 : 0;
  }
  throw UsageError("No command is given; there are " + join(command_names(app)) + ", see qeffect --help.");
}

// A parser's message, with where to look. `first` is the first argument.
UsageError wrong_usage(const CLI::App& app, const CLI::ParseError& e, const std::string& first) {
  const std::vector<std::string> names = command_names(app);
  const bool known = std::find(names.begin(), names.end(), first) != names.end();
  if (known) return UsageError(std::string(e.what()) + "; see qeffect " + first + " --help.");
  if (first.empty() || first.starts_with('-')) return UsageError(std::string(e.what()) + "; see qeffect --help.");
  const std::vector<std::string> near = nearest_names(first, names);
  return UsageError(shortened(first, 100) + " is no command; " +
                    (near.empty() ? "there are " + join(names) : "the nearest is " + join(near)) +
                    ", see qeffect --help.");
}

int run(const CLI::App& app, const CommandLine& line, const std::string& first, const std::function<void()>& parse) {
  try {
    parse();
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help, --version
    throw wrong_usage(app, e, first);
  }
  return dispatch(app, line);
}

// Commands that know nothing of other ranks, even when a launcher starts several of them.
bool stands_alone(const std::string& command) {
  return command == "tokenize" || command == "inspect" || command == "schema";
}

}  // namespace
}  // namespace qe

int main(int argc, char** argv) {
  const std::string first = argc > 1 ? argv[1] : "";
  try {
    CLI::App app("qeffect: FP8 delayed scaling with pipeline parallelism", "qeffect");
    qe::CommandLine line;
    for (int i = 0; i < argc; ++i) line.text += (i > 0 ? " " : "") + std::string(argv[i]);
    qe::declare_options(app, line);
    return qe::run(app, line, first, [&] { app.parse(argc, argv); });
  } catch (const qe::UsageError& e) {
    if (qe::stands_alone(first)) {
      qe::print_error(e.what());
      return static_cast<int>(e.exit_code());
    }
    return qe::run_job([&e]() -> qe::JobStart { throw e; }, {});  // told once, whichever ranks have it
  } catch (const qe::Error& e) {
    qe::print_error(e.what());
    return static_cast<int>(e.exit_code());
  } catch (const std::exception& e) {
    qe::print_error(e.what());
    return static_cast<int>(qe::ExitCode::kRuntime);
  }
}
