#include "app/checkpoint/background_save.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace qe {
namespace {

// Between two questions whether all are done: no rank waits for another longer than that, however slow a disk is.
constexpr std::chrono::milliseconds kPause{100};

struct Abandoned {};  // thrown inside the thread alone

}  // namespace

BackgroundSave::BackgroundSave(Storage& storage, Transport& transport, PipelineRank& rank, StateCopy& copy,
                               const std::string& dir, const Retention& retention, Manifest about)
    : transport_(transport), folder_(storage, transport, rank, dir, retention, std::move(about)), copy_(copy) {
  folder_.open([&] {
    if (folder_.rank_writes()) copy.fill(rank);
  });
  if (!folder_.rank_writes()) return;
  start([this] {
    part_ = folder_.write_file(copy_.entries(), [this](std::size_t i) {
      if (abandoned_) throw Abandoned{};
      return copy_.bytes(i);
    });
  });
}

BackgroundSave::~BackgroundSave() {
  abandoned_ = true;
  if (thread_.joinable()) thread_.join();
}

void BackgroundSave::start(std::function<void()> work) {
  done_ = false;
  const auto run = [this, work = std::move(work)] {
    std::exception_ptr error;
    try {
      work();
    } catch (const Abandoned&) {
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    error_ = error;
    done_ = true;
    changed_.notify_all();
  };
  try {
    thread_ = std::thread(run);
  } catch (const std::system_error&) {
    run();  // the system has no thread left: the loop waits this time
  }
}

void BackgroundSave::join() {
  if (thread_.joinable()) thread_.join();
  if (error_) std::rethrow_exception(error_);
}

bool BackgroundSave::settled() {
  std::string mine;
  {
    const std::lock_guard lock(mutex_);
    mine = error_ ? "failed" : done_ ? "done" : "writing";
  }
  const std::vector<std::string> all = transport_.exchange(mine, Group::kWorld);
  const auto count = [&](const char* state) { return std::count(all.begin(), all.end(), state); };
  if (count("failed") > 0) abandoned_ = true;  // nobody needs this rank's file any more
  return count("failed") > 0 || count("writing") == 0;
}

std::string BackgroundSave::part() {
  join();
  return part_;
}

void BackgroundSave::settle() {
  while (!settled()) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kPause, [this] { return done_; });
  }
}

SavedCheckpoint BackgroundSave::publish() {
  const auto begun = std::chrono::steady_clock::now();
  settle();
  waited_ms_ = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begun).count();
  SavedCheckpoint saved = folder_.publish([this] { return part(); });
  start([this] { folder_.remove_aside(); });
  return saved;
}

void BackgroundSave::close() {
  settle();
  all_or_none(transport_, [this]() -> std::string {
    join();
    return "";
  });
}

}  // namespace qe
