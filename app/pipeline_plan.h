// From a config to what a rank is built from: the lowered, validated schedule with slots and rings, and the rank's
// settings.
#pragma once

#include "app/config.h"
#include "core/runtime/pipeline_rank.h"

namespace qe {

// The action lists: compute only, except where a csv file holds the messages too.
Schedule make_lists(const Config&);
// Throws ScheduleError when the shape cannot be done (parse_config has refused it before).
RankPlan make_rank_plan(const Config&);
RankConfig make_rank_config(const Config&);
// Graphs of a pipeline rank that move scales: two for each stage whose scales move apart from F and I.
int update_graphs(const Config&, const Schedule&, int pipeline_rank);

}  // namespace qe
