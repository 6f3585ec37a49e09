// Keeps the board of the job's ranks told of where this one is.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/runtime/step_hooks.h"
#include "kernels/wire/job_board.h"

namespace qe {

class RankPlace final : public StepHooks {
 public:
  explicit RankPlace(JobBoard* board) : board_(board) {}  // null: nobody is told

  void set(Phase phase, std::uint32_t step) {
    step_ = step;
    tell({phase, step, {}});
  }
  [[nodiscard]] std::uint32_t step() const noexcept { return step_; }

  void binding(StageIndex, int, MicrobatchIndex, Tensor&) override {}
  bool before(const Action& action, QEffect&) override {
    tell({Phase::kAction, step_, action});
    return true;
  }
  void after(const Action&, const TransformerStage&, Device&, Stream&) override {}
  void before_optimizer() override { tell({Phase::kOptimizer, step_, {}}); }

 private:
  void tell(const Place& place) {
    if (board_ != nullptr) board_->set_place(place);
  }
  JobBoard* board_;
  std::atomic<std::uint32_t> step_ = 0;  // a save in the background may ask too
};

}  // namespace qe
