#include "app/checkpoint/resume.h"

#include <algorithm>
#include <set>
#include <string_view>

#include "app/checkpoint/manifest.h"
#include "app/config_faults.h"
#include "app/config_keys.h"
#include "core/error.h"

namespace qe {
namespace {

enum class Rule : std::uint8_t {
  kFree,         // may differ; the report says so
  kQuiet,        // may differ, and nobody needs to know
  kOverridable,  // must be the same unless named
  kFixed         // stored tensors depend on it
};

// By section, then what a single key has of its own. A new key of model, fp8 or optimizer is guarded from the start.
Rule rule_of(const KeySpec& key, const Config& config) {
  const std::string path = key.path();
  const bool fp8 = config.precision.compute == Compute::kFp8;
  static const std::set<std::string_view> fixed{"precision.compute", "precision.bf16_layers", "head.precision",
                                                "optimizer.moments_dtype"};
  static const std::set<std::string_view> same{"training.seed",
                                               "training.seq_length",
                                               "training.micro_batch_size",
                                               "training.global_batch_size",
                                               "training.lr",
                                               "training.min_lr",
                                               "training.lr_schedule",
                                               "training.lr_warmup_iters",
                                               "training.lr_decay_iters"};
  if (fixed.contains(path) || key.section == "model") return Rule::kFixed;
  if (key.section == "fp8") {
    if (path == "fp8.reduce_amax" || !fp8) return Rule::kFree;  // one replica: both settings are the same rule
    return path == "fp8.amax_history_len" ? Rule::kFixed : Rule::kOverridable;
  }
  if (key.section == "optimizer" || same.contains(path)) return Rule::kOverridable;
  if (path == "data.train") return Rule::kQuiet;  // the files themselves are compared
  return key.section == "report" || key.section == "checkpoint" || key.section == "runtime" ? Rule::kQuiet
                                                                                            : Rule::kFree;
}

Json files_json(const std::vector<DataFile>& files) {
  Json list = Json::array();
  for (const DataFile& f : files) {
    list.push_back(f.name + ", " + std::to_string(f.tokens) + " tokens in " + std::to_string(f.bytes) + " bytes");
  }
  return list;
}

std::string shown(const Json& stored, const Json& now) { return "stored " + stored.dump() + ", now " + now.dump(); }

// A key that the table does not know is one of another version: what it asked for cannot be compared.
void add_unknown_keys(const Json& stored, std::vector<std::string>& lines) {
  for (const auto& [section, keys] : stored.items()) {
    for (const auto& [name, value] : keys.items()) {
      const std::string path = section + "." + name;
      const auto& table = key_table();
      if (std::none_of(table.begin(), table.end(), [&](const KeySpec& k) { return k.path() == path; })) {
        lines.push_back(path + ": stored " + value.dump() + ", and this version has no such key");
      }
    }
  }
}

Json stored_value(const Json& config, const KeySpec& key) {
  if (!config.contains(key.section) || !config[key.section].contains(key.name)) return nullptr;
  return config[key.section][key.name];
}

[[noreturn]] void refuse(const std::string& folder, const std::vector<std::string>& lines, const std::string& advice) {
  std::string text = folder + " was saved by a run that differs in " + counted(std::ssize(lines), "place") + ":";
  for (const std::string& line : lines) text += "\n  " + line;
  throw CheckpointError(text + "\n" + advice);
}

}  // namespace

void check_override_names(const std::vector<std::string>& keys) {
  std::vector<std::string> known;
  for (const KeySpec& key : key_table()) known.push_back(key.path());
  known.emplace_back(kGemmChoicesName);
  for (const std::string& name : keys) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    const std::vector<std::string> near = nearest_names(name, known);
    throw UsageError("--override " + name + " names no config key" +
                     (near.empty() ? "; see qeffect --help-config." : "; the nearest is " + near.front() + "."));
  }
}

ResumeRecord compare_for_resume(const Manifest& manifest, const std::string& folder, const Config& config,
                                const std::vector<DataFile>& train_files, const std::vector<std::string>& overrides) {
  ResumeRecord record;
  std::vector<std::string> lines;
  const auto named = [&](const std::string& key) {
    return std::find(overrides.begin(), overrides.end(), key) != overrides.end();
  };
  const auto differ = [&](const std::string& key, const Json& stored, const Json& now, Rule rule) {
    if (stored == now || rule == Rule::kQuiet) return;
    if (rule == Rule::kFree) {
      record.changed.push_back({key, stored.dump(), now.dump()});
    } else if (rule == Rule::kOverridable && named(key)) {
      record.overridden.push_back({key, stored.dump(), now.dump()});
    } else {
      lines.push_back(key + ": " + shown(stored, now) +
                      (rule == Rule::kFixed ? " (no override: the stored tensors depend on it)" : ""));
    }
  };
  add_unknown_keys(manifest.config, lines);
  for (const KeySpec& key : key_table()) {
    differ(key.path(), stored_value(manifest.config, key), key.get(config), rule_of(key, config));
  }
  differ("data.train", files_json(manifest.train_files), files_json(train_files), Rule::kOverridable);
  if (config.training.train_iters < manifest.position.step) {
    lines.push_back("training.train_iters: " + std::to_string(config.training.train_iters) + ", and step " +
                    std::to_string(manifest.position.step) + " is done");
  }
  if (!lines.empty()) {
    refuse(folder, lines,
           "Give the stored values, or name each key that shall have its new value: --override KEY. For a new run with "
           "these weights use --init-from.");
  }
  record.data_restarted = std::any_of(record.overridden.begin(), record.overridden.end(), [](const KeyChange& c) {
    return c.key == "data.train" || c.key == "training.seq_length";
  });
  return record;
}

void compare_gemm_choices(const Manifest& manifest, const std::string& folder, const std::vector<GemmChoice>& now,
                          const std::vector<std::string>& overrides, ResumeRecord& record) {
  std::vector<std::string> lines;
  for (const GemmChoice& stored : manifest.gemm_choices) {
    const auto same =
        std::find_if(now.begin(), now.end(), [&](const GemmChoice& c) { return c.product == stored.product; });
    if (same == now.end() || same->algorithm == stored.algorithm) continue;
    lines.push_back(std::string(kGemmChoicesName) + ": " + stored.product + ", stored algorithm " + stored.algorithm +
                    ", now " + same->algorithm);
  }
  if (lines.empty()) return;
  if (std::find(overrides.begin(), overrides.end(), kGemmChoicesName) == overrides.end()) {
    refuse(folder, lines,
           "Another card or library rounds otherwise: go on where it was saved, or accept other bits with "
           "--override " +
               std::string(kGemmChoicesName) + ".");
  }
  record.overridden.push_back(
      {kGemmChoicesName, Json("the stored algorithms").dump(), Json(std::to_string(lines.size()) + " others").dump()});
}

void require_same_model(const Manifest& manifest, const std::string& folder, const Config& config) {
  std::vector<std::string> lines;
  for (const KeySpec& key : key_table()) {
    if (key.section != "model") continue;
    const Json stored = stored_value(manifest.config, key), now = key.get(config);
    if (stored != now) lines.push_back(key.path() + ": " + shown(stored, now));
  }
  if (!lines.empty()) refuse(folder, lines, "Weights need the model that they were trained in.");
}

}  // namespace qe
