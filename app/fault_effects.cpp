// Where injected faults take effect: the hooks of a step and the calls of a storage.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <thread>
#include <utility>

#include "app/checkpoint/store.h"
#include "app/injected_faults.h"
#include "core/error.h"

namespace qe {
namespace {

// Crash, stop and delay happen here; fail throws; the rest is the caller's.
void happen(const InjectedFault& f) {
  std::fprintf(stderr, "qeffect: injected fault: %s\n", f.text.c_str());
  switch (f.kind) {
    case FaultKind::kFail:
      throw DeviceError("injected fault: " + f.text);
    case FaultKind::kDelay:
      return std::this_thread::sleep_for(std::chrono::duration<double>(f.seconds));
    case FaultKind::kCrash:
      ::kill(::getpid(), SIGKILL);
      return;
    case FaultKind::kStop:
      ::kill(::getpid(), SIGSTOP);
      return;
    default:
      return;
  }
}

class FaultHooks final : public StepHooks {
 public:
  FaultHooks(RankPlace& place, std::shared_ptr<FaultPlan> plan) : place_(place), plan_(std::move(plan)) {}

  void binding(StageIndex stage, int matrix, MicrobatchIndex microbatch, Tensor& bound) override {
    if (plan_->takes_alias(stage, matrix, microbatch) && last_bound_ != nullptr) bound.data = last_bound_;
    last_bound_ = bound.data;
  }
  bool before(const Action& action, QEffect& contract) override {
    place_.before(action, contract);
    bool kept = true;
    while (const auto f = plan_->take({.step = place_.step(), .action = &action})) {
      happen(*f);
      if (f->kind == FaultKind::kDrop) kept = false;
      if (f->kind == FaultKind::kStale) contract.invalidate(action.stage, f->layout);
    }
    return kept;
  }
  void after(const Action& action, const TransformerStage& stage, Device& device, Stream& stream) override {
    while (const auto f = plan_->take({.step = place_.step(), .action = &action, .done = true})) {
      happen(*f);
      const std::vector<int> matrices = stage.matrices();
      if (f->matrix >= static_cast<int>(matrices.size())) {
        throw ConfigError("runtime.faults: \"" + f->text + "\" names a matrix, and stage " +
                          std::to_string(to_int(action.stage)) + " has " + std::to_string(matrices.size()) + ".");
      }
      const Tensor gradient = stage.gradients().bound(matrices[static_cast<std::size_t>(f->matrix)], action.microbatch);
      constexpr std::array<unsigned char, 4> kNan32{0, 0, 0xc0, 0x7f};
      const std::size_t bytes = size_of(gradient.dtype);  // FP32, or BF16: the upper half
      device.upload(stream, gradient.data, kNan32.data() + (kNan32.size() - bytes), bytes);
    }
  }
  void before_optimizer() override {
    place_.before_optimizer();
    while (const auto f = plan_->take({.step = place_.step(), .operation = "optimizer"})) happen(*f);
  }

 private:
  RankPlace& place_;
  std::shared_ptr<FaultPlan> plan_;
  void* last_bound_ = nullptr;
};

// Of one storage and its files.
struct Faulty {
  const RankPlace& place;
  std::shared_ptr<FaultPlan> plan;

  // A folder of a step is "step" and "step.tmp", so that one entry means every checkpoint.
  [[nodiscard]] FaultPlan::Point point(const std::string& operation, const std::string& path) const {
    FaultPlan::Point p{.step = place.step(), .operation = operation};
    for (const auto& part : std::filesystem::path(path)) {
      p.file = part.string();
      const std::size_t end = p.file.find('.');
      const auto step = step_of_name(p.file.substr(0, end));
      if (!step) continue;
      p.step = static_cast<std::uint32_t>(*step);
      p.file = "step" + (end == std::string::npos ? "" : p.file.substr(end));
    }
    return p;
  }
  void fault(const InjectedFault& f, const std::string& doing, const std::string& path) const {
    happen(f);
    if (f.kind == FaultKind::kError) throw storage_failure(doing, path, std::strerror(f.error));
  }
  void call(const std::string& operation, const std::string& doing, const std::string& path) const {
    while (const auto f = plan->take(point(operation, path))) fault(*f, doing, path);
  }
};

// A file whose writing is to fail at a byte is kept in memory until its size is known.
class FaultyFile final : public OutputFile {
 public:
  FaultyFile(std::unique_ptr<OutputFile> file, std::string path, const Faulty& faulty)
      : file_(std::move(file)),
        path_(std::move(path)),
        faulty_(faulty),
        fault_(faulty.plan->take(faulty.point("write", path_))) {}

  void write(Bytes bytes) override {
    fault_ ? (void)kept_.insert(kept_.end(), bytes.begin(), bytes.end()) : file_->write(bytes);
  }
  void finish() override {
    if (fault_) {
      const Bytes all(kept_);
      const std::int64_t at = fault_->byte.value_or(0);
      const std::size_t size = all.size(), half = size / 2, last = size - std::min<std::size_t>(size, 1);
      const std::size_t first = at == -1 ? half : at == -2 ? last : std::min(size, static_cast<std::size_t>(at));
      file_->write(all.first(first));
      faulty_.fault(*fault_, "write", path_);
      file_->write(all.subspan(first));
    }
    faulty_.call("fsync", "sync", path_);
    file_->finish();
    faulty_.call("close", "close", path_);
  }

 private:
  std::unique_ptr<OutputFile> file_;
  std::string path_;
  Faulty faulty_;
  std::optional<InjectedFault> fault_;
  std::vector<unsigned char> kept_;
};

class FaultyStorage final : public Storage {
 public:
  FaultyStorage(std::unique_ptr<Storage> storage, Faulty faulty)
      : storage_(std::move(storage)), faulty_(std::move(faulty)) {}

  void make_directory(const std::string& path) override { storage_->make_directory(path); }
  std::unique_ptr<OutputFile> create(const std::string& path) override {
    faulty_.call("create", "create", path);
    return std::make_unique<FaultyFile>(storage_->create(path), path, faulty_);
  }
  void rename(const std::string& from, const std::string& to) override {
    faulty_.call("rename", "rename " + from + " to", to);
    storage_->rename(from, to);
  }
  void sync_directory(const std::string& path) override {
    faulty_.call("sync", "sync the folder", path);
    storage_->sync_directory(path);
  }
  void remove(const std::string& path) override {
    faulty_.call("remove", "remove", path);
    storage_->remove(path);
  }

 private:
  std::unique_ptr<Storage> storage_;
  Faulty faulty_;
};

}  // namespace

std::unique_ptr<StepHooks> make_fault_hooks(RankPlace& place, std::shared_ptr<FaultPlan> plan) {
  return std::make_unique<FaultHooks>(place, std::move(plan));
}

std::unique_ptr<Storage> make_faulty_storage(std::unique_ptr<Storage> storage, const RankPlace& place,
                                             std::shared_ptr<FaultPlan> plan) {
  return std::make_unique<FaultyStorage>(std::move(storage), Faulty{place, std::move(plan)});
}

}  // namespace qe
