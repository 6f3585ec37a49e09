// Reports, metrics and log lines: formulas by hand count, numbers that read back to the same bits.
#include "app/report.h"

#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "app/environment.h"
#include "app/progress.h"
#include "app/run_directory.h"
#include "core/error.h"
#include "tests/catch.h"
#include "tests/unit/sample_report.h"
#include "tests/unit/scratch.h"

using namespace qe;
using nlohmann::json;

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

std::vector<std::string> lines_of(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> out;
  for (std::string line; std::getline(file, line);) out.push_back(line);
  return out;
}

}  // namespace

TEST_CASE("FLOPs of a token equal a hand count of the matrix products") {
  // 6·(L(4h² + 2hf) + Vh) + 6·L·h·T
  ModelConfig m;
  m.num_layers = 1, m.hidden_size = 2, m.ffn_hidden_size = 3, m.vocab_size = 5;
  CHECK(flops_per_token(m, 7) == 6 * (16 + 12 + 10) + 6 * 14);  // by hand: 228 + 84
  m.num_layers = 4, m.hidden_size = 2048, m.ffn_hidden_size = 8192, m.vocab_size = 32768;
  CHECK(flops_per_token(m, 256) == 1623195648);     // 6·(4·50331648 + 67108864) + 6·4·2048·256
  m.hidden_size = 4096, m.ffn_hidden_size = 11008;  // 4h² + 2hf = 157286400
  CHECK(flops_per_token(m, 256) == 4605345792);
}

TEST_CASE("the median step is over steps, of the slowest rank, without the first") {
  CHECK(median_step_ms({}) == 0);
  CHECK(median_step_ms({{7}}) == 7);
  CHECK(median_step_ms({{90, 10, 13, 11}, {80, 12, 9, 14}}) == 13);  // 12 13 14
  CHECK(median_step_ms({{90, 10, 13}, {80, 12, 9}}) == 12.5);        // 12 13
  CHECK(json::parse(report_json(full_report()))["timing"]["first_step_ms"] == 90);
}

TEST_CASE("tokens per second and TFLOP/s follow from the median step") {
  const json timing = json::parse(report_json(full_report()))["timing"];
  CHECK(timing["tokens_per_step"] == 256);
  CHECK(timing["tokens_per_second"].get<double>() == 256 * 1000.0 / 13);
  const double per_token = timing["flops_per_token"].get<double>();
  CHECK(std::abs(timing["model_tflops_per_rank"].get<double>() - 256 / 0.013 * per_token * 1e-12 / 2) < 1e-12);
}

TEST_CASE("the rate is held against both dense peaks of a card that is known, and of no other") {
  RunReport report = full_report();
  CHECK(json::parse(report_json(report))["timing"]["utilization"].is_null());
  for (RankUsage& rank : report.ranks) rank.device = "NVIDIA H200, sm_90";
  const json timing = json::parse(report_json(report))["timing"];
  const double tflops = timing["model_tflops_per_rank"].get<double>();
  CHECK(timing["utilization"]["of_bf16_dense_peak"].get<double>() == tflops / 989);
  CHECK(timing["utilization"]["of_fp8_dense_peak"].get<double>() == tflops / 1979);
  CHECK(peaks_of("NVIDIA H100 PCIe, sm_90")->fp8 == 1513);
  CHECK(peaks_of("NVIDIA H100 80GB HBM3, sm_90")->fp8 == 1979);
  CHECK_FALSE(peaks_of("CPU reference backend, AVX2").has_value());
  CHECK_THAT(step_line({12, 3.5, 1.5, 3e-4, 8, false}, parse_config("{}", "tiny.json"), CardPeaks{1e-3, 2e-3}),
             ContainsSubstring(" % of BF16 dense, ") && ContainsSubstring(" % of FP8)"));
}

