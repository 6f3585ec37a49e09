// The CUDA backend's Device: one card, driven by one thread. Owns streams, events, memory and graphs; knows no
// arithmetic (CudaOps) and no wire (the transports ask for native streams).
//
// A device belongs to the thread that made it, and a thread has at most one card: the constructor makes it current.
// Memory, and a graph, must outlive the work that uses them: synchronize before they go.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <vector>

#include "core/device.h"
#include "kernels/cuda/launch.h"

namespace qe {

class CudaDevice final : public Device {
 public:
  // The card with this number among those that the process sees. Throws DeviceError when there is none, when it has no
  // FP8 arithmetic (compute capability 8.9) or when this build has no code for it.
  explicit CudaDevice(int ordinal = 0);
  // Cards that the process sees; 0 without a driver.
  [[nodiscard]] static int count() noexcept;
  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  [[nodiscard]] std::string description() const override { return description_; }
  std::unique_ptr<Stream> make_stream(const std::string& name) override;
  std::unique_ptr<Event> make_event() override;
  std::unique_ptr<Event> make_timed_event() override;
  Buffer allocate(std::size_t bytes, MemoryKind) override;
  HostMemory allocate_host(std::size_t bytes) override;
  [[nodiscard]] std::array<std::size_t, kMemoryKinds> memory_by_kind() const override { return bytes_; }
  [[nodiscard]] std::size_t memory_peak() const override { return peak_; }
  [[nodiscard]] MemoryPool memory_pool() const override;

  void copy(Stream&, void* to, const void* from, std::size_t bytes) override;
  void zero(Stream&, void* data, std::size_t bytes) override;
  void upload(Stream&, void* to, const void* host_from, std::size_t bytes) override;
  void download(Stream&, void* host_to, const void* from, std::size_t bytes) override;
  // What the call throws is kept and leaves the next synchronize() as DeviceError.
  void host_call(Stream&, std::function<void()>) override;
  void record(Event&, Stream&) override;
  void wait(Stream&, const Event&) override;
  double elapsed_ms(const Event& from, const Event& to) override;
  void synchronize(Stream&) override;
  void synchronize() override;
  std::unique_ptr<Graph> capture(Stream&, const std::function<void()>& body) override;
  void launch(Graph&, Stream&) override;

  // For operations. The memory of a stream's first operation or capture is allocated then, 96 MiB, and never moves;
  // streams that only carry messages have none.
  const cuda::Launch& launch_on(Stream&);
  static constexpr std::size_t kGemmWorkspaceBytes = std::size_t{32} << 20;
  cuda::Scratch gemm_workspace(Stream&);

  // For transports. While one is set, the host waits for a stream through it: it calls done() until that is true, or
  // throws; what() names the stream. Without one the driver waits, for ever.
  using HostWaiter = std::function<void(const std::function<bool()>& done, const std::function<std::string()>& what)>;
  void set_host_waiter(HostWaiter waiter) { host_waiter_ = std::move(waiter); }
  [[nodiscard]] cudaStream_t native(Stream&) const;
  [[nodiscard]] cudaEvent_t native(const Event&) const;
  [[nodiscard]] int ordinal() const noexcept { return ordinal_; }
  [[nodiscard]] int multiprocessors() const noexcept { return multiprocessors_; }

 private:
  class CudaStream;
  class CudaEvent;
  class CudaGraph;
  struct HostCall;
  struct HostErrors;
  struct Capture;

  void deallocate(void* data, std::size_t bytes, MemoryKind) noexcept override;
  CudaStream& stream_of(Stream&) const;  // refuses a stream that is not the captured one
  void expect_no_capture() const;
  void make_workspace(CudaStream&);
  void enqueue_host_call(CudaStream&, std::function<void()>);
  [[noreturn]] void out_of_memory(std::size_t bytes, MemoryKind) const;

  const int ordinal_;
  std::string description_;
  int multiprocessors_ = 0;
  std::shared_ptr<HostErrors> host_errors_;
  std::vector<CudaStream*> streams_;  // alive
  Capture* capture_ = nullptr;
  HostWaiter host_waiter_;
  std::array<std::size_t, kMemoryKinds> bytes_{};
  std::size_t total_ = 0;
  std::size_t peak_ = 0;
  std::unique_ptr<Stream> setup_;  // zeroes new memory
  std::unique_ptr<cuda::DeviceTables> tables_;
};

}  // namespace qe
