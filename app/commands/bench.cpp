// bench: complete optimizer steps on random tokens, and every operation alone. The contract, the executor and the
// optimizer are those of train; only the data is made up, so that input files cannot matter.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "app/bench/op_times.h"
#include "app/bench/step_times.h"
#include "app/commands/commands.h"
#include "app/environment.h"
#include "app/gemm_table.h"
#include "app/pipeline_plan.h"
#include "app/rank_place.h"
#include "app/report.h"
#include "app/start_check.h"
#include "core/error.h"
#include "core/random.h"

namespace qe {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;
double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

std::vector<std::int32_t> random_tokens(const Config& config, std::uint64_t stream) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(config.tokens_per_step() / config.parallel.data));
  const auto vocab = static_cast<std::uint32_t>(config.model.vocab_size);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    ids[i] =
        static_cast<std::int32_t>(philox(static_cast<std::uint64_t>(config.training.seed), stream, i).w[0] % vocab);
  }
  return ids;
}

struct StepTimes {
  double start_ms = 0;                    // buffers, parameters, capture
  double first_ms = 0;                    // of this rank
  std::vector<std::vector<double>> rank;  // [ranks][steps]; on every rank
  std::int64_t graphs = 0;
  std::int64_t peak_bytes = 0;
  std::vector<std::vector<StepTimeline::Piece>> pieces;  // [ranks]; of a step after those, empty unless asked for
  StartCheck checked;
  std::int64_t taken_bytes = 0;  // of the device's memory since before the first tensor, graphs included
};

StepTimes time_steps(const Config& config, Backend& backend, Transport& transport, const BenchOptions& options,
                     JobBoard* board) {
  StepTimes times;
  auto start = Clock::now();
  const RankPlan plan = make_rank_plan(config);
  RankPlace place(board);
  RankConfig rank_config = make_rank_config(config);
  rank_config.hooks = &place;
  StepTimeline timeline(*backend.device);
  rank_config.timeline = &timeline;
  const std::size_t free_before = backend.device->memory_pool().free;
  times.checked = check_start(rank_config, plan, backend, transport);
  PipelineRank rank(*backend.device, *backend.ops, transport, rank_config, plan, nullptr);
  times.start_ms = ms_since(start);
  const std::vector<std::int32_t> tokens = random_tokens(config, 0), targets = random_tokens(config, 1);
  std::vector<double> mine;
  for (int step = 1; step <= options.warmup + options.steps; ++step) {
    place.set(Phase::kStep, static_cast<std::uint32_t>(step));
    transport.barrier(Group::kWorld);
    start = Clock::now();
    rank.train_step(tokens, targets, config.training.lr, static_cast<std::uint32_t>(step));
    const double ms = ms_since(start);
    if (step == 1) times.first_ms = ms;
    if (step > options.warmup) mine.push_back(ms);
  }
  for (const std::string& text : transport.exchange(Json(mine).dump(), Group::kWorld)) {
    times.rank.push_back(Json::parse(text).get<std::vector<double>>());
  }
  if (!options.timeline.empty()) {
    timeline.watch(true);
    transport.barrier(Group::kWorld);
    rank.train_step(tokens, targets, config.training.lr,
                    static_cast<std::uint32_t>(options.warmup + options.steps + 1));
    for (const std::string& text : transport.exchange(to_text(timeline.pieces()), Group::kWorld)) {
      times.pieces.push_back(pieces_from(text));
    }
  }
  times.taken_bytes =
      static_cast<std::int64_t>(free_before) - static_cast<std::int64_t>(backend.device->memory_pool().free);
  times.graphs = rank.counts().graphs;
  times.peak_bytes = static_cast<std::int64_t>(backend.device->memory_peak());
  return times;
}

// The median over steps of the slowest rank's time.
double median_of_slowest(const StepTimes& times) {
  std::vector<double> slowest(times.rank.front().size(), 0.0);
  for (const std::vector<double>& rank : times.rank) {
    for (std::size_t i = 0; i < rank.size(); ++i) slowest[i] = std::max(slowest[i], rank[i]);
  }
  std::nth_element(slowest.begin(), slowest.begin() + static_cast<std::ptrdiff_t>(slowest.size() / 2), slowest.end());
  return slowest[slowest.size() / 2];
}

