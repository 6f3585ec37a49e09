// What a checkpoint holds, for people: position, files, tensors, scaling state; and where two differ.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "app/checkpoint/store.h"
#include "app/checkpoint/tensor_reader.h"
#include "app/commands/commands.h"
#include "app/config_faults.h"
#include "core/dtype.h"
#include "core/error.h"

namespace qe {
namespace {

constexpr std::string_view kHistory = ".amax_history";

struct Opened {
  std::string folder;
  Manifest manifest;
};

Opened open(const std::string& path) {
  std::string folder = path;
  if (!std::filesystem::exists(path_in(path, kManifestName))) {
    const std::vector<std::int64_t> steps = candidates_in(path);
    if (steps.empty()) throw CheckpointError(path + " is neither a checkpoint nor a folder of checkpoints.");
    folder = path_in(path, step_name(steps.front()));
  }
  return {folder, open_checkpoint(folder)};
}

std::vector<float> values_of(TensorReader& reader, const ManifestTensor& t) {
  const std::vector<unsigned char> bytes = reader.read(t);
  std::vector<float> values(static_cast<std::size_t>(t.shape.elements()));
  if (t.dtype == DType::kF32) {
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    Bf16 v{};
    std::memcpy(&v, bytes.data() + i * sizeof v, sizeof v);
    values[i] = to_float(v);
  }
  return values;
}

std::string shape_text(const Shape& s) { return std::to_string(s.rows) + " x " + std::to_string(s.cols); }

void print_head(const Opened& c) {
  const RunPosition& p = c.manifest.position;
  std::printf("%s\n  step %lld, epoch %llu, %llu applied updates, %lld skipped steps, learning rate %g\n",
              c.folder.c_str(), static_cast<long long>(p.step), static_cast<unsigned long long>(p.epoch),
              static_cast<unsigned long long>(p.applied_updates), static_cast<long long>(p.skipped_steps),
              p.learning_rate);
  std::printf("  data: epoch %lld, window %lld of %lld\n", static_cast<long long>(p.data.epoch),
              static_cast<long long>(p.data.index), static_cast<long long>(c.manifest.data_windows));
  if (p.final_train_loss) std::printf("  last training loss %.6f\n", *p.final_train_loss);
  std::printf("  parameters XXH3 %s, %s; written by %s\n", c.manifest.parameters_xxh3.c_str(),
              c.manifest.finite ? "all finite" : "NOT FINITE", counted(c.manifest.ranks, "rank").c_str());
}

void print_versions(const Manifest& m) {
  std::printf("\nversions (schema %d)\n", kCheckpointSchemaVersion);
  for (const auto& [name, value] : m.environment.items()) {
    std::printf("  %-14s %s\n", name.c_str(),
                value.is_string() ? value.get<std::string>().c_str() : value.dump().c_str());
  }
}

void print_tables(const Opened& c, TensorReader& reader) {
  std::printf("\nfiles\n");
  for (const ManifestFile& f : c.manifest.files) {
    std::printf("  %-28s %14llu bytes  %s\n", f.name.c_str(), static_cast<unsigned long long>(f.bytes), f.xxh3.c_str());
  }
  std::printf("\n  %-58s %-5s %-16s %s\n", "tensor", "type", "shape", "XXH3");
  for (const ManifestTensor& t : c.manifest.tensors) {
    if (t.name.starts_with("fp8.")) continue;
    std::printf("  %-58s %-5s %-16s %s\n", t.name.c_str(), safetensors_name(t.dtype), shape_text(t.shape).c_str(),
                t.xxh3.c_str());
  }
  std::printf("\n  %-40s %-12s %-12s %-12s %s\n", "FP8 slot", "scale", "amax now", "newest", "largest of history");
  for (const ManifestTensor& t : c.manifest.tensors) {
    if (!t.name.starts_with("fp8.") || !t.name.ends_with(kHistory)) continue;
    const std::string slot = t.name.substr(4, t.name.size() - 4 - kHistory.size());
    const ManifestTensor* scale = reader.find("fp8." + slot + ".scale");
    if (scale == nullptr) throw CheckpointError(c.folder + " has a history of " + slot + " without its scale.");
    const std::vector<float> history = values_of(reader, t);
    if (history.empty()) continue;
    std::printf("  %-40s %-12g %-12g %-12g %g of %zu\n", slot.c_str(),
                static_cast<double>(values_of(reader, *scale).at(0)), static_cast<double>(history[0]),
                static_cast<double>(history.back()),
                static_cast<double>(*std::max_element(history.begin(), history.end())), history.size());
  }
}

void verify(const Opened& c, TensorReader& reader) {
  verify_files(c.folder, c.manifest);
  for (const ManifestTensor& t : c.manifest.tensors) reader.read(t);
  std::printf("verified: %s, %s\n", counted(std::ssize(c.manifest.files), "file").c_str(),
              counted(std::ssize(c.manifest.tensors), "tensor").c_str());
}

// One line about a tensor that both have; empty when it is the same.
std::string difference(TensorReader& a, const ManifestTensor& in_a, TensorReader& b, const ManifestTensor& in_b) {
  if (in_a.dtype != in_b.dtype || in_a.shape != in_b.shape) {
    return std::string(safetensors_name(in_a.dtype)) + " " + shape_text(in_a.shape) + " and " +
           safetensors_name(in_b.dtype) + " " + shape_text(in_b.shape);
  }
  if (in_a.xxh3 == in_b.xxh3) return "";
  const std::vector<float> x = values_of(a, in_a), y = values_of(b, in_b);
  std::size_t differing = 0;
  double largest = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (std::memcmp(&x[i], &y[i], sizeof(float)) == 0) continue;
    ++differing;
    largest = std::max(largest, std::fabs(static_cast<double>(x[i]) - static_cast<double>(y[i])));
  }
  char text[96];
  std::snprintf(text, sizeof text, "%zu of %zu elements differ, the most by %g", differing, x.size(), largest);
  return text;
}

int diff(const std::string& first, const std::string& second) {
  const Opened a = open(first), b = open(second);
  TensorReader in_a(a.folder, a.manifest), in_b(b.folder, b.manifest);
  print_head(a);
  print_head(b);
  int differing = 0, same = 0;
  const auto line = [&](const std::string& name, const std::string& text) {
    std::printf("  %-58s %s\n", name.c_str(), text.c_str());
    ++differing;
  };
  std::printf("\n");
  for (const ManifestTensor& t : a.manifest.tensors) {
    const ManifestTensor* other = in_b.find(t.name);
    const std::string text = other == nullptr ? "only in " + a.folder : difference(in_a, t, in_b, *other);
    if (text.empty()) {
      ++same;
    } else {
      line(t.name, text);
    }
  }
  for (const ManifestTensor& t : b.manifest.tensors) {
    if (in_a.find(t.name) == nullptr) line(t.name, "only in " + b.folder);
  }
  std::printf("%s, %d the same\n", counted(differing, "different tensor").c_str(), same);
  return differing == 0 ? 0 : 1;
}

}  // namespace

int run_inspect(const InspectOptions& options) {
  if (options.checkpoint.empty() == options.diff.empty()) {
    throw UsageError("inspect wants one checkpoint, or --diff and two; see qeffect inspect --help.");
  }
  if (!options.diff.empty()) return diff(options.diff.at(0), options.diff.at(1));
  const Opened c = open(options.checkpoint);
  TensorReader reader(c.folder, c.manifest);
  if (options.verify) verify(c, reader);
  print_head(c);
  print_versions(c.manifest);
  print_tables(c, reader);
  return 0;
}

}  // namespace qe
