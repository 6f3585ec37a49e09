#include "app/plan_costs.h"

#include <algorithm>
#include <optional>

#include "app/config_faults.h"
#include "app/config_json.h"
#include "app/config_keys.h"
#include "app/environment.h"
#include "app/regular_file.h"
#include "core/error.h"

namespace qe {
namespace {

constexpr int kSchemaVersion = 1;

// Keys that change what an action costs. Layers, stages, schedule and microbatches do not: that is what a plan varies.
constexpr const char* kConditions[] = {"model.hidden_size",       "model.ffn_hidden_size", "model.num_attention_heads",
                                       "model.vocab_size",        "precision.compute",     "fp8.scale_update",
                                       "head.precision",          "training.seq_length",   "training.micro_batch_size",
                                       "optimizer.moments_dtype", "gradients.placement",   "gradients.dtype",
                                       "gradients.w_group",       "execution.mode"};

Json conditions_of(const Config& config) {
  Json out = Json::object();
  for (const char* path : kConditions) {
    for (const KeySpec& key : key_table()) {
      if (key.path() == path) out[path] = key.get(config);
    }
  }
  return out;
}

// One object of the file: every key that is asked for must be there, and no other.
class Section {
 public:
  Section(const Json& root, std::string path, Faults& faults) : path_(std::move(path)), faults_(faults) {
    if (root.is_object()) {
      json_ = root;
    } else {
      faults_.add(path_, "wanted a section, { ... }.");
    }
  }
  ~Section() {
    for (const auto& [name, value] : json_.items()) faults_.add(at(name), "unknown key; see docs/planning.md.");
  }
  Section(const Section&) = delete;
  Section& operator=(const Section&) = delete;

  std::optional<Json> take(const std::string& name) {
    if (!json_.contains(name)) {
      faults_.add(at(name), "found none; see docs/planning.md.");
      return std::nullopt;
    }
    Json value = json_[name];
    json_.erase(name);
    return value;
  }
  [[nodiscard]] bool has(const std::string& name) const { return json_.contains(name); }
  Json section(const std::string& name) { return take(name).value_or(Json::object()); }
  double milliseconds(const std::string& name, bool positive = false) {
    const std::optional<Json> value = take(name);
    if (!value) return 0;
    const double number = value->is_number() ? value->get<double>() : -1;
    if (positive ? number > 0 : number >= 0) return number;
    faults_.add(at(name), std::string("wanted a number ") + (positive ? "above" : "from") + " 0, in milliseconds.");
    return 0;
  }
  std::string text(const std::string& name) {
    const std::optional<Json> value = take(name);
    if (value && !value->is_string()) faults_.add(at(name), "wanted a string.");
    return value && value->is_string() ? value->get<std::string>() : "";
  }
  [[nodiscard]] std::string at(const std::string& name) const { return path_.empty() ? name : path_ + "." + name; }

