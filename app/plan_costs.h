// What the parts of a stage cost in time: a file of measured costs (docs/planning.md), or one unit a layer.
// Owns the file's form and what it may be applied to; the time line is schedules/simulate's.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "app/config.h"
#include "core/stage/parameters.h"
#include "schedules/simulate.h"

namespace qe {

// Milliseconds of one microbatch; refresh: of one step, 0 where updates write the caches.
struct PartCosts {
  double forward = 0, input_grad = 0, weight_grad = 0, refresh = 0;
};

struct PlanCosts {
  std::string source;     // for people: where the numbers are from
  bool measured = false;  // else the unit is a layer's F, I or W, and only ratios mean anything
  PartCosts layer, embedding, head;
  std::optional<PartCosts> bf16_layer;  // one of precision.bf16_layers; none: as `layer`
  double message = 0;                   // one boundary tensor, on its edge
  double action = 0;                    // around every compute action: hand-off, checks, boundary copies
  double optimizer = 0;                 // a million parameters of a rank
  std::string device;                   // that was measured
};

PlanCosts unit_costs();

// Throws ConfigError when the file is not of the documented form, or was measured under another value of a key that
// changes costs: widths, tokens of a microbatch, precision, placement, mode.
PlanCosts read_costs(const std::string& path, const Config&);
// The file's text, with the keys of this config that it is good for.
std::string costs_json(const PlanCosts&, const Config&);

// By stage.
ScheduleCosts stage_costs(const PlanCosts&, const StageConfig&, const std::vector<StageRange>&);

}  // namespace qe
