#include "app/trainer.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "app/config_faults.h"
#include "app/gemm_table.h"
#include "app/job.h"
#include "app/pipeline_plan.h"
#include "core/error.h"

namespace qe {

namespace {

using Clock = std::chrono::steady_clock;
double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

DataCounts counts_of(const TokenDataset& d) {
  return {static_cast<std::int64_t>(d.files().size()), d.tokens(), d.windows(), d.dropped_tokens()};
}

// What ranks tell rank 0 at the end.
nlohmann::json to_json(const RankUsage& u, const std::vector<double>& step_ms) {
  return {{"device", u.device},
          {"graphs", u.graphs},
          {"replays", u.replays},
          {"handoffs", u.handoffs},
          {"matrix_copies", u.matrix_copies},
          {"weight_quantize_launches", u.weight_quantize_launches},
          {"peak_tapes", u.peak_tapes},
          {"capture_ms", u.capture_ms},
          {"planned_bytes", u.planned_bytes},
          {"bytes_by_kind", u.bytes_by_kind},
          {"peak_bytes", u.peak_bytes},
          {"end_bytes", u.end_bytes},
          {"step_ms", step_ms}};
}
RankUsage usage_from(const nlohmann::json& j) {
  RankUsage u;
  u.device = j.at("device").get<std::string>();
  u.graphs = j.at("graphs").get<std::int64_t>();
  u.replays = j.at("replays").get<std::int64_t>();
  u.handoffs = j.at("handoffs").get<std::int64_t>();
  u.matrix_copies = j.at("matrix_copies").get<std::int64_t>();
  u.weight_quantize_launches = j.at("weight_quantize_launches").get<std::int64_t>();
  u.peak_tapes = j.at("peak_tapes").get<int>();
  u.capture_ms = j.at("capture_ms").get<double>();
  u.planned_bytes = j.at("planned_bytes").get<std::int64_t>();
  u.bytes_by_kind = j.at("bytes_by_kind").get<std::map<std::string, std::int64_t>>();
  u.peak_bytes = j.at("peak_bytes").get<std::int64_t>();
  u.end_bytes = j.at("end_bytes").get<std::int64_t>();
  return u;
}

}  // namespace

Trainer::Trainer(const Config& config, const StartOptions& options, StopSignals* signals, JobBoard* board,
                 const std::string& command_line)
    : config_(config),
      board_(board),
      place_(board),
      plan_(make_rank_plan(config)),
      binding_(bind_rank(config.execution.backend, config.execution.transport,
                         config.pipeline.pipeline_model_parallel_size, config.parallel.data,
                         {config.runtime.timeout_s, board})),
      backend_(make_backend(binding_.backend, binding_.ordinal)),
      transport_(make_transport(*backend_.device, config.pipeline.pipeline_model_parallel_size, config.parallel.data,
                                {config.runtime.timeout_s, board}, binding_.transport)),
      train_data_(config.data.train, config.model.vocab_size, config.training.seq_length, "data.train",
                  config.data.format),
      sampler_(train_data_.windows(), config.training.global_batch_size,
               static_cast<std::uint64_t>(config.training.seed)),
      signals_(signals) {
  if (!config.data.valid.empty()) {
    valid_data_.emplace(config.data.valid, config.model.vocab_size, config.training.seq_length, "data.valid",
                        config.data.format);
  }
  if (!config.data.out_of_domain.empty()) {
    out_of_domain_data_.emplace(config.data.out_of_domain, config.model.vocab_size, config.training.seq_length,
                                "data.out_of_domain", config.data.format);
  }
  std::unique_ptr<Storage> storage = make_disk_storage();
  if (!config.runtime.faults.empty()) {
    faults_ = std::make_shared<FaultPlan>(config, transport_->rank(Group::kWorld));
    fault_hooks_ = make_fault_hooks(place_, faults_);
    storage = make_faulty_storage(std::move(storage), place_, faults_);
  }
  checkpoints_ = std::make_unique<Checkpointer>(config_, options, *transport_, std::move(storage), train_data_);
  report_.init_from = options.init_from;
  start();
  const auto cells = static_cast<std::size_t>(config.tokens_per_step() / config.parallel.data);
  tokens_.resize(cells);
  targets_.resize(cells);
  report_.command = command_line;
  report_.config = config;
  report_.train_data = counts_of(train_data_);
  if (valid_data_) report_.valid_data = counts_of(*valid_data_);
}

Trainer::~Trainer() = default;

void Trainer::start() {
  RankConfig rank_config = make_rank_config(config_);
  rank_config.initialize = !checkpoints_->has_start();
  rank_config.hooks = fault_hooks_ ? fault_hooks_.get() : &place_;
  gemm_note_ = use_gemm_table(config_.execution.gemm_table, backend_);
  checked_ = check_start(rank_config, plan_, backend_, *transport_);
  checkpoints_->set_gemm_choices(checked_.gemms);
  rank_ = std::make_unique<PipelineRank>(*backend_.device, *backend_.ops, *transport_, rank_config, plan_, nullptr);
  position_ = checkpoints_->start(*rank_);
  begun_step_ = position_.step;
  sampler_.seek(position_.data);
  report_.gemm_choices = checked_.gemms;
  report_.resumed = checkpoints_->resumed();
  if (report_.resumed) report_.init_from.clear();
  report_.skipped_steps = position_.skipped_steps;
  report_.initial_train_loss = position_.initial_train_loss;
  report_.final_train_loss = position_.final_train_loss;
}

void Trainer::open_run() {
  if (!leads()) return;
  run_directory_.emplace(config_);
  const auto resumed_step = report_.resumed ? std::optional(report_.resumed->step) : std::nullopt;
  metrics_ = std::make_unique<MetricsLog>(run_directory_->path(), config_, resumed_step);
  progress_ = std::make_unique<Progress>(config_, peaks_of(backend_.device->description()));
  progress_->note("run folder " + run_directory_->path() + " | " + counted(config_.ranks(), "rank") + ", schedule " +
                  name_of(config_.pipeline.schedule) + ", " + counted(config_.microbatches(), "microbatch", "es") +
                  " a step | " + backend_.device->description() + " | transport " + binding_.transport);
  if (!binding_.table.empty()) progress_->note(binding_.table);
  if (!gemm_note_.empty()) progress_->note(gemm_note_);
  for (const std::string& line : checkpoints_->notes()) progress_->note(line);
}

ExitCode Trainer::run() {
  open_run();
  try {
    if (!train_and_evaluate()) report_.status = "stopped";
    fill_report();
  } catch (const NonFiniteError& e) {  // of every rank alike, so that the report can be complete
    note_failure(e.what(), e.exit_code());
    finish_earlier_save();
    fill_report();
    throw;
  } catch (const AgreedError& e) {
    report_failure_alone(e.what(), e.exit_code());
    throw;
  } catch (const Error& e) {
    fail_alone(e.what(), e.exit_code());
    throw;
  } catch (const std::exception& e) {
    fail_alone(message_of(e), ExitCode::kRuntime);
    throw;
  }
  return stopping_ ? ExitCode::kStoppedBySignal : ExitCode::kOk;
}

// It holds a step that was sound. The failure that led here is told, and a disk's beside it.
void Trainer::finish_earlier_save() {
  try {
    finish_saves();
  } catch (const CheckpointError& e) {
    if (leads()) progress_->note(e.what());
  }
}

void Trainer::note_failure(const std::string& message, ExitCode code) {
  report_.status = "failed";
  report_.failure = RunFailure{message, static_cast<int>(code), begun_step_};
}

// Before anything is taken down, because that may hang.
void Trainer::fail_alone(const std::string& message, ExitCode code) {
  if (board_ != nullptr) board_->fail(static_cast<int>(code), message);
  report_failure_alone(message, code);
}

void Trainer::report_failure_alone(const std::string& message, ExitCode code) {
  if (signals_ != nullptr) signals_->ignore_requests();
  note_failure(message, code);
  if (checkpoints_) tell_saves();  // one may have been published before what failed
  write_report_alone();
}

void Trainer::write_report_alone() noexcept {
  if (!leads()) return;
  try {
    report_.rank_step_ms = {step_ms_};
    report_.ranks.clear();
    report_.checks.clear();
    write_report(run_directory_->path(), report_);
  } catch (const std::exception&) {  // the error that led here is told, not this one
  }
}

bool Trainer::train_and_evaluate() {
  const auto steps = static_cast<std::uint32_t>(config_.training.train_iters);
  for (auto step = static_cast<std::uint32_t>(position_.step) + 1; step <= steps; ++step) {
    train_step(step);
    checkpoints_->poll();
    const std::int64_t interval = config_.training.eval_interval;
    if (valid_data_ && interval > 0 && step % interval == 0 && step != steps) log_evaluation(step);
    if (checkpoints_->due(step, stopping_)) save();
    tell_saves();
    if (stopping_) break;
  }
  if (!stopping_) {
    if (valid_data_) log_evaluation(steps);
    if (out_of_domain_data_) report_.out_of_domain_loss = evaluate(*out_of_domain_data_);
  }
  finish_saves();
  return !stopping_;
}

void Trainer::save() {
  position_.data = sampler_.position();
  position_.skipped_steps = report_.skipped_steps;
  position_.initial_train_loss = report_.initial_train_loss;
  position_.final_train_loss = report_.final_train_loss;
  place_.set(Phase::kSave, static_cast<std::uint32_t>(position_.step));
  checkpoints_->save(*rank_, position_);
}

void Trainer::tell_saves() {
  for (const FinishedSave& save : checkpoints_->take_finished()) {
    const SavedCheckpoint& saved = save.checkpoint;
    report_.checkpoints.push_back(
        {saved.step, save.background, saved.bytes, save.stall_ms, save.waited_ms, saved.write_ms});
    if (!leads()) continue;
    char ms[96];
    std::snprintf(ms, sizeof ms, save.background ? "%.0f ms and in the background in %.0f ms" : "%.0f ms",
                  save.stall_ms, saved.write_ms);
    progress_->note("saved " + saved.folder + " in " + ms + ", parameters XXH3 " + saved.parameters_xxh3 +
                    (saved.finite ? "" : "; its weights are not finite, so it is not the latest"));
  }
}

void Trainer::finish_saves() {
  if (checkpoints_->writing()) place_.set(Phase::kSave, static_cast<std::uint32_t>(position_.step));
  checkpoints_->finish();
  tell_saves();
}

void Trainer::train_step(std::uint32_t step) {
  begun_step_ = step;
  place_.set(Phase::kStep, step);
  // A replica takes its share of the step's windows, in order.
  const std::vector<std::int64_t> windows = sampler_.next();
  const auto share = static_cast<std::size_t>(config_.replica_batch_size());
  const auto replica = static_cast<std::size_t>(transport_->rank(Group::kData));
  fill_rows(train_data_, std::span(windows).subspan(replica * share, share), tokens_, targets_);
  const double lr = learning_rate(config_.training, step);
  const auto start = Clock::now();
  const StepResult result = rank_->train_step(tokens_, targets_, lr, step);
  step_ms_.push_back(ms_since(start));
  const double slowest_ms = compare_ranks(step, step_ms_.back(), result.scalars.norm);

  position_.step = step;
  position_.learning_rate = lr;
  const double loss = result.loss_sum / static_cast<double>(config_.tokens_per_step());
  if (!report_.initial_train_loss) report_.initial_train_loss = loss;
  report_.final_train_loss = loss;
  const bool skipped = result.scalars.skip != 0;
  const bool goes_on = skipped && config_.training.on_nonfinite == NonFinitePolicy::kSkip;
  if (leads()) {
    const StepRecord record{step, loss, static_cast<double>(result.scalars.norm), lr, slowest_ms, goes_on};
    metrics_->append(record);
    progress_->step(record);
  }
  if (signals_ != nullptr) {
    signals_->set_status("step " + std::to_string(step) + " of " + std::to_string(config_.training.train_iters) +
                         " is done, loss " + std::to_string(loss));
  }
  if (skipped) {
    handle_skip(step, result.scalars);
  } else {
    position_.consecutive_skips = 0;
  }
}

double Trainer::compare_ranks(std::uint32_t step, double ms, float norm) {
  const std::string norm_bits = std::to_string(std::bit_cast<std::uint32_t>(norm));
  const bool stop = signals_ != nullptr && signals_->stop_requested();
  const std::vector<std::string> all =
      transport_->exchange(norm_bits + " " + std::to_string(ms) + (stop ? " stop" : ""), Group::kWorld);
  double slowest_ms = 0.0;
  for (std::size_t r = 0; r < all.size(); ++r) {
    const std::size_t space = all[r].find(' ');
    slowest_ms = std::max(slowest_ms, std::stod(all[r].substr(space + 1)));
    stopping_ = stopping_ || all[r].ends_with(" stop");
    if (all[r].substr(0, space) == norm_bits) continue;
    throw Error(ExitCode::kRuntime, "Step " + std::to_string(step) + ": rank " + std::to_string(r) +
                                        " has another gradient norm than rank " +
                                        std::to_string(transport_->rank(Group::kWorld)) +
                                        ", so the replicas' weights part; restart from a checkpoint and report this.");
  }
  return slowest_ms;
}

void Trainer::handle_skip(std::uint32_t step, const OptimizerScalars& scalars) {
  ++report_.skipped_steps;
  ++position_.consecutive_skips;
  const std::string tensor =
      scalars.first_bad < 0 ? "the global norm" : "the gradient of " + rank_->model_parameter(scalars.first_bad).name;
  const std::string what = "Step " + std::to_string(step) + ": " + tensor + " is not finite";
  if (config_.training.on_nonfinite == NonFinitePolicy::kStop) {
    throw NonFiniteError(
        what + "; weights are those before the step. Lower training.lr, or set training.on_nonfinite " + "to skip.");
  }
  if (position_.consecutive_skips >= config_.training.max_skipped) {
    throw NonFiniteError(what + ", and " + counted(position_.consecutive_skips, "step") +
                         " in a row skipped reach training.max_skipped; lower training.lr.");
  }
  if (leads()) progress_->note(what + "; the step is skipped.");
}

double Trainer::evaluate(const TokenDataset& data) {
  place_.set(Phase::kEvaluation, static_cast<std::uint32_t>(position_.step));
  const Evaluation pass(data, config_.training.micro_batch_size, config_.training.eval_iters);
  const auto row = static_cast<std::size_t>(config_.training.micro_batch_size) *
                   static_cast<std::size_t>(config_.training.seq_length);
  double sum = 0.0;
  // Every replica takes part in every call; at the end some have less to do, or nothing.
  const std::int64_t share = config_.microbatches();
  for (std::int64_t start = 0; start < pass.microbatches(); start += share * config_.parallel.data) {
    const std::int64_t first = start + share * transport_->rank(Group::kData);
    const auto count = static_cast<int>(std::clamp<std::int64_t>(pass.microbatches() - first, 0, share));
    for (int m = 0; m < count; ++m) {
      const std::size_t at = static_cast<std::size_t>(m) * row;
      pass.fill(first + m, std::span(tokens_).subspan(at, row), std::span(targets_).subspan(at, row));
    }
    sum += rank_->evaluate(tokens_, targets_, count);
  }
  return sum / static_cast<double>(pass.target_tokens());
}

void Trainer::log_evaluation(std::int64_t step) {
  const auto start = Clock::now();
  const double loss = evaluate(*valid_data_);
  report_.final_valid_loss = loss;
  if (!leads()) return;
  const Evaluation pass(*valid_data_, config_.training.micro_batch_size, config_.training.eval_iters);
  const EvalRecord record{step, loss, pass.target_tokens(), ms_since(start)};
  metrics_->append(record);
  progress_->eval(record);
}

RankUsage Trainer::usage() const {
  const ExecutionCounts counts = rank_->counts();
  RankUsage u;
  u.device = backend_.device->description();
  u.graphs = counts.graphs;
  u.replays = static_cast<std::int64_t>(counts.replays);
  u.handoffs = static_cast<std::int64_t>(counts.handoffs);
  u.matrix_copies = static_cast<std::int64_t>(counts.matrix_copies);
  u.weight_quantize_launches = static_cast<std::int64_t>(counts.weight_quantize_launches);
  u.capture_ms = rank_->capture_seconds() * 1e3;
  const auto pipeline_rank = static_cast<std::size_t>(transport_->rank(Group::kPipeline));
  u.peak_tapes = resources(plan_.schedule).ranks.at(pipeline_rank).peak_tapes;
  u.planned_bytes = static_cast<std::int64_t>(checked_.planned_bytes);
  const auto bytes = backend_.device->memory_by_kind();
  for (std::size_t k = 0; k < bytes.size(); ++k) {
    u.bytes_by_kind[name_of(static_cast<MemoryKind>(k))] = static_cast<std::int64_t>(bytes[k]);
    u.end_bytes += static_cast<std::int64_t>(bytes[k]);
  }
  u.peak_bytes = static_cast<std::int64_t>(backend_.device->memory_peak());
  return u;
}

void Trainer::fill_report() {
  place_.set(Phase::kEnd, static_cast<std::uint32_t>(position_.step));
  rank_->contract().require_quiescent();
  if (config_.parallel.data > 1) {
    const auto digests = transport_->exchange(std::to_string(rank_->state_digest()), Group::kWorld);
    const auto pipeline = static_cast<std::size_t>(config_.pipeline.pipeline_model_parallel_size);
    bool same = true;
    for (std::size_t r = pipeline; r < digests.size(); ++r) same = same && digests[r] == digests[r % pipeline];
    report_.checks.push_back({"replicas hold the same state", same, ""});
  }
  const std::vector<std::string> all = transport_->exchange(
      to_json(usage(), step_ms_).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), Group::kWorld);
  if (!leads()) return;
  // No rank waits for this one from here on: counting takes as long as the data are large.
  if (valid_data_ && report_.status == "completed") {
    const std::int64_t windows = config_.training.eval_iters * config_.training.micro_batch_size;
    report_.baselines = ngram_baseline(train_data_, *valid_data_, config_.model.vocab_size, windows);
  }
  progress_->finish();
  bool graphs_as_planned = true;
  for (std::size_t r = 0; r < all.size(); ++r) {
    const nlohmann::json j = nlohmann::json::parse(all[r]);
    report_.ranks.push_back(usage_from(j));
    report_.rank_step_ms.push_back(j.at("step_ms").get<std::vector<double>>());
    const int pipeline_rank = static_cast<int>(r) % config_.pipeline.pipeline_model_parallel_size;
    const bool peak = config_.pipeline.tape_slots == TapeSlots::kPeak;
    const int updates = update_graphs(config_, plan_.schedule, pipeline_rank);
    const int planned = config_.execution.mode == ExecutionMode::kGraph
                            ? graph_count(plan_.schedule, pipeline_rank, peak).total() + updates
                            : 0;
    graphs_as_planned = graphs_as_planned && report_.ranks.back().graphs == planned;
  }
  report_.checks.push_back({"graphs captured as planned", graphs_as_planned, ""});
  report_.checks.push_back({"quiescent at the end", true, ""});
  write_report(run_directory_->path(), report_);
  progress_->note("report " + run_directory_->path() + "/report.json");
}

}  // namespace qe
