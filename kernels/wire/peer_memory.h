// Device memory and events that another process of the host can open. The seam between the messages of
// staged_transport.h and what makes them real: kernels/cuda with CUDA IPC, tests with plain memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "core/device.h"
#include "kernels/wire/host_wait.h"

namespace qe {

using ShareHandle = std::array<std::byte, 64>;  // plain bytes, good in every process of the host

class PeerBlock {
 public:
  virtual ~PeerBlock() = default;
  [[nodiscard]] virtual void* data() const = 0;
  [[nodiscard]] virtual std::size_t bytes() const = 0;   // at least what was asked for; 0 when opened
  [[nodiscard]] virtual ShareHandle handle() const = 0;  // of a block that this process made
};

// Recorded by the process that made it, waited for by the others. A wait is for the latest record() that has returned
// on the other host when it is called: hosts tell each other, over a wire, that it has.
class PeerEvent {
 public:
  virtual ~PeerEvent() = default;
  virtual void record(Stream&) = 0;
  virtual void wait(Stream&) = 0;  // the stream waits, not the host
  [[nodiscard]] virtual ShareHandle handle() const = 0;
};

enum class Combine : std::uint8_t { kSum, kMax };  // a NaN of any rank wins a maximum

class PeerMemory {
 public:
  virtual ~PeerMemory() = default;
  virtual std::unique_ptr<PeerBlock> make_block(std::size_t bytes) = 0;
  virtual std::unique_ptr<PeerBlock> open_block(const ShareHandle&) = 0;
  virtual std::unique_ptr<PeerEvent> make_event() = 0;
  virtual std::unique_ptr<PeerEvent> open_event(const ShareHandle&) = 0;

  // Enqueued. Both ends may be opened blocks.
  virtual void copy(Stream&, void* to, const void* from, std::size_t bytes) = 0;
  // Enqueued. out[i] = parts[0][i] combined with parts[1][i], … in this order; out may be one of the parts.
  virtual void combine(Stream&, Combine, float* out, std::span<const float* const> parts, std::int64_t count) = 0;
  // The host waits for everything enqueued. From the first call of set_host_wait() on the host waits for the device as
  // it waits for other ranks.
  virtual void synchronize() = 0;
  virtual void set_host_wait(const HostWait&) = 0;
};

}  // namespace qe
