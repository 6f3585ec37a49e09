// Messages between processes of one host through memory that both can open. Owns the blocks a message rests in, who may
// use them, and the order between hosts; knows neither CUDA (PeerMemory) nor MPI (Wire).
//
// A send copies into a block of the sender's, records the block's event and posts an envelope. A receive waits on the
// host for the envelope, so that the event is known to be recorded, makes its stream wait for the event, reads the
// block, records an event of its own and gives the block back. A send that finds no free block makes one: it never
// waits, as the proof of the lists assumes (schedules/validate.cpp), and memory grows to the most messages that were
// under way at once.
#pragma once

#include <array>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/transport.h"
#include "kernels/wire/control_plane.h"
#include "kernels/wire/host_wait.h"
#include "kernels/wire/job_board.h"
#include "kernels/wire/peer_memory.h"
#include "kernels/wire/wire.h"

namespace qe {

// Sender's end towards one rank.
class Outbox {
 public:
  Outbox(PeerMemory&, Wire&, int peer);
  ~Outbox();
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;

  void put(Stream&, Channel, const void* data, std::size_t bytes);  // never blocks
  [[nodiscard]] int blocks() const noexcept { return static_cast<int>(blocks_.size()); }

 private:
  struct Block {
    std::unique_ptr<PeerBlock> memory;
    std::unique_ptr<PeerEvent> filled;
    std::unique_ptr<PeerEvent> consumed;  // the receiver's; null until it came with the first credit
    bool announced = false;
    bool busy = false;
  };
  struct Incoming;
  Block& free_block(std::size_t bytes);
  void collect_credits();

  PeerMemory& memory_;
  Wire& wire_;
  int peer_;
  std::vector<Block> blocks_;
  std::array<std::uint64_t, kChannels> next_{};
  std::unique_ptr<Incoming> credit_;  // the next one
};

// What a receiver reads until it gives it back.
struct Arrival {
  const void* data;
  std::uint32_t block;
};

// Receiver's end from one rank.
class Inbox {
 public:
  Inbox(PeerMemory&, Wire&, int rank, int peer);

  // The host waits until the peer has issued the message; the stream waits until it is filled. DeviceError when it has
  // another size. `what` names it.
  Arrival take(Stream&, Channel, std::size_t bytes, const std::string& what, const HostWait&);
  void give_back(Stream&, const Arrival&);  // after the stream's last read

 private:
  struct Block {
    std::unique_ptr<PeerBlock> memory;
    std::unique_ptr<PeerEvent> filled;    // the sender's
    std::unique_ptr<PeerEvent> consumed;  // null until the first give_back()
  };
  PeerMemory& memory_;
  Wire& wire_;
  int rank_;
  int peer_;
  std::map<std::uint32_t, Block> blocks_;
  std::array<std::uint64_t, kChannels> next_{};
};

class StagedTransport final : public Transport {
 public:
  // Collective. ConfigError when ranks are on several hosts. A rule without a board brings a board of its own.
  StagedTransport(std::unique_ptr<PeerMemory>, std::shared_ptr<Wire>, RankLayout, const WaitRule&);
  // Collective unless an exception destroys it; then the other ranks stop waiting.
  ~StagedTransport() override;

  [[nodiscard]] int rank(Group group) const override { return layout_.rank(group); }
  [[nodiscard]] int size(Group group) const override { return layout_.size(group); }
  void send(Stream&, const void* data, std::size_t bytes, int peer, const Action& label) override;
  void recv(Stream&, void* data, std::size_t bytes, int peer, const Action& label) override;
  void all_reduce_sum(Stream&, float* data, std::int64_t count, Group) override;
  void all_reduce_max(Stream&, float* data, std::int64_t count, Group) override;
  void all_gather(Stream&, const void* in, void* out, std::size_t bytes, Group) override;
  void barrier(Group) override;
  std::vector<std::string> exchange(const std::string& mine, Group) override;

  // Memory blocks made so far for messages to other ranks.
  [[nodiscard]] int blocks() const noexcept;

 private:
  void reduce(Stream&, Combine, const char* name, float* data, std::int64_t count, Group);
  Outbox& outbox(int world_rank);
  Inbox& inbox(int world_rank);

  std::unique_ptr<PeerMemory> memory_;
  std::shared_ptr<Wire> wire_;
  RankLayout layout_;
  ControlPlane control_;
  HostWait wait_;
  std::optional<JobBoard> own_board_;
  JobBoard* board_;
  std::map<int, Outbox> outboxes_;  // by world rank
  std::map<int, Inbox> inboxes_;
  std::array<std::uint64_t, 3> reductions_{};  // so far, per group
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace qe
