// A save whose files are written while training goes on: a copy of the state on the host, a thread that writes it, and
// publishing at a later step boundary. The thread sees no device, no transport and no other rank.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "app/checkpoint/save_folder.h"
#include "app/checkpoint/state_copy.h"

namespace qe {

class BackgroundSave {
 public:
  // Collective, as everything here but the destructor. Fills the copy and begins to write it. Throws as save_checkpoint
  // does; then nothing is left behind. `storage` must outlive it and allow calls from another thread; so must the copy,
  // which is the thread's until publish() returns.
  BackgroundSave(Storage&, Transport&, PipelineRank&, StateCopy&, const std::string& dir, const Retention&,
                 Manifest about);
  ~BackgroundSave();  // gives up what has not been published
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  // Whether publish() would not wait: every rank has written its file, or some rank cannot.
  bool settled();
  // Waits for every rank's file, then does what save_checkpoint does, but begins to remove older checkpoints in the
  // thread. Throws CheckpointError on every rank alike where one could not write. Once.
  SavedCheckpoint publish();
  // After publish: waits until they are removed. Throws CheckpointError on every rank alike where one could not be.
  void close();
  [[nodiscard]] double waited_ms() const noexcept { return waited_ms_; }  // by publish(), for files being written

 private:
  // `work` in the thread; what it throws is kept for join().
  void start(std::function<void()> work);
  void join();
  void settle();       // the thread of every rank; however long it takes, no rank waits for another past a deadline
  std::string part();  // of the manifest, when the thread is done

  Transport& transport_;
  SaveFolder folder_;
  const StateCopy& copy_;
  std::atomic<bool> abandoned_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = true;
  double waited_ms_ = 0;
  std::string part_;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace qe
