// Faults that a user asks for by runtime.faults, to see what a failure looks like: what can be asked, and where it
// takes effect. Without them nothing here runs: they sit in decorators of the step's hooks and of the storage.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "app/checkpoint/storage.h"
#include "app/config_faults.h"
#include "app/rank_place.h"
#include "core/action.h"

namespace qe {

struct Config;

enum class FaultKind : std::uint8_t { kFail, kDelay, kCrash, kStop, kDrop, kStale, kAlias, kNan, kError };

// One entry of the list: "crash rank=1 step=3 at=1I0". Which keys a kind takes is in injected_faults.cpp's table.
struct InjectedFault {
  std::string text;  // as written
  FaultKind kind = FaultKind::kFail;
  std::optional<int> rank;            // world rank; none: any rank that gets there
  std::optional<std::uint32_t> step;  // none: the first that gets there
  std::optional<Action> action;       // at=2I0
  std::string operation;              // at=optimizer, or of a file: create, write, fsync, close, rename, sync, remove
  std::string file;                   // last part of its path; none: any
  std::optional<std::int64_t> byte;   // of a write; -1: the middle, -2: the last
  double seconds = 0;
  int error = 0;  // errno
  CacheLayout layout = CacheLayout::kRowwise;
  int stage = 0, matrix = 0, microbatch = 0;
};

// Adds to `faults` a sentence for each entry that cannot be, under runtime.faults.
void check_injected_faults(const Config&, Faults& faults);
// Throws ConfigError when the config asks for faults and the command line does not allow them, or when no rank runs the
// action of one.
void expect_faults_allowed(const Config&, bool allowed);

// The faults of one rank; each takes effect once. Any thread.
class FaultPlan {
 public:
  FaultPlan(const Config&, int world_rank);
  [[nodiscard]] bool empty() const noexcept { return faults_.empty(); }

  struct Point {
    std::uint32_t step;
    const Action* action = nullptr;
    bool done = false;  // the action has been issued
    std::string operation, file;
  };
  // Takes the first fault that is due there, if there is one.
  std::optional<InjectedFault> take(const Point&);
  // A gradient's binding that is to be an alias.
  bool takes_alias(StageIndex, int matrix, MicrobatchIndex);

 private:
  std::mutex mutex_;
  std::vector<InjectedFault> faults_;
};

// The hooks of a rank with its faults: tells `place` as well.
std::unique_ptr<StepHooks> make_fault_hooks(RankPlace& place, std::shared_ptr<FaultPlan>);
// Calls of `storage` that fail, wait or kill this process where the plan says so. A file's step is that of the
// checkpoint it belongs to, else the one that `place` is at.
std::unique_ptr<Storage> make_faulty_storage(std::unique_ptr<Storage> storage, const RankPlace& place,
                                             std::shared_ptr<FaultPlan>);

}  // namespace qe
