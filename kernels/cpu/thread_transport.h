// Ranks as threads of one process, for tests. Owns the mailboxes and the end of a world in which a rank failed.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "core/error.h"
#include "core/transport.h"
#include "kernels/cpu/device.h"
#include "kernels/wire/wire.h"

namespace qe {

// Another rank failed first; its error is the one to report.
struct WorldAborted : DeviceError {
  explicit WorldAborted(const std::string& why) : DeviceError(why) {}
};

class ThreadWorld {
 public:
  // Ranks: pipeline · data. A rank that makes no progress for timeout_s seconds throws DeviceError.
  ThreadWorld(int pipeline, int data, double timeout_s = 60);

  // Once per rank, from any thread. The transport is used by the thread of its device and may outlive the world. When
  // it is destroyed by an exception, the world is aborted.
  std::unique_ptr<Transport> connect(int world_rank, CpuDevice&);
  // The wire alone, for other transports; instead of connect().
  std::shared_ptr<Wire> wire(int world_rank);

  // Everything that waits in this world throws WorldAborted. The first reason stays.
  void abort(const std::string& why) noexcept;

  [[nodiscard]] int ranks() const noexcept;

 private:
  friend class ThreadWire;
  struct State;
  std::shared_ptr<State> state_;
};

// One thread per rank; joins all, then rethrows the first error, preferring what is not WorldAborted.
void run_ranks(int ranks, const std::function<void(int rank)>& body);
// The same for every rank of a world, which a failing rank aborts.
void run_ranks(ThreadWorld&, const std::function<void(int rank)>& body);

}  // namespace qe
