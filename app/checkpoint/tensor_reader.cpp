#include "app/checkpoint/tensor_reader.h"

#include <utility>

#include "app/checkpoint/store.h"
#include "core/error.h"

namespace qe {

TensorReader::TensorReader(std::string folder, const Manifest& manifest) : folder_(std::move(folder)) {
  for (const ManifestTensor& t : manifest.tensors) by_name_.emplace(t.name, &t);
}

const ManifestTensor* TensorReader::find(const std::string& name) const {
  const auto at = by_name_.find(name);
  return at == by_name_.end() ? nullptr : at->second;
}

bool TensorReader::stored_as_listed(const ManifestTensor& t) {
  const auto& tensors = open(t.file).tensors;
  const auto stored = tensors.find(t.name);
  return stored != tensors.end() && stored->second.dtype == t.dtype && stored->second.shape == t.shape;
}

std::vector<unsigned char> TensorReader::read(const ManifestTensor& t) {
  const OpenFile& from = open(t.file);
  if (!stored_as_listed(t)) {
    throw CheckpointError(from.file->path() + " does not hold " + t.name + " as the manifest lists it; use another " +
                          "checkpoint.");
  }
  const StoredTensor& stored = from.tensors.at(t.name);
  std::vector<unsigned char> bytes(stored.bytes());
  from.file->read(stored.offset, bytes);
  require_digest(t, bytes, "in " + from.file->path());
  return bytes;
}

const TensorReader::OpenFile& TensorReader::open(const std::string& name) {
  OpenFile& file = files_[name];
  if (!file.file) {
    file.file = std::make_unique<InputFile>(path_in(folder_, name));
    for (StoredTensor& t : read_safetensors_header(*file.file)) file.tensors.emplace(t.name, t);
  }
  return file;
}

void require_digest(const ManifestTensor& t, Bytes bytes, const std::string& where) {
  const std::string digest = digest_of(bytes);
  if (digest == t.xxh3) return;
  throw CheckpointError(t.name + " has the XXH3 digest " + digest + " " + where + ", wanted " + t.xxh3 +
                        "; use another checkpoint.");
}

}  // namespace qe
