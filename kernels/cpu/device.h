// The CPU backend's Device: lazy in-order streams run by one thread. Owns streams, events, memory and graphs; knows no
// arithmetic (CpuOps) and no wire (the transports hand it messages).
//
// Nothing runs until somebody synchronizes, and then only what the wait edges force, so a missing edge is a stale read
// every time and not once in a while. Two policies decide what else may run:
//   kImmediate    after each enqueue everything runs that can run without blocking; for training.
//   kAdversarial  enqueueing only queues. Seed 0 runs exactly what a synchronize() demands. Other seeds let streams run
//                 ahead of the demand by seeded amounts, which also finds work that starts too early.
// Within a stream the order of the queue always holds.
//
// Messages are obligations: before the host blocks, every send and reduction that is still queued is started if its
// prerequisites can run. Otherwise two ranks, each with its send still in the queue, would wait for each other for
// ever. For the same reason a rank must end with synchronize() or with Transport::barrier(): a device drops what has
// not run.
//
// Memory must outlive the work that uses it: synchronize before a Buffer goes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/device.h"
#include "kernels/wire/host_wait.h"

namespace qe {

enum class DrainPolicy : std::uint8_t { kImmediate, kAdversarial };

// A message of a transport in a stream.
class Pending {
 public:
  virtual ~Pending() = default;                            // must not touch the transport
  virtual void start() = 0;                                // once, when the message reaches the head of its stream
  [[nodiscard]] virtual bool poll() = 0;                   // done? never blocks; throws DeviceError when it cannot be
  [[nodiscard]] virtual bool is_obligation() const = 0;    // a peer may wait for start()
  [[nodiscard]] virtual std::string describe() const = 0;  // "2RECV_F3 (64 bytes) from rank 0"
};

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(DrainPolicy policy = DrainPolicy::kImmediate, std::uint64_t seed = 0);
  ~CpuDevice() override;
  CpuDevice(const CpuDevice&) = delete;
  CpuDevice& operator=(const CpuDevice&) = delete;

  [[nodiscard]] std::string description() const override;
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
  void host_call(Stream&, std::function<void()>) override;
  void record(Event&, Stream&) override;
  void wait(Stream&, const Event&) override;
  double elapsed_ms(const Event& from, const Event& to) override;
  void synchronize(Stream&) override;
  void synchronize() override;
  std::unique_ptr<Graph> capture(Stream&, const std::function<void()>& body) override;
  void launch(Graph&, Stream&) override;

  // Work of an op: copies of its pointers and scalars. Capturable. What it throws leaves the call that made it run.
  void enqueue(Stream&, std::function<void()> work);

  // For transports. A message cannot be captured.
  void enqueue_message(Stream&, std::unique_ptr<Pending>);
  // The host waits for `done`, with the obligations kept meanwhile. Throws as HostWait::look() does after a time
  // without any progress; its detail is what every stream of this rank waits for.
  void wait_until(const std::function<bool()>& done, const std::function<std::string()>& what);
  void set_host_wait(const HostWait& wait) { wait_ = wait; }      // a deadline of 60 s until set
  void set_owner(std::string rank) { owner_ = std::move(rank); }  // "rank 3", for reports

 private:
  struct Queue;
  class CpuStream;
  class CpuEvent;
  class CpuGraph;
  struct Capture {
    Queue* queue;
    std::vector<std::function<void()>> nodes;
  };

  void deallocate(void* data, std::size_t bytes, MemoryKind) noexcept override;
  Queue& queue_of(Stream&) const;
  void expect_host_may_block() const;
  bool advance(Queue&, std::uint64_t position);
  void settle(Queue&);
  void pump();
  void discharge();
  void wander();
  void run(const std::function<void()>& work);
  [[nodiscard]] std::string describe_streams() const;
  std::uint64_t draw(std::uint64_t bound);

  const DrainPolicy policy_;
  const bool wanders_;  // adversarial with a seed
  const std::uint64_t seed_;
  std::uint64_t draws_ = 0;
  std::vector<std::shared_ptr<Queue>> queues_;
  Capture* capture_ = nullptr;
  bool running_ = false;
  std::uint64_t progress_ = 0;  // items passed and messages started
  HostWait wait_{0, 60};
  std::string owner_ = "this process";
  std::array<std::size_t, kMemoryKinds> bytes_{};
  std::size_t total_ = 0;
  std::size_t peak_ = 0;
};

}  // namespace qe
