#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "app/checkpoint/checkpoint.h"
#include "app/checkpoint/safetensors.h"
#include "core/error.h"

namespace qe {
namespace {

using Json = nlohmann::ordered_json;

// Whether all values are finite: an exponent of ones is Inf or NaN.
bool all_finite(const std::vector<unsigned char>& bytes, DType type) {
  if (type == DType::kBF16) {
    for (std::size_t i = 0; i + 1 < bytes.size(); i += 2) {
      std::uint16_t v = 0;
      std::memcpy(&v, bytes.data() + i, sizeof v);
      if ((v & 0x7f80u) == 0x7f80u) return false;
    }
    return true;
  }
  for (std::size_t i = 0; i + 3 < bytes.size(); i += 4) {
    std::uint32_t v = 0;
    std::memcpy(&v, bytes.data() + i, sizeof v);
    if ((v & 0x7f800000u) == 0x7f800000u) return false;
  }
  return true;
}

std::string file_name(int pipeline_rank) {
  const std::string digits = std::to_string(pipeline_rank);
  return "rank_" + std::string(5 - std::min<std::size_t>(5, digits.size()), '0') + digits + ".safetensors";
}

// This rank's file; returns its part of the manifest as JSON, for the exchange.
std::string write_rank_file(Storage& storage, PipelineRank& rank, const std::string& folder, const std::string& name) {
  const std::vector<StateEntry> entries = rank.state();
  std::vector<StoredTensor> tensors;
  for (const StateEntry& e : entries) tensors.push_back({e.name, e.view.dtype, e.view.shape, 0});
  bool finite = true;
  const std::unique_ptr<OutputFile> file = storage.create(path_in(folder, name));
  const WrittenFile written = write_safetensors(*file, tensors, [&](std::size_t i) {
    std::vector<unsigned char> bytes = rank.read(entries[i]);
    finite = finite && all_finite(bytes, entries[i].view.dtype);
    return bytes;
  });
  Json list = Json::array();
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const StateEntry& e = entries[i];
    list.push_back(json_of(
        ManifestTensor{e.name, e.view.dtype, e.global_shape, e.offset, e.view.shape, name, written.tensors[i]}));
  }
  return Json{
      {"file", json_of(ManifestFile{name, written.bytes, written.digest})}, {"tensors", list}, {"finite", finite}}
      .dump();
}

void gather_parts(const std::vector<std::string>& parts, Manifest& manifest) {
  for (const std::string& part : parts) {
    if (part.empty()) continue;
    const Json j = Json::parse(part);
    manifest.files.push_back(file_from(j.at("file")));
    for (const Json& t : j.at("tensors")) manifest.tensors.push_back(tensor_from(t));
    manifest.finite = manifest.finite && j.at("finite").get<bool>();
  }
  manifest.parameters_xxh3 = parameters_digest(manifest.tensors);
}

}  // namespace

std::vector<std::string> all_or_none(Transport& transport, const std::function<std::string()>& mine) {
  std::string text;
  try {
    text = "+" + mine();
  } catch (const CheckpointError& e) {
    text = std::string("-") + e.what();
  } catch (const Error&) {
    throw;  // takes the job down under its own name
  } catch (const std::exception& e) {
    text = std::string("-") + e.what();
  }
  std::vector<std::string> all = transport.exchange(text, Group::kWorld);
  const bool all_alike = std::all_of(all.begin(), all.end(), [&](const std::string& s) { return s == all.front(); });
  if (all_alike && text.starts_with('-')) throw CheckpointError(text.substr(1));
  std::string errors;
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].starts_with('-')) {
      errors += (errors.empty() ? "rank " : "\nrank ") + std::to_string(r) + ": " + all[r].substr(1);
    }
    all[r].erase(0, 1);
  }
  if (!errors.empty()) throw CheckpointError(errors);
  return all;
}

void probe_shared_folder(Storage& storage, Transport& transport, const std::string& dir) {
  const bool leads = transport.rank(Group::kWorld) == 0;
  const std::string path = path_in(dir, "shared.tmp");
  const std::string token = all_or_none(transport, [&]() -> std::string {
                              if (!leads) return "";
                              storage.make_directory(dir);
                              const std::string text = std::to_string(
                                  std::filesystem::file_time_type::clock::now().time_since_epoch().count());
                              storage.write_file(path, text);
                              return text;
                            }).front();
  all_or_none(transport, [&]() -> std::string {
    std::string found;
    try {
      found = read_text_file(path);
    } catch (const CheckpointError&) {
      found.clear();  // not there is the same as another one
    }
    if (found == token) return "";
    throw CheckpointError("checkpoint.dir " + dir + " is not shared: this rank does not see what rank 0 wrote to " +
                          path + "; name a folder that all hosts have in common.");
  });
  all_or_none(transport, [&]() -> std::string {
    if (leads) storage.remove(path);
    return "";
  });
}

SavedCheckpoint save_checkpoint(Storage& storage, Transport& transport, PipelineRank& rank, const std::string& dir,
                                const Retention& retention, Manifest about) {
  rank.contract().require_quiescent();
  const bool leads = transport.rank(Group::kWorld) == 0;
  about.position.epoch = rank.contract().epoch();
  about.position.applied_updates = rank.applied_updates();
  about.ranks = transport.size(Group::kWorld);
  SavedCheckpoint saved;
  saved.folder = path_in(dir, step_name(about.position.step));
  const std::string unfinished = saved.folder + ".tmp";
  try {
    all_or_none(transport, [&]() -> std::string {
      if (!leads) return "";
      storage.remove(unfinished);
      storage.make_directory(unfinished);
      return "";
    });
    gather_parts(all_or_none(transport,
                             [&]() -> std::string {
                               if (transport.rank(Group::kData) != 0) return "";
                               return write_rank_file(storage, rank, unfinished,
                                                      file_name(transport.rank(Group::kPipeline)));
                             }),
                 about);
    saved.finite = about.finite;
    saved.parameters_xxh3 = about.parameters_xxh3;
    const std::vector<std::string> removed = all_or_none(transport, [&]() -> std::string {
      if (!leads) return "";
      storage.write_file(path_in(unfinished, kManifestName), manifest_text(about));
      publish(storage, dir, about.position.step, about.finite);
      return Json(prune(storage, dir, about.position.step, retention)).dump();
    });
    saved.removed = Json::parse(removed.front()).get<std::vector<std::string>>();
  } catch (const CheckpointError&) {
    // What was written is of no use; a disk that refuses this too changes nothing.
    try {
      if (leads) storage.remove(unfinished);
    } catch (const CheckpointError&) {
    }
    throw;
  }
  return saved;
}

}  // namespace qe
