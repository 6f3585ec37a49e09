#include "kernels/cuda/device_tables.h"

namespace qe::cuda {

UploadedTables::UploadedTables(Device& device) : device_(device), stream_(device.make_stream("tables")) {}

const void* UploadedTables::find_or_upload(const void* host, std::size_t bytes) {
  std::string key(static_cast<const char*>(host), bytes);
  const auto found = tables_.find(key);
  if (found != tables_.end()) return found->second.data();
  Buffer memory = device_.allocate(bytes, MemoryKind::kWorkspace);
  device_.upload(*stream_, memory.data(), host, bytes);
  device_.synchronize(*stream_);
  return tables_.emplace(std::move(key), std::move(memory)).first->second.data();
}

}  // namespace qe::cuda
