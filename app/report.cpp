#include "app/report.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "app/card_peaks.h"
#include "app/environment.h"
#include "app/run_directory.h"
#include "core/error.h"

namespace qe {
namespace {

using Json = nlohmann::ordered_json;

Json finite_or_null(double v) { return std::isfinite(v) ? Json(v) : Json(nullptr); }
Json optional_number(const std::optional<double>& v) { return v ? finite_or_null(*v) : Json(nullptr); }

double per_second(std::int64_t count, double ms) { return ms > 0 ? static_cast<double>(count) * 1000 / ms : 0; }

const char* status_of(const StepRecord& r) {
  if (r.skipped) return "skipped";
  return std::isfinite(r.loss) && std::isfinite(r.grad_norm) ? "ok" : "non_finite";
}

Json json_of(const DataCounts& d) {
  return {{"files", d.files}, {"tokens", d.tokens}, {"windows", d.windows}, {"dropped_tokens", d.dropped_tokens}};
}

Json json_of(const RankUsage& r) {
  Json bytes = Json::object();
  for (const auto& [kind, count] : r.bytes_by_kind) bytes[kind] = count;
  return {{"device", r.device},
          {"graphs", r.graphs},
          {"replays", r.replays},
          {"handoffs", r.handoffs},
          {"matrix_copies", r.matrix_copies},
          {"weight_quantize_launches", r.weight_quantize_launches},
          {"peak_tapes", r.peak_tapes},
          {"capture_ms", finite_or_null(r.capture_ms)},
          {"planned_bytes", r.planned_bytes},
          {"bytes_by_kind", bytes},
          {"peak_bytes", r.peak_bytes},
          {"end_bytes", r.end_bytes}};
}

// Of a rank's card; null where its peaks are not known.
Json utilization_of(double tflops, const std::string& device) {
  const auto peaks = peaks_of(device);
  if (!peaks) return nullptr;
  return {{"bf16_dense_peak_tflops", peaks->bf16},
          {"of_bf16_dense_peak", tflops / peaks->bf16},
          {"fp8_dense_peak_tflops", peaks->fp8},
          {"of_fp8_dense_peak", tflops / peaks->fp8}};
}

Json timing_of(const RunReport& r) {
  Json trials = Json::array();
  for (std::size_t rank = 0; rank < r.rank_step_ms.size(); ++rank) {
    trials.push_back({{"rank", rank}, {"step_ms", r.rank_step_ms[rank]}});
  }
  double first = 0;
  for (const auto& steps : r.rank_step_ms) first = std::max(first, steps.empty() ? 0 : steps.front());
  const double median = median_step_ms(r.rank_step_ms);
  const std::int64_t per_token = flops_per_token(r.config.model, r.config.training.seq_length);
  const double tokens_per_second = per_second(r.config.tokens_per_step(), median);
  const double tflops = tokens_per_second * static_cast<double>(per_token) * 1e-12 / r.config.ranks();
  return {{"metric", "optimizer-step wall time, maximum over ranks, median over steps without the first"},
          {"trials", trials},
          {"first_step_ms", first},
          {"median_step_ms", median},
          {"tokens_per_step", r.config.tokens_per_step()},
          {"tokens_per_second", tokens_per_second},
          {"flops_per_token", per_token},
          {"flops_formula", "6 (L(4h^2 + 2hf) + Vh) + 6 L h T"},
          {"model_tflops_per_rank", tflops},
          {"utilization", utilization_of(tflops, r.ranks.empty() ? "" : r.ranks.front().device)}};
}

// The lines of a metrics file that a run resumed after `step` does not write again. The evaluation after the last step
// is made again; a line that a kill cut short is dropped.
std::string lines_until(const std::string& path, std::int64_t step, std::int64_t train_iters) {
  std::ifstream file(path, std::ios::binary);
  std::string kept;
  for (std::string line; std::getline(file, line);) {
    const Json j = Json::parse(line, nullptr, false);
    if (!j.is_object() || !j.contains("step") || !j["step"].is_number_integer()) continue;
    const bool again = step == train_iters && j["step"] == step && j.value("event", "") == "eval";
    if (j["step"] <= step && !again) kept += line + "\n";
  }
  return kept;
}

Json json_of(const std::vector<KeyChange>& changes) {
  Json list = Json::array();
  for (const KeyChange& c : changes) {
    list.push_back({{"key", c.key}, {"stored", Json::parse(c.stored)}, {"now", Json::parse(c.now)}});
  }
  return list;
}

Json json_of(const ResumeRecord& r) {
  return {{"from", r.from},
          {"step", r.step},
          {"passed_over", r.passed_over},
          {"overridden", json_of(r.overridden)},
          {"changed", json_of(r.changed)},
          {"data_restarted", r.data_restarted}};
}

}  // namespace

std::int64_t flops_per_token(const ModelConfig& m, int seq_length) noexcept {
  const std::int64_t layers = m.num_layers, h = m.hidden_size, f = m.ffn_hidden_size, v = m.vocab_size;
  return 6 * (layers * (4 * h * h + 2 * h * f) + v * h) + 6 * layers * h * seq_length;
}

double median_step_ms(const std::vector<std::vector<double>>& rank_step_ms) {
  std::vector<double> slowest;
  for (const auto& steps : rank_step_ms) {
    slowest.resize(std::max(slowest.size(), steps.size()), 0);
    for (std::size_t i = 0; i < steps.size(); ++i) slowest[i] = std::max(slowest[i], steps[i]);
  }
  if (slowest.size() > 1) slowest.erase(slowest.begin());
  if (slowest.empty()) return 0;
  std::sort(slowest.begin(), slowest.end());
  const std::size_t half = slowest.size() / 2;
  return slowest.size() % 2 == 1 ? slowest[half] : 0.5 * (slowest[half - 1] + slowest[half]);
}

MetricsLog::MetricsLog(const std::string& run_directory, const Config& config, std::optional<std::int64_t> resumed_step)
    : tokens_per_step_(config.tokens_per_step()),
      flops_per_token_(flops_per_token(config.model, config.training.seq_length)),
      ranks_(config.ranks()),
      path_((std::filesystem::path(run_directory) / "metrics.jsonl").string()),
      file_(nullptr) {
  if (resumed_step) replace_file(path_, lines_until(path_, *resumed_step, config.training.train_iters));
  file_ = std::fopen(path_.c_str(), resumed_step ? "a" : "w");
  if (file_ == nullptr) throw Error(ExitCode::kRuntime, "Cannot write " + path_ + "; check the disk and report.dir.");
}

MetricsLog::~MetricsLog() { std::fclose(file_); }

void MetricsLog::append(const StepRecord& r) {
  const double tokens_per_second = per_second(tokens_per_step_, r.ms);
  const Json line{
      {"event", "step"},
      {"step", r.step},
      {"status", status_of(r)},
      {"loss", finite_or_null(r.loss)},
      {"grad_norm", finite_or_null(r.grad_norm)},
      {"lr", r.lr},
      {"ms", r.ms},
      {"tokens", tokens_per_step_},
      {"tokens_per_second", tokens_per_second},
      {"tokens_per_second_per_rank", tokens_per_second / ranks_},
      {"model_tflops_per_rank", tokens_per_second * static_cast<double>(flops_per_token_) * 1e-12 / ranks_}};
  write(line.dump());
}

void MetricsLog::append(const EvalRecord& r) {
  const Json line{{"event", "eval"},
                  {"step", r.step},
                  {"status", std::isfinite(r.valid_loss) ? "ok" : "non_finite"},
                  {"valid_loss", finite_or_null(r.valid_loss)},
                  {"target_tokens", r.target_tokens},
                  {"ms", r.ms}};
  write(line.dump());
}

void MetricsLog::write(const std::string& line) {
  if (std::fprintf(file_, "%s\n", line.c_str()) < 0 || std::fflush(file_) != 0) {
    throw Error(ExitCode::kRuntime, "Cannot write " + path_ + "; check the disk.");
  }
}

Json gemm_json(const std::vector<GemmChoice>& choices) {
  Json list = Json::array();
  for (const GemmChoice& c : choices) list.push_back({{"product", c.product}, {"algorithm", c.algorithm}});
  return list;
}

std::string report_json(const RunReport& r) {
  Json resources = Json::array();
  for (std::size_t rank = 0; rank < r.ranks.size(); ++rank) {
    Json one{{"rank", rank}};
    one.update(json_of(r.ranks[rank]));
    resources.push_back(one);
  }
  Json checks = Json::array();
  for (const CheckResult& c : r.checks)
    checks.push_back({{"name", c.name}, {"passed", c.passed}, {"detail", c.detail}});
  Json checkpoints = Json::array();
  for (const SaveRecord& s : r.checkpoints) {
    checkpoints.push_back({{"step", s.step},
                           {"background", s.background},
                           {"bytes", s.bytes},
                           {"stall_ms", s.stall_ms},
                           {"waited_ms", s.waited_ms},
                           {"write_ms", s.write_ms}});
  }
  const std::size_t steps = r.rank_step_ms.empty() ? 0 : r.rank_step_ms.front().size();
  Json root{{"schema_version", kReportSchemaVersion},
            {"command", r.command},
            {"status", r.status},
            {"failure", nullptr},
            {"config", Json::parse(dump_config(r.config))},
            {"derived", {{"microbatches", r.config.microbatches()}, {"ranks", r.config.ranks()}}},
            {"environment", Json::parse(environment_json())},
            {"gemm_choices", gemm_json(r.gemm_choices)},
            {"resumed", nullptr},
            {"init_from", r.init_from.empty() ? Json(nullptr) : Json(r.init_from)},
            {"steps", steps},
            {"skipped_steps", r.skipped_steps},
            {"initial", {{"train_loss", optional_number(r.initial_train_loss)}}},
            {"final",
             {{"train_loss", optional_number(r.final_train_loss)},
              {"valid_loss", optional_number(r.final_valid_loss)},
              {"out_of_domain_loss", optional_number(r.out_of_domain_loss)}}},
            {"baselines", nullptr},
            {"data", {{"train", json_of(r.train_data)}, {"valid", nullptr}}},
            {"timing", timing_of(r)},
            {"checkpoints", checkpoints},
            {"resources", resources},
            {"checks", checks}};
  if (r.failure) {
    root["failure"] = {{"message", r.failure->message}, {"exit_code", r.failure->exit_code}, {"step", r.failure->step}};
  }
  if (r.resumed) root["resumed"] = json_of(*r.resumed);
  if (r.baselines) root["baselines"] = {{"bigram", r.baselines->bigram}, {"trigram", r.baselines->trigram}};
  if (r.valid_data) root["data"]["valid"] = json_of(*r.valid_data);
  return root.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

void write_report(const std::string& run_directory, const RunReport& report) {
  replace_file((std::filesystem::path(run_directory) / "report.json").string(), report_json(report));
}

}  // namespace qe
