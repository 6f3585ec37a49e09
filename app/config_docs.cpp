// The key table as text for people and as a JSON Schema for editors.
#include <cmath>
#include <sstream>

#include "app/config.h"
#include "app/config_faults.h"
#include "app/config_keys.h"

namespace qe {
namespace {

std::string number_text(double v) {
  std::ostringstream out;
  out.precision(16);
  if (v == std::floor(v) && std::abs(v) < 1e16) {
    out << static_cast<std::int64_t>(v);
  } else {
    out << v;
  }
  return out.str();
}

Json bounded(const KeySpec& key, const char* type) {
  Json schema{{"type", type}};
  const bool whole = key.type != ValueType::kNumber;
  const auto bound = [whole](double v) { return whole ? Json(static_cast<std::int64_t>(v)) : Json(v); };
  schema[key.above_minimum ? "exclusiveMinimum" : "minimum"] = bound(key.minimum);
  schema[key.below_maximum ? "exclusiveMaximum" : "maximum"] = bound(key.maximum);
  return schema;
}

Json value_schema(const KeySpec& key) {
  const Json text{{"type", "string"}};
  switch (key.type) {
    case ValueType::kBoolean:
      return {{"type", "boolean"}};
    case ValueType::kInteger:
      return bounded(key, "integer");
    case ValueType::kNumber:
      return bounded(key, "number");
    case ValueType::kIntegerList:
      return {{"type", "array"}, {"items", bounded(key, "integer")}};
    case ValueType::kStringList:
      return {{"anyOf", Json::array({text, {{"type", "array"}, {"items", text}}})}};
    case ValueType::kString:
      break;
  }
  if (key.choices.empty()) return text;
  Json names = key.choices;
  for (const std::string& alias : key.aliases) names.push_back(alias);
  return {{"enum", names}};
}

}  // namespace

std::string KeySpec::range() const {
  const auto bounds = [this] {
    return std::string(above_minimum ? "above " : "from ") + number_text(minimum) +
           (below_maximum ? " to below " : " to ") + number_text(maximum);
  };
  switch (type) {
    case ValueType::kBoolean:
      return "true or false";
    case ValueType::kInteger:
      return "an integer " + bounds();
    case ValueType::kNumber:
      return (single ? "an FP32 number " : "a number ") + bounds();
    case ValueType::kIntegerList:
      return "a list of integers " + bounds();
    case ValueType::kStringList:
      return "a string or a list of strings";
    case ValueType::kString:
      break;
  }
  if (choices.empty()) return "a string";
  std::string out = choices.size() == 1 ? "" : "one of ";
  for (std::size_t i = 0; i < choices.size(); ++i) out += (i == 0 ? "\"" : ", \"") + choices[i] + "\"";
  return out;
}

std::string KeySpec::default_text() const { return derived_default.empty() ? get(Config{}).dump() : derived_default; }

std::string config_help() {
  std::string out = "Config keys. JSON, // comments allowed; --set section.key=value overrides a key.\n";
  std::string section;
  for (const KeySpec& key : key_table()) {
    if (key.section != section) out += "\n" + (section = key.section) + "\n";
    out += "  " + key.name + " = " + key.default_text() + "\n      " + key.meaning + "; " + key.range() + "\n";
  }
  return out;
}

std::string config_schema() {
  Json sections = Json::object();
  for (const KeySpec& key : key_table()) {
    Json& section = sections[key.section];
    if (section.is_null())
      section = {{"type", "object"}, {"additionalProperties", false}, {"properties", Json::object()}};
    Json schema = value_schema(key);
    schema["description"] = key.meaning + ". Default: " + key.default_text();
    if (key.derived_default.empty()) schema["default"] = key.get(Config{});
    section["properties"][key.name] = schema;
  }
  const Json root{{"$schema", "http://json-schema.org/draft-07/schema#"},
                  {"title", "qeffect config"},
                  {"type", "object"},
                  {"additionalProperties", false},
                  {"properties", sections}};
  return root.dump(2) + "\n";
}

std::string config_markdown() {
  std::string out =
      "# Config keys\n\nMade by `qeffect schema --markdown` from the key table in app/config_keys.cpp; do not edit.\n"
      "A config is one JSON object of sections; `//` comments are allowed. `--set section.key=value` overrides a "
      "key.\n";
  std::string section;
  for (const KeySpec& key : key_table()) {
    if (key.section != section) {
      out += "\n## " + (section = key.section) + "\n\n| key | default | values | meaning |\n|---|---|---|---|\n";
    }
    const std::string quote = key.derived_default.empty() ? "`" : "";
    out.append("| `").append(key.name).append("` | ").append(quote).append(key.default_text()).append(quote);
    out.append(" | ").append(key.range()).append(" | ").append(key.meaning).append(" |\n");
  }
  return out;
}

}  // namespace qe
