// The key table: every config key once, with type, range, default and one line of meaning. The parser, the checks'
// wording, the help, the JSON Schema and the docs page are all made from it. Contradictions between keys are in
// config_check.cpp.
#pragma once

#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "app/config.h"

namespace qe {

using Json = nlohmann::ordered_json;

enum class ValueType : std::uint8_t { kBoolean, kInteger, kNumber, kString, kStringList, kIntegerList };

struct KeySpec {
  std::string section;
  std::string name;
  ValueType type = ValueType::kInteger;
  double minimum = -std::numeric_limits<double>::infinity();  // of the number, or of each list entry
  double maximum = std::numeric_limits<double>::infinity();
  bool above_minimum = false;  // the minimum itself is refused
  bool below_maximum = false;
  bool single = false;               // of a number: what is used, and so what is checked, is the nearest float
  std::vector<std::string> choices;  // of a string; empty: any
  std::vector<std::string> aliases;  // other accepted spellings, for the schema
  std::string derived_default;       // how the default follows from other keys; empty: the value in Config{}
  std::string meaning;
  std::function<bool(Config&, const Json&)> set;  // false: not one of the choices. The type has been checked
  std::function<Json(const Config&)> get;

  [[nodiscard]] std::string path() const { return section + "." + name; }
  [[nodiscard]] std::string range() const;         // "an integer from 1 to 1024", "one of fp8, bf16, fp32"
  [[nodiscard]] std::string default_text() const;  // "4", "2 under zbv, else 1"
};

// In the order of documentation; keys of one section stand together.
const std::vector<KeySpec>& key_table();

// Names that users of other trainers will try, and why they are refused.
struct RefusedKey {
  std::string_view name;  // "section.key", a leaf name, or a section
  std::string_view reason;
};
const std::vector<RefusedKey>& refused_keys();

}  // namespace qe