TEST_CASE("losses in reports and metrics read back to the same bits") {
  const Scratch dir;
  const Config config = parse_config("{}", "tiny.json");
  MetricsLog log(dir / "", config);
  const std::vector<double> values = {1.0 / 3, 0.1, 5e-324, 1.7976931348623157e308, 2.0000000000000004};
  RunReport report = full_report();
  for (const double v : values) {
    log.append(StepRecord{1, v, v, v, 12.5, false});
    report.final_train_loss = v;
    const double back = json::parse(report_json(report))["final"]["train_loss"].get<double>();
    CHECK(std::bit_cast<std::uint64_t>(back) == std::bit_cast<std::uint64_t>(v));
  }
  const auto lines = lines_of(dir / "metrics.jsonl");
  REQUIRE(lines.size() == values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    for (const char* key : {"loss", "grad_norm", "lr"}) CHECK(json::parse(lines[i])[key].get<double>() == values[i]);
  }
}

TEST_CASE("a resumed run keeps the metrics up to its step, and writes each later line once") {
  const Scratch dir;
  const Config config = parse_config("{}", "tiny.json", {"training.train_iters=4"});
  const auto steps_of = [&] {
    std::vector<std::string> found;
    for (const std::string& line : lines_of(dir / "metrics.jsonl")) {
      const json j = json::parse(line);
      found.push_back(j["event"].get<std::string>() + std::to_string(j["step"].get<int>()));
    }
    return found;
  };
  {
    MetricsLog log(dir / "", config);
    for (int step = 1; step <= 4; ++step) log.append(StepRecord{step, 1, 1, 1, 1, false});
    log.append(EvalRecord{2, 1, 64, 5});
    log.append(EvalRecord{4, 1, 64, 5});
  }
  std::ofstream(dir / "metrics.jsonl", std::ios::app) << "{\"event\": \"step\", \"st";  // killed while it wrote
  using Names = std::vector<std::string>;
  { const MetricsLog log(dir / "", config, 4); }  // the evaluation after the last step is made again
  CHECK(steps_of() == Names{"step1", "step2", "step3", "step4", "eval2"});
  { MetricsLog(dir / "", config, 2).append(StepRecord{3, 2, 1, 1, 1, false}); }
  CHECK(steps_of() == Names{"step1", "step2", "eval2", "step3"});
  { const MetricsLog log(dir / "", config); }
  CHECK(steps_of().empty());
}

TEST_CASE("a metrics line is on disk when append returns, and non-finite numbers are null with a status") {
  const Scratch dir;
  const Config config = parse_config("{}", "tiny.json");
  MetricsLog log(dir / "", config);
  log.append(StepRecord{1, 2.5, 1.0, 3e-4, 8, false});
  json line = json::parse(lines_of(dir / "metrics.jsonl").at(0));
  CHECK(line["event"] == "step");
  CHECK(line["status"] == "ok");
  CHECK(line["tokens"] == 256);
  CHECK(line["tokens_per_second"] == 32000);
  log.append(StepRecord{2, kNaN, 1.0, 3e-4, 8, false});
  log.append(StepRecord{3, 1.0, std::numeric_limits<double>::infinity(), 3e-4, 8, true});
  log.append(EvalRecord{3, kNaN, 64, 5});
  const auto lines = lines_of(dir / "metrics.jsonl");
  REQUIRE(lines.size() == 4);
  CHECK(json::parse(lines[1])["loss"].is_null());
  CHECK(json::parse(lines[1])["status"] == "non_finite");
  CHECK(json::parse(lines[2])["grad_norm"].is_null());
  CHECK(json::parse(lines[2])["status"] == "skipped");
  CHECK(json::parse(lines[3])["valid_loss"].is_null());
  CHECK(json::parse(lines[3])["status"] == "non_finite");
}

TEST_CASE("a report whose command line is not UTF-8 is written, the odd bytes replaced") {
  RunReport r = full_report();
  r.command = "qeffect train --config caf\xE9.json";
  CHECK(json::parse(report_json(r))["command"] == "qeffect train --config caf\uFFFD.json");
}

