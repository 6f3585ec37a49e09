// A report with every field set, for the tests of its form.
#pragma once

#include "app/report.h"

namespace qe {

inline RunReport full_report() {
  RunReport r;
  r.command = "qeffect train --config \"a b.json\"";
  r.config = parse_config("{}", "tiny.json", {"pipeline.pipeline_model_parallel_size=2", "data.train=a.bin"});
  r.rank_step_ms = {{90, 10, 13, 11}, {80, 12, 9, 14}};
  r.skipped_steps = 1;
  r.init_from = "old/step_00000009";
  r.resumed = ResumeRecord{"new/step_00000003", 3, {"step_00000004 was not finished."}, {}, {}, false};
  r.resumed->overridden = {{"training.lr", "0.001", "0.002"}};
  r.resumed->changed = {{"pipeline.schedule", "\"zbv\"", "\"1f1b\""}};
  r.initial_train_loss = 5.5;
  r.final_train_loss = 0.1;
  r.final_valid_loss = 1.0 / 3;
  r.baselines = NgramBaseline{2.3, 1.83};
  r.train_data = {1, 1000, 15, 39};
  r.valid_data = DataCounts{2, 200, 3, 7};
  r.checkpoints = {{2, false, 4096, 20, 0, 18}, {4, true, 4096, 3, 1.5, 45.5}};
  RankUsage usage;
  usage.device = "cpu";
  usage.graphs = 14;
  usage.bytes_by_kind = {{"weights", 4096}};
  r.ranks = {usage, usage};
  r.checks = {{"quiescent at the end", true, ""}};
  return r;
}

}  // namespace qe
