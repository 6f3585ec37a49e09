// The cells that must hold equal bytes: five schedules on one, two and four ranks over the same eight layers, in either
// mode, with either backward, in every gradient placement. Names configs; compares nothing.
#pragma once

#include <string>
#include <vector>

#include "tests/runtime/training_run.h"

namespace qe::testing {

// Eight layers of hidden 32, so that hundreds of cells can run; everything else as in test_config. FP8 with an amax
// history of four, one sequence of 16 tokens a microbatch.
inline const Overrides kMatrixModel{
    "model.num_layers=8",          "model.hidden_size=32",    "model.num_attention_heads=2",
    "model.ffn_hidden_size=48",    "model.vocab_size=100",    "training.seq_length=16",
    "training.micro_batch_size=1", "training.train_iters=20", "model.max_position_embeddings=16"};

inline Overrides microbatches(int m) { return {"training.global_batch_size=" + std::to_string(m)}; }

// The five schedules on so many ranks: one stage a rank for gpipe and 1f1b, two for the others.
inline std::vector<Overrides> mappings(int ranks) {
  const Overrides pp{"pipeline.pipeline_model_parallel_size=" + std::to_string(ranks)};
  const Overrides two_chunks = pp + Overrides{"pipeline.virtual_pipeline_model_parallel_size=2"};
  return {Overrides{"pipeline.schedule=gpipe"} + pp, Overrides{"pipeline.schedule=1f1b"} + pp,
          Overrides{"pipeline.schedule=interleaved_1f1b"} + two_chunks,
          Overrides{"pipeline.schedule=zb1p"} + two_chunks, Overrides{"pipeline.schedule=zbv"} + two_chunks};
}

inline std::vector<Overrides> mappings() {
  std::vector<Overrides> all;
  for (const int ranks : {1, 2, 4}) {
    for (Overrides& m : mappings(ranks)) all.push_back(std::move(m));
  }
  return all;
}

inline const std::vector<Overrides> kModes{{"execution.mode=eager"}, {"execution.mode=graph"}};
inline const std::vector<Overrides> kBackwards{{"pipeline.backward=split"}, {"pipeline.backward=full"}};
// One BF16 gradient a microbatch: two ways to the same bytes.
inline const std::vector<Overrides> kViews{{"gradients.placement=copied"}, {"gradients.placement=arena"}};
// One FP32 gradient for all microbatches: likewise, and not the views' bytes.
inline const std::vector<Overrides> kSlots{{"pipeline.tape_slots=peak"}, {"pipeline.tape_slots=per_microbatch"}};

// Every choice of one entry of each list, joined.
inline std::vector<Overrides> cells(const std::vector<std::vector<Overrides>>& lists) {
  std::vector<Overrides> joined{{}};
  for (const std::vector<Overrides>& list : lists) {
    std::vector<Overrides> longer;
    for (const Overrides& cell : joined) {
      for (const Overrides& choice : list) longer.push_back(cell + choice);
    }
    joined = std::move(longer);
  }
  return joined;
}

inline std::string name_of(const Overrides& cell) {
  std::string name;
  for (const std::string& o : cell) name += o + " ";
  return name;
}

}  // namespace qe::testing
