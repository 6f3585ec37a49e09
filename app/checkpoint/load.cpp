#include <algorithm>
#include <charconv>
#include <filesystem>

#include "app/checkpoint/checkpoint.h"
#include "app/checkpoint/tensor_reader.h"
#include "app/config_faults.h"
#include "core/error.h"

namespace qe {
namespace {

namespace fs = std::filesystem;

constexpr char kLatest[] = "latest";

std::optional<std::int64_t> as_step(const std::string& text) {
  std::int64_t step = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), step);
  if (error != std::errc() || stop != text.data() + text.size() || step < 0) return std::nullopt;
  return step;
}

// The folder that `wanted` names, a step or a path, if it is there.
std::string named_folder(const std::string& dir, const std::string& wanted) {
  const auto step = as_step(wanted);
  const std::string folder = step ? path_in(dir, step_name(*step)) : wanted;
  if (fs::is_directory(folder)) {
    if (fs::exists(path_in(folder, kManifestName)) || steps_in(folder).empty()) return folder;
    throw CheckpointError(folder + " is a folder of checkpoints, with " + listed(steps_in(folder)) +
                          "; name one of them, as " + path_in(folder, step_name(steps_in(folder).back())) + ".");
  }
  throw CheckpointError("There is no checkpoint " + folder + "; " + dir + " has " + listed(steps_in(dir)) +
                        ". Resume from one of those, or from \"latest\", which starts afresh where none is.");
}

// All ranks look at the folder together, each at its share of the files. The manifest, or why there is none.
struct Verdict {
  std::optional<Manifest> manifest;
  std::string refusal;
};
Verdict examine(Transport& transport, const std::string& folder) {
  Verdict verdict;
  try {
    const auto all = all_or_none(transport, [&]() -> std::string {
      const std::string text = read_text_file(path_in(folder, kManifestName));
      verdict.manifest = open_checkpoint(folder);
      verify_files(folder, *verdict.manifest, transport.rank(Group::kWorld), transport.size(Group::kWorld));
      return digest_of({reinterpret_cast<const unsigned char*>(text.data()), text.size()});
    });
    all_or_none(transport, [&]() -> std::string {
      if (all[static_cast<std::size_t>(transport.rank(Group::kWorld))] == all.front()) return "";
      throw CheckpointError(folder + " is another checkpoint here than on rank 0; name a folder that hosts share.");
    });
  } catch (const CheckpointError& e) {
    verdict = {std::nullopt, e.what()};
  }
  return verdict;
}

// What keeps the entry from being loaded; empty: nothing.
std::string mismatch(TensorReader& reader, const StateEntry& e) {
  const ManifestTensor* t = reader.find(e.name);
  if (t == nullptr) return e.name + " is missing";
  const auto shape = [](const Shape& s) { return std::to_string(s.rows) + " x " + std::to_string(s.cols); };
  if (t->dtype != e.view.dtype) {
    return e.name + " is " + safetensors_name(t->dtype) + ", wanted " + safetensors_name(e.view.dtype);
  }
  if (t->global_shape != e.global_shape || t->offset != e.offset || t->shape != e.view.shape) {
    return e.name + " is " + shape(t->shape) + ", wanted " + shape(e.view.shape);
  }
  return reader.stored_as_listed(*t) ? "" : e.name + " is not in " + t->file + " as the manifest says";
}

void require_fitting(TensorReader& reader, const std::vector<StateEntry>& entries, const std::string& folder) {
  std::string lines;
  int faults = 0;
  for (const StateEntry& e : entries) {
    const std::string fault = mismatch(reader, e);
    if (fault.empty()) continue;
    if (++faults <= 10) lines += "\n  " + fault;
  }
  if (faults == 0) return;
  throw CheckpointError(folder + " does not fit this model in " + counted(faults, "tensor") + ":" + lines +
                        (faults > 10 ? "\n  …" : "") + "\nUse the config of its manifest.json.");
}