TEST_CASE("a report with non-finite and missing numbers is still strict JSON") {
  RunReport r = full_report();
  r.final_train_loss = kNaN;
  r.final_valid_loss.reset();
  const json j = json::parse(report_json(r));
  CHECK(j["final"]["train_loss"].is_null());
  CHECK(j["final"]["valid_loss"].is_null());
}

TEST_CASE("the report echoes the resolved config and names the machine") {
  const json j = json::parse(report_json(full_report()));
  CHECK(j["schema_version"] == 1);
  CHECK(j["config"] == json::parse(dump_config(full_report().config)));
  CHECK(j["derived"]["microbatches"] == 4);
  CHECK_THAT(j["environment"]["mpi"].get<std::string>(), ContainsSubstring("Open MPI"));
  CHECK_FALSE(j["environment"]["cpu"].get<std::string>().empty());
}

TEST_CASE("a run directory is fresh by default, reused when named, and holds the resolved config") {
  const Scratch dir;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(dir / "");
  Config config = parse_config("{}", "configs/tiny.json");
  const auto made = [&config] { return RunDirectory(config).path(); };
  const std::string first = made(), second = made();
  CHECK(first != second);
  CHECK(first.starts_with("runs/tiny-"));
  CHECK(dump_config(load_config(second + "/config.json")) == dump_config(config));
  config.report.dir = "named/deep";
  CHECK(made() == "named/deep");
  CHECK(made() == "named/deep");
  write_report("named/deep", full_report());
  CHECK(std::filesystem::exists("named/deep/report.json"));
  CHECK_FALSE(std::filesystem::exists("named/deep/report.json.tmp"));
  made();  // a run that fails before its report must not seem to have this one
  CHECK_FALSE(std::filesystem::exists("named/deep/report.json"));
  write_report("named/deep", full_report());
  config.report.dir = "named/deep/report.json/x";
  CHECK_THROWS_AS(made(), ConfigError);
  std::filesystem::current_path(before);
}

TEST_CASE("two runs do not write to one folder: the second is refused, until the first has ended") {
  const Scratch dir;
  Config config = parse_config("{}", "tiny.json");
  config.report.dir = dir / "run";
  {
    const RunDirectory first(config);
    std::ofstream(dir / "run/report.json") << "{}";
    CHECK_THROWS_WITH(RunDirectory(config), ContainsSubstring("another run is writing to " + (dir / "run")));
    CHECK(std::filesystem::exists(dir / "run/report.json"));
  }
  CHECK(RunDirectory(config).path() == dir / "run");
}

TEST_CASE("a failed run's report says why, with which exit code and in which step") {
  RunReport r = full_report();
  CHECK(json::parse(report_json(r))["failure"].is_null());
  r.status = "failed";
  r.failure = RunFailure{"Token file a.bin ends", 4, 17};
  const json failure = json::parse(report_json(r))["failure"];
  CHECK(failure == json{{"message", "Token file a.bin ends"}, {"exit_code", 4}, {"step", 17}});
}

TEST_CASE("log lines say what users look for") {
  const Config config = parse_config("{}", "tiny.json");
  CHECK_THAT(step_line({12, 3.14159, 1.5, 3e-4, 8, false}, config, {}),
             ContainsSubstring("step     12/100 | loss 3.1416 | norm 1.5000 | lr 3.00e-04 | 8.00 ms | 32000 tok/s"));
  CHECK_THAT(step_line({12, kNaN, 1.5, 3e-4, 8, true}, config, {}), ContainsSubstring("| skipped"));
  CHECK_THAT(step_line({12, 1.5, -kNaN, 3e-4, 8, false}, config, {}),
             ContainsSubstring("| norm nan |") && ContainsSubstring("| not finite"));
  CHECK_THAT(eval_line({100, 1.25, 640, 3}, config), ContainsSubstring("valid loss 1.2500 over 640 tokens"));
  CHECK(progress_line(50, 100, 74460) == "[##########----------]  50.0%  1:02:03 left");
  CHECK(progress_line(100, 100, 5) == "[####################] 100.0%  0:00:00 left");
}
