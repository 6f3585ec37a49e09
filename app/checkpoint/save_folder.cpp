#include "app/checkpoint/save_folder.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "app/checkpoint/safetensors.h"
#include "core/error.h"

namespace qe {
namespace {

using Json = nlohmann::ordered_json;

// Whether all values are finite: an exponent of ones is Inf or NaN.
bool all_finite(Bytes bytes, DType type) {
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

}  // namespace

SaveFolder::SaveFolder(Storage& storage, Transport& transport, PipelineRank& rank, std::string dir,
                       const Retention& retention, Manifest about)
    : storage_(storage),
      transport_(transport),
      dir_(std::move(dir)),
      retention_(retention),
      about_(std::move(about)),
      rank_writes_(writes_checkpoints(transport)),
      file_(file_name(transport.rank(Group::kPipeline))) {
  rank.contract().require_quiescent();
  about_.position.epoch = rank.contract().epoch();
  about_.position.applied_updates = rank.applied_updates();
  about_.ranks = transport.size(Group::kWorld);
  saved_.step = about_.position.step;
  saved_.folder = path_in(dir_, step_name(about_.position.step));
  unfinished_ = saved_.folder + ".tmp";
}

void SaveFolder::open(const std::function<void()>& mine) {
  try {
    all_or_none(transport_, [&]() -> std::string {
      if (leads()) {
        storage_.remove(unfinished_);
        storage_.make_directory(unfinished_);
      }
      mine();
      return "";
    });
  } catch (const CheckpointError&) {
    remove();
    throw;
  }
}

std::string SaveFolder::write_file(const std::vector<StateEntry>& entries, const Read& read) const {
  const auto start = std::chrono::steady_clock::now();
  std::vector<StoredTensor> tensors;
  for (const StateEntry& e : entries) tensors.push_back({e.name, e.view.dtype, e.view.shape, 0});
  bool finite = true;
  const std::unique_ptr<OutputFile> file = storage_.create(path_in(unfinished_, file_));
  const WrittenFile written = write_safetensors(*file, tensors, [&](std::size_t i) {
    const Bytes bytes = read(i);
    finite = finite && all_finite(bytes, entries[i].view.dtype);
    return bytes;
  });
  Json list = Json::array();
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const StateEntry& e = entries[i];
    list.push_back(json_of(
        ManifestTensor{e.name, e.view.dtype, e.global_shape, e.offset, e.view.shape, file_, written.tensors[i]}));
  }
  const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - start;
  return Json{{"file", json_of(ManifestFile{file_, written.bytes, written.digest})},
              {"tensors", list},
              {"finite", finite},
              {"ms", taken.count()}}
      .dump();
}

void SaveFolder::gather_parts(const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    if (part.empty()) continue;
    const Json j = Json::parse(part);
    about_.files.push_back(file_from(j.at("file")));
    saved_.bytes += about_.files.back().bytes;
    for (const Json& t : j.at("tensors")) about_.tensors.push_back(tensor_from(t));
    about_.finite = about_.finite && j.at("finite").get<bool>();
    saved_.write_ms = std::max(saved_.write_ms, j.at("ms").get<double>());
  }
  about_.parameters_xxh3 = parameters_digest(about_.tensors);
}

SavedCheckpoint SaveFolder::publish(const std::function<std::string()>& part) {
  try {
    gather_parts(all_or_none(transport_, part));
    saved_.finite = about_.finite;
    saved_.parameters_xxh3 = about_.parameters_xxh3;
    all_or_none(transport_, [&]() -> std::string {
      if (!leads()) return "";
      storage_.write_file(path_in(unfinished_, kManifestName), manifest_text(about_));
      qe::publish(storage_, dir_, about_.position.step, about_.finite);
      aside_ = set_aside(storage_, dir_, about_.position.step, retention_);
      return "";
    });
  } catch (const CheckpointError&) {
    remove();
    throw;
  }
  return saved_;
}

// What was written is of no use; a disk that refuses this too changes nothing.
void SaveFolder::remove() noexcept {
  try {
    if (leads()) storage_.remove(unfinished_);
  } catch (const CheckpointError&) {
  }
}

}  // namespace qe
