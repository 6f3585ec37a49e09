// JSON → Config → JSON by way of the key table.
#include "app/config.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <numbers>
#include <optional>

#include "app/config_check.h"
#include "app/config_faults.h"
#include "app/config_json.h"
#include "app/config_keys.h"
#include "app/regular_file.h"
#include "core/error.h"

namespace qe {
namespace {

std::vector<std::string> all_paths() {
  std::vector<std::string> out;
  for (const KeySpec& key : key_table()) out.push_back(key.path());
  return out;
}

std::vector<std::string> all_sections() {
  std::vector<std::string> out;
  for (const KeySpec& key : key_table()) {
    if (out.empty() || out.back() != key.section) out.push_back(key.section);
  }
  return out;
}

const KeySpec* find_key(const std::string& path) {
  for (const KeySpec& key : key_table()) {
    if (key.path() == path) return &key;
  }
  return nullptr;
}

// A refusal by name with its reason; empty when the name is not one of those.
std::string reason_refused(std::string_view section, std::string_view name) {
  const std::string path = std::string(section) + "." + std::string(name);
  for (const RefusedKey& r : refused_keys()) {
    if (r.name == path || r.name == name || r.name == section) return std::string(r.reason);
  }
  return "";
}

std::string suggestion(const std::vector<std::string>& names) {
  if (names.empty()) return "see qeffect --help-config.";
  return (names.size() == 1 ? "the nearest is " : "the nearest are ") + join(names) + ".";
}

std::string shown(const Json& value) {
  return shortened(value.dump(-1, ' ', false, Json::error_handler_t::replace), 60);
}

// What the key's user will see of a number.
double as_used(const KeySpec& key, double x) { return key.single ? static_cast<double>(static_cast<float>(x)) : x; }

bool in_range(const KeySpec& key, const Json& v) {
  const double given = v.get<double>();
  const double x = as_used(key, given);
  if (x == 0 && given != 0) return false;  // zero often means off, so that nothing may become it
  return (key.above_minimum ? x > key.minimum : x >= key.minimum) &&
         (key.below_maximum ? x < key.maximum : x <= key.maximum);
}

bool all_of(const Json& list, bool (*test)(const Json&)) {
  if (!list.is_array()) return false;
  for (const Json& entry : list) {
    if (!test(entry)) return false;
  }
  return true;
}

bool is_integer(const Json& v) { return v.is_number_integer(); }
bool is_text(const Json& v) { return v.is_string(); }

bool acceptable(const KeySpec& key, const Json& v) {
  switch (key.type) {
    case ValueType::kBoolean:
      return v.is_boolean();
    case ValueType::kInteger:
      return is_integer(v) && in_range(key, v);
    case ValueType::kNumber:
      return v.is_number() && in_range(key, v);
    case ValueType::kString:
      return is_text(v);
    case ValueType::kStringList:
      return is_text(v) || all_of(v, is_text);
    case ValueType::kIntegerList:
      if (!all_of(v, is_integer)) return false;
      for (const Json& entry : v) {
        if (!in_range(key, entry)) return false;
      }
      return true;
  }
  return false;
}

// The float in range that is nearest to x; as many digits as tell floats apart.
std::string nearest_single(const KeySpec& key, double x) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  float low = static_cast<float>(key.minimum), high = static_cast<float>(key.maximum);
  if (key.above_minimum) low = std::nextafter(low, kInfinity);
  if (key.below_maximum) high = std::nextafter(high, -kInfinity);
  float nearest = static_cast<float>(std::clamp<double>(x, low, high));
  if (nearest == 0 && x > 0) nearest = std::numeric_limits<float>::denorm_min();
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", static_cast<double>(nearest));
  return text;
}

std::string nearest_value(const KeySpec& key, const Json& v) {
  if (v.is_string() && !key.choices.empty()) {
    const auto names = nearest_names(v.get<std::string>(), key.choices);
    return names.empty() ? "" : "; " + suggestion(names).substr(0, suggestion(names).size() - 1);
  }
  if (key.type == ValueType::kInteger && v.is_number()) {
    const double x = std::clamp(std::round(v.get<double>()), key.minimum, key.maximum);
    return "; the nearest is " + std::to_string(static_cast<std::int64_t>(x));
  }
  if (key.single && v.is_number()) return "; the nearest is " + nearest_single(key, v.get<double>());
  return "";
}

// Sets every key that is known and acceptable; notes which ones were given.
class Reader {
 public:
  Reader(Config& config, Given& given, Faults& faults) : config_(config), given_(given), faults_(faults) {}