Json to_json(const OpTime& t) {
  Json j{{"name", t.name},
         {"shape", t.shape},
         {"us", t.microseconds},
         {"gb_per_s", static_cast<double>(t.bytes) / t.microseconds * 1e-3}};
  if (t.flops > 0) j["tflop_per_s"] = static_cast<double>(t.flops) / t.microseconds * 1e-6;
  return j;
}

void print(const OpTime& t) {
  std::printf("%-38s %-38s %10.2f us %8.0f GB/s", t.name.c_str(), t.shape.c_str(), t.microseconds,
              static_cast<double>(t.bytes) / t.microseconds * 1e-3);
  if (t.flops > 0) std::printf(" %8.1f TFLOP/s", static_cast<double>(t.flops) / t.microseconds * 1e-6);
  std::printf("\n");
}

void write(const std::string& option, const std::string& path, const Json& result) {
  std::ofstream file(path);
  file << result.dump(2, ' ', false, Json::error_handler_t::replace) << '\n';
  if (!file.flush()) throw UsageError(option + " " + path + " cannot be written; name a file in a folder that exists.");
}

}  // namespace

int run_bench(const Config& config, const BenchOptions& options, JobBoard* board, const std::string& command_line) {
  const int pipeline = config.pipeline.pipeline_model_parallel_size, data = config.parallel.data;
  const WaitRule rule(config.runtime.timeout_s, board);
  const RankBinding binding = bind_rank(config.execution.backend, config.execution.transport, pipeline, data, rule);
  Backend backend = make_backend(binding.backend, binding.ordinal);
  const std::unique_ptr<Transport> transport = make_transport(*backend.device, pipeline, data, rule, binding.transport);
  const bool leads = transport->rank(Group::kWorld) == 0;
  const std::string gemms = use_gemm_table(config.execution.gemm_table, backend);
  if (leads && !gemms.empty()) std::printf("%s\n", gemms.c_str());
  Json result{{"command", command_line},
              {"device", backend.device->description()},
              {"transport", binding.transport},
              {"ranks", binding.table},
              {"environment", Json::parse(environment_json())},
              {"config", Json::parse(dump_config(config))}};
  if (options.steps > 0) {
    const StepTimes times = time_steps(config, backend, *transport, options, board);
    const double median = median_of_slowest(times);
    const double tokens = static_cast<double>(config.tokens_per_step()) / (median * 1e-3);
    const double tflops =
        tokens * static_cast<double>(flops_per_token(config.model, config.training.seq_length)) * 1e-12;
    if (leads) {
      std::printf("%s | step %.3f ms (median of %d, slowest rank) | %.0f tok/s | %.2f TFLOP/s | first step %.1f ms\n",
                  backend.device->description().c_str(), median, options.steps, tokens, tflops, times.first_ms);
    }
    result["steps"] = {{"median_ms", median},
                       {"tokens_per_s", tokens},
                       {"tflop_per_s", tflops},
                       {"start_ms", times.start_ms},
                       {"first_ms", times.first_ms},
                       {"warmup", options.warmup},
                       {"rank_ms", times.rank},
                       {"graphs", times.graphs},
                       {"peak_bytes", times.peak_bytes},
                       {"planned_bytes", times.checked.planned_bytes},
                       {"taken_bytes", times.taken_bytes}};
    result["gemm_choices"] = gemm_json(times.checked.gemms);
    if (leads && !options.timeline.empty()) {
      result["timeline"] = Json::array();
      for (const auto& pieces : times.pieces) result["timeline"].push_back(time_by_kind(pieces));
      write("--timeline", options.timeline, chrome_trace(times.pieces));
    }
  }
  if (options.ops && leads) {  // nothing collective comes after, so that no rank waits for this one
    result["ops"] = Json::array();
    for (const OpTime& t : time_ops(backend, config.stage_config())) {
      print(t);
      result["ops"].push_back(to_json(t));
    }
  }
  if (leads && !options.output.empty()) write("--output", options.output, result);
  return 0;
}

}  // namespace qe
