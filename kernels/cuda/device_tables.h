// Host arrays kept in device memory for the life of the backend, found again by their bytes. Owns their memory.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>

#include "core/device.h"
#include "kernels/cuda/launch.h"

namespace qe::cuda {

class UploadedTables final : public DeviceTables {
 public:
  explicit UploadedTables(Device&);
  const void* find_or_upload(const void* host, std::size_t bytes) override;

 private:
  Device& device_;
  std::unique_ptr<Stream> stream_;
  std::unordered_map<std::string, Buffer> tables_;  // by their bytes
};

}  // namespace qe::cuda