  void read(const Json& root) {
    for (const auto& [section, keys] : root.items()) {
      if (!is_section(section)) {
        refuse_top_level(section);
      } else if (!keys.is_object()) {
        faults_.add(section, "found " + shown(keys) + ", wanted a section, { ... }.");
      } else {
        for (const auto& [name, value] : keys.items()) read_key(section, name, value);
      }
    }
  }

 private:
  static bool is_section(const std::string& name) {
    for (const KeySpec& key : key_table()) {
      if (key.section == name) return true;
    }
    return false;
  }

  static bool is_key_name(const std::string& name) {
    for (const KeySpec& key : key_table()) {
      if (key.name == name) return true;
    }
    return false;
  }

  void refuse_top_level(const std::string& name) {
    if (const std::string reason = reason_refused(name, name); !reason.empty()) {
      faults_.add(name, "refused: " + reason + ".");
      return;
    }
    // A key that lost its section, or is written "section.key", is likelier than a misspelt section.
    std::vector<std::string> near;
    if (name.find('.') != std::string::npos) near = nearest_names(name, all_paths());
    if (near.empty() && is_key_name(name)) near = nearest_keys("", name, all_paths());
    if (near.empty()) near = nearest_names(name, all_sections());
    if (near.empty()) near = nearest_keys("", name, all_paths());
    faults_.add(name, "unknown section; " + suggestion(near));
  }

  void read_key(const std::string& section, const std::string& name, const Json& value) {
    const std::string path = section + "." + name;
    const KeySpec* key = find_key(path);
    if (key == nullptr) {
      const std::string reason = reason_refused(section, name);
      faults_.add(path, reason.empty() ? "unknown key; " + suggestion(nearest_keys(section, name, all_paths()))
                                       : "refused: " + reason + ".");
      return;
    }
    given_.insert(path);
    if (acceptable(*key, value) && key->set(config_, value)) return;
    faults_.add(path, "found " + shown(value) + ", wanted " + key->range() + nearest_value(*key, value) + ".");
  }

  Config& config_;
  Given& given_;
  Faults& faults_;
};

}  // namespace

StageConfig Config::stage_config() const {
  StageConfig s;
  s.model = model;
  s.compute = precision.compute;
  s.bf16_layers = precision.bf16_layers;
  s.head = head.precision;
  s.fp8 = fp8;
  s.gradients = gradients;
  s.micro_batch_size = training.micro_batch_size;
  s.seq_length = training.seq_length;
  s.microbatches = microbatches();
  s.seed = static_cast<std::uint64_t>(training.seed);
  return s;
}

Config parse_config(const std::string& json_text, const std::string& source_name,
                    const std::vector<std::string>& overrides) {
  Faults faults;
  Json root = read_config_json(json_text, source_name, faults);
  for (const std::string& text : overrides) apply_override(root, text);
  Config config;
  config.name = std::filesystem::path(source_name).stem().string();
  Given given;
  Reader(config, given, faults).read(root);
  read_schedule_file(config, faults);
  resolve_defaults(config, given, faults);
  check_config(config, given, faults);
  faults.throw_if_any(source_name);
  return config;
}

Config load_config(const std::string& path, const std::vector<std::string>& overrides) {
  const RegularFile file(path);
  const auto text = file.failure().empty() ? file.read_all() : std::nullopt;
  if (!text) {
    throw ConfigError(
        "The config file " + path + " " +
        (file.failure().empty() ? std::string("cannot be read: ") + std::strerror(errno) : file.failure()) +
        "; wanted a JSON file, name one by --config.");
  }
  return parse_config(*text, path, overrides);
}

std::string dump_config(const Config& config) {
  Json root = Json::object();
  for (const KeySpec& key : key_table()) root[key.section][key.name] = key.get(config);
  return root.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

double learning_rate(const TrainingSection& t, std::int64_t step) noexcept {
  if (step < t.lr_warmup_iters) return t.lr * static_cast<double>(step) / static_cast<double>(t.lr_warmup_iters);
  std::int64_t first = t.lr_warmup_iters, last = t.lr_decay_iters;  // the fall goes from lr at first to min_lr at last
  if (t.lr_schedule == LrSchedule::kConstant) return t.lr;
  if (t.lr_schedule == LrSchedule::kWsd) first = t.train_iters - t.lr_decay_iters, last = t.train_iters;
  if (step <= first) return t.lr;  // the end of the warm-up is at lr even where the fall has no step of its own
  if (step >= last) return t.min_lr;
  const double done = static_cast<double>(step - first) / static_cast<double>(last - first);
  const double kept = t.lr_schedule == LrSchedule::kCosine ? 0.5 * (1 + std::cos(std::numbers::pi * done)) : 1 - done;
  return t.min_lr + (t.lr - t.min_lr) * kept;
}

}  // namespace qe
