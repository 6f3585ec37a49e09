#include "app/checkpoint/store.h"

#include <algorithm>
#include <charconv>
#include <filesystem>

#include "core/error.h"

namespace qe {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step_";
constexpr std::string_view kUnfinished = ".tmp";
constexpr std::size_t kStepDigits = 8;
constexpr char kPointer[] = "latest";

std::vector<std::string> names_in(const std::string& dir) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    throw CheckpointError("Cannot list " + dir + " (" + error.message() + "); check checkpoint.dir.");
  }
  return names;
}

// Out of the names that readers look at; returns where it is now.
std::string put_aside(Storage& storage, const std::string& dir, const std::string& name) {
  std::string aside = path_in(dir, name + ".old" + std::string(kUnfinished));
  if (fs::exists(aside)) storage.remove(aside);
  storage.rename(path_in(dir, name), aside);
  return aside;
}

}  // namespace

std::string step_name(std::int64_t step) {
  const std::string digits = std::to_string(step);
  return std::string(kPrefix) + std::string(kStepDigits - std::min(kStepDigits, digits.size()), '0') + digits;
}

std::optional<std::int64_t> step_of_name(const std::string& name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  std::int64_t step = 0;
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  if (error != std::errc() || stop != end || step < 0 || step_name(step) != name) return std::nullopt;
  return step;
}

std::string path_in(const std::string& dir, const std::string& name) { return (fs::path(dir) / name).string(); }

std::vector<std::int64_t> steps_in(const std::string& dir) {
  std::vector<std::int64_t> steps;
  for (const std::string& name : names_in(dir)) {
    if (const auto step = step_of_name(name)) steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::string listed(const std::vector<std::int64_t>& steps) {
  if (steps.empty()) return "no checkpoint";
  std::string text = steps.size() == 1 ? "step " : "steps ";
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if (i > 0) text += i + 1 == steps.size() ? " and " : ", ";
    text += std::to_string(steps[i]);
  }
  return text;
}

std::optional<std::int64_t> pointed_at(const std::string& dir) {
  const std::string path = path_in(dir, kPointer);
  if (!fs::is_regular_file(path)) return std::nullopt;
  std::string name = read_text_file(path);
  if (name.empty() || name.back() != '\n') return std::nullopt;
  name.pop_back();
  return step_of_name(name);
}

std::vector<std::int64_t> candidates_in(const std::string& dir) {
  std::vector<std::int64_t> steps = steps_in(dir);
  std::reverse(steps.begin(), steps.end());
  const auto pointed = pointed_at(dir);
  if (!pointed) return steps;
  // A folder above the pointer was not yet announced, or belongs to a run that was taken back: it comes last.
  const auto above = std::stable_partition(steps.begin(), steps.end(), [&](std::int64_t s) { return s <= *pointed; });
  std::sort(above, steps.end());
  if (std::find(steps.begin(), steps.end(), *pointed) == steps.end()) steps.insert(steps.begin(), *pointed);
  return steps;
}

std::vector<std::string> unfinished_in(const std::string& dir) {
  std::vector<std::string> names = names_in(dir);
  std::erase_if(names, [](const std::string& n) { return !n.starts_with(kPrefix) || !n.ends_with(kUnfinished); });
  std::sort(names.begin(), names.end());
  return names;
}

Manifest open_checkpoint(const std::string& folder) {
  const std::string path = path_in(folder, kManifestName);
  Manifest manifest = parse_manifest(read_text_file(path), path);
  for (const ManifestFile& f : manifest.files) {
    const InputFile file(path_in(folder, f.name));
    if (file.size() == f.bytes) continue;
    throw CheckpointError(file.path() + " has " + std::to_string(file.size()) + " bytes, wanted " +
                          std::to_string(f.bytes) + "; restore it or use another checkpoint.");
  }
  return manifest;
}

void verify_files(const std::string& folder, const Manifest& manifest, int part, int parts) {
  for (std::size_t i = static_cast<std::size_t>(part); i < manifest.files.size();
       i += static_cast<std::size_t>(parts)) {
    const ManifestFile& f = manifest.files[i];
    const InputFile file(path_in(folder, f.name));
    const std::string digest = digest_of_file(file);
    if (digest == f.xxh3) continue;
    throw CheckpointError(file.path() + " has the XXH3 digest " + digest + ", wanted " + f.xxh3 +
                          "; restore it or use another checkpoint.");
  }
}

void publish(Storage& storage, const std::string& dir, std::int64_t step, bool finite) {
  const std::string name = step_name(step), folder = path_in(dir, name);
  const std::string unfinished = folder + std::string(kUnfinished);
  storage.sync_directory(unfinished);
  if (fs::exists(folder)) storage.remove(put_aside(storage, dir, name));  // of a run that was taken back
  storage.rename(unfinished, folder);
  storage.sync_directory(dir);
  if (!finite) return;
  const std::string pointer = path_in(dir, kPointer), next = pointer + std::string(kUnfinished);
  storage.write_file(next, name + "\n");
  storage.rename(next, pointer);
  storage.sync_directory(dir);
}

std::vector<std::string> set_aside(Storage& storage, const std::string& dir, std::int64_t step, const Retention& keep) {
  std::vector<std::string> aside;
  for (const std::string& name : unfinished_in(dir)) aside.push_back(path_in(dir, name));
  std::vector<std::int64_t> steps = steps_in(dir);
  std::reverse(steps.begin(), steps.end());
  int finite_seen = 0;
  for (const std::int64_t s : steps) {
    if (s > step) continue;  // of a run that was taken back; replaced when this one gets there
    bool finite = false;
    try {
      finite = open_checkpoint(path_in(dir, step_name(s))).finite;
    } catch (const CheckpointError&) {
      continue;  // damaged: takes no place of a sound one, and is not ours to judge
    }
    const bool recent = finite ? ++finite_seen <= keep.keep_last : finite_seen == 0;
    if (recent || (keep.keep_every > 0 && s % keep.keep_every == 0)) continue;
    aside.push_back(put_aside(storage, dir, step_name(s)));
  }
  return aside;
}

void remove_all(Storage& storage, const std::vector<std::string>& folders) {
  for (const std::string& folder : folders) storage.remove(folder);
}

}  // namespace qe