 private:
  Json json_ = Json::object();
  std::string path_;
  Faults& faults_;
};

PartCosts read_part(Section& ms, const std::string& name, bool positive, Faults& faults) {
  Section part(ms.section(name), ms.at(name), faults);
  PartCosts costs;
  costs.forward = part.milliseconds("forward", positive);
  costs.input_grad = part.milliseconds("input_grad", positive);
  costs.weight_grad = part.milliseconds("weight_grad", positive);
  costs.refresh = part.milliseconds("refresh");
  return costs;
}

Json json_of(const PartCosts& c) {
  return {{"forward", c.forward}, {"input_grad", c.input_grad}, {"weight_grad", c.weight_grad}, {"refresh", c.refresh}};
}

void check_conditions(Section& root, const Config& config, Faults& faults) {
  Section found(root.section("config"), "config", faults);
  const Json needed = conditions_of(config);
  for (const auto& [path, wanted] : needed.items()) {
    const std::optional<Json> value = found.take(path);
    if (!value || *value == wanted) continue;
    faults.add(found.at(path), "was measured with " + value->dump() + ", this config has " + wanted.dump() +
                                   "; measure again by qeffect plan --measure-costs.");
  }
}

}  // namespace

PlanCosts unit_costs() {
  PlanCosts costs;
  costs.source = "unit costs: F = I = W = 1 a layer, all else free; measure by --measure-costs, apply by --costs";
  costs.layer = {1, 1, 1, 0};
  return costs;
}

PlanCosts read_costs(const std::string& path, const Config& config) {
  const RegularFile file(path);
  const std::optional<std::string> text = file.failure().empty() ? file.read_all() : std::nullopt;
  if (!text) {
    const std::string why = file.failure().empty() ? "cannot be read" : file.failure();
    throw ConfigError("The cost file " + path + " " + why + "; make one by qeffect plan --measure-costs.");
  }
  Faults faults;
  PlanCosts costs;
  {
    Section root(read_config_json(*text, path, faults), "", faults);
    const std::optional<Json> version = root.take("schema_version");
    if (version && *version != kSchemaVersion) faults.add("schema_version", "found " + version->dump() + ", wanted 1.");
    costs.device = root.text("device");
    root.text("qeffect");
    check_conditions(root, config, faults);
    Section ms(root.section("ms"), "ms", faults);
    costs.layer = read_part(ms, "layer", true, faults);
    if (ms.has("bf16_layer")) {
      costs.bf16_layer = read_part(ms, "bf16_layer", true, faults);
    } else if (!config.precision.bf16_layers.empty()) {
      faults.add("ms.bf16_layer",
                 "found none, and precision.bf16_layers names layers; measure again by qeffect plan "
                 "--measure-costs.");
    }
    costs.embedding = read_part(ms, "embedding", false, faults);
    costs.head = read_part(ms, "head", false, faults);
    costs.message = ms.milliseconds("message");
    costs.action = ms.milliseconds("action");
    costs.optimizer = ms.milliseconds("optimizer_per_million_parameters");
  }
  faults.throw_if_any(path);
  costs.measured = true;
  costs.source = "measured: " + path + " (" + costs.device + ")";
  return costs;
}

std::string costs_json(const PlanCosts& costs, const Config& config) {
  Json root{{"schema_version", kSchemaVersion},
            {"device", costs.device},
            {"qeffect", version_text()},
            {"config", conditions_of(config)},
            {"ms",
             {{"layer", json_of(costs.layer)},
              {"embedding", json_of(costs.embedding)},
              {"head", json_of(costs.head)},
              {"message", costs.message},
              {"action", costs.action},
              {"optimizer_per_million_parameters", costs.optimizer}}}};
  if (costs.bf16_layer) root["ms"]["bf16_layer"] = json_of(*costs.bf16_layer);
  return root.dump(2) + "\n";
}

ScheduleCosts stage_costs(const PlanCosts& costs, const StageConfig& config, const std::vector<StageRange>& ranges) {
  ScheduleCosts out;
  out.message = costs.message;
  const PartCosts bf16_layer = costs.bf16_layer.value_or(costs.layer);
  for (const StageRange& range : ranges) {
    const auto bf16 = std::count_if(config.bf16_layers.begin(), config.bf16_layers.end(), [&](int layer) {
      return layer >= range.first_layer && layer < range.first_layer + range.num_layers;
    });
    const auto sum = [&](double PartCosts::*part) {
      return static_cast<double>(range.num_layers - bf16) * (costs.layer.*part) +
             static_cast<double>(bf16) * (bf16_layer.*part) + (range.embedding ? costs.embedding.*part : 0) +
             (range.head ? costs.head.*part : 0);
    };
    out.stages.push_back({sum(&PartCosts::forward) + costs.action, sum(&PartCosts::input_grad) + costs.action,
                          sum(&PartCosts::weight_grad) + costs.action, sum(&PartCosts::refresh)});
  }
  return out;
}

}  // namespace qe