// A folder above the one that "latest" points to is complete or not, and is not taken; it must not go without a word.
void note_newer(const std::string& dir, FoundCheckpoint& found) {
  for (const std::int64_t step : steps_in(dir)) {
    const std::string folder = path_in(dir, step_name(step));
    const auto named = [&](const std::string& line) { return line.find(folder) != std::string::npos; };
    if (step <= found.manifest.position.step ||
        std::any_of(found.passed_over.begin(), found.passed_over.end(), named)) {
      continue;
    }
    found.passed_over.push_back(folder +
                                " is newer than what latest points to: its run ended before it was announced, or "
                                "was taken back to an earlier step; --resume " +
                                std::to_string(step) + " takes it.");
  }
}

bool is_weight(const std::string& name) { return name.starts_with("master."); }

}  // namespace

std::optional<FoundCheckpoint> find_checkpoint(Transport& transport, const std::string& dir,
                                               const std::string& wanted) {
  // Rank 0 looks around; the others look where it says.
  const std::vector<std::string> told = all_or_none(transport, [&]() -> std::string {
    if (transport.rank(Group::kWorld) != 0) return "";
    if (wanted != kLatest) return named_folder(dir, wanted) + "\n";
    std::string lines;
    for (const std::int64_t step : candidates_in(dir)) lines += path_in(dir, step_name(step)) + "\n";
    return lines;
  });
  FoundCheckpoint found;
  if (wanted == kLatest) {
    for (const std::string& name : unfinished_in(dir)) {
      found.passed_over.push_back(path_in(dir, name) + " was not finished.");
    }
  }
  const std::size_t unfinished = found.passed_over.size();
  const std::string& folders = told.front();
  for (std::size_t at = 0, end = 0; at < folders.size(); at = end + 1) {
    end = folders.find('\n', at);
    const std::string folder = folders.substr(at, end - at);
    Verdict verdict = examine(transport, folder);
    if (verdict.manifest && (verdict.manifest->finite || wanted != kLatest)) {
      found.folder = folder;
      found.manifest = std::move(*verdict.manifest);
      if (wanted == kLatest) note_newer(dir, found);
      return found;
    }
    found.passed_over.push_back(verdict.manifest ? folder + " holds weights that are not finite." : verdict.refusal);
  }
  if (found.passed_over.size() == unfinished) return std::nullopt;
  std::string lines;
  for (const std::string& line : found.passed_over) lines += "\n  " + line;
  throw CheckpointError("No checkpoint of " + (wanted == kLatest ? dir : wanted) + " can be used:" + lines);
}

void load_checkpoint(Transport& transport, PipelineRank& rank, const FoundCheckpoint& found, Restored what) {
  std::vector<StateEntry> entries = rank.state();
  if (what == Restored::kWeights) std::erase_if(entries, [](const StateEntry& e) { return !is_weight(e.name); });
  TensorReader reader(found.folder, found.manifest);
  const std::vector<std::string> counts = all_or_none(transport, [&] {
    require_fitting(reader, entries, found.folder);
    return std::to_string(entries.size());
  });
  std::size_t loaded = 0, stored = 0;
  for (int r = 0; r < transport.size(Group::kPipeline); ++r) loaded += std::stoull(counts[static_cast<std::size_t>(r)]);
  for (const ManifestTensor& t : found.manifest.tensors) {
    stored += what == Restored::kEverything || is_weight(t.name) ? 1 : 0;
  }
  if (loaded != stored) {
    throw CheckpointError(found.folder + " has " + std::to_string(stored) + " tensors and this model " +
                          std::to_string(loaded) + "; use the config of its manifest.json.");
  }
  all_or_none(transport, [&]() -> std::string {
    for (const StateEntry& e : entries) {
      const ManifestTensor& t = *reader.find(e.name);
      rank.load(e, reader.read(t));
      require_digest(t, rank.read(e), "on the device");
    }
    return "";
  });
  if (what == Restored::kEverything) {
    rank.restore(found.manifest.position.epoch, found.manifest.position.applied_updates);
  } else {
    rank.restore(0, 0);
  }
}

}  // namespace qe
