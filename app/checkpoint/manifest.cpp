#include "app/checkpoint/manifest.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <string_view>

#include "app/checkpoint/safetensors.h"
#include "core/error.h"

namespace qe {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kFirstLine = "{\"manifest_xxh3\": \"";
constexpr std::size_t kDigits = 16;
constexpr std::string_view kEndOfFirstLine = "\",\n";

Json pair_of(const Shape& s) { return {s.rows, s.cols}; }
Shape shape_from(const Json& j) {
  const auto sides = j.get<std::vector<std::int64_t>>();
  if (sides.size() != 2) throw CheckpointError("a shape has two sides");
  return {sides[0], sides[1]};
}

// A loss may be absent, and a skipped step's may be no number: JSON has null for one and a word for the other.
Json json_of(const std::optional<double>& v) {
  if (!v) return nullptr;
  return std::isfinite(*v) ? Json(*v) : Json("not finite");
}
std::optional<double> optional_from(const Json& j) {
  if (j.is_null()) return std::nullopt;
  return j.is_string() ? std::numeric_limits<double>::quiet_NaN() : j.get<double>();
}

// Every key there, none else: a field of another version must not be dropped unseen.
void require_keys(const Json& j, std::initializer_list<std::string_view> keys, const std::string& where) {
  if (!j.is_object()) throw CheckpointError(where + " is no object");
  for (const std::string_view key : keys) {
    if (!j.contains(key)) throw CheckpointError(where + " lacks \"" + std::string(key) + "\"");
  }
  for (const auto& [key, value] : j.items()) {
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
      throw CheckpointError(where + " has \"" + key + "\", which this version does not know");
    }
  }
}

Json json_of(const RunPosition& p) {
  return {{"step", p.step},
          {"epoch", p.epoch},
          {"applied_updates", p.applied_updates},
          {"learning_rate", p.learning_rate},
          {"data", {{"epoch", p.data.epoch}, {"index", p.data.index}}},
          {"skipped_steps", p.skipped_steps},
          {"consecutive_skips", p.consecutive_skips},
          {"initial_train_loss", json_of(p.initial_train_loss)},
          {"final_train_loss", json_of(p.final_train_loss)}};
}

RunPosition position_from(const Json& j) {
  require_keys(j,
               {"step", "epoch", "applied_updates", "learning_rate", "data", "skipped_steps", "consecutive_skips",
                "initial_train_loss", "final_train_loss"},
               "\"position\"");
  require_keys(j["data"], {"epoch", "index"}, "\"position.data\"");
  RunPosition p;
  p.step = j["step"].get<std::int64_t>();
  p.epoch = j["epoch"].get<std::uint64_t>();
  p.applied_updates = j["applied_updates"].get<std::uint64_t>();
  p.learning_rate = j["learning_rate"].get<double>();
  p.data = {j["data"]["epoch"].get<std::int64_t>(), j["data"]["index"].get<std::int64_t>()};
  p.skipped_steps = j["skipped_steps"].get<std::int64_t>();
  p.consecutive_skips = j["consecutive_skips"].get<int>();
  p.initial_train_loss = optional_from(j["initial_train_loss"]);
  p.final_train_loss = optional_from(j["final_train_loss"]);
  return p;
}

Manifest manifest_from(const Json& j) {
  if (!j.contains("schema_version") || j["schema_version"] != kCheckpointSchemaVersion) {
    throw CheckpointError("found schema_version " +
                          (j.contains("schema_version") ? j["schema_version"].dump() : "none") + ", wanted " +
                          std::to_string(kCheckpointSchemaVersion));
  }
  require_keys(j,
               {"manifest_xxh3", "schema_version", "position", "finite", "parameters_xxh3", "data", "config",
                "environment", "gemm_choices", "ranks", "files", "tensors"},
               "it");
  require_keys(j["data"], {"windows", "train"}, "\"data\"");
  Manifest m;
  m.position = position_from(j["position"]);
  m.finite = j["finite"].get<bool>();
  m.parameters_xxh3 = j["parameters_xxh3"].get<std::string>();
  m.data_windows = j["data"]["windows"].get<std::int64_t>();
  for (const Json& f : j["data"]["train"]) {
    m.train_files.push_back(
        {f.at("file").get<std::string>(), f.at("tokens").get<std::int64_t>(), f.at("bytes").get<std::int64_t>()});
  }
  m.config = j["config"];
  m.environment = j["environment"];
  for (const Json& c : j["gemm_choices"]) {
    require_keys(c, {"product", "algorithm"}, "a GEMM choice");
    m.gemm_choices.push_back({c["product"].get<std::string>(), c["algorithm"].get<std::string>()});
  }
  m.ranks = j["ranks"].get<int>();
  for (const Json& f : j["files"]) m.files.push_back(file_from(f));
  for (const Json& t : j["tensors"]) m.tensors.push_back(tensor_from(t));
  return m;
}

}  // namespace

