// The resource seam: streams, events, memory and graphs of one rank. Every member is mandatory in every backend.
//
// Streams are in-order queues; order between two streams exists only through record() and wait(). A backend may run a
// stream's work any time after it is enqueued, and the CPU backend delays it on purpose (kernels/cpu/device.h), so a
// missing edge shows on a laptop too.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "core/tensor.h"

namespace qe {

class Stream {
 public:
  virtual ~Stream() = default;
};

// Marks a position of a stream. Before its first record() an event counts as done.
class Event {
 public:
  virtual ~Event() = default;
};

// A recorded sequence of work over fixed addresses. Destroyed before the transports and streams that it used.
class Graph {
 public:
  virtual ~Graph() = default;
  [[nodiscard]] virtual int nodes() const = 0;
};

// What memory is for: the report gives bytes by kind.
enum class MemoryKind : std::uint8_t {
  kWeights,      // FP32 masters
  kWeightCache,  // FP8 and BF16 copies
  kMoments,
  kGradients,  // main gradients, arena, staging
  kTape,
  kBoundary,      // rings, outputs and inputs between stages
  kScalingState,  // histories, scales, their step-start copy
  kWorkspace,
  kStep,  // tokens, targets, losses, counters, optimizer scalars
};
inline constexpr std::size_t kMemoryKinds = 9;
const char* name_of(MemoryKind) noexcept;

// Where a device's memory comes from.
struct MemoryPool {
  std::string name;           // alike for devices of one host that share it: "host", a card's PCI id
  std::size_t free = 0;       // bytes that neither this process nor another holds
  std::size_t workspace = 0;  // bytes that a stream takes with its first operation, once
};

class Device;

using HostMemory = std::unique_ptr<unsigned char[], void (*)(unsigned char*) noexcept>;

// Owns device memory; move-only.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Device& owner, void* data, std::size_t bytes, MemoryKind kind) noexcept
      : owner_(&owner), data_(data), bytes_(bytes), kind_(kind) {}
  Buffer(Buffer&& o) noexcept { swap(o); }
  Buffer& operator=(Buffer&& o) noexcept {
    Buffer(std::move(o)).swap(*this);
    return *this;
  }
  ~Buffer();

  [[nodiscard]] void* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  template <class T>
  [[nodiscard]] T* as() const noexcept {
    return static_cast<T*>(data_);
  }

 private:
  void swap(Buffer& o) noexcept {
    std::swap(owner_, o.owner_);
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
    std::swap(kind_, o.kind_);
  }
  Device* owner_ = nullptr;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  MemoryKind kind_ = MemoryKind::kWorkspace;
};

class Device {
 public:
  virtual ~Device() = default;

  [[nodiscard]] virtual std::string description() const = 0;  // "CPU reference backend, AVX2", "NVIDIA H200, sm_90"

  virtual std::unique_ptr<Stream> make_stream(const std::string& name) = 0;
  virtual std::unique_ptr<Event> make_event() = 0;
  virtual std::unique_ptr<Event> make_timed_event() = 0;  // one whose record notes when the stream passed it

  // 256-byte aligned and zeroed before it returns. Throws DeviceError when memory is short.
  virtual Buffer allocate(std::size_t bytes, MemoryKind) = 0;
  [[nodiscard]] virtual std::array<std::size_t, kMemoryKinds> memory_by_kind() const = 0;  // bytes now
  [[nodiscard]] virtual std::size_t memory_peak() const = 0;                               // bytes, all kinds
  [[nodiscard]] virtual MemoryPool memory_pool() const = 0;                                // now

  // Page-locked where that lets downloads run at the link's rate and without the host's waiting for the stream; not
  // zeroed. Throws std::bad_alloc.
  virtual HostMemory allocate_host(std::size_t bytes) = 0;

  // Enqueued on the stream, capturable.
  virtual void copy(Stream&, void* to, const void* from, std::size_t bytes) = 0;  // device → device
  virtual void zero(Stream&, void* data, std::size_t bytes) = 0;
  // Enqueued; the host bytes are read before it returns.
  virtual void upload(Stream&, void* to, const void* host_from, std::size_t bytes) = 0;
  // Enqueued, capturable; host memory is written when the stream gets there and must live until then.
  virtual void download(Stream&, void* host_to, const void* from, std::size_t bytes) = 0;
  // Enqueued, capturable; runs on the host when the stream gets there. Must not call the device.
  virtual void host_call(Stream&, std::function<void()>) = 0;

  virtual void record(Event&, Stream&) = 0;
  virtual void wait(Stream&, const Event&) = 0;  // the stream waits for the event's latest record
  // Milliseconds between the latest records of two timed events, which the host has waited for.
  virtual double elapsed_ms(const Event& from, const Event& to) = 0;
  virtual void synchronize(Stream&) = 0;  // the host waits for all of the stream's work
  virtual void synchronize() = 0;         // the host waits for all streams of this device

  // Runs body, which enqueues on the stream, and keeps what it enqueued instead of running it.
  // Nothing may be allocated and no other stream used inside.
  virtual std::unique_ptr<Graph> capture(Stream&, const std::function<void()>& body) = 0;
  virtual void launch(Graph&, Stream&) = 0;

 private:
  friend class Buffer;
  virtual void deallocate(void* data, std::size_t bytes, MemoryKind) noexcept = 0;
};

inline Buffer::~Buffer() {
  if (data_ != nullptr) owner_->deallocate(data_, bytes_, kind_);
}

}  // namespace qe
