#include "app/config_json.h"

#include <algorithm>
#include <set>
#include <utility>

#include "app/utf8.h"
#include "core/error.h"

namespace qe {
namespace {

constexpr int kMostNesting = 64;  // a config needs three levels; deeper ones cost stack when they are taken apart

// Watches the parser. nlohmann keeps the last of two equal keys and says nothing, so keys are noted as they come.
class ParseWatch {
 public:
  // `faults` may be null: then duplicates are not looked for. `source` is what messages name.
  ParseWatch(std::string source, Faults* faults) : source_(std::move(source)), faults_(faults) {}

  bool operator()(int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kMostNesting) {
      throw ConfigError(source_ + " nests deeper than " + std::to_string(kMostNesting) +
                        " levels; a config has sections of keys, and lists at most.");
    }
    if (faults_ == nullptr) return true;
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
          faults_->add(path(), "found this key more than once; keep one.");
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
  std::string source_;
  Faults* faults_;
  std::vector<Object> open_;
};

// "x.json:3:7: "
std::string place_of(const std::string& text, std::size_t at, const std::string& source_name) {
  const std::size_t line_start = at == 0 ? std::string::npos : text.rfind('\n', at - 1);
  const auto line = 1 + std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(at), '\n');
  const std::size_t column = line_start == std::string::npos ? at + 1 : at - line_start;
  return source_name + ":" + std::to_string(line) + ":" + std::to_string(column) + ": ";
}

std::string describe_syntax_error(const std::string& text, const Json::parse_error& e, const std::string& source_name) {
  const std::size_t at = std::min(e.byte == 0 ? 0 : e.byte - 1, text.size());
  const std::string place = place_of(text, at, source_name);
  if (at == text.size()) return place + "the JSON ends too early; close every brace, bracket and quote.";
  const std::size_t last = at == 0 ? std::string::npos : text.find_last_not_of(" \t\r\n", at - 1);
  if ((text[at] == '}' || text[at] == ']') && last != std::string::npos && text[last] == ',') {
    return place + "found a comma before the closing " + text[at] + "; JSON wants none there, remove it.";
  }
  std::string what =
      e.what();  // "[json...] parse error at line 1, column 2: syntax error while ... - unexpected ...; ..."
  if (const auto cut = what.find(" - "); cut != std::string::npos) what = what.substr(cut + 3);
  return place + "not valid JSON, " + shortened(what, 200) + ".";
}

// What the parser would take, or refuse in words that only its authors understand.
void check_text(const std::string& text, const std::string& source_name) {
  if (text.empty()) throw ConfigError(source_name + " is empty; wanted a JSON object of sections, {} at least.");
  if (text.starts_with("\xEF\xBB\xBF")) {
    throw ConfigError(source_name + " begins with a byte order mark; save it as UTF-8 without one.");
  }
  if (const std::size_t at = text.find('\0'); at != std::string::npos) {
    throw ConfigError(place_of(text, at, source_name) + "found a NUL byte; wanted JSON as UTF-8 text.");
  }
  if (const std::size_t at = first_invalid_utf8(text); at != std::string::npos) {
    throw ConfigError(place_of(text, at, source_name) + "found a byte that is not UTF-8; save the file as UTF-8.");
  }
}

}  // namespace

Json read_config_json(const std::string& text, const std::string& source_name, Faults& faults) {
  check_text(text, source_name);
  try {
    Json root =
        Json::parse(text, ParseWatch(source_name, &faults), /*allow_exceptions=*/true, /*ignore_comments=*/true);
    if (root.is_object()) return root;
    throw ConfigError(source_name + " holds " + root.type_name() + "; wanted one JSON object of sections.");
  } catch (const Json::parse_error& e) {
    throw ConfigError(describe_syntax_error(text, e, source_name));
  } catch (const Json::out_of_range& e) {  // "[json...] number overflow parsing '1e999'"
    const std::string what = e.what();
    const std::size_t quote = what.find('\'');
    throw ConfigError(source_name + ": found the number " +
                      shortened(quote == std::string::npos ? what : what.substr(quote), 60) +
                      ", wanted one below 1.8e308.");
  }
}

void apply_override(Json& root, const std::string& override_text) {
  const std::size_t equals = override_text.find('=');
  const std::string path = override_text.substr(0, equals);
  const std::size_t dot = path.find('.');
  if (equals == std::string::npos || dot == std::string::npos || dot == 0 || dot + 1 == path.size()) {
    throw UsageError("--set " + shortened(override_text, 100) +
                     " is not an override; wanted section.key=value, as in training.lr=3e-4.");
  }
  if (!is_utf8(override_text)) throw ConfigError("--set " + path + ": found a value that is not UTF-8; wanted UTF-8.");
  const std::string text = override_text.substr(equals + 1);
  Json value;
  try {
    value = Json::parse(text, ParseWatch("--set " + shortened(override_text, 60), nullptr));
  } catch (const Json::exception&) {
    value = text;
  }
  Json& section = root[path.substr(0, dot)];
  if (section.is_null() || section.is_object()) section[path.substr(dot + 1)] = value;
}

}  // namespace qe
