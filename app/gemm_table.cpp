#include "app/gemm_table.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>

#include "app/config_faults.h"
#include "app/config_json.h"
#include "app/regular_file.h"
#include "core/error.h"

namespace qe {
namespace {

constexpr int kSchemaVersion = 1;
constexpr std::size_t kWordDigits = 16;
constexpr const char* kAdvice = "; mend it, or tune into a new file by qeffect bench --tune.";

std::string shown(const Json& value) { return shortened(value.dump(), 60); }

// Lower-case words of 16 digits with a space between them. How many there are is the library's business.
bool is_algorithm(const std::string& text) {
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool between = i % (kWordDigits + 1) == kWordDigits;
    if (between ? text[i] != ' ' : std::string_view("0123456789abcdef").find(text[i]) == std::string_view::npos) {
      return false;
    }
  }
  return text.size() % (kWordDigits + 1) == kWordDigits;
}

// Reads one object of the file: exactly the keys that are asked for.
class Reader {
 public:
  Reader(const Json& json, std::string path, Faults& faults)
      : is_object_(json.is_object()), path_(std::move(path)), faults_(faults) {
    if (is_object_) {
      json_ = json;
    } else {
      faults_.add(path_, "found " + shown(json) + ", wanted an object, { ... }" + kAdvice);
    }
  }
  ~Reader() {
    for (const auto& [name, value] : json_.items()) faults_.add(at(name), std::string("unknown key") + kAdvice);
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  // null, with a fault, where the value is not one that `fits`.
  template <class Fits>
  Json take(const std::string& name, const char* wanted, const Fits& fits) {
    const Json value = json_.contains(name) ? json_[name] : Json();
    json_.erase(name);
    if (fits(value)) return value;
    if (is_object_)
      faults_.add(at(name), "found " + (value.is_null() ? "none" : shown(value)) + ", wanted " + wanted + kAdvice);
    return {};
  }
  std::string text(const std::string& name) {
    const Json value = take(name, "a text", [](const Json& v) { return v.is_string() && v != ""; });
    return value.is_null() ? "" : value.get<std::string>();
  }
  double microseconds(const std::string& name) {
    const Json value = take(name, "microseconds above 0", [](const Json& v) { return v.is_number() && v > 0; });
    return value.is_null() ? 0 : value.get<double>();
  }
  Json list(const std::string& name) {
    const Json value = take(name, "a list, [ ... ]", [](const Json& v) { return v.is_array(); });
    return value.is_null() ? Json::array() : value;
  }
  [[nodiscard]] std::string at(const std::string& name) const { return path_.empty() ? name : path_ + "." + name; }

 private:
  const bool is_object_;  // else it has one fault, not one a key
  Json json_ = Json::object();
  std::string path_;
  Faults& faults_;
};

std::string indexed(const std::string& path, std::size_t i) { return path + "[" + std::to_string(i) + "]"; }

GemmTableEntry read_entry(const Json& json, const std::string& path, Faults& faults) {
  Reader reader(json, path, faults);
  GemmTableEntry entry;
  entry.product = reader.text("product");
  const Json algorithm = reader.take("algorithm", "words of 16 hexadecimal digits",
                                     [](const Json& v) { return v.is_string() && is_algorithm(v.get<std::string>()); });
  if (algorithm.is_string()) entry.algorithm = algorithm.get<std::string>();
  entry.us = reader.microseconds("us");
  entry.first_us = reader.microseconds("first_us");
  return entry;
}

GemmTable read_table(const Json& json, const std::string& path, Faults& faults) {
  Reader reader(json, path, faults);
  GemmTable table;
  table.platform.device = reader.text("device");
  const Json count = reader.take("multiprocessors", "an integer from 1 to 100000",
                                 [](const Json& v) { return v.is_number_integer() && v >= 1 && v <= 100000; });
  if (!count.is_null()) table.platform.multiprocessors = count.get<int>();
  table.platform.library = reader.text("library");
  const Json entries = reader.list("entries");
  std::set<std::string> products;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const std::string place = indexed(reader.at("entries"), i);
    table.entries.push_back(read_entry(entries[i], place, faults));
    const std::string& product = table.entries.back().product;
    if (!product.empty() && !products.insert(product).second) {
      faults.add(place + ".product",
                 "found " + product + " a second time, wanted each product once; keep one of them.");
    }
  }
  return table;
}

std::string described(const GemmPlatform& p) {
  return p.device + ", " + counted(p.multiprocessors, "multiprocessor") + ", " + p.library;
}

std::vector<GemmTable>::iterator find_table(std::vector<GemmTable>& tables, const GemmPlatform& platform) {
  return std::find_if(tables.begin(), tables.end(), [&](const GemmTable& t) { return t.platform == platform; });
}

}  // namespace

