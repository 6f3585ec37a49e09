// Tensors of one checkpoint by name: each file's header is read once, each tensor's bytes are held against its digest.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "app/checkpoint/manifest.h"
#include "app/checkpoint/safetensors.h"

namespace qe {

class TensorReader {
 public:
  // The manifest must outlive it.
  TensorReader(std::string folder, const Manifest&);

  // Null: the checkpoint has no such tensor.
  [[nodiscard]] const ManifestTensor* find(const std::string& name) const;
  // Whether the file of a tensor of the manifest holds it with the manifest's type and shape. Throws CheckpointError
  // when the file is unsound.
  bool stored_as_listed(const ManifestTensor&);
  // Throws CheckpointError when the bytes cannot be read or have another digest.
  std::vector<unsigned char> read(const ManifestTensor&);

 private:
  struct OpenFile {
    std::unique_ptr<InputFile> file;
    std::map<std::string, StoredTensor> tensors;
  };
  const OpenFile& open(const std::string& name);

  std::string folder_;
  std::map<std::string, const ManifestTensor*> by_name_;
  std::map<std::string, OpenFile> files_;
};

// Throws CheckpointError that says `where` the bytes came from unless they have the tensor's digest.
void require_digest(const ManifestTensor&, Bytes bytes, const std::string& where);

}  // namespace qe
