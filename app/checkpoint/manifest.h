// manifest.json: what a checkpoint is and what its other files must be. Written last, it carries a digest of itself and
// of every file; without it a folder is no checkpoint.
//
// The first line is {"manifest_xxh3": "<16 digits>", and the digest is that of all bytes after it, so that a change of
// any byte shows.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "app/data/batch_sampler.h"
#include "core/tensor.h"
#include "kernels/gemm_choice.h"

namespace qe {

inline constexpr int kCheckpointSchemaVersion = 1;
inline constexpr char kManifestName[] = "manifest.json";

struct ManifestFile {
  std::string name;  // beside the manifest
  std::uint64_t bytes = 0;
  std::string xxh3;
};

// One slice of a global tensor and where it is. Today a slice is the whole tensor.
struct ManifestTensor {
  std::string name;  // as StateEntry's
  DType dtype = DType::kF32;
  Shape global_shape, offset, shape;
  std::string file;
  std::string xxh3;  // of its bytes
};

struct DataFile {
  std::string name;  // without its folder, so that data can move
  std::int64_t tokens = 0;
  std::int64_t bytes = 0;
  bool operator==(const DataFile&) const = default;
};

// What a run carries over a restart beside tensors.
struct RunPosition {
  std::int64_t step = 0;              // optimizer steps done, skipped ones counted
  std::uint64_t epoch = 0;            // commits
  std::uint64_t applied_updates = 0;  // Adam's t
  double learning_rate = 0;           // of the last step
  DataPosition data;
  std::int64_t skipped_steps = 0;
  int consecutive_skips = 0;
  std::optional<double> initial_train_loss, final_train_loss;
};

struct Manifest {
  RunPosition position;
  bool finite = true;           // every master and moment
  std::string parameters_xxh3;  // of the masters, the same for every cut
  std::int64_t data_windows = 0;
  std::vector<DataFile> train_files;
  nlohmann::ordered_json config;         // resolved
  nlohmann::ordered_json environment;    // versions
  std::vector<GemmChoice> gemm_choices;  // how the run computes its matrix products; empty on the CPU
  int ranks = 1;                         // of the run that wrote it
  std::vector<ManifestFile> files;
  std::vector<ManifestTensor> tensors;  // in global order of the writing ranks
};

// XXH3 over name and digest of every "master." tensor, by name.
std::string parameters_digest(const std::vector<ManifestTensor>&);

std::string manifest_text(const Manifest&);
// Throws CheckpointError that names `path` when the digest does not match, the schema version is another, or a field is
// missing, unknown or mistyped.
Manifest parse_manifest(const std::string& text, const std::string& path);

nlohmann::ordered_json json_of(const ManifestTensor&);
ManifestTensor tensor_from(const nlohmann::ordered_json&);
nlohmann::ordered_json json_of(const ManifestFile&);
ManifestFile file_from(const nlohmann::ordered_json&);

}  // namespace qe
