#include "app/config_json.h"

#include <algorithm>
#include <set>

#include "core/error.h"

namespace qe {
namespace {

// nlohmann keeps the last of two equal keys and says nothing, so keys are noted while they are parsed.
class DuplicateFinder {
 public:
  explicit DuplicateFinder(Faults& faults) : faults_(faults) {}

  bool operator()(int /*depth*/, Json::parse_event_t event, Json& parsed) {
    switch (event) {
      case Json::parse_event_t::object_start:
        open_.push_back({});
        break;
      case Json::parse_event_t::object_end:
        open_.pop_back();
        break;
      case Json::parse_event_t::key:
        open_.back().current = parsed.get<std::string>();
        if (!open_.back().seen.insert(open_.back().current).second) {
          faults_.add(path(), "found this key more than once; keep one.");
        }
        break;
      default:
        break;
    }
    return true;
  }

 private:
  struct Object {
    std::set<std::string> seen;
    std::string current;
  };
  [[nodiscard]] std::string path() const {
    std::string out;
    for (const Object& o : open_) out += (out.empty() ? "" : ".") + o.current;
    return out;
  }
  Faults& faults_;
  std::vector<Object> open_;
};

std::string describe_syntax_error(const std::string& text, const Json::parse_error& e, const std::string& source_name) {
  const std::size_t at = std::min(e.byte == 0 ? 0 : e.byte - 1, text.size());
  const std::size_t line_start = at == 0 ? std::string::npos : text.rfind('\n', at - 1);
  const auto line = 1 + std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(at), '\n');
  const std::size_t column = line_start == std::string::npos ? at + 1 : at - line_start;
  const std::string place = source_name + ":" + std::to_string(line) + ":" + std::to_string(column) + ": ";
  if (at == text.size()) return place + "the JSON ends too early; close every brace, bracket and quote.";
  const std::size_t last = at == 0 ? std::string::npos : text.find_last_not_of(" \t\r\n", at - 1);
  if ((text[at] == '}' || text[at] == ']') && last != std::string::npos && text[last] == ',') {
    return place + "found a comma before the closing " + text[at] + "; JSON wants none there, remove it.";
  }
  std::string what =
      e.what();  // "[json...] parse error at line 1, column 2: syntax error while ... - unexpected ...; ..."
  if (const auto cut = what.find(" - "); cut != std::string::npos) what = what.substr(cut + 3);
  return place + "not valid JSON, " + what + ".";
}

}  // namespace

Json read_config_json(const std::string& text, const std::string& source_name, Faults& faults) {
  if (text.starts_with("\xEF\xBB\xBF")) {
    throw ConfigError(source_name + " begins with a byte order mark; save it as UTF-8 without one.");
  }
  try {
    Json root = Json::parse(text, DuplicateFinder(faults), /*allow_exceptions=*/true, /*ignore_comments=*/true);
    if (root.is_object()) return root;
    throw ConfigError(source_name + " holds " + root.type_name() + "; wanted one JSON object of sections.");
  } catch (const Json::parse_error& e) {
    throw ConfigError(describe_syntax_error(text, e, source_name));
  }
}

void apply_override(Json& root, const std::string& override_text) {
  const std::size_t equals = override_text.find('=');
  const std::string path = override_text.substr(0, equals);
  const std::size_t dot = path.find('.');
  if (equals == std::string::npos || dot == std::string::npos || dot == 0 || dot + 1 == path.size()) {
    throw UsageError("--set " + override_text +
                     " is not an override; wanted section.key=value, as in training.lr=3e-4.");
  }
  const std::string text = override_text.substr(equals + 1);
  Json value;
  try {
    value = Json::parse(text);
  } catch (const Json::exception&) {
    value = text;
  }
  Json& section = root[path.substr(0, dot)];
  if (section.is_null() || section.is_object()) section[path.substr(dot + 1)] = value;
}

}  // namespace qe
