#include "kernels/wire/staged_transport.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "core/error.h"

namespace qe {
namespace {

constexpr double kLastBarrier_s = 5;  // how long a clean end waits for the others to let go of its memory

struct Envelope {
  std::uint64_t bytes;
  std::uint32_t block;
  std::uint32_t first_use;  // the handles are good
  ShareHandle memory, filled;
};
struct Credit {
  std::uint32_t block;
  std::uint32_t first_use;  // the handle is good
  ShareHandle consumed;
};
static_assert(std::is_trivially_copyable_v<Envelope> && std::is_trivially_copyable_v<Credit>);

std::string describe(const Action& label, std::size_t bytes, int world_rank) {
  return to_string(label) + " (" + std::to_string(bytes) + " bytes) from rank " + std::to_string(world_rank);
}

}  // namespace

struct Outbox::Incoming {
  Credit credit{};
  std::uint64_t sequence = 0;
  std::unique_ptr<Receive> receive;
};

Outbox::Outbox(PeerMemory& memory, Wire& wire, int peer)
    : memory_(memory), wire_(wire), peer_(peer), credit_(std::make_unique<Incoming>()) {}
Outbox::~Outbox() = default;

void Outbox::collect_credits() {
  for (;;) {
    Incoming& next = *credit_;
    if (next.receive == nullptr) {
      next.receive = wire_.expect({peer_, Channel::kCredit, next.sequence}, &next.credit, sizeof next.credit,
                                  "a block from rank " + std::to_string(peer_));
    }
    if (!next.receive->done()) return;
    next.receive.reset();
    ++next.sequence;
    Block& block = blocks_.at(next.credit.block);
    if (next.credit.first_use != 0) block.consumed = memory_.open_event(next.credit.consumed);
    block.busy = false;
  }
}

// The smallest that fits, or a new one.
Outbox::Block& Outbox::free_block(std::size_t bytes) {
  Block* best = nullptr;
  for (Block& b : blocks_) {
    if (b.busy || b.memory->bytes() < bytes) continue;
    if (best == nullptr || b.memory->bytes() < best->memory->bytes()) best = &b;
  }
  if (best == nullptr) {
    best = &blocks_.emplace_back();
    best->memory = memory_.make_block(std::max<std::size_t>(bytes, 1));
    best->filled = memory_.make_event();
  }
  return *best;
}

void Outbox::put(Stream& stream, Channel channel, const void* data, std::size_t bytes) {
  if (!blocks_.empty()) collect_credits();
  Block& block = free_block(bytes);
  if (block.consumed != nullptr) block.consumed->wait(stream);
  if (bytes != 0) memory_.copy(stream, block.memory->data(), data, bytes);
  block.filled->record(stream);

  Envelope envelope{bytes, static_cast<std::uint32_t>(&block - blocks_.data()), block.announced ? 0U : 1U, {}, {}};
  if (!block.announced) {
    envelope.memory = block.memory->handle();
    envelope.filled = block.filled->handle();
  }
  block.announced = true;
  block.busy = true;
  wire_.post({peer_, channel, next_[static_cast<std::size_t>(channel)]++}, &envelope, sizeof envelope);
}

Inbox::Inbox(PeerMemory& memory, Wire& wire, int rank, int peer)
    : memory_(memory), wire_(wire), rank_(rank), peer_(peer) {}

Arrival Inbox::take(Stream& stream, Channel channel, std::size_t bytes, const std::string& what, const HostWait& wait) {
  Envelope envelope{};
  const Address from{peer_, channel, next_[static_cast<std::size_t>(channel)]++};
  const auto receive = wire_.expect(from, &envelope, sizeof envelope, what);
  wait.until([&] { return receive->done(); }, [&] { return what; });
  if (envelope.bytes != bytes) throw size_mismatch(rank_, what, std::to_string(envelope.bytes), bytes);
  Block& block = blocks_[envelope.block];
  if (envelope.first_use != 0) {
    block.memory = memory_.open_block(envelope.memory);
    block.filled = memory_.open_event(envelope.filled);
  }
  block.filled->wait(stream);
  return {block.memory->data(), envelope.block};
}

void Inbox::give_back(Stream& stream, const Arrival& arrival) {
  Block& block = blocks_.at(arrival.block);
  Credit credit{arrival.block, block.consumed == nullptr ? 1U : 0U, {}};
  if (block.consumed == nullptr) {
    block.consumed = memory_.make_event();
    credit.consumed = block.consumed->handle();
  }
  block.consumed->record(stream);
  wire_.post({peer_, Channel::kCredit, next_[static_cast<std::size_t>(Channel::kCredit)]++}, &credit, sizeof credit);
}

StagedTransport::StagedTransport(std::unique_ptr<PeerMemory> memory, std::shared_ptr<Wire> wire, RankLayout layout,
                                 const WaitRule& rule)
    : memory_(std::move(memory)),
      wire_(std::move(wire)),
      layout_(layout),
      control_(wire_, layout),
      wait_(layout.world, rule),
      board_(rule.board) {
  if (board_ == nullptr) {
    own_board_.emplace(layout.world, [this](const auto& mine) { return exchange(mine, Group::kWorld); });
    board_ = &*own_board_;
    wait_ = HostWait(layout.world, {rule.timeout_s, board_});
  }
  if (!board_->other_host().empty()) {
    throw ConfigError("execution.transport ipc joins the ranks of one host, but " + board_->other_host() +
                      "; start all ranks on one host, or use nccl");
  }
  memory_->set_host_wait(wait_);
}

StagedTransport::~StagedTransport() {
  if (std::uncaught_exceptions() > exceptions_) {
    board_->raise(static_cast<int>(ExitCode::kDevice));
    return;
  }
  try {
    memory_->synchronize();
    inboxes_.clear();
    // Blocks go only after every reader has closed them.
    control_.barrier(Group::kWorld, HostWait(layout_.world, {kLastBarrier_s, board_, false}));
  } catch (const std::exception&) {  // a rank that failed has told why; this one has nothing left to lose
  }
}

Outbox& StagedTransport::outbox(int world_rank) {
  return outboxes_.try_emplace(world_rank, *memory_, *wire_, world_rank).first->second;
}

Inbox& StagedTransport::inbox(int world_rank) {
  return inboxes_.try_emplace(world_rank, *memory_, *wire_, layout_.world, world_rank).first->second;
}

void StagedTransport::send(Stream& s, const void* data, std::size_t bytes, int peer, const Action&) {
  QE_EXPECTS(peer >= 0 && peer < layout_.pipeline && peer != rank(Group::kPipeline), "a message needs another rank");
  board_->expect_no_failure();
  outbox(layout_.world_rank_of(peer, Group::kPipeline)).put(s, Channel::kPoint, data, bytes);
}

void StagedTransport::recv(Stream& s, void* data, std::size_t bytes, int peer, const Action& label) {
  QE_EXPECTS(peer >= 0 && peer < layout_.pipeline && peer != rank(Group::kPipeline), "a message needs another rank");
  const int from = layout_.world_rank_of(peer, Group::kPipeline);
  Inbox& box = inbox(from);
  const Arrival arrival = box.take(s, Channel::kPoint, bytes, describe(label, bytes, from), wait_);
  if (bytes != 0) memory_->copy(s, data, arrival.data, bytes);
  box.give_back(s, arrival);
}

void StagedTransport::reduce(Stream& s, Combine combine, const char* name, float* data, std::int64_t count,
                             Group group) {
  if (size(group) == 1) return;
  const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(float);
  const std::string what = std::string(name) + " " + std::to_string(reductions_[static_cast<std::size_t>(group)]++) +
                           " over the " + name_of(group) + " group";
  const auto peer = [&](int member) { return layout_.world_rank_of(member, group); };
  const int self = rank(group);
  for (int i = 0; i < size(group); ++i) {
    if (i != self) outbox(peer(i)).put(s, stream_channel(group), data, bytes);
  }
  std::vector<Arrival> arrivals;
  std::vector<const float*> parts;
  for (int i = 0; i < size(group); ++i) {
    if (i == self) {
      arrivals.push_back({data, 0});
    } else {
      arrivals.push_back(
          inbox(peer(i)).take(s, stream_channel(group), bytes, what + " from rank " + std::to_string(peer(i)), wait_));
    }
    parts.push_back(static_cast<const float*>(arrivals.back().data));
  }
  memory_->combine(s, combine, data, parts, count);
  for (int i = 0; i < size(group); ++i) {
    if (i != self) inbox(peer(i)).give_back(s, arrivals[static_cast<std::size_t>(i)]);
  }
}

void StagedTransport::all_reduce_sum(Stream& s, float* data, std::int64_t count, Group group) {
  reduce(s, Combine::kSum, "all_reduce_sum", data, count, group);
}

void StagedTransport::all_reduce_max(Stream& s, float* data, std::int64_t count, Group group) {
  reduce(s, Combine::kMax, "all_reduce_max", data, count, group);
}

void StagedTransport::all_gather(Stream& s, const void* in, void* out, std::size_t bytes, Group group) {
  const auto part = [&](int member) { return static_cast<std::byte*>(out) + static_cast<std::size_t>(member) * bytes; };
  const int self = rank(group);
  const std::string what = "all_gather " + std::to_string(reductions_[static_cast<std::size_t>(group)]++) +
                           " over the " + name_of(group) + " group";
  if (part(self) != in && bytes != 0) memory_->copy(s, part(self), in, bytes);
  for (int i = 0; i < size(group); ++i) {
    if (i != self) outbox(layout_.world_rank_of(i, group)).put(s, stream_channel(group), in, bytes);
  }
  for (int i = 0; i < size(group); ++i) {
    if (i == self) continue;
    const int from = layout_.world_rank_of(i, group);
    const Arrival arrival =
        inbox(from).take(s, stream_channel(group), bytes, what + " from rank " + std::to_string(from), wait_);
    if (bytes != 0) memory_->copy(s, part(i), arrival.data, bytes);
    inbox(from).give_back(s, arrival);
  }
}

void StagedTransport::barrier(Group group) { control_.barrier(group, wait_); }

std::vector<std::string> StagedTransport::exchange(const std::string& mine, Group group) {
  return control_.exchange(mine, group, wait_);
}

int StagedTransport::blocks() const noexcept {
  int all = 0;
  for (const auto& [peer, box] : outboxes_) all += box.blocks();
  return all;
}

}  // namespace qe
