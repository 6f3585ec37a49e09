#include "app/checkpointer.h"

#include <chrono>
#include <filesystem>

#include "app/environment.h"
#include "core/error.h"

namespace qe {
namespace {

using Clock = std::chrono::steady_clock;
double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

std::vector<DataFile> files_of(const TokenDataset& data) {
  std::vector<DataFile> files;
  for (const TokenFile& f : data.files()) {
    const std::filesystem::path path = f.path();
    files.push_back({path.filename().string(), f.size(), static_cast<std::int64_t>(std::filesystem::file_size(path))});
  }
  return files;
}

std::string line_of(const KeyChange& c) { return c.key + " " + c.stored + " -> " + c.now; }

}  // namespace

Checkpointer::Checkpointer(const Config& config, const StartOptions& options, Transport& transport,
                           std::unique_ptr<Storage> storage, const TokenDataset& train)
    : config_(config),
      transport_(transport),
      storage_(std::move(storage)),
      overrides_(options.overrides),
      train_files_(files_of(train)),
      windows_(train.windows()) {
  const std::string& dir = config_.checkpoint.dir;
  if (!dir.empty()) probe_shared_folder(*storage_, transport_, dir);
  if (options.resume) found_ = find_checkpoint(transport_, dir, *options.resume);
  const bool resumes = found_.has_value();
  if (!resumes && !options.init_from.empty()) {
    found_ = find_checkpoint(transport_, dir, options.init_from);
    if (!found_) throw CheckpointError("--init-from " + options.init_from + ": " + dir + " has no checkpoint.");
  }
  if (!found_) return;
  // Hosts may have other data under the same names.
  all_or_none(transport_, [&]() -> std::string {
    if (resumes) {
      resumed_ = compare_for_resume(found_->manifest, found_->folder, config_, train_files_, options.overrides);
      resumed_->from = found_->folder;
      resumed_->step = found_->manifest.position.step;
      resumed_->passed_over = found_->passed_over;
    } else {
      require_same_model(found_->manifest, found_->folder, config_);
    }
    return "";
  });
}

Checkpointer::~Checkpointer() = default;

void Checkpointer::set_gemm_choices(std::vector<GemmChoice> choices) {
  if (resumed_) compare_gemm_choices(found_->manifest, found_->folder, choices, overrides_, *resumed_);
  gemm_choices_ = std::move(choices);
}

std::vector<std::string> Checkpointer::notes() const {
  std::vector<std::string> lines;
  if (!found_) return lines;
  for (const std::string& why : found_->passed_over) lines.push_back("passed over: " + why);
  const std::string weights = ", parameters XXH3 " + found_->manifest.parameters_xxh3;
  if (!resumed_) {
    lines.push_back("weights from " + found_->folder + weights);
    return lines;
  }
  lines.push_back("resumed from " + found_->folder + " after step " + std::to_string(resumed_->step) + weights);
  for (const KeyChange& c : resumed_->overridden) lines.push_back("overridden: " + line_of(c));
  for (const KeyChange& c : resumed_->changed) lines.push_back("changed: " + line_of(c));
  if (resumed_->data_restarted) lines.push_back("the training data are read from their beginning");
  return lines;
}

RunPosition Checkpointer::start(PipelineRank& rank) {
  if (config_.checkpoint.async && !config_.checkpoint.dir.empty()) {
    all_or_none(transport_, [&]() -> std::string {
      if (writes_checkpoints(transport_)) copy_.reserve(rank);
      return "";
    });
  }
  if (!found_) return {};
  load_checkpoint(transport_, rank, *found_, resumed_ ? Restored::kEverything : Restored::kWeights);
  if (!resumed_) return {};
  RunPosition position = found_->manifest.position;
  if (resumed_->data_restarted) position.data = {};
  return position;
}

bool Checkpointer::due(std::int64_t step, bool stopping) const noexcept {
  const CheckpointSection& c = config_.checkpoint;
  if (c.dir.empty()) return false;
  return stopping || step == config_.training.train_iters || (c.interval > 0 && step % c.interval == 0);
}

void Checkpointer::save(PipelineRank& rank, const RunPosition& position) {
  if (pending_) publish_pending();
  Manifest about;
  about.position = position;
  about.data_windows = windows_;
  about.train_files = train_files_;
  about.config = nlohmann::ordered_json::parse(dump_config(config_));
  about.environment = nlohmann::ordered_json::parse(environment_json());
  about.gemm_choices = gemm_choices_;
  const CheckpointSection& c = config_.checkpoint;
  const Retention retention{c.keep_last, c.keep_every};
  const auto start = Clock::now();
  close_published();
  if (c.async) {
    pending_ = std::make_unique<BackgroundSave>(*storage_, transport_, rank, copy_, c.dir, retention, std::move(about));
    pending_stall_ms_ = ms_since(start);
  } else {
    const SavedCheckpoint saved = save_checkpoint(*storage_, transport_, rank, c.dir, retention, std::move(about));
    finished_.push_back({saved, false, ms_since(start), 0});
  }
}

void Checkpointer::poll() {
  if (pending_ && pending_->settled()) publish_pending();
}

void Checkpointer::finish() {
  if (pending_) publish_pending();
  close_published();
}

void Checkpointer::publish_pending() {
  std::unique_ptr<BackgroundSave> save = std::move(pending_);  // gone whatever happens: nobody publishes twice
  const auto start = Clock::now();
  const SavedCheckpoint saved = save->publish();
  finished_.push_back({saved, true, pending_stall_ms_ + ms_since(start), save->waited_ms()});
  published_ = std::move(save);
}

void Checkpointer::close_published() {
  if (const std::unique_ptr<BackgroundSave> save = std::move(published_)) save->close();
}

}  // namespace qe
