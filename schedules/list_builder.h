// What every maker shares: where stages live, and a rank's list that numbers microbatches by itself.
// Owns no order of its own: which action comes next is the maker's business.
#pragma once

#include <vector>

#include "core/schedule.h"

namespace qe {

std::vector<int> loop_placement(const PipelineShape&);  // [S]: stage % P
std::vector<int> v_placement(const PipelineShape&);     // [S]: rank r owns stages r and 2P-1-r

// One rank's compute list. The n-th call of one kind for one stage is microbatch n, so a list ascends by construction.
// Microbatches from M on are counted and left out: zbv builds a longer list than it emits.
class ListBuilder {
 public:
  explicit ListBuilder(const PipelineShape&);

  void forward(int stage) { append(ActionKind::kForward, stage, forwards_); }
  void input_grad(int stage) { append(ActionKind::kInputGrad, stage, input_grads_); }
  void weight_grad(int stage) { append(ActionKind::kWeightGrad, stage, weight_grads_); }
  void input_and_weight_grad(int stage) {
    input_grad(stage);
    weight_grad(stage);
  }

  // How many were asked for so far, those left out included.
  [[nodiscard]] int forwards(int stage) const { return forwards_.at(static_cast<std::size_t>(stage)); }
  [[nodiscard]] int input_grads(int stage) const { return input_grads_.at(static_cast<std::size_t>(stage)); }
  [[nodiscard]] int weight_grads(int stage) const { return weight_grads_.at(static_cast<std::size_t>(stage)); }

  [[nodiscard]] std::vector<Action> take() { return std::move(list_); }

 private:
  void append(ActionKind kind, int stage, std::vector<int>& counts);

  int microbatches_;
  std::vector<int> forwards_, input_grads_, weight_grads_;  // [S]
  std::vector<Action> list_;
};

}  // namespace qe
