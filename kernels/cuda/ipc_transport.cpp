#include "kernels/cuda/ipc_transport.h"

#include <cstring>
#include <utility>

#include "kernels/cuda/check.h"
#include "kernels/cuda/handles.h"
#include "kernels/cuda/reduce.h"
#include "kernels/wire/staged_transport.h"

namespace qe {
namespace {

static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(ShareHandle) && sizeof(cudaIpcEventHandle_t) == sizeof(ShareHandle));

// Smaller allocations share a page of the driver's, and a handle shares the whole page.
constexpr std::size_t kSharedPage = std::size_t{2} << 20;

template <class Native>
ShareHandle to_bytes(const Native& native) {
  ShareHandle handle{};
  std::memcpy(handle.data(), &native, sizeof native);
  return handle;
}
template <class Native>
Native from_bytes(const ShareHandle& handle) {
  Native native{};
  std::memcpy(&native, handle.data(), sizeof native);
  return native;
}

class OwnBlock final : public PeerBlock {
 public:
  explicit OwnBlock(Buffer memory) : memory_(std::move(memory)) {
    QE_CUDA_CHECK(cudaIpcGetMemHandle(&handle_, memory_.data()));
  }
  [[nodiscard]] void* data() const override { return memory_.data(); }
  [[nodiscard]] std::size_t bytes() const override { return memory_.bytes(); }
  [[nodiscard]] ShareHandle handle() const override { return to_bytes(handle_); }

 private:
  Buffer memory_;
  cudaIpcMemHandle_t handle_{};
};

class OpenedBlock final : public PeerBlock {
 public:
  explicit OpenedBlock(const ShareHandle& handle) {
    const cudaError_t status =
        cudaIpcOpenMemHandle(&data_, from_bytes<cudaIpcMemHandle_t>(handle), cudaIpcMemLazyEnablePeerAccess);
    if (status == cudaSuccess) return;
    (void)cudaGetLastError();
    throw DeviceError(std::string("another rank's device memory cannot be opened (") + cudaGetErrorString(status) +
                      "); its GPU must be visible to this rank and reachable from its GPU: leave CUDA_VISIBLE_DEVICES "
                      "alike on all ranks of the host, or set execution.transport to nccl");
  }
  ~OpenedBlock() override { (void)cudaIpcCloseMemHandle(data_); }
  OpenedBlock(const OpenedBlock&) = delete;
  OpenedBlock& operator=(const OpenedBlock&) = delete;
  [[nodiscard]] void* data() const override { return data_; }
  [[nodiscard]] std::size_t bytes() const override { return 0; }
  [[nodiscard]] ShareHandle handle() const override { return {}; }

 private:
  void* data_ = nullptr;
};

class IpcEvent final : public PeerEvent {
 public:
  explicit IpcEvent(const CudaDevice& device) : device_(device) {
    cudaEvent_t event = nullptr;
    QE_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess));
    event_.reset(event);
    QE_CUDA_CHECK(cudaIpcGetEventHandle(&handle_, event));
  }
  IpcEvent(const CudaDevice& device, const ShareHandle& handle) : device_(device) {
    cudaEvent_t event = nullptr;
    QE_CUDA_CHECK(cudaIpcOpenEventHandle(&event, from_bytes<cudaIpcEventHandle_t>(handle)));
    event_.reset(event);
  }
  void record(Stream& s) override { QE_CUDA_CHECK(cudaEventRecord(event_.get(), device_.native(s))); }
  void wait(Stream& s) override { QE_CUDA_CHECK(cudaStreamWaitEvent(device_.native(s), event_.get(), 0)); }
  [[nodiscard]] ShareHandle handle() const override { return to_bytes(handle_); }

 private:
  const CudaDevice& device_;
  cuda::EventHandle event_;
  cudaIpcEventHandle_t handle_{};
};

class IpcMemory final : public PeerMemory {
 public:
  explicit IpcMemory(CudaDevice& device) : device_(device) {}
  ~IpcMemory() override { device_.set_host_waiter({}); }
  IpcMemory(const IpcMemory&) = delete;
  IpcMemory& operator=(const IpcMemory&) = delete;

  std::unique_ptr<PeerBlock> make_block(std::size_t bytes) override {
    const std::size_t pages = (bytes + kSharedPage - 1) / kSharedPage;
    return std::make_unique<OwnBlock>(device_.allocate(pages * kSharedPage, MemoryKind::kBoundary));
  }
  std::unique_ptr<PeerBlock> open_block(const ShareHandle& handle) override {
    return std::make_unique<OpenedBlock>(handle);
  }
  std::unique_ptr<PeerEvent> make_event() override { return std::make_unique<IpcEvent>(device_); }
  std::unique_ptr<PeerEvent> open_event(const ShareHandle& handle) override {
    return std::make_unique<IpcEvent>(device_, handle);
  }

  void copy(Stream& s, void* to, const void* from, std::size_t bytes) override {
    QE_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, device_.native(s)));
  }
  void combine(Stream& s, Combine combine, float* out, std::span<const float* const> parts,
               std::int64_t count) override {
    cuda::combine_parts(device_.native(s), combine, out, parts, count);
  }
  void synchronize() override { device_.synchronize(); }
  void set_host_wait(const HostWait& wait) override {
    device_.set_host_waiter([wait](const auto& done, const auto& what) { wait.until(done, what); });
  }

 private:
  CudaDevice& device_;
};

}  // namespace

std::unique_ptr<Transport> make_ipc_transport(CudaDevice& device, std::shared_ptr<Wire> wire, RankLayout layout,
                                              const WaitRule& rule) {
  return std::make_unique<StagedTransport>(std::make_unique<IpcMemory>(device), std::move(wire), layout, rule);
}

}  // namespace qe