std::vector<GemmTable> parse_gemm_tables(const std::string& text, const std::string& source) {
  Faults faults;
  std::vector<GemmTable> tables;
  {
    Reader root(read_config_json(text, source, faults), "", faults);
    root.take("schema_version", "1", [](const Json& v) { return v == kSchemaVersion; });
    const Json list = root.list("tables");
    for (std::size_t i = 0; i < list.size(); ++i) {
      const std::string place = indexed("tables", i);
      GemmTable table = read_table(list[i], place, faults);
      if (!table.platform.device.empty() && find_table(tables, table.platform) != tables.end()) {
        faults.add(place, "found a second table for " + described(table.platform) + ", wanted one; join them.");
      }
      tables.push_back(std::move(table));
    }
  }
  faults.throw_if_any(source);
  return tables;
}

std::vector<GemmTable> read_gemm_tables(const std::string& path) {
  const RegularFile file(path);
  const std::optional<std::string> text = file.failure().empty() ? file.read_all() : std::nullopt;
  if (text) return parse_gemm_tables(*text, path);
  const std::string why = file.failure().empty() ? "cannot be read" : file.failure();
  throw ConfigError("The tune file " + path + " " + why + "; make one by qeffect bench --tune.");
}

std::string gemm_tables_json(const std::vector<GemmTable>& tables) {
  using Ordered = nlohmann::ordered_json;
  Ordered list = Ordered::array();
  for (const GemmTable& t : tables) {
    Ordered entries = Ordered::array();
    for (const GemmTableEntry& e : t.entries) {
      entries.push_back({{"product", e.product}, {"algorithm", e.algorithm}, {"us", e.us}, {"first_us", e.first_us}});
    }
    list.push_back({{"device", t.platform.device},
                    {"multiprocessors", t.platform.multiprocessors},
                    {"library", t.platform.library},
                    {"entries", entries}});
  }
  return Ordered{{"schema_version", kSchemaVersion}, {"tables", list}}.dump(1) + "\n";
}

void write_gemm_tables(const std::string& path, const std::vector<GemmTable>& tables) {
  const std::string temporary = path + ".tmp";
  std::ofstream file(temporary, std::ios::binary);
  file << gemm_tables_json(tables);
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(temporary, path, error);
  if (!file || error) {
    throw UsageError("The tune file " + path + " cannot be written; name a file in a folder that can be written.");
  }
}

void put_entry(std::vector<GemmTable>& tables, const GemmPlatform& platform, const GemmTableEntry& entry) {
  auto table = find_table(tables, platform);
  if (table == tables.end()) table = tables.insert(table, {platform, {}});
  const auto same = std::find_if(table->entries.begin(), table->entries.end(),
                                 [&](const GemmTableEntry& e) { return e.product == entry.product; });
  if (same == table->entries.end()) {
    table->entries.push_back(entry);
  } else {
    *same = entry;
  }
}

std::string use_gemm_table(const std::string& path, Backend& backend) {
  if (path.empty()) return "";
  std::vector<GemmTable> tables = read_gemm_tables(path);
  GemmChooser* chooser = gemm_chooser(backend);
  if (chooser == nullptr) return path + " is not used: the CPU backend computes every product in one way";
  const GemmPlatform platform = chooser->gemm_platform();
  const auto table = find_table(tables, platform);
  if (table == tables.end()) {
    return path + " is not used: it has no table for " + described(platform) + "; make one by qeffect bench --tune";
  }
  std::vector<GemmChoice> choices;
  for (const GemmTableEntry& e : table->entries) choices.push_back({e.product, e.algorithm});
  chooser->use_gemms(choices, path);
  return path + ": " + counted(std::ssize(choices), "tuned product") + " for " + described(platform);
}

}  // namespace qe
