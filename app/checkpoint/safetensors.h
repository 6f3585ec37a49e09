// The safetensors format: a u64 little-endian header size, a JSON header padded with spaces, one buffer without holes.
// Owns the bytes of a file; knows nothing of steps or ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "app/checkpoint/storage.h"
#include "core/tensor.h"

namespace qe {

struct StoredTensor {
  std::string name;
  DType dtype = DType::kF32;  // FP32 and BF16
  Shape shape;
  std::uint64_t offset = 0;  // of its first byte, in the file

  [[nodiscard]] std::uint64_t bytes() const noexcept {
    return static_cast<std::uint64_t>(shape.elements()) * size_of(dtype);
  }
};

const char* safetensors_name(DType);  // "F32", "BF16"

struct WrittenFile {
  std::uint64_t bytes = 0;
  std::string digest;                // XXH3 of the whole file
  std::vector<std::string> tensors;  // XXH3 of each tensor's bytes
};

// Writes the tensors in order; `read` gives one's bytes when its turn comes, and they are used before it is called
// again. Offsets of `tensors` are ignored. Synced when it returns.
WrittenFile write_safetensors(OutputFile& file, const std::vector<StoredTensor>& tensors,
                              const std::function<Bytes(std::size_t)>& read);

// The tensors of a file, in the order of their bytes. Throws CheckpointError that names the file unless the header is
// sound, every dtype is one of ours, and the tensors fill the buffer without holes or overlap.
std::vector<StoredTensor> read_safetensors_header(const InputFile& file);

}  // namespace qe