Json json_of(const ManifestTensor& t) {
  return {{"name", t.name},
          {"dtype", safetensors_name(t.dtype)},
          {"global_shape", pair_of(t.global_shape)},
          {"offset", pair_of(t.offset)},
          {"shape", pair_of(t.shape)},
          {"file", t.file},
          {"xxh3", t.xxh3}};
}

ManifestTensor tensor_from(const Json& j) {
  require_keys(j, {"name", "dtype", "global_shape", "offset", "shape", "file", "xxh3"}, "a tensor");
  const std::string dtype = j["dtype"].get<std::string>();
  if (dtype != "F32" && dtype != "BF16") throw CheckpointError("a tensor has dtype " + dtype);
  return {j["name"].get<std::string>(),  dtype == "F32" ? DType::kF32 : DType::kBF16,
          shape_from(j["global_shape"]), shape_from(j["offset"]),
          shape_from(j["shape"]),        j["file"].get<std::string>(),
          j["xxh3"].get<std::string>()};
}

Json json_of(const ManifestFile& f) { return {{"name", f.name}, {"bytes", f.bytes}, {"xxh3", f.xxh3}}; }

ManifestFile file_from(const Json& j) {
  require_keys(j, {"name", "bytes", "xxh3"}, "a file");
  ManifestFile f{j["name"].get<std::string>(), j["bytes"].get<std::uint64_t>(), j["xxh3"].get<std::string>()};
  if (f.name.empty() || f.name.find('/') != std::string::npos) throw CheckpointError("a file has the name " + f.name);
  return f;
}

std::string parameters_digest(const std::vector<ManifestTensor>& tensors) {
  std::vector<std::string> lines;
  for (const ManifestTensor& t : tensors) {
    if (t.name.starts_with("master.")) lines.push_back(t.name + " " + t.xxh3 + "\n");
  }
  std::sort(lines.begin(), lines.end());
  std::string all;
  for (const std::string& line : lines) all += line;
  return digest_of({reinterpret_cast<const unsigned char*>(all.data()), all.size()});
}

std::string manifest_text(const Manifest& m) {
  Json train = Json::array(), gemms = Json::array(), files = Json::array(), tensors = Json::array();
  for (const DataFile& f : m.train_files) train.push_back({{"file", f.name}, {"tokens", f.tokens}, {"bytes", f.bytes}});
  for (const GemmChoice& c : m.gemm_choices) gemms.push_back({{"product", c.product}, {"algorithm", c.algorithm}});
  for (const ManifestFile& f : m.files) files.push_back(json_of(f));
  for (const ManifestTensor& t : m.tensors) tensors.push_back(json_of(t));
  const Json body{{"schema_version", kCheckpointSchemaVersion},
                  {"position", json_of(m.position)},
                  {"finite", m.finite},
                  {"parameters_xxh3", m.parameters_xxh3},
                  {"data", {{"windows", m.data_windows}, {"train", train}}},
                  {"config", m.config},
                  {"environment", m.environment},
                  {"gemm_choices", gemms},
                  {"ranks", m.ranks},
                  {"files", files},
                  {"tensors", tensors}};
  const std::string rest = body.dump(1).substr(2) + "\n";  // without "{\n"
  const std::string digest = digest_of({reinterpret_cast<const unsigned char*>(rest.data()), rest.size()});
  return std::string(kFirstLine) + digest + std::string(kEndOfFirstLine) + rest;
}

Manifest parse_manifest(const std::string& text, const std::string& path) {
  const auto refuse = [&](const std::string& what) -> CheckpointError {
    return CheckpointError(path + " cannot be used: " + what + "; restore it or use another checkpoint.");
  };
  const std::size_t start = kFirstLine.size() + kDigits + kEndOfFirstLine.size();
  if (text.size() <= start || !text.starts_with(kFirstLine) ||
      text.substr(kFirstLine.size() + kDigits, kEndOfFirstLine.size()) != kEndOfFirstLine) {
    throw refuse("its first line holds no digest");
  }
  const std::string stored = text.substr(kFirstLine.size(), kDigits);
  const std::string found =
      digest_of({reinterpret_cast<const unsigned char*>(text.data()) + start, text.size() - start});
  if (stored != found) throw refuse("its digest is " + found + ", wanted " + stored);
  try {
    return manifest_from(Json::parse(text));
  } catch (const CheckpointError& e) {
    throw refuse(e.what());
  } catch (const nlohmann::json::exception& e) {
    throw refuse(e.what());
  }
}

}  // namespace qe
